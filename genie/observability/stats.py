"""Which resources are fought for: those on which most was waited and collided lately, in bounded memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from genie.core import WAITING, Cycle, Deadlocked, Locked, Reason, Released, Request, TimedOut, blocked_resources
from genie.core.lock_table import LockTable
from genie.observability.histogram import Histogram, Recent, Sample

WINDOW_MS: Final = 300_000
"""What is told goes back for one to two windows."""
MOST: Final = 4_096
"""Names in one window. When there are more, the half of them goes that matters least."""


@dataclass(slots=True)
class Heat:
    """One resource: requests that could not have it at once, and how long those that waited for it did."""

    collisions: int = 0
    waited_ms: float = 0.0


class Hot:
    """Counts by resource, in two windows of time."""

    def __init__(self) -> None:
        self._now: dict[str, Heat] = {}
        self._before: dict[str, Heat] = {}
        self._turned_ms = 0.0
        """When the present window began."""

    def turn(self, now: float) -> None:
        """Let time pass (`now` in ms, of any clock that goes on): what is old is forgotten."""
        if now - self._turned_ms >= WINDOW_MS:
            late = now - self._turned_ms >= 2 * WINDOW_MS
            self._before, self._now = {} if late else self._now, {}
            self._turned_ms = now

    def collided(self, names: Iterable[str]) -> None:
        """A request found these in others' hands."""
        for name in names:
            self.of(name).collisions += 1

    def waited(self, names: Iterable[str], waited_ms: float) -> None:
        """The wait of a request for these is over."""
        for name in names:
            self.of(name).waited_ms += waited_ms

    def top(self, limit: int) -> list[tuple[str, Heat]]:
        """The most waited for, then the most collided on, first."""
        return hottest(self.found(), limit)

    def found(self) -> Iterator[tuple[str, Heat]]:
        """Each resource once, in no order, as it is now: what changes while it is read is not missed, nor in the way."""
        before, now = self._before.copy(), self._now.copy()
        for name, heat in before.items():
            later = now.pop(name, None)
            yield (
                name,
                heat if later is None else Heat(heat.collisions + later.collisions, heat.waited_ms + later.waited_ms),
            )
        yield from now.items()

    def of(self, name: str) -> Heat:
        """What is counted of one resource, to be added to."""
        heat = self._now.get(name)
        if heat is None:
            if len(self._now) >= MOST:
                self._now = dict(sorted(self._now.items(), key=_weight, reverse=True)[: MOST // 2])
            heat = self._now[name] = Heat()
        return heat


def hottest(found: Iterable[tuple[str, Heat]], limit: int) -> list[tuple[str, Heat]]:
    """The most waited for, then the most collided on, first."""
    return nlargest(limit, found, _weight)


def _weight(item: tuple[str, Heat]) -> tuple[float, int]:
    return item[1].waited_ms, item[1].collisions


# -- What a server counts of its life: plain numbers, cheap to count, read by whoever shows them --------

DEADLOCKS: Final = 100
"""Deadlocks that are remembered."""
STEPS: Final = 10_000
"""Steps of all of them together: a cycle may be long."""
CANCELLED: Final = "cancelled"
"""How a request went whose client gave it up while it waited: of those that were not held, the reason `success`."""
WAYS: Final = tuple(reason for reason in Reason if reason is not Reason.TRANSACTION_TIMEOUT)
"""Reasons for which a request may end without having been held."""
IDLE_NEWCOMERS: Final = 1_000
"""Requests that may be remembered though they wait no more."""
SIZES: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0)


@dataclass(slots=True, frozen=True)
class Deadlock:
    """A request that would have closed a cycle, and the cycle, victim first."""

    at_unix_ms: float
    id: int
    transaction: str | None
    cycle: Cycle


class Stats:
    """Counters since the start of this process, whatever roles it had."""

    def __init__(self) -> None:
        self.granted = 0
        """Requests that were held at once."""
        self.waited = 0
        """Requests that were held after they had waited."""
        self.queued = 0
        """Requests that could not be held at once."""
        self.refused: Counter[Reason] = Counter()
        """Requests that ended without having been held, by reason; `success`: the client gave up."""
        self.ended: Counter[Reason] = Counter()
        """Holds that ended otherwise than by release."""
        self.errors: Counter[str] = Counter()
        """Commands that were refused, by code."""
        self.waits = Histogram()
        """Of those that had to wait and were granted (ms)."""
        self.holds = Histogram()
        """Of holds that ended (ms)."""
        self.commits = Histogram()
        """How long commits took (ms)."""
        self.sizes = Histogram(SIZES)
        """Changes in one commit."""
        self.store_errors = 0
        """How often the store took longer than it may, or failed."""
        self.reorderings = 0
        """Reorderings of lines in past times as leader. (Those of the present one are the lock manager's to count.)"""
        self.lag = Histogram()
        """How much later than it should the loop came to what it had to do (ms)."""
        self.hot = Hot()
        self.deadlocks: deque[Deadlock] = deque(maxlen=DEADLOCKS)
        self._steps = 0
        self._untold = 0
        self.newcomers: deque[Request] = deque()
        """Those that began to wait lately, where somebody looks after slow waits and says so."""
        self.follows_newcomers = False
        self._in_way: dict[int, tuple[str, ...]] = {}
        """What was in the way of a waiting request that names several resources, by its id."""
        self.recent = Recent()

    @property
    def deadlocked(self) -> int:
        """Requests that ended with `deadlock`."""
        return self.refused[Reason.DEADLOCK]

    @property
    def outcomes(self) -> dict[str, int]:
        """Requests by how they went, each of the possible ways: held at once, held later, or why not."""
        refused = {CANCELLED if reason is Reason.SUCCESS else reason.value: self.refused[reason] for reason in WAYS}
        return {"granted": self.granted, "waited": self.waited, **refused}

    def turn(self, now: float) -> None:
        """Let time pass (`now` in ms, of any clock that goes on)."""
        self.hot.turn(now)
        if self.recent.due(now):
            self.recent.add(
                Sample(
                    at_ms=now,
                    grants=self.granted + self.waited,
                    releases=self.holds.count,
                    waits=self.queued,
                    timeouts=self.refused[Reason.QUEUE_TIMEOUT] + self.ended[Reason.TRANSACTION_TIMEOUT],
                    deadlocks=self.deadlocked,
                    errors=self.errors.total(),
                    waited=tuple(self.waits.counts),
                )
            )

    def arrived(self, request: Request, table: LockTable) -> None:
        """A request was not held at once. It waits, or has ended in the same step, which `over` tells next."""
        self.queued += 1
        if request.state is WAITING:
            if self.follows_newcomers:
                self.newcomers.append(request)
            one = _only(request)
            if one is not None:
                self.hot.of(one).collisions += 1
            else:
                found = self._in_way[request.id] = tuple(blocked_resources(table, request))
                self.hot.collided(found)

    def locked(self, event: Locked) -> None:
        """A request is held after it has waited."""
        self.waited += 1
        self.waits.add(event.waited_ms)
        self._waited(event.request, event.waited_ms)

    def over(self, event: Released, now: float) -> None:
        """A request ended; `now` is the manager's time."""
        request, reason = event.request, event.reason
        lasted_ms = now - request.since
        if request.fence:
            self.holds.add(lasted_ms)
            if reason is not Reason.SUCCESS:
                self.ended[reason] += 1
            return
        self.refused[reason] += 1
        if isinstance(event, Deadlocked):
            self._deadlock(event)
        elif isinstance(event, TimedOut) and lasted_ms == 0 and request.queue_timeout_ms <= 0:
            self.hot.collided({blocker.resource for blocker in event.blockers})
        else:
            self._waited(request, lasted_ms)

    def untold_deadlocks(self) -> tuple[list[Deadlock], int]:
        """Those since the last call, of which the oldest may be forgotten, and how many there were."""
        many, self._untold = self._untold, 0
        return list(self.deadlocks)[-many:] if many else [], many

    def forget_newcomers(self, waiting: int) -> None:
        """Let go of those that wait no more, where they are many beside the `waiting`."""
        if len(self.newcomers) > 2 * waiting + IDLE_NEWCOMERS:
            self.newcomers = deque(request for request in self.newcomers if request.state is WAITING)

    def begin(self) -> None:
        """Another time as leader begins."""
        self.newcomers.clear()
        self._in_way.clear()

    def _deadlock(self, event: Deadlocked) -> None:
        cycle, request = event.cycle, event.request
        self.hot.collided({wait.resource for wait in cycle.waits if wait.waiter == request.id})
        if len(self.deadlocks) == DEADLOCKS:
            self._steps -= len(self.deadlocks.popleft().cycle.waits)
        self.deadlocks.append(Deadlock(request.since_unix_ms, request.id, request.transaction, cycle))
        self._untold += 1
        self._steps += len(cycle.waits)
        while self._steps > STEPS and len(self.deadlocks) > 1:
            self._steps -= len(self.deadlocks.popleft().cycle.waits)

    def _waited(self, request: Request, waited_ms: float) -> None:
        one = _only(request)
        if one is not None:
            self.hot.of(one).waited_ms += waited_ms
        else:
            self.hot.waited(self._in_way.pop(request.id, ()), waited_ms)


def _only(request: Request) -> str | None:
    """The resource that it names, if that is one."""
    exclusive, shared = request.exclusive, request.shared
    return (exclusive or shared)[0] if len(exclusive) + len(shared) == 1 else None
