"""The commits of a leader: one at a time, within the store timeout and the lease, with heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

from genie.core import LockManager
from genie.server.outcome import BatchOutcome
from genie.storage.store import Batch, LeadershipLost, Store

if TYPE_CHECKING:
    from genie.observability.stats import Stats

HEARTBEAT_S = 1.0
"""Interval in seconds at which an idle leader commits its clock; a third of the lease if that is shorter. After a crash,
locks last longer than requested by at most this interval.
"""

MIN_TICK_S = 0.025
"""Shortest interval in seconds at which the commits are checked."""

ID_RESERVATION = 100_000
"""Number of ids that are reserved in the store, by a high-water mark, before they are assigned to requests."""


class Due(Enum):
    """What a check of the commits finds."""

    NOTHING = "nothing"
    HEARTBEAT = "heartbeat"
    """The leader is idle: it must commit its clock."""
    REJECTION = "rejection"
    """The commit in flight has exceeded the store timeout: queued commands are rejected until it is acknowledged."""


class Commits:
    """Sends batches to the store, and measures how long a commit takes and how long the leader is idle.

    With a store in memory, no batch is sent and the lease does not expire.
    """

    def __init__(
        self, store: Store, manager: LockManager, stats: Stats, *, lease_s: float, store_timeout_s: float
    ) -> None:
        self.in_flight = False
        """True if a commit was sent to the store and is not acknowledged yet."""
        self.store_unavailable = False
        """True if the commit in flight has taken longer than the store timeout."""
        self.ids_reserved_below = 0
        """The high-water mark of ids in the store, or in the commit in flight."""
        self._store = store
        self._manager = manager
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        """Event-loop time when the last commit was sent."""
        self._store_timeout_s = store_timeout_s
        self._lease_s = lease_s if store.durable else inf
        self._heartbeat_s = min(HEARTBEAT_S, self._lease_s / 3)
        self.tick_s = max(MIN_TICK_S, min(self._heartbeat_s, store_timeout_s / 4))
        """Interval in seconds at which `check` must be called if the store is durable."""

    def is_needed(self) -> bool:
        """Return whether a batch without changes needs a commit in a durable store.

        The lease may have expired, or an id that is not reserved in the store may have been assigned.
        """
        return self._loop.time() - self._sent_at > self._lease_s or self._manager.next_id > self.ids_reserved_below

    def send(self, outcome: BatchOutcome, now: float, done: Callable[[BaseException | None], None]) -> None:
        """Send the changes of the batch to the store, with the high-water mark of ids. `now` is the lock manager's time (ms).

        The store calls `done`, which must call `end`. More ids are reserved once half of the last reservation is used. A later
        leader never assigns a reserved id, so `queued` may contain the id of a request that is not stored.
        """
        next_id = self._manager.next_id
        if next_id > self.ids_reserved_below - ID_RESERVATION // 2:
            self.ids_reserved_below = next_id + ID_RESERVATION
        changes, outcome.changes, outcome.stored_below = outcome.changes, {}, next_id
        self.in_flight, self._sent_at = True, self._loop.time()
        self._stats.batch_sizes.add(len(changes))
        self._store.commit(Batch(changes, self.ids_reserved_below, self._manager.next_fence, now), done)

    def end(self, error: BaseException | None) -> BaseException | None:
        """Record the end of the commit in flight, and return why it failed, or None if the store has acknowledged it.

        `error` is what the store has reported. A commit that took longer than the lease fails with LeadershipLost.
        """
        self.in_flight = self.store_unavailable = False
        took_s = self._loop.time() - self._sent_at
        self._stats.commits.add(took_s * 1000)
        if error is None and took_s > self._lease_s:
            reason = (
                f"a commit took {took_s:.1f} s, longer than the lease of {self._lease_s:g} s; another node may lead"
            )
            error = LeadershipLost(reason)
        return error

    def check(self) -> Due:
        """Return what is due. A commit that exceeds the store timeout is reported once.

        Raises LeadershipLost after the lease.
        """
        since_commit_s = self._loop.time() - self._sent_at
        if not self.in_flight:
            # A heartbeat that waits for the next check would be too late.
            return Due.HEARTBEAT if since_commit_s >= self._heartbeat_s - self.tick_s else Due.NOTHING
        if since_commit_s > self._lease_s:
            raise LeadershipLost(f"no commit was acknowledged within the lease of {self._lease_s:g} s")
        if since_commit_s < self._store_timeout_s or self.store_unavailable:
            return Due.NOTHING
        self.store_unavailable = True
        self._stats.store_errors += 1
        return Due.REJECTION
