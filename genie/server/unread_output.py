"""Limits for what clients do not read: the total bytes over all connections, and the time without any progress."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

MAX_STALL_S = 30.0
"""Maximum seconds for which a client with much unread output may read nothing."""

MAX_CLOSED = 100
"""Maximum number of connections that are closed in one iteration of the event loop because their clients read nothing, or in order
to reach `LOW_WATER_SHARE`."""

LOW_WATER_SHARE = 0.9
"""When the limit is exceeded, connections are closed until only this share of the limit is used. So the search for the
largest backlogs, which sorts all of them, runs rarely."""

WRITE_BUFFER_BYTES = 4 << 10
"""Unread bytes of one connection that are not counted. A connection with more is *write-blocked*."""


class SlowConsumer(Protocol):
    """The part of a connection that `UnreadOutput` uses."""

    @property
    def unread_bytes(self) -> int:
        """Bytes that the client has not read."""

    def abort_slow_consumer(self, reason: str) -> None:
        """Log the reason and close the connection at once, without sending its unread bytes."""


@dataclass(slots=True)
class Backlog:
    """The unread output of a write-blocked connection."""

    bytes: int
    last_read_at: float
    """Event-loop time when the client last read output, or when the connection became write-blocked."""


class UnreadOutput:
    """Tracks the unread output of each write-blocked connection, and closes connections beyond the limits.

    If all unread output together exceeds `max_bytes`, the connections with the most are closed. A connection whose client
    has read nothing for `MAX_STALL_S` is closed, too.
    """

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        """Unread bytes of all write-blocked connections."""
        self.max_bytes = max_bytes
        self._backlogs: dict[SlowConsumer, Backlog] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled: asyncio.Handle | None = None
        """The scheduled call of `_close_more`. None if it is not scheduled."""
        self._largest: list[SlowConsumer] = []
        """The write-blocked connections at the time at which the limit was exceeded, the largest backlog last. Empty
        once enough of them are closed."""
        self.closed = 0
        """Number of connections that were closed because of a limit."""

    def __len__(self) -> int:
        return len(self._backlogs)

    def add(self, connection: SlowConsumer, size: int) -> None:
        """Count `size` more unread bytes of a write-blocked connection: at the first call all of its unread output.

        Closes connections if the limit is exceeded.
        """
        backlog = self._backlogs.get(connection)
        if backlog is None:
            loop = asyncio.get_running_loop()
            self._backlogs[connection] = Backlog(size, loop.time())
            if self._timer is None:
                self._timer = loop.call_later(MAX_STALL_S, self._close_stalled)
        else:
            backlog.bytes += size
        self.bytes += size
        if self.bytes > self.max_bytes:
            self._close_largest()

    def discard(self, connection: SlowConsumer) -> None:
        """Forget a connection whose client has read its output, or that is lost."""
        backlog = self._backlogs.pop(connection, None)
        if backlog is not None:
            self.bytes -= backlog.bytes

    def _record_progress(self, connection: SlowConsumer, backlog: Backlog, now: float) -> None:
        """Subtract the bytes that the client has read since the last call."""
        read_bytes = backlog.bytes - connection.unread_bytes
        if read_bytes > 0:
            self.bytes -= read_bytes
            backlog.bytes -= read_bytes
            backlog.last_read_at = now

    def _close_largest(self) -> None:
        """Close the connections with the most unread output until the total is within the limit.

        Later, `_close_more` closes others until the low-water mark.
        """
        self._close_until(self.max_bytes, len(self._largest))  # those of the last search, if they suffice
        if self.bytes > self.max_bytes:
            now = asyncio.get_running_loop().time()
            for connection, backlog in self._backlogs.items():
                self._record_progress(connection, backlog, now)
            self._largest = sorted(self._backlogs, key=lambda connection: self._backlogs[connection].bytes)
            self._close_until(self.max_bytes, len(self._largest))
        self._schedule_more()

    def _schedule_more(self) -> None:
        """Schedule `_close_more` for the next iteration of the event loop, if connections are left to close."""
        if self._largest and self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._close_more)

    def _close_more(self) -> None:
        """Close up to `MAX_CLOSED` connections in each iteration, until the total is at most `LOW_WATER_SHARE` of the limit."""
        self._scheduled = None
        self._close_until(self.max_bytes * LOW_WATER_SHARE, MAX_CLOSED)
        self._schedule_more()

    def _close_until(self, max_bytes: float, max_closed: int) -> None:
        """Close connections of `_largest` until the total is at most `max_bytes`, but no more than `max_closed`."""
        reason = (
            f"all connections together have more than {self.max_bytes} unread bytes, and this one has among the most"
        )
        while self.bytes > max_bytes and self._largest and max_closed:
            connection = self._largest.pop()
            if connection in self._backlogs:
                self._close(connection, reason)
                max_closed -= 1
        if self.bytes <= self.max_bytes * LOW_WATER_SHARE:
            self._largest.clear()

    def _close(self, connection: SlowConsumer, reason: str) -> None:
        """Close a connection, and log the reason."""
        self.discard(connection)
        self.closed += 1
        connection.abort_slow_consumer(reason)

    def _close_stalled(self) -> None:
        """Close the connections whose clients have read nothing for `MAX_STALL_S`, and set the timer for the next one."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        stalled = []
        for connection, backlog in self._backlogs.items():
            self._record_progress(connection, backlog, now)
            if now - backlog.last_read_at >= MAX_STALL_S:
                stalled.append(connection)
        for connection in stalled[:MAX_CLOSED]:
            self._close(connection, f"the client has read nothing for {MAX_STALL_S:g} s")
        if self._backlogs:
            first_read_at = min(backlog.last_read_at for backlog in self._backlogs.values())
            delay_s = 0.0 if len(stalled) > MAX_CLOSED else max(first_read_at + MAX_STALL_S - now, 1.0)
            self._timer = loop.call_later(delay_s, self._close_stalled)
