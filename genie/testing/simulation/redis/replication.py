"""A replica's connection to its master, and what goes over it: writes, or all that the master has."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from genie.testing.simulation.loop import Node, SimLoop
from genie.testing.simulation.redis.keyspace import Keys
from genie.testing.simulation.redis.resp import Reader, command
from genie.testing.simulation.redis.server import PORT, RedisConnection, SimRedis


@dataclass(slots=True, eq=False)
class Write:
    """One write, with the commands that it consists of. `on` has the hosts of those who have, or had, carried it out."""

    number: int
    commands: list[list[bytes]]
    on: list[str] = field(default_factory=list)
    noted: Any = None
    """What a witness makes of it."""


@dataclass(slots=True)
class Writes:
    """What is under way between the Redises of one world: writes and whole states, by number."""

    known: list[Write] = field(default_factory=list)
    states: list[tuple[Keys, list[Write]]] = field(default_factory=list)


class Upstream(asyncio.Protocol):
    """A replica's connection to its master."""

    def __init__(self, redis: ReplicatedRedis) -> None:
        self._redis = redis
        self._reader = Reader()
        self._queue: deque[tuple[float, list[bytes]]] = deque()
        self._last_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.transport: Any = None
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """What is to be carried out, each after its time."""
        for message in self._reader.feed(data):
            self._last_at = max(self._last_at, self._loop.time() + self._redis.lag())
            self._queue.append((self._last_at, message))
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """It has ended; what was not carried out will come again, or not."""
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
        self.ended.set()

    def end(self) -> None:
        """Take nothing more."""
        self.ended.set()
        self.transport.abort()

    def _arm(self) -> None:
        if self._timer is None and self._queue:
            self._timer = self._loop.call_at(self._queue[0][0], self._take)

    def _take(self) -> None:
        self._timer = None
        while self._queue and self._queue[0][0] <= self._loop.time() and not self.ended.is_set():
            self._redis.take(self._queue.popleft()[1])
        self._arm()


# -- A simulated Redis that has replicas, or is one: writes go to them one by one, each after its time, over the network --------

AGAIN_S = 0.05, 0.5
"""How long a replica waits before it tries again to reach its master."""


