"""The commits of a leader: one at a time, with heartbeats, the store timeout and the lease."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Protocol

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
"""Shortest interval in seconds of the timer that detects store timeouts."""

ID_RESERVATION = 100_000
"""Number of ids that are reserved in the store, by a high-water mark, before they are assigned to requests."""


class CommitListener(Protocol):
    """What the commits report. The pipeline implements it."""

    def on_stored(self) -> None:
        """Handle that the store has acknowledged the batch in flight."""

    def on_store_timeout(self) -> None:
        """Handle that the store has not acknowledged the batch in flight within the store timeout."""

    def on_heartbeat_due(self) -> None:
        """Commit the clock, because the leader is idle."""

    def on_failed(self, error: BaseException) -> None:
        """Give up leadership. A batch in flight may or may not be stored."""


class Commits:
    """Sends batches to the store, and detects a store timeout or an expired lease.

    The lease of a store in memory does not expire, and its batches are never sent.
    """

    def __init__(
        self,
        store: Store,
        manager: LockManager,
        stats: Stats,
        outcome: BatchOutcome,
        listener: CommitListener,
        *,
        lease_s: float,
        store_timeout_s: float,
    ) -> None:
        self.in_flight = False
        """Whether a commit was sent to the store and is not acknowledged yet."""
        self.store_unavailable = False
        """Whether the commit in flight has taken longer than the store timeout."""
        self.ids_reserved_below = 0
        """The high-water mark of ids in the store, or in the commit in flight."""
        self._store = store
        self._manager = manager
        self._stats = stats
        self._outcome = outcome
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        """Event-loop time when the last commit was sent."""
        self._store_timeout_s = store_timeout_s
        self._lease_s = lease_s if store.durable else inf
        self._heartbeat_s = min(HEARTBEAT_S, self._lease_s / 3)
        self._tick_s = max(MIN_TICK_S, min(self._heartbeat_s, store_timeout_s / 4))
        self._ticker = self._loop.call_later(self._tick_s, self._on_tick) if store.durable else None
        self._stopped = False

    def is_needed(self) -> bool:
        """Return whether a batch without changes needs a commit in a durable store.

        The lease may have expired, or an id that is not reserved in the store may have been assigned.
        """
        return self._loop.time() - self._sent_at > self._lease_s or self._manager.next_id > self.ids_reserved_below

    def send(self, now: float) -> None:
        """Send the changes of the batch to the store, with the high-water mark of ids. `now` is the lock manager's time (ms).

        More ids are reserved once half of the last reservation is used. A later leader never assigns a reserved id. So an
        id may be sent to its client in `queued` although the request itself is not stored.
        """
        manager, outcome = self._manager, self._outcome
        changes, outcome.changes = outcome.changes, {}
        outcome.stored_below = manager.next_id
        if manager.next_id > self.ids_reserved_below - ID_RESERVATION // 2:
            self.ids_reserved_below = manager.next_id + ID_RESERVATION
        self.in_flight, self._sent_at = True, self._loop.time()
        self._stats.batch_sizes.add(len(changes))
        self._store.commit(Batch(changes, self.ids_reserved_below, manager.next_fence, now), self._on_acknowledged)

    def stop(self) -> None:
        """Report nothing more. Whether the store acknowledges the batch in flight is ignored."""
        self._stopped = True
        if self._ticker is not None:
            self._ticker.cancel()

    def dispose(self) -> None:
        """Drop the reference to the listener, after `stop`."""
        del self._listener

    def _on_acknowledged(self, error: BaseException | None) -> None:
        """Report that the batch is stored. With an `error`, or after the lease, report that leadership is lost."""
        self.in_flight = self.store_unavailable = False
        if self._stopped:
            return
        took_s = self._loop.time() - self._sent_at
        self._stats.commits.add(took_s * 1000)
        if error is None and took_s > self._lease_s:
            reason = (
                f"a commit took {took_s:.1f} s, longer than the lease of {self._lease_s:g} s; another node may lead"
            )
            error = LeadershipLost(reason)
        if error is None:
            self._listener.on_stored()
        else:
            self._listener.on_failed(error)

    def _on_tick(self) -> None:
        """Detect a store timeout or an expired lease, and an idle leader.

        A single timer recurs, because a separate timer for each commit would cost more than the commit (measured).
        """
        if self._stopped:
            return
        self._ticker = self._loop.call_later(self._tick_s, self._on_tick)
        since_commit_s = self._loop.time() - self._sent_at
        try:
            if self.in_flight:
                if since_commit_s > self._lease_s:
                    reason = f"no commit was acknowledged within the lease of {self._lease_s:g} s"
                    self._listener.on_failed(LeadershipLost(reason))
                elif since_commit_s >= self._store_timeout_s and not self.store_unavailable:
                    self._store_timed_out()
            elif since_commit_s >= self._heartbeat_s - self._tick_s:  # the next tick would be too late
                self._listener.on_heartbeat_due()
        except Exception as error:  # noqa: BLE001 - a defect: stop, as the state is unknown
            self._listener.on_failed(error)

    def _store_timed_out(self) -> None:
        """Report that the store has not acknowledged the batch in flight in time."""
        self.store_unavailable = True
        self._stats.store_errors += 1
        self._listener.on_store_timeout()
