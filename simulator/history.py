"""The history of a simulated cluster: beside the messages and faults, the changes of the store, logs and beliefs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from genie.testing.simulation.history import FAULT, History, Message
from genie.testing.simulation.network import SimTransport

STORE = "store"
"""A server changed the store. The data of the entry is a `Change`."""
LOG = "log"
"""A server logged a line."""
BELIEF = "belief"
"""A library client considers a lock held, or no longer does. The data of the entry is a `Belief`."""


@dataclass(slots=True)
class Change:
    """A change of the store by one atomic write."""

    written: dict[int, Message]
    """The new records by request id."""
    removed: dict[int, Message]
    """The last values of the removed records by request id."""
    epoch: int
    counters: tuple[int, float, int, int]
    """The batch index, the clock, the next request id and the next fencing token of the namespace."""
    is_snapshot: bool = False
    """True if the write was not a batch, so that the change was found by comparing all records before and after."""
    unrecoverable: bool = False
    """True if the store had lost acknowledged writes that no running server knew, so that they cannot be restored."""
    state: StoreState | None = field(default=None, repr=False)
    """The state after the change, if there are several Redis servers."""


@dataclass(slots=True, eq=False)
class StoreState:
    """A state of the namespace on one Redis: after a batch, or after a server acquired leadership.

    States form a tree. `parent` is the state from which the writer continued. `replaced` is the state that the Redis had
    before the write. The two differ if a server wrote its snapshot to a Redis that had rolled back. `known_to_writer` is the
    latest state that the writer demonstrably knew.
    """

    number: int
    """States are numbered in the order in which they were written."""
    at: float
    writer: str
    """The name of the server process that wrote the state."""
    host: str
    """The host of the Redis."""
    position: tuple[int, int]
    """The epoch, and the index of the batch within it."""
    state_key: bytes
    parent: StoreState | None
    replaced: StoreState | None
    known_to_writer: StoreState | None
    is_snapshot: bool
    """True if the writer wrote its whole state, not a batch."""
    records: dict[int, Message]
    """All records by request id."""
    is_late: bool = False
    """True if the writer had already stored a later state: the write came late, from a connection that was replaced."""
    acknowledged_at: float | None = None
    """When enough replicas had the state; None before that."""
    observed: bool = False
    """True if a server has sent a message that depends on the state."""

    def __str__(self) -> str:
        return f"{self.position[0]}-{self.position[1]} by {self.writer} on {self.host}"

    def descends_from(self, other: StoreState) -> bool:
        """Return whether this state is `other` or a descendant of `other`."""
        state: StoreState | None = self
        while state is not None and state is not other:
            state = None if state.number < other.number else state.parent  # a parent has a lower number
        return state is other

    def mark_observed(self) -> None:
        """Mark this state and its ancestors as observed, because a server sends a message that depends on them."""
        state: StoreState | None = self
        while state is not None and not state.observed:  # the ancestors of an observed state are marked already
            state.observed, state = True, state.parent

    @property
    def acquires_leadership(self) -> bool:
        """True if the writer becomes the leader by this write."""
        if self.is_batch:
            return False
        if not self.is_snapshot:
            return True
        # A snapshot that directly follows a takeover by the same server belongs to this takeover.
        replaced = self.replaced
        return (
            replaced is not None
            and replaced.writer == self.writer
            and not replaced.is_batch
            and not replaced.is_snapshot
        )

    @property
    def is_batch(self) -> bool:
        """True if the write was a batch: batches have indexes from 1 within an epoch, takeovers and snapshots have 0."""
        return self.position[1] > 0


@dataclass
class ClusterHistory(History):
    """Collects the entries of a simulated cluster, for the checkers."""

    final: StoreState | None = None
    """The last state of the primary, if there are several Redis servers."""
    violations: list[tuple[float, str]] = field(default_factory=list)
    """The times and the descriptions of violations that the recorders of the store have found."""
    before_change: Callable[[], None] = lambda: None
    """Called before a change of the store is recorded."""
    after_input: Callable[[], None] = lambda: None
    """Called before a client process receives bytes, to schedule a check of what the process made of them."""

    def append(self, kind: str, node: str, data: Any, connection: int = 0) -> None:
        """Append an entry with the current time."""
        if kind is STORE:
            self.before_change()
        super().append(kind, node, data, connection)

    def digest(self) -> str:
        """Return a hash of all entries. Two runs of the same seed must give equal hashes."""
        return sha256("\n".join(map(str, self.entries)).encode()).hexdigest()

    def tail(self, count: int = 60, about: int | None = None) -> str:
        """Return the last `count` entries as text.

        With the request id `about`, only the faults and the entries that mention this id are counted and returned.
        """
        matching = [entry for entry in self.entries if about is None or entry.kind == FAULT or str(about) in str(entry)]
        return "\n".join(map(str, matching[max(0, len(matching) - count) :]))

    def received(self, transport: SimTransport, data: bytes) -> None:
        """Record the messages that a client process is about to receive."""
        super().received(transport, data)
        if transport.connection.address[1] == self.server_port and transport is transport.connection.client:
            self.after_input()
