"""Who a server is, as the others of its namespace see it."""

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
    """A server that leads a namespace, or would.

    `boot`, `host` and `listening` say which it is: who can listen where it did, on the same machine since the same
    start, is its successor, and it is gone. `address` is where clients reach it. It leads for `lease_ms` from each of its
    commits on.
    """

    listening: str = ""
    address: str = ""
    lease_ms: int = 3_000
    boot: str = ""
    host: str = ""

    def succeeds(self, other: Node) -> bool:
        """Whether this is the same server, started again."""
        return bool(self.boot) and (self.boot, self.host, self.listening) == (other.boot, other.host, other.listening)


def this_node(listening: tuple[str, int], advertise: str | None, lease_ms: int) -> Node:
    """The node that a process is which has bound an address."""
    host, port = listening
    name = socket.gethostname()
    shown = name if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104 - it is compared
    return Node(f"{host}:{port}", advertise or f"{shown}:{port}", lease_ms, _boot(), name)


def _boot() -> str:
    """The start of this machine, as seen from its network namespace; empty where that can't be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116 - containers of one machine may have one name
    except OSError:
        return ""
    return f"{boot}/{network}"


def pack(node: Node | None) -> bytes:
    """A node as it is stored; nobody is nothing."""
    return b"" if node is None else json.encode(node)


def unpack(stored: bytes | None) -> Node | None:
    """The same, back."""
    return json.decode(stored, type=Node) if stored else None


# -- What a store is --------


@dataclass(slots=True, weakref_slot=True)
class StoredOrigin:
    """The session that made a request, as it is stored."""

    key: str | None
    timeout_ms: float


@dataclass(slots=True)
class Ending:
    """How a request of a session ended: to be sent again after a lost connection, and to recognize its `ref`.

    `at` is the manager's time (ms) of the end. `line` is the message, with its newline; empty where the session released
    the request itself, which needs no repetition. `reason` is stored as part of it, `request` is not stored.
    """

    id: int
    ref: str | None
    origin: Origin
    at: float
    line: bytes
    reason: Reason = SUCCESS
    request: Request | None = None
    """The request, while this process knows it: another one with the same `ref` must be the same by meaning."""


Change = Request | Ending | None
"""What is to be known of an id from now on: a request that is held or waits, an ending, or (None, or a request that has
ended) nothing."""


@dataclass(slots=True)
class Batch:
    """What one group commit writes, all of it or nothing.

    `changes` has the ids of which something changed. The rest are the manager's counters (no id from `next_id` on was
    given out, nor may one below it be) and clock (ms).
    """

    changes: dict[int, Change] = field(default_factory=dict)
    next_id: int = 1
    next_fence: int = 1
    clock_ms: float = 0.0


class Replica:
    """The state that the batches so far have led to, ready to be led from: all locks, lines and deadlines.

    `endings` are those that the sessions of the namespace may have to be told, by id.
    """

    def __init__(self) -> None:
        self.manager = LockManager()
        self.endings: dict[int, Ending] = {}
        self.clock_ms = 0.0

    def apply(self, batch: Batch) -> None:
        """Follow one batch. What it changes leaves its places before anything takes one."""
        manager, endings = self.manager, self.endings
        for id_ in batch.changes:
            manager.forget(id_)
            endings.pop(id_, None)
        for id_, change in batch.changes.items():
            if isinstance(change, Ending):
                endings[id_] = change
            elif change is not None and change.state is not ENDED:
                manager.adopt(change)
        manager.next_id, manager.next_fence, self.clock_ms = batch.next_id, batch.next_fence, batch.clock_ms

    def knows(self, id_: int) -> bool:
        """Whether there is anything under this id."""
        table = self.manager.table
        return id_ in table.held or id_ in table.waiting or id_ in self.endings

    def whole(self) -> Batch:
        """All of it as one batch."""
        return whole(self.manager, self.endings, self.manager.next_id, self.clock_ms)


def whole(manager: LockManager, endings: dict[int, Ending], next_id: int, clock_ms: float) -> Batch:
    """A whole state as one batch: whatever is stored at all."""
    changes: dict[int, Change] = {
        request.id: request
        for requests in (manager.table.held, manager.table.waiting)
        for request in requests.values()
        if is_stored(request)
    }
    changes.update(endings)
    return Batch(changes, next_id, manager.next_fence, clock_ms)


def is_stored(request: Request) -> bool:
    """Whether a living request outlives this process. One that waits goes with its connection, unless it has a session."""
    return request.state is HELD or (request.origin is not None and request.origin.key is not None)


class Superseded(Exception):
    """Another server has taken the namespace over. This one must not say anything to anyone any more."""


class Store(Protocol):
    """Keeps the requests that are held, and those of sessions that wait. One batch at a time."""

    durable: bool
    """Whether anything is written, so that it is worth telling what changed."""

    @property
    def errors(self) -> int:
        """How often it could not be reached."""

    @property
    def full(self) -> bool:
        """Whether it has no room left: what ends is still written, and nothing new should be begun."""

    async def open(self, node: Node, whole: Callable[[], Batch], following: Callable[[str | None], None]) -> Replica:
        """Wait until this node leads the namespace; returns what it holds. May be called again after that has ended.

        `following` is told meanwhile who leads (the address for clients), or that this is not known. `whole` gives the
        whole present state at any later time: a store that finds its own content lost writes it anew from there.
        """

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        """Write a batch and call `done`: now or, with most stores, later.

        The store retries, with the same batch, for as long as it takes; `done` is given an error only where there is
        no use in that, as with `Superseded`. The next batch must wait until then.
        """

    async def wanted(self) -> None:
        """Wait until another node asks for the namespace with good reason. To be called while this one leads."""

    async def resign(self) -> None:
        """Let another node lead at once. Nothing is committed afterwards."""

    async def close(self) -> None:
        """Let go of everything. Nothing is committed afterwards."""
