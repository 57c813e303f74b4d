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
"""Interval in seconds at which an idle leader commits its clock. A third of the lease is used instead if that is
shorter. After a crash, locks last longer than requested by at most this interval."""

MIN_TICK_S = 0.025
"""Shortest interval in seconds at which the commits are checked."""

ID_RESERVATION = 100_000
"""Number of ids that are reserved in the store in advance. A later leader assigns only ids above the reserved ones."""


class Due(Enum):
    """What the pipeline must do after a check of the commits."""

    NOTHING = "nothing"
    HEARTBEAT = "heartbeat"
    """The leader is idle: it must commit its clock."""
    REJECTION = "rejection"
    """The commit in flight has exceeded the store timeout: queued commands are rejected until it is acknowledged."""


class Commits:
    """Sends batches to the store, one at a time, and measures how long a commit takes and how long the leader is idle.

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
        """All smaller ids are reserved in the store, or by the commit in flight."""
        self._store = store
        self._manager = manager
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        """Event-loop time at which the last commit was sent."""
        self._store_timeout_s = store_timeout_s
        self._lease_s = lease_s if store.durable else inf  # locks in memory have no other leader
        self._heartbeat_s = min(HEARTBEAT_S, self._lease_s / 3)
        self.tick_s = max(MIN_TICK_S, min(self._heartbeat_s, store_timeout_s / 4))
        """Interval in seconds at which `check` must be called if the store is durable."""

    def is_needed(self) -> bool:
        """Return whether a batch without changes needs a commit in a durable store before its replies are sent.

        It does if the lease may have expired, or if a request has got an id that is not reserved in the store.
        """
        return self._loop.time() - self._sent_at > self._lease_s or self._manager.next_id > self.ids_reserved_below

    def send(self, outcome: BatchOutcome, now: float, done: Callable[[BaseException | None], None]) -> None:
        """Send the changes of the batch to the store. `now` is the lock manager's time (ms).

        The store calls `done` with None or an error, and `done` must call `end`. The commit also reserves ids once half
        of the last reservation is used: `queued` may contain the id of a request that is not stored.
        """
        next_id = self._manager.next_id
        if next_id > self.ids_reserved_below - ID_RESERVATION // 2:
            self.ids_reserved_below = next_id + ID_RESERVATION
        changes, outcome.changes, outcome.stored_below = outcome.changes, {}, next_id
        self.in_flight, self._sent_at = True, self._loop.time()
        self._stats.batch_sizes.add(len(changes))
        self._store.commit(Batch(changes, self.ids_reserved_below, self._manager.next_fence, now), done)

    def end(self, error: BaseException | None) -> BaseException | None:
        """Record the end of the commit in flight. Return None if it succeeded, else the error with which it failed.

        `error` is the error that the store reported, or None. A commit that took longer than the lease fails with
        LeadershipLost.
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
        """Return what is due. `REJECTION` is returned once for a commit.

        Raises LeadershipLost if the commit in flight has taken longer than the lease.
        """
        since_commit_s = self._loop.time() - self._sent_at
        if not self.in_flight:
            # One interval early: at the next check, the heartbeat could be late.
            return Due.HEARTBEAT if since_commit_s >= self._heartbeat_s - self.tick_s else Due.NOTHING
        if since_commit_s > self._lease_s:
            raise LeadershipLost(f"no commit was acknowledged within the lease of {self._lease_s:g} s")
        if since_commit_s < self._store_timeout_s or self.store_unavailable:
            return Due.NOTHING
        self.store_unavailable = True
        self._stats.store_errors += 1
        return Due.REJECTION
