"""The contract between a namespace and its store: batches, retained replies, the state machine, `Store` and `Node`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct, json

from genie.core import ENDED, HELD, SUCCESS, LockManager, Origin, Reason, Request, in_parts
from genie.core.tables import clear_in_parts
from genie.roles import FollowerRole, StoreOutage


class Node(Struct, frozen=True):
    """One server process, as the other servers of a namespace see it."""

    listening: str = ""
    """The address, `host:port`, on which the process listens."""
    address: str = ""
    """The address, `host:port`, to which clients connect."""
    lease_ms: int = 3_000
    """How long a leader may act after it sent its last acknowledged commit."""
    boot: str = ""
    """The boot id of the machine. Empty if the system has none."""
    host: str = ""
    """The host name of the machine."""

    def is_restart_of(self, other: Node) -> bool:
        """Return whether this node is the server `other` after a restart, so that the process of `other` is gone.

        Only one process can listen on an address of one machine. False if the boot id is unknown, because the two nodes
        may then be on different machines.
        """
        return bool(self.boot) and (self.boot, self.host, self.listening) == (other.boot, other.host, other.listening)


def this_node(listening: tuple[str, int], advertise: str | None, lease_ms: int, boot: str = "") -> Node:
    """Return this process as a node. `listening` is the (host, port) on which it listens.

    Clients connect to `advertise` (`host:port`). If it is None, clients connect to the listening address, or to the
    host name of this machine if the server listens on all interfaces.
    """
    host, port = listening
    host_name = socket.gethostname()
    is_wildcard = host in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
    bracketed_host = f"[{host}]" if ":" in host else host  # IPv6
    client_host = host_name if is_wildcard else bracketed_host
    return Node(
        listening=f"{host}:{port}",
        address=advertise or f"{client_host}:{port}",
        lease_ms=lease_ms,
        boot=boot,
        host=host_name,
    )


def encode_node(node: Node | None) -> bytes:
    """Return a node as JSON, or empty bytes for None, which are stored after the leader has resigned."""
    return b"" if node is None else json.encode(node)


def decode_node(stored: bytes | None) -> Node | None:
    """Return the node that `encode_node` has encoded, or None if `stored` is empty or None."""
    return json.decode(stored, type=Node) if stored else None


# -- Batches and the state that they lead to ----------------------------------------------------------


@dataclass(slots=True, weakref_slot=True)
class StoredOrigin:
    """The session that made a request, as read from the store: its key, its session timeout, its note and its principal."""

    key: str | None
    timeout_ms: float
    note: str | None = None
    principal: str | None = None


class SessionOrigin(Origin, Protocol):
    """A session that retains replies."""

    principal: str | None
    """The name of the session's principal. None if its client needed no token."""


@dataclass(slots=True)
class RetainedReply:
    """The final reply to a session's request, kept to be sent again after a reconnect and to recognize a repeated `ref`."""

    id: int
    """The id of the request."""
    ref: str | None
    """The idempotency key of the request, if the client has given one."""
    origin: SessionOrigin
    """The session that made the request."""
    at: float
    """When the request ended, in milliseconds of the lock manager's clock."""
    message: bytes
    """The message as sent, with its newline. Empty if the session released the request itself: that reply is not sent
    again."""
    reason: Reason = SUCCESS
    """Why the request ended. Stored as part of `message`."""
    request: Request | None = None
    """The ended request, to check that another request with the same `ref` is equivalent. Not stored, so it is None
    after a restart or takeover. Also None if the request was large."""
    fingerprint: bytes | None = None
    """A digest of the parameters of a large request, which replaces `request`. Not stored."""


Change = Request | RetainedReply | None
"""The new value of an id: a held or waiting request, or a retained reply. None, or an ended request, deletes the id."""


class Batch(Struct):  # made for every commit: msgspec does that in C
    """One group commit: the store applies all of it or nothing.

    The counters and the clock are those of the lock manager after the batch.
    """

    changes: dict[int, Change] = {}
    """The new value of each id that has changed."""
    next_id: int = 1
    """This id and all greater ids are unused."""
    next_fence: int = 1
    """This fencing token and all greater ones are unused."""
    clock_ms: float = 0.0


