"""`Peer`, the client of a pipeline: state, session, input queue, outbox. `connection.py` adds the socket.

`InternalClient` has no socket: it executes a command of the server itself, for the admin port.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final, Protocol

from genie.access import Principal
from genie.errors import RequestRejected
from genie.protocol.commands import Hello, Namespaced
from genie.protocol.framing import LongLine, UnsplitLines
from genie.server.sessions import Session


class ConnectionState(Enum):
    """The protocol state of a connection.

    `Peer.closing` and `Peer.closed` are independent of the state: commands that were read earlier are still executed.
    """

    AUTHENTICATING = "authenticating"
    """The client is not authenticated yet, or was rejected. Nothing is submitted to a handler."""
    AWAIT_HELLO = "await-hello"
    """The first command is awaited. A client that needs no session, namespace or token may omit `hello`."""
    HELLO_REJECTED = "hello-rejected"
    """Only another `hello` is accepted, because other commands would be executed without the requested session."""
    READY = "ready"
    """Commands are submitted to the handler of the namespace."""
    DETACHED = "detached"
    """The session has ended or was taken over. No further command is executed."""


READY: Final = ConnectionState.READY
DETACHED: Final = ConnectionState.DETACHED
"""Module-level names: an attribute lookup on the enum takes three times as long, and every read from a client compares
states.
"""

TRANSITIONS: Final[dict[ConnectionState, frozenset[ConnectionState]]] = {
    ConnectionState.AWAIT_HELLO: frozenset(
        (ConnectionState.AUTHENTICATING, ConnectionState.HELLO_REJECTED, ConnectionState.READY)
    ),
    ConnectionState.AUTHENTICATING: frozenset((ConnectionState.AWAIT_HELLO,)),
    ConnectionState.HELLO_REJECTED: frozenset((ConnectionState.AUTHENTICATING, ConnectionState.READY)),
    ConnectionState.READY: frozenset((ConnectionState.HELLO_REJECTED, ConnectionState.DETACHED)),
    ConnectionState.DETACHED: frozenset(),
}
"""The states that may follow each state. READY becomes HELLO_REJECTED if the handler rejects the submitted `hello`.
HELLO_REJECTED becomes AUTHENTICATING if the token of the next `hello` is wrong; then the connection is closed.
"""


MAX_BYTES_BEFORE_REPLY: Final = 8 << 10
"""Maximum bytes of deferred watch events that are sent immediately with a reply. Beyond it, the reply is deferred,
too."""


class EndOfInput:
    """The last item that a connection submits: close the connection after the replies to the earlier items."""


END_OF_INPUT = EndOfInput()


class SessionState:
    """The item after a `hello` that resumes a session with many requests: send the next slice of their state."""


SESSION_STATE = SessionState()

Item = bytes | LongLine | RequestRejected | EndOfInput | SessionState | Hello | Namespaced
"""An item of input: a line, an error to send instead of a reply, the end of the input, the state of a resumed session, or a
decoded command."""

Input = Sequence[Item] | UnsplitLines
"""The items of one call of `submit`: a sequence, or complete lines that are not split yet."""

Queued = tuple[Iterator[Item], int, int]
"""The remaining items of an input, the number of items (`sys.maxsize` if unknown), and the bytes that contained them."""

InputQueue = deque[Queued]


class CommandHandler(Protocol):
    """Executes or rejects the commands of connections: the pipeline of a leader, or the handler of a follower."""

    is_leader: bool
    """True if this handler executes commands rather than rejecting them."""

    def submit(self, connection: Peer, items: Input, size: int) -> None:
        """Queue commands of one connection in order. `size` is the number of their bytes."""

    def on_partial_line(self, connection: Peer, size: int) -> None:
        """Stop reading from a connection with an incomplete line of `size` bytes if too many bytes are queued."""

    def on_disconnect(self, connection: Peer) -> None:
        """End or keep the requests that are bound to a lost connection."""

    def on_writable(self, connection: Peer) -> None:
        """Continue with the commands of a client that reads its messages again."""


class Peer:
    """The state of one client. A subclass implements writing, and pausing and resuming of reading."""

    __slots__ = (
        "busy_until",
        "closed",
        "closing",
        "deferred",
        "has_reply",
        "input_paused",
        "input_queue",
        "outbox",
        "overran_until",
        "principal",
        "queued_bytes",
        "session",
        "state",
        "watch_bytes",
        "write_blocked",
    )

    def __init__(self) -> None:
        self.state = ConnectionState.AWAIT_HELLO
        self.principal: Principal | None = None
        """The identity and permissions of the client. None if clients need no token: then everything is permitted."""
        self.session = Session(self)
        """The session of the connection. A `hello` may replace it with a session that has a key."""
        self.input_queue: InputQueue = deque()
        """Queued commands. Each entry contains the commands of one read."""
        self.queued_bytes = 0
        """Bytes of `input_queue`."""
        self.input_paused = False
        """True if reading is paused (back pressure), because too many bytes are queued."""
        self.busy_until = self.overran_until = 0.0
        """Times of the scheduler, in seconds of the monotonic clock. The connection is busy until `busy_until`. If it
        exceeds its quantum again before `overran_until`, it becomes busy."""
        self.outbox: list[bytes] = []
        """Messages of the current batch, sent by `flush`."""
        self.has_reply = False
        """True if `outbox` may contain a message other than a watch event, so that the outbox must not be deferred.
        Then the connection is in `BatchOutcome.dirty`."""
        self.deferred: list[bytes] = []
        """Watch events of stored batches that are sent a little later, and replies that are sent after many such
        events."""
        self.watch_bytes = 0
        """Bytes of watch events in `outbox` and `deferred`, 0 if there are none. May include the bytes of replies in
        `outbox`."""
        self.write_blocked = False
        """True if the client does not read its messages, so that much output is buffered."""
        self.closing = False
        """True if no further input is accepted. Commands that were read earlier are still executed."""
        self.closed = False
        """True if the connection is lost, so that nothing can be sent."""

    def enter_state(self, state: ConnectionState) -> None:
        """Change the state. Raises RuntimeError if `TRANSITIONS` does not permit the change."""
        if state is not self.state:
            if state not in TRANSITIONS[self.state]:
                raise RuntimeError(f"{self.state} does not become {state}")
            self.state = state

    def detach(self) -> None:
        """Ignore further commands, because the session has ended or was taken over by another connection."""
        self.session = Session(self)
        self.enter_state(DETACHED)
        self.stop_reading()

    # -- output -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the deferred watch events, then all messages of the batch, in one write.

        If many bytes of events are deferred, the messages are deferred, too, because very many watchers may get a reply
        at once.
        """
        self.has_reply = False
        if self.deferred:
            self.defer()  # adds the messages of the batch to `deferred`
            if self.watch_bytes <= MAX_BYTES_BEFORE_REPLY:
                self.flush_deferred()
        else:
            data = b"".join(self.outbox)
            self.outbox.clear()
            self.watch_bytes = 0
            self._write(data)

    def defer(self) -> None:
        """Defer the messages in the outbox: they are sent with the next reply, or by `flush_deferred`."""
        self.deferred += self.outbox
        self.outbox.clear()

    def flush_deferred(self) -> None:
        """Send deferred messages. The messages of the batch in flight stay in the outbox."""
        data = b"".join(self.deferred)
        self.deferred.clear()
        self.watch_bytes = sum(map(len, self.outbox))
        self._write(data)

    @property
    def unread_bytes(self) -> int:
        """Number of written bytes that the client has not read, or 0 if the subclass has no buffer."""
        return 0

    def _write(self, data: bytes) -> None:
        """Send bytes to the client. `data` may be empty."""
        raise NotImplementedError

    # -- flow control and end -----------------------------------------------------------------------------

    def pause_input(self) -> None:
        """Stop reading until `resume_input`, because too many bytes are queued."""
        self.input_paused = True

    def resume_input(self) -> None:
        """Resume reading after `pause_input`."""
        self.input_paused = False

    def stop_reading(self) -> None:
        """Accept no further input."""
        self.closing = True

    def finish(self) -> None:
        """Send all messages, then close."""
        self.closing = True

    def abort(self) -> None:
        """Close immediately, without sending pending messages."""
        self.closed = True


def principal_name(connection: Peer) -> str | None:
    """Return the name of a connection's principal, or None if its client needed no token."""
    return None if connection.principal is None else connection.principal.name


class InternalClient(Peer):
    """A client inside the server process, for one command.

    As for any client, the reply is sent once the command is stored.
    """

    __slots__ = ("_handler", "_reply")

    def __init__(self, handler: CommandHandler) -> None:
        super().__init__()
        self.enter_state(ConnectionState.READY)
        self._handler = handler
        self._reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def execute(self, line: bytes) -> bytes:
        """Submit one line and return the reply.

        The caller must set a timeout, because an unavailable store delays the reply.
        """
        self._handler.submit(self, [line], len(line))
        try:
            return await self._reply
        finally:
            self.closed = True
            self._handler.on_disconnect(self)

    def abort(self) -> None:
        """Cancel the command, because this server lost leadership."""
        self._reply.cancel()

    def _write(self, data: bytes) -> None:
        if data and not self._reply.done():
            self._reply.set_result(data)
