"""Statistics of one namespace on one server: plain counters that the metrics and the admin port read.

Contention is counted by resource, in bounded memory. Nearly everything else is a number or a histogram.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from genie.core import WAITING, Cycle, Deadlocked, Locked, Reason, Released, Request, TimedOut, blocked_resources
from genie.core.lock_table import LockTable
from genie.observability.histogram import Histogram, RateWindow, Sample

WINDOW_MS: Final = 300_000
"""Length of a window of `ContentionStats`. Reports cover the current and the previous window."""
MAX_RESOURCES: Final = 4_096
"""Maximum number of resources in one window. When a window is full, the less contended half is dropped."""


@dataclass(slots=True)
class Contention:
    """Contention on one resource."""

    conflicts: int = 0
    """Number of requests that could not lock the resource immediately."""
    waited_ms: float = 0.0
    """Their total wait time."""


class ContentionStats:
    """Contention by resource, over two windows of time: the current and the previous window."""

    def __init__(self) -> None:
        self._current: dict[str, Contention] = {}
        """Contention by resource name in the current window."""
        self._previous: dict[str, Contention] = {}
        """Contention by resource name in the previous window."""
        self._window_start_ms = 0.0
        """Monotonic time at which the current window started."""

    def start_window_if_due(self, now: float) -> None:
        """Start a new window if the current window is over. `now` is monotonic, in ms."""
        age_ms = now - self._window_start_ms
        if age_ms < WINDOW_MS:
            return
        is_outdated = age_ms >= 2 * WINDOW_MS  # the current window is older than a previous window may be
        self._previous = {} if is_outdated else self._current
        self._current = {}
        self._window_start_ms = now

    def record_conflict(self, names: Iterable[str]) -> None:
        """Count a request that conflicted with other requests on these resources."""
        for name in names:
            self.entry(name).conflicts += 1

    def record_wait(self, names: Iterable[str], waited_ms: float) -> None:
        """Add the wait time of a request whose wait for these resources has ended."""
        for name in names:
            self.entry(name).waited_ms += waited_ms

    def entries(self) -> Iterator[tuple[str, Contention]]:
        """Yield each resource once, in no order, with its total contention in both windows.

        The iteration continues with the state at its start, even if conflicts are recorded between two steps.
        """
        previous, current = self._previous.copy(), self._current.copy()
        for name, earlier in previous.items():
            later = current.pop(name, Contention())
            yield name, Contention(earlier.conflicts + later.conflicts, earlier.waited_ms + later.waited_ms)
        yield from current.items()

    def entry(self, name: str) -> Contention:
        """Return the entry of a resource in the current window. A missing entry is created."""
        entry = self._current.get(name)
        if entry is None:
            if len(self._current) >= MAX_RESOURCES:  # keep the half with the most contention
                self._current = dict(most_contended(self._current.items(), MAX_RESOURCES // 2))
            entry = self._current[name] = Contention()
        return entry


def most_contended(entries: Iterable[tuple[str, Contention]], limit: int) -> list[tuple[str, Contention]]:
    """Return the `limit` most contended resources, in descending order of total wait time, then of conflicts."""
    return nlargest(limit, entries, _rank)


def _rank(entry: tuple[str, Contention]) -> tuple[float, int]:
    """Return the key by which resources are ordered."""
    _name, contention = entry
    return contention.waited_ms, contention.conflicts


# -- Counters of a namespace --------

MAX_DEADLOCKS: Final = 100
"""Maximum number of recent deadlocks in memory."""
MAX_DEADLOCK_STEPS: Final = 10_000
"""Maximum number of steps of all recent deadlocks in memory together, because one cycle may be long."""
CANCELLED: Final = "cancelled"
"""Outcome of a waiting request that its client released. Its `Reason` is SUCCESS."""
UNGRANTED_REASONS: Final = tuple(reason for reason in Reason if reason is not Reason.TRANSACTION_TIMEOUT)
"""Reasons for which a request may end without a grant."""
BATCH_SIZE_BOUNDS: Final[tuple[float, ...]] = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0)
"""Upper bounds of the buckets for the number of changes in a commit."""


@dataclass(slots=True, frozen=True)
class Deadlock:
    """A request that was ended because it would have closed a cycle in the wait-for graph."""

    at_unix_ms: float
    id: int
    """The id of the request, the victim."""
    transaction: str | None
    """The transaction of the request."""
    cycle: Cycle
    """The cycle, which begins with the victim."""


class Stats:
    """Counters of a namespace since the start of the process, over all changes of its role."""

    def __init__(self) -> None:
        # More than 16 fields: each is a number that the metrics show.
        self.granted = 0
        """Requests granted immediately."""
        self.waited = 0
        """Requests granted after a wait."""
        self.queued = 0
        """Requests that could not be granted immediately."""
        self.not_granted: Counter[Reason] = Counter()
        """Requests that ended without a grant, by reason. The reason SUCCESS means that the client has cancelled the
        request."""
        self.lost_holds: Counter[Reason] = Counter()
        """Held requests that ended other than by a release, by reason."""
        self.errors: Counter[str] = Counter()
        """Rejected commands, by error code."""
        self.session_takeovers = 0
        """Connections that were closed because a newer connection has resumed their session."""
        self.lagged_watchers = 0
        """Connections whose watches ended with `lagged`."""
        self.waits = Histogram()
        """Wait times of requests granted after a wait (ms)."""
        self.holds = Histogram()
        """Hold times of held locks that have ended (ms)."""
        self.commits = Histogram()
        """Latency of commits to the store (ms)."""
        self.batch_sizes = Histogram(BATCH_SIZE_BOUNDS)
        """Changes per commit."""
        self.store_errors = 0
        """Store timeouts and failures."""
        self.rearrangements = 0
        """Wait-queue rearrangements of past epochs as leader. In the current epoch the lock manager counts them."""
        self.lag = Histogram()
        """Event-loop lag: the delay with which timers ran (ms)."""
        self.contention = ContentionStats()
        """Conflicts and wait time by resource."""
        self.deadlocks: deque[Deadlock] = deque(maxlen=MAX_DEADLOCKS)
        """Recent deadlocks, oldest first."""
        self._deadlock_steps = 0
        """Steps of all deadlocks in `deadlocks`."""
        self._unreported_deadlocks = 0
        """Deadlocks since the last call of `take_unreported_deadlocks`."""
        self.recent_waiters: dict[int, Request] = {}
        """Waiting requests by id, in order of arrival, until the slow-wait log has read them. Empty unless
        `tracks_recent_waiters`."""
        self.tracks_recent_waiters = False
        """True if the slow-wait log is enabled."""
        self._blocked_resources: dict[int, tuple[str, ...]] = {}
        """By id of a waiting request, the resources on which it is blocked. Only for requests that name several
        resources, or units."""
        self.rate_window = RateWindow()
        """Samples of the last minute, for rates and wait quantiles."""

    @property
    def deadlocked(self) -> int:
        """The number of requests that were ended by a deadlock."""
        return self.not_granted[Reason.DEADLOCK]

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of requests by outcome: `granted`, `waited`, or the reason for which they were not granted."""
        counts = {"granted": self.granted, "waited": self.waited}
        for reason in UNGRANTED_REASONS:
            outcome = CANCELLED if reason is Reason.SUCCESS else reason.value
            counts[outcome] = self.not_granted[reason]
        return counts

    def sample(self, now: float) -> None:
        """Start a window of contention and take a sample for the rates, each if it is due.

        `now` is monotonic, in ms.
        """
        self.contention.start_window_if_due(now)
        if self.rate_window.should_sample(now):
            self.rate_window.add(
                Sample(
                    at_ms=now,
                    grants=self.granted + self.waited,
                    releases=self.holds.count,
                    waits=self.queued,
                    timeouts=self.not_granted[Reason.QUEUE_TIMEOUT] + self.lost_holds[Reason.TRANSACTION_TIMEOUT],
                    deadlocks=self.deadlocked,
                    errors=self.errors.total(),
                    waited=tuple(self.waits.counts),
                )
            )

    def record_queued(self, request: Request, table: LockTable) -> None:
        """Count a request that was not granted immediately. If the request waits, also count its conflicts by resource.

        A request that has ended in the same step does not wait. `record_ended` counts its conflicts.
        """
        self.queued += 1
        if request.state is WAITING:
            if self.tracks_recent_waiters:
                self.recent_waiters[request.id] = request
            # A request for one plain name is blocked by this resource, or by a subtree that contains it, which counts
            # the same.
            if request.details is not None and request.details.units:
                blocked = self._blocked_resources[request.id] = tuple(blocked_resources(table, request))
                self.contention.record_conflict(blocked)
            elif len(request.exclusive) == 1 and not request.shared:
                self.contention.entry(request.exclusive[0]).conflicts += 1
            elif not request.exclusive and len(request.shared) == 1:
                self.contention.entry(request.shared[0]).conflicts += 1
            else:  # the resources that blocked the request must be known when the wait ends
                blocked = self._blocked_resources[request.id] = tuple(blocked_resources(table, request))
                self.contention.record_conflict(blocked)

    def record_granted(self, event: Locked) -> None:
        """Count a request that was granted after a wait."""
        self.waited += 1
        self.waits.add(event.waited_ms)
        self._record_wait(event.request, event.waited_ms)

    def record_ended(self, event: Released, now: float) -> None:
        """Count a request that ended: its hold time if it was held, otherwise its reason and wait time.

        `now` is the lock manager's time (ms).
        """
        request, reason = event.request, event.reason
        duration_ms = now - request.since
        if request.fence:  # the request was held
            self.holds.add(duration_ms)
            if reason is not Reason.SUCCESS:
                self.lost_holds[reason] += 1
            return
        self.not_granted[reason] += 1
        if isinstance(event, Deadlocked):
            self._record_deadlock(event)
        elif isinstance(event, TimedOut) and duration_ms == 0 and request.queue_timeout_ms <= 0:  # a try-lock
            self.contention.record_conflict({blocker.resource for blocker in event.blockers})
        else:
            self._record_wait(request, duration_ms)

    def take_unreported_deadlocks(self) -> tuple[list[Deadlock], int]:
        """Return the deadlocks since the last call, and their number.

        The number may be greater than the length of the list, because only recent deadlocks are kept in memory.
        """
        count, self._unreported_deadlocks = self._unreported_deadlocks, 0
        recent = list(self.deadlocks)[-count:] if count else []
        return recent, count

    def start_epoch(self) -> None:
        """Drop references to requests of the previous epoch, because this server begins to lead again."""
        self.recent_waiters.clear()
        self._blocked_resources.clear()

    def _record_deadlock(self, event: Deadlocked) -> None:
        """Add a deadlock to the recent deadlocks, and drop the oldest deadlocks beyond the limits."""
        cycle, request = event.cycle, event.request
        self.contention.record_conflict({wait.resource for wait in cycle.waits if wait.waiter == request.id})
        max_earlier_steps = MAX_DEADLOCK_STEPS - len(cycle.waits)
        while self.deadlocks and (len(self.deadlocks) == MAX_DEADLOCKS or self._deadlock_steps > max_earlier_steps):
            oldest = self.deadlocks.popleft()
            self._deadlock_steps -= len(oldest.cycle.waits)
        self.deadlocks.append(Deadlock(request.since_unix_ms, request.id, request.transaction, cycle))
        self._deadlock_steps += len(cycle.waits)
        self._unreported_deadlocks += 1

    def _record_wait(self, request: Request, waited_ms: float) -> None:
        """Add the wait time of a request that waits no longer to the contention of the resources on which it was blocked."""
        if self.tracks_recent_waiters:
            self.recent_waiters.pop(request.id, None)
        if request.details is not None and request.details.units:
            self.contention.record_wait(self._blocked_resources.pop(request.id, ()), waited_ms)
        elif len(request.exclusive) == 1 and not request.shared:  # the usual case
            self.contention.entry(request.exclusive[0]).waited_ms += waited_ms
        elif not request.exclusive and len(request.shared) == 1:
            self.contention.entry(request.shared[0]).waited_ms += waited_ms
        else:
            self.contention.record_wait(self._blocked_resources.pop(request.id, ()), waited_ms)
