"""Limits for what clients do not read: the total bytes over all connections, and the time without any progress."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

MAX_STALL_S = 30.0
"""Maximum seconds in which a client with much unread output reads nothing."""

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
        """The connections that had unread output when the limit was exceeded, the most last. Empty when enough of them are
        closed."""
        self.closed = 0
        """Number of connections that were closed because of a limit."""

    def __len__(self) -> int:
        return len(self._backlogs)

    def add(self, connection: SlowConsumer, size: int) -> None:
        """Count new output of a write-blocked connection; the first call counts all of its unread output.

        May close connections.
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
        read = backlog.bytes - connection.unread_bytes
        if read > 0:
            self.bytes -= read
            backlog.bytes -= read
            backlog.last_read_at = now

    def _close_largest(self) -> None:
        """Close the connections with the most unread output until the total is within the limit, and others later."""
        self._close_until(self.max_bytes, len(self._largest))
        if self.bytes > self.max_bytes:
            now = asyncio.get_running_loop().time()
            for connection, backlog in self._backlogs.items():
                self._record_progress(connection, backlog, now)
            self._largest = sorted(self._backlogs, key=lambda one: self._backlogs[one].bytes)
            self._close_until(self.max_bytes, len(self._largest))
        self._schedule_more()

    def _schedule_more(self) -> None:
        if self._largest and self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._close_more)

    def _close_more(self) -> None:
        """Close more of these connections, some in each iteration, until the total is at most `LOW_WATER_SHARE` of the limit."""
        self._scheduled = None
        self._close_until(self.max_bytes * LOW_WATER_SHARE, MAX_CLOSED)
        self._schedule_more()

    def _close_until(self, max_bytes: float, max_closed: int) -> None:
        reason = (
            f"all connections together have more than {self.max_bytes} unread bytes, and this one is among the largest"
        )
        while self.bytes > max_bytes and self._largest and max_closed:
            connection = self._largest.pop()
            if connection in self._backlogs:
                self._close(connection, reason)
                max_closed -= 1
        if self.bytes <= self.max_bytes * LOW_WATER_SHARE:
            self._largest.clear()

    def _close(self, connection: SlowConsumer, reason: str) -> None:
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
            self._close(connection, f"nothing was read for {MAX_STALL_S:g} s")
        if self._backlogs:
            first_read_at = min(backlog.last_read_at for backlog in self._backlogs.values())
            delay_s = 0.0 if len(stalled) > MAX_CLOSED else max(first_read_at + MAX_STALL_S - now, 1.0)
            self._timer = loop.call_later(delay_s, self._close_stalled)
