"""A command from inside the server, carried out like a client's: stored first, told then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from genie.server.connection import Connection
from genie.server.registry import Registry

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.server.desk import Desk


class Errand(Connection):
    """A connection without a socket, for one command."""

    __slots__ = ("_told",)

    def __init__(self, settings: Settings, desk: Desk) -> None:
        super().__init__(desk, settings, Registry(settings))
        self._told: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def carry_out(self, line: bytes) -> bytes:
        """Hand the line in, and wait for the answer. It never comes where the server stops leading meanwhile: bound it."""
        self.desk.submit(self, [line], len(line))
        try:
            return await self._told
        finally:
            self.closed = True
            self.desk.gone(self)

    def abort(self) -> None:
        """The server has stopped leading."""
        self._told.cancel()

    def _write(self, data: bytes) -> None:
        if data and not self._told.done():
            self._told.set_result(data)
