"""The contract between a namespace and its store: batches, retained replies, the state machine, `Store` and `Node`."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec import Struct, json

from genie.core import ENDED, HELD, SUCCESS, LockManager, Origin, Reason, Request


class Node(Struct, frozen=True):
    """One server process, as the other servers of a namespace see it.

    `boot`, `host` and `listening` identify the process: only one process can listen on an address of one machine, so a
    node with the same three values is this node after a restart, and the old process is gone. `address` is where clients
    connect. As a leader it may act for `lease_ms` after each commit.
    """

    listening: str = ""
    address: str = ""
    lease_ms: int = 3_000
    boot: str = ""
    host: str = ""

    def is_restart_of(self, other: Node) -> bool:
        """Return whether this node is the same server as `other`, started again."""
        return bool(self.boot) and (self.boot, self.host, self.listening) == (other.boot, other.host, other.listening)


def this_node(listening: tuple[str, int], advertise: str | None, lease_ms: int) -> Node:
    """Return the node of this process, which has bound the address `listening`.

    Clients connect to `advertise`, by default to the bound address, or to the host name if that is a wildcard.
    """
    host, port = listening
    host_name = socket.gethostname()
    is_wildcard = host in ("0.0.0.0", "::")  # noqa: S104 - it is compared
    client_host = host_name if is_wildcard else f"[{host}]" if ":" in host else host
    return Node(f"{host}:{port}", advertise or f"{client_host}:{port}", lease_ms, _boot_id(), host_name)


def _boot_id() -> str:
    """Return an id of this boot of the machine and of the network namespace; empty where the system has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116 - containers of one machine may share a host name
    except OSError:
        return ""
    return f"{boot}/{network}"


def encode_node(node: Node | None) -> bytes:
    """Return a node as it is stored: JSON, or empty for no node."""
    return b"" if node is None else json.encode(node)


def decode_node(stored: bytes | None) -> Node | None:
    """Return the node that `encode_node` stored."""
    return json.decode(stored, type=Node) if stored else None


# -- Batches and the state that they lead to ----------------------------------------------------------


@dataclass(slots=True, weakref_slot=True)
class StoredOrigin:
    """The session that made a request, as read from the store. `key` identifies it; `timeout_ms` is its session timeout."""

    key: str | None
    timeout_ms: float


@dataclass(slots=True)
class RetainedReply:
    """The terminal reply to a session's request, kept to be sent again after a reconnect and to recognize its `ref`.

    `at` is the lock manager's time (ms) when the request ended. `message` is the message as sent, with its newline. It is
    empty where the session released the request itself, which need not be repeated. `reason` is stored as part of
    `message`; `request` is not stored.
    """

    id: int
    ref: str | None
    origin: Origin
    at: float
    message: bytes
    reason: Reason = SUCCESS
    request: Request | None = None
    """The request, while this process has it: another request with the same `ref` must be equivalent."""


Change = Request | RetainedReply | None
"""The new value of an id: a request that is held or waits, or a retained reply. None (or an ended request) deletes it."""


@dataclass(slots=True)
class Batch:
    """One group commit: the store applies all of it or nothing.

    `changes` maps the ids that changed to their new values. The other fields are the lock manager's counters and clock
    (ms): ids below `next_id` may be in use, ids from `next_id` on are not.
    """

    changes: dict[int, Change] = field(default_factory=dict)
    next_id: int = 1
    next_fence: int = 1
    clock_ms: float = 0.0


class StateMachine:
    """The state of a namespace after all batches applied so far, from which a new leader continues.

    `manager` has the locks, wait queues and deadlines. `retained_replies` are those that clients may still ask for, by id.
    """

    def __init__(self) -> None:
        self.manager = LockManager()
        self.retained_replies: dict[int, RetainedReply] = {}
        self.clock_ms = 0.0

    def apply(self, batch: Batch) -> None:
        """Apply one batch: replace, add or delete each changed request and retained reply, and set the counters.

        All old values are removed before any new one is added, because two of them may use the same queue position.
        """
        manager, retained = self.manager, self.retained_replies
        for id_ in batch.changes:
            manager.discard(id_)
            retained.pop(id_, None)
        for id_, change in batch.changes.items():
            if isinstance(change, RetainedReply):
                retained[id_] = change
            elif change is not None and change.state is not ENDED:
                manager.adopt(change)
        manager.next_id, manager.next_fence, self.clock_ms = batch.next_id, batch.next_fence, batch.clock_ms

    def __contains__(self, id_: int) -> bool:
        table = self.manager.table
        return id_ in table.held or id_ in table.waiting or id_ in self.retained_replies

    def snapshot(self) -> Batch:
        """Return the whole state as one batch."""
        return snapshot_of(self.manager, self.retained_replies, self.manager.next_id, self.clock_ms)


def snapshot_of(
    manager: LockManager, retained_replies: dict[int, RetainedReply], next_id: int, clock_ms: float
) -> Batch:
    """Return the whole state as one batch: the requests that are stored, and the retained replies."""
    changes: dict[int, Change] = {
        request.id: request
        for requests in (manager.table.held, manager.table.waiting)
        for request in requests.values()
        if is_stored(request)
    }
    changes.update(retained_replies)
    return Batch(changes, next_id, manager.next_fence, clock_ms)


def is_stored(request: Request) -> bool:
    """Return whether a request that has not ended survives this process.

    A waiting request without a session ends with its connection, so it is not stored.
    """
    return request.state is HELD or (request.origin is not None and request.origin.key is not None)


# -- The store ----------------------------------------------------------------------------------------


class LeadershipLost(Exception):
    """The node no longer leads the namespace, or cannot be sure that it does. It must not send anything to clients."""


class Store(Protocol):
    """Keeps the held requests and the waiting requests of sessions. It commits one batch at a time."""

    durable: bool
    """Whether the store writes anything, so that collecting a write set is worth it."""

    @property
    def failure_count(self) -> int:
        """How many operations failed because the store was unavailable or rejected them."""

    @property
    def full(self) -> bool:
        """Whether the store is out of memory: it still stores releases, but no new requests should be accepted."""

    async def open(
        self, node: Node, snapshot: Callable[[], Batch], on_leader_changed: Callable[[str | None], None]
    ) -> StateMachine:
        """Follow the namespace until this node leads it, and return its state. Call it again when leadership has ended.

        `on_leader_changed` is called with the leader's address for clients, or with None while it is unknown.
        `snapshot` returns the leader's state at any later time: a store that has lost its content restores it from there.
        """

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        """Write a batch, then call `done(None)`, before this returns or later.

        The store retries the same batch until it is stored. `done` gets an error only where retrying is useless, such as
        `LeadershipLost`. The caller must not commit the next batch before `done` was called.
        """

    async def wait_for_transfer_request(self) -> None:
        """While this node leads, wait until another node asks for the namespace and should have it."""

    async def resign(self) -> None:
        """Give up leadership, so that another node can take over at once. Nothing may be committed afterwards."""

    async def close(self) -> None:
        """Close connections and end tasks. Nothing may be committed afterwards."""
