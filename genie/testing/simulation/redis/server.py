"""One connection to a simulated Redis: commands in, replies out, and those that wait before they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from genie.testing.simulation.network import Listener, SimTransport
from genie.testing.simulation.redis.commands import Commands, Read
from genie.testing.simulation.redis.keyspace import Undo
from genie.testing.simulation.redis.resp import Failure, Reader, encode

CUT_BEFORE, CUT_AFTER, REFUSE = "cut before", "cut after", "refuse"
"""What may become of a command: the connection ends before it is carried out, or after; or it is answered by an error."""

NOT_YET = object()
"""No reply: it comes later."""


class RedisConnection(asyncio.Protocol):
    """A connection. A command that waits keeps those behind it waiting."""

    def __init__(self, redis: SimRedis, registry: dict[RedisConnection, None]) -> None:
        self._redis = redis
        self._registry = registry
        self._reader = Reader()
        self._transport: SimTransport
        self.who = ""
        """The node on the other side."""
        self._version = 2
        self._written_to = 0
        """How far the replicas must be to have what was written here."""
        self._waiting: list[list[bytes]] = []
        self._ready: Callable[[], object] | None = None
        """Says what the command that waits is answered, or that this is not known yet."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("SimTransport", transport)
        self.who = self._transport.connection.client.node.name
        self._registry[self] = None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """It has ended."""
        self._registry.pop(self, None)
        self._redis.left(self)
        self._ready = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Some commands, or parts of them."""
        self._waiting += self._reader.feed(data)
        self._go_on()

    def cut(self) -> None:
        """End it."""
        self._transport.abort()

    def look(self) -> None:
        """Something has changed: can what waits be answered?"""
        if self._ready is not None:
            reply = self._ready()
            if reply is not NOT_YET:
                self._waited(reply)

    def say(self, reply: object) -> None:
        """Send a reply."""
        if isinstance(reply, dict) and self._version < 3 and reply and isinstance(next(iter(reply.values())), list):
            reply = [list(item) for item in reply.items()]
        self._transport.write(encode(reply, self._version))

    # -- inside -------------------------------------------------------------------------------------------

    def _waited(self, reply: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ready = self._timer = None
        self.say(reply)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._ready is None and not self._transport.is_closing():
            self._take(self._waiting.pop(0))

    def _take(self, command: list[bytes]) -> None:
        if self._redis.replicates(self, command):
            return
        fault = self._redis.fault(command, self.who)
        if fault is REFUSE:
            self.say(Failure("ERR it is a bad day"))
        elif fault is CUT_BEFORE:
            self.cut()
        else:
            reply = self._carry_out(command)
            if fault is CUT_AFTER:
                self.cut()
            elif self._ready is None:
                self.say(reply)

    def _carry_out(self, command: list[bytes]) -> object:
        name = command[0].upper()
        if name == b"HELLO":
            self._version = int(command[1]) if len(command) > 1 else self._version
            return {b"server": b"redis", b"version": b"7.2.0", b"proto": self._version, b"mode": b"standalone"}
        if name == b"XREAD":
            return self._read(command)
        if name == b"WAIT":
            return self._wait(int(command[1]), int(command[2]))
        before = self._redis.offset
        reply = self._redis.carry_out(command, self.who)
        if self._redis.offset > before:
            self._written_to = self._redis.offset
        return reply

    def _read(self, command: list[bytes]) -> object:
        read = Read(self._redis.keys, command)
        found = read.found()
        if read.block_ms is not None:
            self._redis.on_listen(self.who, read)
        if found is not None or read.block_ms is None:
            return found if self._version > 2 or found is None else list(found.items())

        def ready() -> object:
            there = read.found()
            return NOT_YET if there is None else there

        self._block(ready, read.block_ms, lambda: None)
        return None

    def _wait(self, wanted: int, timeout_ms: int) -> object:
        """WAIT: how many replicas have what was written over this connection, when enough of them have, or at the end."""
        if self._redis.read_only:
            return Failure("ERR WAIT cannot be used with replica instances.")

        def ready() -> object:
            count = self._redis.copies(self._written_to)
            return NOT_YET if count < wanted else count

        count = ready()
        if count is not NOT_YET:
            return count
        self._block(ready, timeout_ms, lambda: self._redis.copies(self._written_to))
        return None

    def _block(self, ready: Callable[[], object], timeout_ms: int, late: Callable[[], object]) -> None:
        self._ready = ready
        if timeout_ms:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_ms / 1000, lambda: self._waited(late()))


# -- A Redis in memory that speaks RESP in the simulated network, and has bad days when it is told to --------

PORT = 6379

Fault = Callable[[list[bytes], str], str | None]
"""Given a command and the node that sent it, says what becomes of it; None if nothing does."""


class SimRedis(Commands):
    """One process. `fault` is asked before each command that comes over a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Fault = lambda _command, _who: None
        self.on_write: Callable[[list[Undo], str], None] = lambda _group, _who: None
        """Called after each command that has written something, with what it undid and the node that it came from."""
        self.on_listen: Callable[[str, Read], None] = lambda _who, _read: None
        """Called where somebody would wait for what comes behind an entry: with the node, and what it reads."""
        self._connections: dict[RedisConnection, None] = {}
        self._listener: Listener | None = None

    async def serve(self, host: str, port: int = PORT) -> None:
        """Take connections, as the node that is running."""
        loop = asyncio.get_running_loop()
        made = await loop.create_server(lambda: RedisConnection(self, self._connections), host, port)
        self._listener = cast("Listener", made)

    def cut_all(self) -> None:
        """End every connection."""
        for connection in list(self._connections):
            connection.cut()

    def restart(self, lost_writes: int = 0) -> int:
        """End every connection and forget the scripts, and the last so many writes. Returns how many those were."""
        self.cut_all()
        self._scripts.clear()
        return self.keys.lose(lost_writes)

    def flush(self) -> None:
        """FLUSHALL."""
        self.keys.clear()

    def carry_out(self, command: list[bytes], who: str = "") -> object:
        """Carry out one command as one write, which is lost as a whole or not at all. A failure is returned."""
        try:
            reply = self.execute(command)
        except Failure as failure:
            reply = failure
        effects, self._effects = self._effects, []
        written = self.keys.end_write()
        if written:
            self.wrote(effects, who)
            self.on_write(written, who)
            self.look()
        return reply

    def look(self) -> None:
        """Something has changed: whoever waits for it is answered."""
        for connection in list(self._connections):
            connection.look()

    # -- for those with replicas --------------------------------------------------------------------------

    offset = 0
    """How much was written."""

    def wrote(self, effects: list[list[bytes]], who: str) -> None:
        """Commands have written something, all of them together."""

    def copies(self, offset: int) -> int:  # noqa: ARG002
        """How many replicas have said that they have as much."""
        return 0

    def replicates(self, connection: RedisConnection, command: list[bytes]) -> bool:  # noqa: ARG002
        """Whether a command is one of a replica, and was dealt with."""
        return False

    def left(self, connection: RedisConnection) -> None:
        """A connection has ended."""
