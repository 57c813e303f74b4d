"""The contract between a namespace and its store: batches, retained replies, the state machine, `Store` and `Node`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct, json

from genie.core import ENDED, HELD, SUCCESS, LockManager, Origin, Reason, Request
from genie.roles import FollowerRole, StoreOutage


class Node(Struct, frozen=True):
    """One server process, as the other servers of a namespace see it.

    `boot`, `host` and `listening` identify the process: only one process can listen on an address of one machine. So two
    nodes with the same three values are the same server before and after a restart, and the old process is gone.
    `boot` is empty if the system has no boot id. `address` is where clients connect. A leader may act for `lease_ms`
    after it sent its last acknowledged commit.
    """

    listening: str = ""
    address: str = ""
    lease_ms: int = 3_000
    boot: str = ""
    host: str = ""

    def is_restart_of(self, other: Node) -> bool:
        """Return whether this node is the server `other` after a restart.

        False if the boot id is unknown: the two nodes may then be on different machines.
        """
        return bool(self.boot) and (self.boot, self.host, self.listening) == (other.boot, other.host, other.listening)


def this_node(listening: tuple[str, int], advertise: str | None, lease_ms: int, boot: str = "") -> Node:
    """Return this process as a node. `listening` is the (host, port) on which it listens.

    Clients connect to `advertise` (`host:port`). The default is the listening address, with the host name of this machine
    if the server listens on all interfaces.
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
    """Return a node as JSON, or an empty string for None. The empty string is stored after the leader has resigned."""
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
    """The terminal reply to a session's request, kept to be sent again after a reconnect and to recognize its `ref`.

    `at` is the lock manager's time (ms) when the request ended. `message` is the message as sent, with its newline. The
    message is empty if the session released the request itself, because that reply need not be sent again. `reason` is
    stored as part of `message`; `request` is not stored.
    """

    id: int
    ref: str | None
    origin: SessionOrigin
    at: float
    message: bytes
    reason: Reason = SUCCESS
    request: Request | None = None
    """The ended request, to check that another request with the same `ref` is equivalent. None after a restart or takeover,
    and if the request was large."""
    fingerprint: bytes | None = None
    """In place of a large `request`: a digest of its parameters. Not stored."""


Change = Request | RetainedReply | None
"""The new value of an id: a held or waiting request, or a retained reply. None, or an ended request, deletes the id."""


@dataclass(slots=True)
class Batch:
    """One group commit: the store applies all of it or nothing.

    `changes` maps the ids that changed to their new values. The other fields are the lock manager's counters and clock
    (ms) after the batch. Ids below `next_id` may be in use; `next_id` and all greater ids are unused.
    """

    changes: dict[int, Change] = field(default_factory=dict)
    next_id: int = 1
    next_fence: int = 1
    clock_ms: float = 0.0


class StateMachine:
    """The state of a namespace after all batches applied so far, from which a new leader continues.

    `manager` has the locks, wait queues and deadlines. `retained_replies` maps request ids to the replies that clients may
    still request again. `clock_ms` is the time of the lock manager at the last batch.
    """

    def __init__(self) -> None:
        self.manager = LockManager()
        self.retained_replies: dict[int, RetainedReply] = {}
        self.clock_ms = 0.0

    def apply(self, batch: Batch) -> None:
        """Apply one batch: replace, add or delete each changed request and retained reply, and set the counters.

        All old values are removed before any new one is added, because an old and a new value may
        have the same queue position.
        """
        manager, retained = self.manager, self.retained_replies
        # A loaded state is applied to an empty one, which has no old values.
        replaced: Iterable[int] = batch.changes if manager.table.held or manager.table.waiting or retained else ()
        for id_ in replaced:
            retained.pop(id_, None)
        requests: list[Request] = []
        for id_, change in batch.changes.items():
            if isinstance(change, RetainedReply):
                retained[id_] = change
            elif change is not None and change.state is not ENDED:
                requests.append(change)
        manager.load(requests, replaced)
        manager.next_id, manager.next_fence, self.clock_ms = batch.next_id, batch.next_fence, batch.clock_ms

    def __contains__(self, id_: int) -> bool:
        """Return whether the state has a request or a retained reply with this id."""
        table = self.manager.table
        return id_ in table.held or id_ in table.waiting or id_ in self.retained_replies

    def snapshot(self) -> Batch:
        """Return the whole state as one batch, which could be stored."""
        return snapshot_of(self.manager, self.retained_replies, self.manager.next_id, self.clock_ms)


def snapshot_of(
    manager: LockManager, retained_replies: dict[int, RetainedReply], next_id: int, clock_ms: float
) -> Batch:
    """Return a state as one batch: all retained replies, and the requests that must be stored (`is_stored`)."""
    changes: dict[int, Change] = {
        request.id: request
        for requests in (manager.table.held, manager.table.waiting)
        for request in requests.values()
        if is_stored(request)
    }
    changes.update(retained_replies)
    return Batch(changes, next_id, manager.next_fence, clock_ms)


def is_stored(request: Request) -> bool:
    """Return whether a held or waiting request must be stored, so that it survives this process.

    A waiting request without a session is not stored, because it ends with its connection.
    """
    return request.state is HELD or (request.origin is not None and request.origin.key is not None)


# -- The store ----------------------------------------------------------------------------------------


class LeadershipLost(Exception):
    """The node no longer leads the namespace, or cannot be sure of leading it. The node must not send anything to clients."""


class UnknownFormat(ValueError):
    """A namespace was written by a version of Genie with another format. It must be neither led nor changed."""


class UnsafeStore(ValueError):
    """The configuration of the store breaks what the settings of the server promise about acknowledged commits."""


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The memory that the store uses, and the limit from which on it rejects new requests, in bytes. 0 means no limit."""

    used: int
    limit: int


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

        Raises UnknownFormat, before the node leads, if another version of Genie has written the namespace in a format that
        this version does not know.

        `on_role_changed` is called with each new role of this node until it leads.
        `snapshot` must return the current state while this node leads: the store uses it to restore lost data.
        """

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        """Write a batch, then call `done(None)`; `done` may be called before `commit` returns.

        The store retries the batch until it is stored. `done` is called with an error only if retrying is useless, for
        example `LeadershipLost`. The caller must not commit the next batch before `done` was called.
        """

    async def wait_for_transfer_request(self) -> None:
        """Wait until another node requests the namespace and this node, the leader, should transfer it."""

    async def read_memory(self) -> StoreMemory | None:
        """Return the memory of the store while this node leads, or None if the store does not report it."""

    async def resign(self) -> None:
        """Give up leadership, so that another node can take over at once. Nothing may be committed afterwards."""

    async def close(self) -> None:
        """Close all connections and cancel all tasks. Nothing may be committed afterwards."""
