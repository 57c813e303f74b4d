"""A Redis in memory that speaks RESP in the simulated network, and has bad days when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from genie.testing.network import Listener
from genie.testing.redis.commands import Commands
from genie.testing.redis.connection import RedisConnection
from genie.testing.redis.keys import Undo
from genie.testing.redis.reads import Read
from genie.testing.redis.resp import Failure

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
