"""Replication of a simulated Redis: a master sends its writes to the replicas, each of which has its own lag.

A replica whose log is not a prefix of the master's log gets a full copy of the data (a full resynchronization).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from genie.testing.simulation.loop import Node, SimLoop
from genie.testing.simulation.redis.keyspace import Keyspace
from genie.testing.simulation.redis.resp import CommandParser, encode_command
from genie.testing.simulation.redis.server import PORT, RedisConnection, SimRedis


@dataclass(slots=True, eq=False)
class Write:
    """An atomic write and its commands. `hosts` have executed the write at some time, even if they lost the write later."""

    number: int
    at: float
    commands: list[list[bytes]]
    hosts: list[str] = field(default_factory=list)
    state: Any = None
    """The `StoreState` after the write, which a recorder sets; None if the write did not change the namespace."""


@dataclass(slots=True)
class ReplicationLog:
    """All writes and full copies of the Redis servers of one simulation, by number.

    A replication message contains only the number of a write or of a copy. A copy has the keys and the log of the master.
    """

    writes: list[Write] = field(default_factory=list)
    copies: list[tuple[Keyspace, list[Write]]] = field(default_factory=list)


class Upstream(asyncio.Protocol):
    """A replica's connection to its master: queues the replication messages, and applies each after a lag."""

    def __init__(self, redis: ReplicatedRedis) -> None:
        self._redis = redis
        self._parser = CommandParser()
        self._queue: deque[tuple[float, list[bytes]]] = deque()
        """The received messages, each with the time at which the replica applies it."""
        self._last_apply_at = 0.0
        """When the last received message is applied (virtual time)."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.transport: Any = None
        self.ended = asyncio.Event()
        """Set when the connection has ended."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Queue each replication message, which is applied after a random lag, but never before an earlier message."""
        for message in self._parser.feed(data):
            self._last_apply_at = max(self._last_apply_at, self._loop.time() + self._redis.lag())
            self._queue.append((self._last_apply_at, message))
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Drop the queued messages: when the replica connects again, the master sends the missing writes again."""
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
        self.ended.set()

    def end(self) -> None:
        self.ended.set()
        self.transport.abort()

    def _set_timer(self) -> None:
        """Set a timer for the next queued message, if no timer is set."""
        if self._timer is None and self._queue:
            self._timer = self._loop.call_at(self._queue[0][0], self._apply_due)

    def _apply_due(self) -> None:
        """Apply the messages whose lag has passed."""
        self._timer = None
        while self._queue and self._queue[0][0] <= self._loop.time() and not self.ended.is_set():
            self._redis.apply(self._queue.popleft()[1])
        self._set_timer()


# -- Masters and replicas --------

RETRY_DELAY_S = 0.05, 0.5
"""The shortest and the longest time after which a replica connects to its master again."""


class ReplicatedRedis(SimRedis):
    """A Redis that is a master or a replica. The data and the role survive a restart of the process.

    `max_lag_s` is the longest replication lag in seconds, in addition to the network delay.
    """

    def __init__(
        self, loop: SimLoop, host: str, replication_log: ReplicationLog, random: Random, max_lag_s: float
    ) -> None:
        super().__init__()
        # More than 16 fields: the state as a master and as a replica, because the role changes.
        self._loop = loop
        self.host = host
        self._replication_log = replication_log
        self._random = random
        self._max_lag_s = max_lag_s
        self.log: list[Write] = []
        """The writes that this Redis has executed."""
        self.master: str | None = None
        """The host of the master that this Redis follows; None if this Redis is a master itself."""
        self.process: Node = loop.create_node(host, host)
        self._starts = 0
        """How often the process was started; part of its name."""
        self._replicas: dict[RedisConnection, int] = {}
        """The connections of replicas, each with the number of writes that the replica has acknowledged."""
        self._upstream: Upstream | None = None
        """The connection to the master; None while disconnected."""
        self._following_task: asyncio.Task[None] | None = None
        """Connects to the master again and again; None if this Redis is a master."""
        self.on_replicated: Callable[[Write], None] = lambda _write: None
        """Called with a write that this replica has executed for the first time."""

    @property
    def offset(self) -> int:  # type: ignore[override]
        """The number of writes that this Redis has executed."""
        return len(self.log)

    @property
    def alive(self) -> bool:
        """True if the process is neither killed nor stopped."""
        return not self.process.dead and not self.process.stopped

    # -- the process -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a new process with the same data and role, but without connections and cached scripts."""
        self._starts += 1
        self.process = self._loop.create_node(f"{self.host}.{self._starts}", self.host)
        self._connections.clear()
        self._replicas.clear()
        self._scripts.clear()
        self.run_id, self.started_at = self.process.name, self._loop.time()
        self._upstream = self._following_task = None
        self._loop.spawn(self.process, self._serve_and_follow())

    def revive(self, loading_s: float = 0.0) -> None:
        """Start the process if it was killed. It loads its data for `loading_s` seconds."""
        if self.process.dead:
            self.loaded_at = self._loop.time() + loading_s
            self.start()

    def lose_writes_since(self, at: float) -> int:
        """Lose the writes that were made after a time, as a machine that fails before they are on disk; return how many.

        The process must have been killed, and must have no replicas.
        """
        lost_count = sum(write.at > at for write in self.log)
        del self.log[len(self.log) - lost_count :]
        return self.keys.undo_last_writes(lost_count)

    async def _serve_and_follow(self) -> None:
        await self.serve(self.host)
        self._follow()

    def call_in_process(self, callback: Callable[[], None]) -> None:
        """Schedule a call as part of the process.

        If the process is stopped, the call is made once the process continues. If the process is dead, it is never made.
        """
        self._loop.call_soon(callback, context=self.process.context)

    def promote(self) -> None:
        """REPLICAOF NO ONE: become a master. Received writes whose lag has not passed are dropped."""
        if self.master is not None:
            self.master, self.read_only = None, False
            self._follow()

    def demote(self, master: str) -> None:
        """REPLICAOF: become a replica of a host, and close all connections, as sentinels do when they demote a master."""
        if self.master != master:
            self.master, self.read_only = master, True
            self.cut_all()
            self._follow()

    def pause_replication(self) -> None:
        """Stop reading from the master, until `resume_replication` or a new connection to the master."""
        if self._upstream is not None:
            self._upstream.transport.pause_reading()

    def resume_replication(self) -> None:
        """Read from the master again."""
        if self._upstream is not None:
            self._upstream.transport.resume_reading()

    # -- as a master --------------------------------------------------------------------------------------

    def replicate(self, effects: list[list[bytes]], sender: str) -> None:  # noqa: ARG002
        """Append an atomic write with the commands `effects` to the log, and send the write to the replicas."""
        write = Write(len(self._replication_log.writes), self._loop.time(), commands=effects, hosts=[self.host])
        self._replication_log.writes.append(write)
        self.log.append(write)
        for replica in self._replicas:
            replica.send_reply([b"WRITE", b"%d" % write.number])

    def replicas_with(self, offset: int) -> int:
        """Return how many replicas have acknowledged the writes up to an offset."""
        return sum(acknowledged >= offset for acknowledged in self._replicas.values())

    def handle_if_replication(self, connection: RedisConnection, command: list[bytes]) -> bool:
        """Handle the commands that a replica sends to its master; return False for any other command.

        PSYNC begins the replication, and REPLCONF acknowledges a number of writes.
        """
        if command[0] == b"PSYNC":
            self._attach(connection, count=int(command[1]), last_number=int(command[2]))
        elif command[0] == b"REPLCONF":
            if connection in self._replicas:
                self._replicas[connection] = int(command[1])
                self.reply_if_unblocked()
        else:
            return False
        return True

    def on_disconnect(self, connection: RedisConnection) -> None:
        """Remove a replica whose connection has ended."""
        self._replicas.pop(connection, None)

    def _attach(self, connection: RedisConnection, count: int, last_number: int) -> None:
        """PSYNC: send a replica the missing data, or close the connection if this Redis is not a master.

        The replica has executed `count` writes, and `last_number` is the number of the last one. If these writes are a prefix
        of this master's log, the replica gets the missing writes. Otherwise the replica gets a full copy.
        """
        if self.master is not None:  # this Redis is a replica now
            connection.cut()
        elif count <= len(self.log) and (not count or self.log[count - 1].number == last_number):
            self._replicas[connection] = count
            for write in self.log[count:]:
                connection.send_reply([b"WRITE", b"%d" % write.number])
        else:
            self._replicas[connection] = 0
            self._replication_log.copies.append((deepcopy(self.keys), list(self.log)))
            connection.send_reply([b"STATE", b"%d" % (len(self._replication_log.copies) - 1)])

    def do_role(self, _command: list[bytes]) -> object:
        """ROLE: a master reports its replicas, and a replica reports its master."""
        if self.master is not None:
            state = b"connect" if self._upstream is None else b"connected"
            return [b"slave", self.master.encode(), PORT, state, len(self.log)]
        replicas = [
            [connection.peer.encode(), b"%d" % PORT, b"%d" % acknowledged]
            for connection, acknowledged in self._replicas.items()
        ]
        return [b"master", len(self.log), replicas]

    # -- as a replica -------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Apply a change of the role: end the replication from the former master, and begin it from the current one.

        If this Redis is now a master itself, it replicates from no host. Its replicas are forgotten, and must send PSYNC again.
        """
        if self._following_task is not None:
            self._following_task.cancel()
            self._following_task = None
        if self._upstream is not None:
            self._upstream.end()
            self._upstream = None
        self._replicas.clear()
        if self.master is not None:
            self._following_task = self._loop.create_task(
                self._connect_to(self.master), context=self.process.context.copy()
            )

    async def _connect_to(self, master: str) -> None:
        """Replicate from the host `master` until cancelled. When connecting fails or the connection ends, retry after a delay."""
        while True:
            upstream = Upstream(self)
            try:
                async with asyncio.timeout(2):
                    await self._loop.create_connection(lambda upstream=upstream: upstream, master, PORT)
            except OSError:
                pass
            else:
                self._upstream = upstream
                last_number = self.log[-1].number if self.log else 0
                upstream.transport.write(encode_command(b"PSYNC", b"%d" % len(self.log), b"%d" % last_number))
                await upstream.ended.wait()
                self._upstream = None
            await asyncio.sleep(self._random.uniform(*RETRY_DELAY_S))

    def lag(self) -> float:
        """Return a random lag in seconds for the next write; half of the writes have no lag."""
        return self._random.uniform(0, self._max_lag_s) if self._random.random() < 0.5 else 0.0

    def apply(self, message: list[bytes]) -> None:
        """Apply a replication message of the master (a write or a full copy), and send the new number of writes back."""
        number = int(message[1])
        if message[0] == b"WRITE":
            write = self._replication_log.writes[number]
            self.read_only = False  # for the commands of the master
            for command in write.commands:
                self.execute(command)
            self.read_only = True
            self._effects.clear()  # this replica has no replicas of its own
            self.notify_watchers({key for key, _, _ in self.keys.end_write()})
            self.log.append(write)
            self._record_replicated(write)
        else:
            keys, log = self._replication_log.copies[number]
            self.keys, self.log = deepcopy(keys), list(log)
            self.notify_watchers(None)
            for write in self.log:
                self._record_replicated(write)
        if self._upstream is not None:
            self._upstream.transport.write(encode_command(b"REPLCONF", b"%d" % len(self.log)))

    def _record_replicated(self, write: Write) -> None:
        """Record that this replica has executed a write, unless that is already recorded."""
        if self.host not in write.hosts:
            write.hosts.append(self.host)
            self.on_replicated(write)