class StateMachine:
    """The state of a namespace after all batches applied so far, from which a new leader continues."""

    def __init__(self) -> None:
        self.manager = LockManager()
        """The locks, wait queues, deadlines and counters."""
        self.retained_replies: dict[int, RetainedReply] = {}
        """By request id, the replies that clients may still request again."""
        self.clock_ms = 0.0
        """The time of the lock manager at the last batch."""

    def apply(self, batch: Batch) -> None:
        """Apply one batch: replace, add or delete each changed request and retained reply, and set the counters.

        All old values are removed before any new one is added, because an old and a new value may
        have the same queue position.
        """
        for _ in self.apply_in_parts(batch):
            pass

    def apply_in_parts(self, batch: Batch) -> Iterator[None]:
        """Apply one batch, which may be a whole state, in parts of a few ms: yield after each."""
        manager, retained = self.manager, self.retained_replies
        is_empty = not (manager.table.held or manager.table.waiting or retained)
        replaced: Iterable[int] = () if is_empty else batch.changes
        for id_ in replaced:
            retained.pop(id_, None)
        yield from manager.load_in_parts(_live_requests(batch.changes, retained), replaced)
        manager.next_id, manager.next_fence, self.clock_ms = batch.next_id, batch.next_fence, batch.clock_ms

    def free_in_parts(self) -> Iterator[None]:
        """Drop the state in parts, because it is no longer used. Yield between the parts."""
        table = self.manager.table
        for part in in_parts(table.waiting.values()):
            for request in part:  # a queue entry refers to its request
                request.queue_entry = request.moved = None
            yield
        yield from clear_in_parts(self.retained_replies)
        yield from self.manager.free_in_parts()

    def __contains__(self, id_: int) -> bool:
        """Return whether the state has a request or a retained reply with this id."""
        table = self.manager.table
        return id_ in table.held or id_ in table.waiting or id_ in self.retained_replies

    def snapshot(self) -> Batch:
        """Return the whole state as one batch, which could be stored."""
        return snapshot_of(self.manager, self.retained_replies, self.manager.next_id, self.clock_ms)


def _live_requests(changes: dict[int, Change], retained: dict[int, RetainedReply]) -> Iterator[Request]:
    """Yield the held and the waiting requests of a batch, and add its retained replies to `retained`."""
    for id_, change in changes.items():
        if isinstance(change, RetainedReply):
            retained[id_] = change
        elif change is not None and change.state is not ENDED:
            yield change


def snapshot_of(
    manager: LockManager, retained_replies: dict[int, RetainedReply], next_id: int, clock_ms: float
) -> Batch:
    """Return a state as one batch: all retained replies, and the requests that must be stored (`is_stored`)."""
    changes: dict[int, Change] = {**manager.table.held}  # a copy of a million takes 15 ms, a loop 100 ms
    changes.update({id_: request for id_, request in manager.table.waiting.items() if is_stored(request)})
    changes.update(retained_replies)
    return Batch(changes, next_id, manager.next_fence, clock_ms)


def is_stored(request: Request) -> bool:
    """Return whether a held or waiting request must be stored, so that it survives this process.

    A waiting request without a session is not stored, because it ends with its connection.
    """
    return request.state is HELD or (request.origin is not None and request.origin.key is not None)


# -- The store ----------------------------------------------------------------------------------------


class LeadershipLost(Exception):
    """The node does not lead the namespace any more, or cannot be sure to lead it.

    It must not send anything to clients.
    """


class UnknownFormat(ValueError):
    """A namespace was written by a version of Genie with another format. It must be neither led nor changed."""


class UnsafeStore(ValueError):
    """The settings of the server promise that acknowledged commits survive, and the configuration of the store can lose them."""


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The memory of the store, in bytes."""

    used: int
    limit: int
    """The store rejects new requests while it uses more memory than this. 0 if there is no limit."""


class Store(Protocol):
    """Stores the held requests, and the waiting requests of sessions. Batches are committed one at a time."""

    durable: bool
    """False if the store discards all batches: then the caller need not collect any changes."""

    @property
    def failure_count(self) -> int:
        """How many operations failed because the store was unavailable or rejected them."""

    @property
    def full(self) -> bool:
        """True if the store is out of memory. It still stores releases, but no new requests should be accepted."""

    @property
    def outage(self) -> StoreOutage | None:
        """The current interruption of the store, or None if the store is available."""

    async def open(
        self, node: Node, snapshot: Callable[[], Batch], on_role_changed: Callable[[FollowerRole], None]
    ) -> StateMachine:
        """Follow the namespace until this node leads it, and return its state. Call `open` again after LeadershipLost.

        `snapshot` must return the current state while this node leads: the store uses it to restore lost data.
        `on_role_changed` is called with each new role of this node until it leads.

        Raises UnknownFormat, before the node leads, if another version of Genie has written the namespace in a format
        that this version does not know.
        """

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        """Write a batch, and retry until it is stored. Then call `done(None)`, possibly before `commit` returns.

        `done` is called with an error if retrying is useless, for example with `LeadershipLost`. The caller must not
        commit the next batch before `done` was called.
        """

    async def wait_for_transfer_request(self) -> None:
        """Wait until another node requests the namespace and this node, the leader, should transfer it."""

    async def read_memory(self) -> StoreMemory | None:
        """Return the memory of the store while this node leads, or None if the store does not report it."""

    async def resign(self) -> None:
        """Give up leadership, so that another node can take over at once. Nothing may be committed afterwards."""

    async def close(self) -> None:
        """Close all connections and cancel all tasks. Nothing may be committed afterwards."""