class ReplicatedRedis(SimRedis):
    """One of several. What it has, and whose replica it is, outlives its process.

    `lag_s` is how long a write may take beyond its way before a replica has it.
    """

    def __init__(self, loop: SimLoop, host: str, writes: Writes, random: Random, lag_s: float) -> None:
        super().__init__()
        self._loop = loop
        self.host = host
        self._writes = writes
        self._random = random
        self._lag_s = lag_s
        self.log: list[Write] = []
        """All that it has carried out."""
        self.master: str | None = None
        """The host of the one that it follows; None: it is a master itself."""
        self.process: Node = loop.node(host, host)
        self._starts = 0
        self._replicas: dict[RedisConnection, int] = {}
        """Connections of replicas, and how many writes each has."""
        self._link: Upstream | None = None
        self._following: asyncio.Task[None] | None = None
        self.on_copy: Callable[[Write], None] = lambda _write: None
        """Called with each write that it has from its master."""

    @property
    def offset(self) -> int:  # type: ignore[override]
        """How many writes it has carried out."""
        return len(self.log)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return not self.process.dead and not self.process.stopped

    # -- its processes ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, with what it has."""
        self._starts += 1
        self.process = self._loop.node(f"{self.host}.{self._starts}", self.host)
        self._connections.clear()
        self._replicas.clear()
        self._scripts.clear()
        self._link = self._following = None
        self._loop.spawn(self.process, self._live())

    def revive(self) -> None:
        """Start it, if it has ended."""
        if self.process.dead:
            self.start()

    async def _live(self) -> None:
        await self.serve(self.host)
        self._follow()

    def order(self, what: Callable[[], None]) -> None:
        """Have the process do something: at once, or when it runs again, or never."""
        self._loop.call_soon(what, context=self.process.context)

    def promote(self) -> None:
        """REPLICAOF NO ONE. What has not been carried out by now will not be."""
        if self.master is not None:
            self.master, self.read_only = None, False
            self._follow()

    def demote(self, master: str) -> None:
        """REPLICAOF, as sentinels say it: with the end of all connections."""
        if self.master != master:
            self.master, self.read_only = master, True
            self.cut_all()
            self._follow()

    def pause(self) -> None:
        """Take nothing from the master for now."""
        if self._link is not None:
            self._link.transport.pause_reading()

    def resume(self) -> None:
        """Take what has come meanwhile."""
        if self._link is not None:
            self._link.transport.resume_reading()

    # -- as a master --------------------------------------------------------------------------------------

    def wrote(self, effects: list[list[bytes]], who: str) -> None:  # noqa: ARG002
        """Send it to the replicas."""
        write = Write(len(self._writes.known), effects, [self.host])
        self._writes.known.append(write)
        self.log.append(write)
        for replica in self._replicas:
            replica.say([b"WRITE", b"%d" % write.number])

    def copies(self, offset: int) -> int:
        """How many replicas have said that they have as much."""
        return sum(have >= offset for have in self._replicas.values())

    def replicates(self, connection: RedisConnection, parts: list[bytes]) -> bool:
        """A replica wants to follow, or says how far it is."""
        if parts[0] == b"PSYNC":
            self._attach(connection, int(parts[1]), int(parts[2]))
        elif parts[0] == b"REPLCONF":
            if connection in self._replicas:
                self._replicas[connection] = int(parts[1])
                self.look()
        else:
            return False
        return True

    def left(self, connection: RedisConnection) -> None:
        """A connection has ended, perhaps a replica's."""
        self._replicas.pop(connection, None)

    def _attach(self, connection: RedisConnection, count: int, last: int) -> None:
        if self.master is not None:
            connection.cut()
        elif count <= len(self.log) and (not count or self.log[count - 1].number == last):
            self._replicas[connection] = count
            for write in self.log[count:]:
                connection.say([b"WRITE", b"%d" % write.number])
        else:
            self._replicas[connection] = 0
            self._writes.states.append((deepcopy(self.keys), list(self.log)))
            connection.say([b"STATE", b"%d" % (len(self._writes.states) - 1)])

    def role(self, _command: list[bytes]) -> object:
        """Whether it is a master, and who follows it; or whom it follows."""
        if self.master is not None:
            state = b"connect" if self._link is None else b"connected"
            return [b"slave", self.master.encode(), PORT, state, len(self.log)]
        have = [[connection.who.encode(), b"%d" % PORT, b"%d" % have] for connection, have in self._replicas.items()]
        return [b"master", len(self.log), have]

    # -- as a replica -------------------------------------------------------------------------------------

    def _follow(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None
        if self._link is not None:
            self._link.end()
            self._link = None
        self._replicas.clear()
        if self.master is not None:
            self._following = self._loop.create_task(self._reach(self.master), context=self.process.context.copy())

    async def _reach(self, master: str) -> None:
        """Connect to the master, again and again."""
        while True:
            link = Upstream(self)
            try:
                async with asyncio.timeout(2):
                    await self._loop.create_connection(lambda link=link: link, master, PORT)
            except OSError:
                pass
            else:
                self._link = link
                last = self.log[-1].number if self.log else 0
                link.transport.write(command(b"PSYNC", b"%d" % len(self.log), b"%d" % last))
                await link.ended.wait()
                self._link = None
            await asyncio.sleep(self._random.uniform(*AGAIN_S))

    def lag(self) -> float:
        """How long the next write takes."""
        return self._random.uniform(0, self._lag_s) if self._random.random() < 0.5 else 0.0

    def take(self, message: list[bytes]) -> None:
        """Carry out what the master has sent, and say so."""
        number = int(message[1])
        if message[0] == b"WRITE":
            write = self._writes.known[number]
            self.read_only = False
            for parts in write.commands:
                self.execute(parts)
            self.read_only = True
            self._effects.clear()
            self.keys.end_write()
            self.log.append(write)
            self._has(write)
        else:
            keys, log = self._writes.states[number]
            self.keys, self.log = deepcopy(keys), list(log)
            for write in self.log:
                self._has(write)
        if self._link is not None:
            self._link.transport.write(command(b"REPLCONF", b"%d" % len(self.log)))

    def _has(self, write: Write) -> None:
        if self.host not in write.on:
            write.on.append(self.host)
            self.on_copy(write)
