"""Bounds for lines that clients have begun and not completed: their bytes over all connections, and their age."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from genie.errors import Code, RequestRejected

if TYPE_CHECKING:
    from genie.server.connection import Connection

log = structlog.get_logger()

MAX_LINE_AGE_S = 30.0
"""Seconds from the first byte of a line to its last."""

LOW_WATER_SHARE = 0.9
"""Beyond the bound connections are closed until so much of it is left, so that not every read has to look for one."""


class PartialLines:
    """Counts the incomplete line of each connection, and closes connections beyond the bounds.

    At most `max_bytes` in all: the connection with the most is closed first. A connection without an incomplete line
    costs nothing here.
    """

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        """Bytes of all incomplete lines."""
        self._max_bytes = max_bytes
        self._sizes: dict[Connection, int] = {}
        self._began: dict[Connection, float] = {}
        """When the first byte of each came, on the clock of the event loop, oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    def update(self, connection: Connection, size: int, *, new: bool) -> None:
        """Count the incomplete line of a connection, of `size` bytes. `new`: it is another line than before."""
        self.bytes += size - self._sizes.pop(connection, 0)
        if new or not size:
            self._began.pop(connection, None)
        if not size:
            return
        self._sizes[connection] = size
        if connection not in self._began:
            loop = asyncio.get_running_loop()
            self._began[connection] = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(MAX_LINE_AGE_S, self._close_oldest)
        if self.bytes > self._max_bytes:
            self._close_largest()

    def forget(self, connection: Connection) -> None:
        """A connection was lost, or reads no more."""
        self.bytes -= self._sizes.pop(connection, 0)
        self._began.pop(connection, None)

    def _close_largest(self) -> None:
        why = f"incomplete lines of all connections have more than {self._max_bytes} bytes, and this one is among the longest"
        for connection in sorted(self._sizes, key=self._sizes.__getitem__, reverse=True):
            if self.bytes <= self._max_bytes * LOW_WATER_SHARE:
                break
            self._close(connection, RequestRejected(Code.TOO_MANY, why))

    def _close_oldest(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection, began in list(self._began.items()):
            if began > now - MAX_LINE_AGE_S:
                self._timer = loop.call_later(began + MAX_LINE_AGE_S - now, self._close_oldest)
                return
            if connection.reading_is_paused:  # the rest may have been sent
                del self._began[connection]
                self._began[connection] = now
                continue
            why = f"the line was not completed within {MAX_LINE_AGE_S:g} s"
            self._close(connection, RequestRejected(Code.BAD_MESSAGE, why))
        if self._began:
            self._timer = loop.call_later(MAX_LINE_AGE_S, self._close_oldest)

    def _close(self, connection: Connection, why: RequestRejected) -> None:
        log.warning("connection with an incomplete line closed", bytes=self._sizes[connection], reason=why.message)
        self.forget(connection)
        connection.drop_partial_line(why)
