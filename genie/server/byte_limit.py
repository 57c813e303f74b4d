"""A limit for the bytes that all connections have together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

MAX_CLOSED_LARGE_CONNECTIONS = 100
"""Maximum number of connections that are closed in one iteration of the event loop, once the total is within the limit."""

LOW_WATER_SHARE = 0.9
"""When the limit is exceeded, connections are closed until only this share of the limit is used. So the search for the
connections with the most bytes, which sorts all connections, runs rarely."""


C = TypeVar("C")
"""A connection."""


class ByteLimit(Generic[C]):
    """Counts the bytes of each connection. If their total exceeds the limit, closes the connections with the most bytes.

    The total is within the limit again when `add` returns. In the next iterations of the event loop, other connections
    are closed until the total is at most `LOW_WATER_SHARE` of the limit.
    """

    def __init__(self, max_bytes: int, close: Callable[[C], None], refresh: Callable[[], None] | None = None) -> None:
        """Create the limit.

        `close` closes a connection and calls `discard`. `refresh` subtracts bytes that connections no longer have. It is
        called before each search.
        """
        self.max_bytes = max_bytes
        self.total = 0
        self.bytes: dict[C, int] = {}
        """Bytes of each connection that has any."""
        self._close = close
        self._refresh = refresh
        self._largest: list[C] = []
        """The connections that had bytes at the last search, those with the most last. Empty once enough are closed."""
        self._scheduled: asyncio.Handle | None = None
        """The scheduled call of `_close_more`. None if it is not scheduled."""

    def add(self, connection: C, size: int) -> None:
        """Count `size` more bytes of a connection. Close connections if the limit is exceeded."""
        self.bytes[connection] = self.bytes.get(connection, 0) + size
        self.total += size
        if self.total > self.max_bytes:
            self._close_until(self.max_bytes, len(self._largest))
            if self.total > self.max_bytes:  # those of the last search do not suffice
                self._search()
                self._close_until(self.max_bytes, len(self._largest))
            self._schedule_more()

    def subtract(self, connection: C, size: int) -> None:
        """Count `size` fewer bytes of a connection, which keeps some."""
        self.bytes[connection] -= size
        self.total -= size

    def discard(self, connection: C) -> None:
        """Forget all bytes of a connection, if it has any."""
        self.total -= self.bytes.pop(connection, 0)

    def _search(self) -> None:
        """Sort the connections by their bytes."""
        if self._refresh is not None:
            self._refresh()
        self._largest = sorted(self.bytes, key=self.bytes.__getitem__)

    def _schedule_more(self) -> None:
        """Schedule `_close_more` for the next iteration of the event loop, if connections are left to close."""
        if self._largest and self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._close_more)

    def _close_more(self) -> None:
        """Close connections in each iteration, until the total is at most `LOW_WATER_SHARE` of the limit."""
        self._scheduled = None
        self._close_until(self.max_bytes * LOW_WATER_SHARE, MAX_CLOSED_LARGE_CONNECTIONS)
        self._schedule_more()

    def _close_until(self, max_bytes: float, max_closed: int) -> None:
        """Close connections of the last search until the total is at most `max_bytes`, but no more than `max_closed`."""
        while self.total > max_bytes and self._largest and max_closed:
            connection = self._largest.pop()
            if connection in self.bytes:
                self._close(connection)
                max_closed -= 1
        if self.total <= self.max_bytes * LOW_WATER_SHARE:
            self._largest.clear()
