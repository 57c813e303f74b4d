"""Limits for incomplete lines: the total bytes over all connections, and the age of each line."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Protocol

from genie.errors import Code, RequestRejected
from genie.observability.limited_log import log_limited
from genie.server.byte_limit import ByteLimit

MAX_LINE_AGE_S = 30.0
"""Maximum seconds from the first byte of a line to its last."""

MAX_CLOSED_OLD_LINES = 100
"""Maximum number of connections that are closed in one iteration of the event loop because of the age of their lines."""


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
        self._sizes: ByteLimit[LineOwner] = ByteLimit(max_bytes, self._close_large)
        """The incomplete lines of the connections that have one."""
        self._started_at: dict[LineOwner, float] = {}
        """Event-loop time of the first byte of each connection's line, oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all incomplete lines."""
        return self._sizes.total

    def update(self, connection: LineOwner, size: int, *, new: bool) -> None:
        """Set the bytes of a connection's incomplete line, 0 if it has none.

        Closes connections if the limit is exceeded. With `new`, this is another line than at the last call, so its age
        starts now.
        """
        self._sizes.discard(connection)
        if new or not size:
            self._started_at.pop(connection, None)
        if not size:
            return
        if connection not in self._started_at:
            loop = asyncio.get_running_loop()
            self._started_at[connection] = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(MAX_LINE_AGE_S, self._close_oldest)
        self._sizes.add(connection, size)

    def discard(self, connection: LineOwner) -> None:
        """Forget the incomplete line of a connection that is lost or accepts no further input."""
        self._sizes.discard(connection)
        self._started_at.pop(connection, None)

    def _close_large(self, connection: LineOwner) -> None:
        limit = self._sizes.max_bytes
        reason = f"the incomplete lines of all connections exceed {limit} bytes, and this line is among the longest"
        self._close(connection, RequestRejected(Code.TOO_MANY, reason))

    def _close_oldest(self) -> None:
        """Close up to `MAX_CLOSED_OLD_LINES` connections whose line is older than `MAX_LINE_AGE_S`.

        Set the timer for the next line. If the server itself has paused reading, the age of a line starts again.
        """
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection, started_at in [*islice(self._started_at.items(), MAX_CLOSED_OLD_LINES)]:
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
            line_bytes=self._sizes.bytes[connection],
            reason=rejection.message,
        )
        self.discard(connection)
        connection.drop_partial_line(rejection)
