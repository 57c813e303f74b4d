"""Limits for what clients do not read: the total bytes over all connections, and the time without any progress.

The commands that a connection has queued count, too. They may wait until the client reads its output.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from genie.server.byte_limit import ByteLimit

MAX_STALL_S = 30.0
"""Maximum seconds for which a client with unread output may read nothing."""

MAX_CLOSED_STALLED_CONNECTIONS = 100
"""Maximum number of connections that are closed in one iteration of the event loop because their clients read nothing."""

WRITE_BUFFER_BYTES = 1
"""A connection is *write-blocked* if its transport has more unsent bytes: if the buffers of the operating system are full. The
transport would keep 900 bytes for each further write, so there is none."""


TLS_WRITE_BUFFER_BYTES = 4 << 10
"""The same with TLS, before and after the encryption. More than the last message of a handshake, which may be unsent."""

MAX_WRITE_BYTES = 16 << 10
"""Maximum bytes of output that a connection passes to its transport at once. The transport keeps them all in memory until the
last of them are sent, but reports only the unsent ones."""

COMMAND_FACTOR = 5
"""Memory of the shortest queued commands, as a multiple of their bytes."""


class SlowConsumer(Protocol):
    """The part of a connection that `UnreadOutput` uses."""

    @property
    def blocked_bytes(self) -> int:
        """Bytes of output that the client has not read, and of the memory of queued commands."""

    def abort_slow_consumer(self, reason: str) -> None:
        """Log the reason and close the connection at once, without sending its unread bytes."""


class UnreadOutput:
    """Tracks the unread output of each write-blocked connection, and closes connections beyond the limits.

    If all unread output together exceeds `max_bytes`, the connections with the most are closed. A connection whose client
    has read nothing for `MAX_STALL_S` is closed, too.
    """

    def __init__(self, max_bytes: int) -> None:
        self._unread: ByteLimit[SlowConsumer] = ByteLimit(max_bytes, self._close_large, self._record_progress)
        """The unread bytes of the write-blocked connections."""
        self._last_read_at: dict[SlowConsumer, float] = {}
        """Event-loop time when each client last read output, or when its connection became write-blocked."""
        self._timer: asyncio.TimerHandle | None = None
        self.closed = 0
        """Number of connections that were closed because of a limit."""

    @property
    def bytes(self) -> int:
        """Unread bytes of all write-blocked connections."""
        return self._unread.total

    def __len__(self) -> int:
        return len(self._last_read_at)

    def add(self, connection: SlowConsumer, size: int) -> None:
        """Count `size` more bytes of a write-blocked connection: at the first call all of its `blocked_bytes`.

        Closes connections if the limit is exceeded.
        """
        if connection not in self._last_read_at:
            loop = asyncio.get_running_loop()
            self._last_read_at[connection] = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(MAX_STALL_S, self._close_stalled)
        self._unread.add(connection, size)

    def discard(self, connection: SlowConsumer) -> None:
        """Forget a connection whose client has read its output, or that is lost."""
        self._unread.discard(connection)
        self._last_read_at.pop(connection, None)

    def _record_progress(self) -> None:
        """Subtract the bytes that the clients have read since the last call, and the commands that were executed."""
        now = asyncio.get_running_loop().time()
        for connection, counted_bytes in self._unread.bytes.items():
            read_bytes = counted_bytes - connection.blocked_bytes
            if read_bytes > 0:
                self._unread.subtract(connection, read_bytes)
                self._last_read_at[connection] = now

    def _close_large(self, connection: SlowConsumer) -> None:
        limit = self._unread.max_bytes
        self._close(
            connection, f"all connections together have more than {limit} unread bytes, and this one has among the most"
        )

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
        self._record_progress()
        stalled = [connection for connection, read_at in self._last_read_at.items() if now - read_at >= MAX_STALL_S]
        for connection in stalled[:MAX_CLOSED_STALLED_CONNECTIONS]:
            self._close(connection, f"the client has read nothing for {MAX_STALL_S:g} s")
        if self._last_read_at:
            longest_unread_since = min(self._last_read_at.values())
            # At least a second, because each call reads the progress of all connections.
            delay_s = (
                0.0
                if len(stalled) > MAX_CLOSED_STALLED_CONNECTIONS
                else max(longest_unread_since + MAX_STALL_S - now, 1.0)
            )
            self._timer = loop.call_later(delay_s, self._close_stalled)
