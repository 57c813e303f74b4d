"""`Peer`, the client of a pipeline: state, session, input queue, outbox. `connection.py` adds the socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final, Protocol

from genie.access import Principal
from genie.errors import RequestRejected
from genie.protocol.commands import Hello, Namespaced
from genie.protocol.framing import UnsplitLines
from genie.server.sessions import Session


class ConnectionState(Enum):
    """The protocol state of a connection.

    `Peer.closing` and `Peer.closed` are independent of it: commands that were read before are still executed.
    """

    AUTHENTICATING = "authenticating"
    """The client is not authenticated yet, or was rejected. No handler has the connection."""
    AWAIT_HELLO = "await-hello"
    """The first command is awaited. It may be another one than `hello` if no session, namespace or token is needed."""
    HELLO_REJECTED = "hello-rejected"
    """Only another `hello` is accepted: other commands would be executed without the requested session."""
    READY = "ready"
    """Commands are submitted to the handler of the namespace."""
    DETACHED = "detached"
    """The session has ended or was taken over. No further command is executed."""


READY: Final = ConnectionState.READY
DETACHED: Final = ConnectionState.DETACHED
"""Module-level names, because an attribute lookup on the enum takes three times as long and every read compares with them.
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
"""READY becomes HELLO_REJECTED if the handler rejects the submitted `hello`. HELLO_REJECTED becomes AUTHENTICATING, and
the connection is closed, if the token of the next `hello` is wrong.
"""


class EndOfInput:
    """Submitted as the last item of a connection, which is closed after the replies to the items before."""


END_OF_INPUT = EndOfInput()

Item = bytes | RequestRejected | EndOfInput | Hello | Namespaced
"""What a connection submits: a line, an error to send, the end of the input, or a decoded command."""

Input = Sequence[Item] | UnsplitLines
"""The items of one `submit`."""

Queued = tuple[Iterator[Item], int, int]
"""The remaining items of an input, their number (`sys.maxsize` if unknown), and the bytes in which they were read."""

InputQueue = deque[Queued]


class CommandHandler(Protocol):
    """What a connection submits its input to: the pipeline of a leader, or the handler of a follower."""

    is_leader: bool
    """Whether commands are executed here."""

    def submit(self, connection: Peer, items: Input, size: int) -> None:
        """Queue commands of one connection in order. `size` is the number of bytes in which they were read."""

    def on_disconnect(self, connection: Peer) -> None:
        """Release what is bound to a lost connection."""


class Peer:
    """One client. A subclass writes to it, and pauses and resumes reading."""

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
    )

    def __init__(self) -> None:
        self.state = ConnectionState.AWAIT_HELLO
        self.principal: Principal | None = None
        """The identity and permissions of the client. None: authentication is not required, everything is permitted."""
        self.session = Session(self)
        self.input_queue: InputQueue = deque()
        """Queued commands, one entry for each read."""
        self.queued_bytes = 0
        """Bytes of `input_queue`."""
        self.input_paused = False
        """Back pressure: reading is paused, because too many bytes are queued."""
        self.busy_until = self.overran_until = 0.0
        """Set by the scheduler: until when the connection is busy, and until when another overrun of its quantum makes
        it busy."""
        self.outbox: list[bytes] = []
        """Messages of the current batch, sent by `flush`."""
        self.has_reply = False
        """Whether `outbox` contains other messages than watch events, so that it must not be deferred."""
        self.deferred: list[bytes] = []
        """Watch events of stored batches, to be sent a little later."""
        self.watch_bytes = 0
        """Bytes of watch events in `outbox` and `deferred`."""
        self.closing = False
        """Whether no further input is accepted. Commands that were read before are still executed."""
        self.closed = False
        """Whether the connection is lost, so that nothing can be sent."""

    def enter_state(self, state: ConnectionState) -> None:
        """Change the state, as `TRANSITIONS` permits."""
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{self.state} does not become {state}"  # noqa: S101
            self.state = state

    def detach(self) -> None:
        """End the execution of commands, because the session has ended or was taken over by another connection."""
        self.session = Session(self)
        self.enter_state(DETACHED)
        self.stop_reading()

    # -- output -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send all messages of the batch in one write, after the deferred ones."""
        self.has_reply = False
        if self.deferred:
            self.deferred += self.outbox
            self.outbox.clear()
            self.flush_deferred()
        else:
            data = b"".join(self.outbox)
            self.outbox.clear()
            self._write(data)
        self.watch_bytes = 0

    def defer(self) -> None:
        """Defer the watch events in the outbox: they are sent with the next reply, or by `flush_deferred`."""
        self.deferred += self.outbox
        self.outbox.clear()

    def flush_deferred(self) -> None:
        """Send deferred watch events."""
        data = b"".join(self.deferred)
        self.deferred.clear()
        self.watch_bytes -= len(data)
        self._write(data)

    @property
    def unread_bytes(self) -> int:
        """Bytes written that the client has not read."""
        return 0

    def _write(self, data: bytes) -> None:
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
