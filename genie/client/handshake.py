"""The handshakes of the successive connections of a session. Also records why the client closes a connection or gives up.

Every connection begins with `hello` and a `ping`. The server replies with `welcome`, then with the state of the session's
requests (resumption), then with `pong`. The client sends nothing else before it has received `pong`.

Takeovers: if a newer connection sends the same secret, the server ends the older one with `session-taken-over`. A client may
take over its own session once, when it reconnects before the server has noticed the end of the earlier connection. If several
connections in a row end by a takeover, another process with the same secret reconnects as often as this one. Then the client
ends.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from genie.client import commands, errors
from genie.errors import Code, GenieError, RequestRejected, Unavailable
from genie.protocol import messages

FINAL_ERRORS: Final = frozenset({Code.UNAUTHORIZED, Code.UNKNOWN_NAMESPACE, Code.UNSUPPORTED_PROTOCOL})
"""Error codes in reply to `hello` that are reported to the callers, because a retry at this server would not help."""

MAX_TAKEOVERS: Final = 3
"""The client ends when this number of connections in a row has ended by a takeover."""


class Phase(Enum):
    """The state of the connection."""

    DOWN = auto()
    HANDSHAKE = auto()
    """The client has sent `hello`."""
    RESUMING = auto()
    """The client has received `welcome`. The server now sends the state of the session's requests."""
    UP = auto()


UP: Final = Phase.UP


class Handshake:
    """The state of the current connection, and how servers have replied to `hello`.

    Args:
        session_timeout: seconds for which the server keeps the session of a disconnected client.
        namespace: the namespace of all commands, which the server must confirm. None means the server's first namespace.
        note: the note of all requests without a note of their own, or None.

    """

    def __init__(self, session_timeout: float, namespace: str | None, note: str | None) -> None:
        self.phase = Phase.DOWN
        self.connection_number = 0
        """The number of the current connection. The first connection has number 1."""
        self.connected_at = 0.0
        """When `hello` was sent on the current connection."""
        self.close_reason = ""
        """Why the I/O layer must close the current connection, for example because the server is silent. Empty if it need not
        be closed."""
        self.redirect: str | None = None
        """If the server has replied that it is a follower: the leader's address, or an empty text if the follower knows no
        leader. Otherwise None."""
        self.server = ""
        """Version and build of the last server that accepted a `hello`."""
        self.final_error: RequestRejected | None = None
        """The error (one of `FINAL_ERRORS`) in reply to the `hello` of the current attempt, or None. The I/O layer resets it
        before each attempt."""
        self.has_ended = False
        """True if the client must not connect again, because another process uses its session."""
        self._rejection: RequestRejected | None = None
        """The error that ended the client, or the error of the last server if all servers have rejected this client for
        good. Otherwise None."""
        self._takeovers = 0
        """Number of connections in a row that have ended by a takeover."""
        self._is_taken_over = False
        """True if the server reported a takeover on the current connection."""
        self._namespace = namespace
        self._secret = ""
        """Identifies the session to the server. Set by `use_secret`."""
        self._make_hello = functools.partial(
            commands.make_hello, session_timeout=session_timeout, namespace=namespace, note=note
        )
        self._hello = b""
        """The encoded `hello`."""

    @property
    def rejection(self) -> RequestRejected | None:
        """A copy of the error that ended the client, or with which all servers have rejected it for good, or None."""
        return None if self._rejection is None else errors.copy_rejection(self._rejection)

    def use_secret(self, secret: str) -> None:
        """Identify the session by this secret from the next `hello` on. Raises ValueError if the secret is invalid."""
        self._secret = secret
        self._hello = self._make_hello(secret)

    def use_token(self, token: str | None) -> None:
        """Send this token with the next `hello`, for authentication. Raises ValueError if it is empty or too long."""
        self._hello = self._make_hello(self._secret, token=token)

    def on_round_failed(self, rejections: Sequence[RequestRejected | None]) -> None:
        """Record a failed round of connection attempts.

        `rejections` has one entry for each attempt: the error with which the server rejected the client for good, or
        None for any other failure. Calls fail with the last rejection if all attempts were rejected. Otherwise a server may
        still accept the client in the next round.
        """
        is_rejected_by_all = bool(rejections) and None not in rejections
        if not self.has_ended:
            self._rejection = rejections[-1] if is_rejected_by_all else None

    def request_close(self, reason: str) -> None:
        """Make the I/O layer close the connection. If this method is called several times, the first reason counts."""
        self.close_reason = self.close_reason or reason

    # -- events of the connection -------------------------------------------------------------------------

    def on_connected(self, now: float) -> list[bytes]:
        """Start the handshake on a new connection. Returns the encoded commands to send."""
        self.phase = Phase.HANDSHAKE
        self.connected_at = now
        self.connection_number += 1
        self.close_reason = ""
        self.redirect = None
        return [self._hello, commands.RESUMPTION_PING]

    def on_welcome(self, welcome: messages.Welcome.Payload) -> bool:
        """Begin the resumption, and return True.

        If the server has another protocol version or namespace, request the end of the connection, and return False.
        """
        if welcome.protocol != commands.PROTOCOL:
            code = Code.UNSUPPORTED_PROTOCOL
            problem = f"the server speaks protocol {welcome.protocol}, not {commands.PROTOCOL}"
        elif self._namespace not in (None, welcome.namespace):
            code = Code.UNKNOWN_NAMESPACE
            problem = f"the server serves the namespace {welcome.namespace!r}, not {self._namespace!r}"
        else:
            self.phase = Phase.RESUMING
            self._rejection = None
            self.server = welcome.server
            return True
        self.final_error = RequestRejected(code, problem)
        self.request_close(problem)
        return False

    def on_error(self, error: GenieError, leader: str | None) -> None:
        """Handle an error reply: request the end of the connection after `unavailable`, and after any error in a handshake.

        `leader` is the address of the leader if the error is from a follower that knows it.
        """
        if isinstance(error, RequestRejected):
            if error.code in FINAL_ERRORS and self.phase is Phase.HANDSHAKE:
                self.final_error = error
            if error.code == Code.SESSION_TAKEN_OVER and error.ref is None:  # not the reply to a command
                self._is_taken_over = True
        is_unavailable = isinstance(error, Unavailable)
        if is_unavailable or self.phase is not UP:
            self.request_close(f"the server answered: {error}")
        if is_unavailable:
            self.redirect = leader or ""  # "": try the next address

    def on_disconnected(self) -> bool:
        """Record the end of the connection. Returns True if the client has ended, because another process uses its session."""
        self.phase = Phase.DOWN
        self._takeovers = self._takeovers + 1 if self._is_taken_over else 0
        self._is_taken_over = False
        if self._takeovers < MAX_TAKEOVERS:
            return False
        self.has_ended = True
        self._rejection = RequestRejected(
            Code.SESSION_TAKEN_OVER,
            f"another connection took over the session of this client {MAX_TAKEOVERS} times in a row: two processes use the "
            "same session=…; give each process its own, or none",
        )
        return True
