"""A client as the pipeline sees it: state, session, input queue, outbox. `connection.py` adds the socket."""

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
    """How far a connection has come. (Whether its transport is closing is `Peer.closing` and `Peer.closed`: commands
    that were read before that are still executed.)
    """

    AUTHENTICATING = "authenticating"
    """No handler knows the connection: the client is not authenticated yet, or was rejected."""
    AWAIT_HELLO = "await-hello"
    """Its first command decides: `hello`, or any other where no session, namespace or token is needed."""
    HELLO_REJECTED = "hello-rejected"
    """Nothing but another `hello` is accepted: what follows would run without the session that was asked for."""
    READY = "ready"
    """Its commands go to the handler of its namespace."""
    DETACHED = "detached"
    """Its session has ended or was taken over: no further command of it is executed."""


READY: Final = ConnectionState.READY
DETACHED: Final = ConnectionState.DETACHED
"""Module-level names: looking a member up on its class takes three times as long, and each read compares with them."""

TRANSITIONS: Final[dict[ConnectionState, frozenset[ConnectionState]]] = {
    ConnectionState.AWAIT_HELLO: frozenset(
        (ConnectionState.AUTHENTICATING, ConnectionState.HELLO_REJECTED, ConnectionState.READY)
    ),
    ConnectionState.AUTHENTICATING: frozenset((ConnectionState.AWAIT_HELLO,)),
    ConnectionState.HELLO_REJECTED: frozenset((ConnectionState.AUTHENTICATING, ConnectionState.READY)),
    ConnectionState.READY: frozenset((ConnectionState.HELLO_REJECTED, ConnectionState.DETACHED)),
    ConnectionState.DETACHED: frozenset(),
}
"""READY becomes HELLO_REJECTED where the handler rejects the `hello` that was submitted to it; HELLO_REJECTED becomes
AUTHENTICATING, for good, where the token of the next `hello` is wrong."""


class EndOfInput:
    """Submitted in place of a command: the client will send nothing more, or must not. It is sent its replies, then
    the connection is closed.
    """


END_OF_INPUT = EndOfInput()

Item = bytes | RequestRejected | EndOfInput | Hello | Namespaced
"""What a connection submits: a line, an error to be sent in its place, the end, or a decoded command."""

Input = Sequence[Item] | UnsplitLines
"""What it submits at once."""

Queued = tuple[Iterator[Item], int, int]
"""The rest of a queued input: its items, how many they are (a large number where that is unknown), and their bytes."""

InputQueue = deque[Queued]


class CommandHandler(Protocol):
    """What a connection submits its input to: the pipeline of a leader, or the handler of a follower."""

    is_leader: bool
    """Whether commands are executed here."""

    def submit(self, connection: Peer, items: Input, size: int) -> None:
        """Queue items of one connection, in order, that were read as `size` bytes."""

    def on_disconnect(self, connection: Peer) -> None:
        """Release what is bound to a connection that was lost."""


class Peer:
    """One client. A subclass writes to it, and stops and resumes reading from it."""

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
        """Who the client is and what it may do. None: authentication is not required, everything is permitted."""
        self.session = Session(self)
        self.input_queue: InputQueue = deque()
        """Its queued commands, read by read."""
        self.queued_bytes = 0
        """Bytes of `input_queue`."""
        self.input_paused = False
        """Back pressure: too many bytes are queued, so nothing is read."""
        self.busy_until = self.overran_until = 0.0
        """The scheduler's times: until when it runs after light connections, and until when the next turn beyond its
        quantum makes it do so."""
        self.outbox: list[bytes] = []
        """Messages of the current batch."""
        self.has_reply = False
        """Whether `outbox` has more than watch events: replies, or news of the client's own requests."""
        self.deferred: list[bytes] = []
        """Watch events of stored batches that are not sent yet."""
        self.watch_bytes = 0
        """Bytes of watch events in `outbox` and `deferred`."""
        self.closing = False
        """No further input is accepted; what was read before is executed and answered."""
        self.closed = False
        """The connection is lost: nothing can be sent."""

    def enter_state(self, state: ConnectionState) -> None:
        """Change the state, by `TRANSITIONS`."""
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{self.state} does not become {state}"  # noqa: S101
            self.state = state

    def detach(self) -> None:
        """Execute nothing more: the session has ended, or another connection took it over."""
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
        """Keep the batch's watch events: they are sent with the next reply, or a little later."""
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
        """Stop reading until `resume_input`: too many bytes are queued."""
        self.input_paused = True

    def resume_input(self) -> None:
        """Read again."""
        self.input_paused = False

    def stop_reading(self) -> None:
        """Accept no further input."""
        self.closing = True

    def finish(self) -> None:
        """Send everything, then close."""
        self.closing = True

    def abort(self) -> None:
        """Close at once, without sending the rest."""
        self.closed = True
