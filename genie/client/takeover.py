"""Session takeovers: another process uses the secret of this client's session."""

from __future__ import annotations

from typing import Final

from genie.errors import Code, RequestRejected

MAX_TAKEOVERS: Final = 3
"""Number of connections in a row that end by a takeover, after which the client ends."""


class TakeoverCount:
    """Counts the connections in a row that ended because a newer connection took over the session.

    One takeover may be the client's own, whose earlier connection the server still had. Several in a row are the work of
    another process with the same secret, which reconnects as often as this one.
    """

    def __init__(self) -> None:
        self.error: RequestRejected | None = None
        """The error that ended the client; None: the client works."""
        self._in_a_row = 0
        self._is_taken_over = False
        """Whether the server reported a takeover on the current connection."""

    def on_taken_over(self) -> None:
        """Record that the server reported a takeover on the current connection."""
        self._is_taken_over = True

    def on_disconnected(self) -> bool:
        """Record the end of a connection. Returns whether it ends the client, and sets `error` then."""
        self._in_a_row = self._in_a_row + 1 if self._is_taken_over else 0
        self._is_taken_over = False
        if self._in_a_row < MAX_TAKEOVERS:
            return False
        self.error = RequestRejected(
            Code.SESSION_TAKEN_OVER,
            f"another connection took over the session of this client {MAX_TAKEOVERS} times in a row: two processes use the "
            "same session=…; give each process its own, or none",
        )
        return True
