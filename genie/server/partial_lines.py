"""Limits for incomplete lines: the total bytes over all connections, and the age of each line."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Protocol

from genie.errors import Code, RequestRejected
from genie.observability.limited_log import log_limited

MAX_LINE_AGE_S = 30.0
"""Maximum seconds from the first byte of a line to its last."""

MAX_CLOSED = 100
"""Maximum number of connections that are closed in one iteration of the event loop because of the age of their lines, or in order
to reach `LOW_WATER_SHARE`."""

LOW_WATER_SHARE = 0.9
"""When the limit is exceeded, connections are closed until only this share of the limit is used. So the search for the
largest lines, which sorts all lines, runs rarely.
"""


class LineOwner(Protocol):
    """The part of a connection that `PartialLines` uses."""

    @property
    def reading_is_paused(self) -> bool:
        """True if reading from the client is paused and will be resumed."""

    def drop_partial_line(self, rejection: RequestRejected) -> None:
        """Drop the incomplete line, send `rejection` and close the connection."""


class PartialLines:
    """Tracks the incomplete line of each connection, and closes connections beyond the limits.

    If all incomplete lines together exceed `max_bytes`, the connections with the largest lines are closed. A line that is
    older than `MAX_LINE_AGE_S` also closes its connection.
    """

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        """Bytes of all incomplete lines."""
        self._max_bytes = max_bytes
        self._sizes: dict[LineOwner, int] = {}
        """Bytes of the incomplete line of each connection that has one."""
        self._started_at: dict[LineOwner, float] = {}
        """Event-loop time of the first byte of each connection's line, oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled: asyncio.Handle | None = None
        """The scheduled call of `_close_more`. None if it is not scheduled."""
        self._largest: list[LineOwner] = []
        """The connections that had incomplete lines when the limit was exceeded, the largest line last. Empty once
        enough of them are closed."""

    def update(self, connection: LineOwner, size: int, *, new: bool) -> None:
        """Set the bytes of a connection's incomplete line, 0 if it has none.

        Closes connections if the limit is exceeded. With `new`, this is another line than at the last call, so its age
        starts now.
        """
        self.bytes += size - self._sizes.pop(connection, 0)
        if new or not size:
            self._started_at.pop(connection, None)
        if not size:
            return
        self._sizes[connection] = size
        if connection not in self._started_at:
            loop = asyncio.get_running_loop()
            self._started_at[connection] = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(MAX_LINE_AGE_S, self._close_oldest)
        if self.bytes > self._max_bytes:
            self._close_largest()

    def discard(self, connection: LineOwner) -> None:
        """Forget the incomplete line of a connection that is lost or accepts no further input."""
        self.bytes -= self._sizes.pop(connection, 0)
        self._started_at.pop(connection, None)

    def _close_largest(self) -> None:
        """Close the connections with the largest lines until the total is within the limit.

        Later, `_close_more` closes others until the low-water mark.
        """
        self._close_until(self._max_bytes, len(self._largest))  # those of the last search, if they suffice
        if self.bytes > self._max_bytes:
            self._largest = sorted(self._sizes, key=self._sizes.__getitem__)
            self._close_until(self._max_bytes, len(self._largest))
        self._schedule_more()

    def _schedule_more(self) -> None:
        """Schedule `_close_more` for the next iteration of the event loop, if connections are left to close."""
        if self._largest and self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._close_more)

    def _close_more(self) -> None:
        """Close up to `MAX_CLOSED` connections in each iteration, until the total is at most `LOW_WATER_SHARE` of the limit."""
        self._scheduled = None
        self._close_until(self._max_bytes * LOW_WATER_SHARE, MAX_CLOSED)
        self._schedule_more()

    def _close_until(self, max_bytes: float, max_closed: int) -> None:
        """Close connections of `_largest` until the total is at most `max_bytes`, but no more than `max_closed`."""
        reason = f"the incomplete lines of all connections exceed {self._max_bytes} bytes, and this line is among the longest"
        while self.bytes > max_bytes and self._largest and max_closed:
            connection = self._largest.pop()
            if connection in self._sizes:
                self._close(connection, RequestRejected(Code.TOO_MANY, reason))
                max_closed -= 1
        if self.bytes <= self._max_bytes * LOW_WATER_SHARE:
            self._largest.clear()

    def _close_oldest(self) -> None:
        """Close up to `MAX_CLOSED` connections whose line is older than `MAX_LINE_AGE_S`.

        Set the timer for the next line. If the server itself has paused reading, the age of a line starts again.
        """
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection, started_at in [*islice(self._started_at.items(), MAX_CLOSED)]:
            if started_at > now - MAX_LINE_AGE_S:
                self._timer = loop.call_later(started_at + MAX_LINE_AGE_S - now, self._close_oldest)
                return
            if connection.reading_is_paused:  # the rest of the line may be in the kernel's buffer
                del self._started_at[connection]  # then add it at the end, as the youngest line
                self._started_at[connection] = now
                continue
            self._close(
                connection,
                RequestRejected(Code.BAD_MESSAGE, f"the line was not completed within {MAX_LINE_AGE_S:g} s"),
            )
        if self._started_at:  # the other lines are checked after other connections were served
            oldest = next(iter(self._started_at.values()))
            self._timer = loop.call_later(max(0.0, oldest + MAX_LINE_AGE_S - now), self._close_oldest)

    def _close(self, connection: LineOwner, rejection: RequestRejected) -> None:
        """Log the reason, and close a connection with an incomplete line."""
        log_limited(
            "warning",
            "connection with an incomplete line closed",
            line_bytes=self._sizes[connection],
            reason=rejection.message,
        )
        self.discard(connection)
        connection.drop_partial_line(rejection)
