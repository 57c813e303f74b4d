"""The lock manager in this process, with growing tables, wait queues, requests and numbers of
shared waiters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count

from genie.core import Event, Locked, LockManager, Release, Request
from scale_parts.report import Row, building, in_turns, medians, ratio

LONG_MS = 2_000_000_000
GRANTS_PER_MS = 100
"""Time by the manager's clock between two of the other locks, so that their deadlines are
distributed as on a busy server.
"""
STEPS = 4_000
ROUNDS = 15
CROWD_ROUNDS = 7


def cycle() -> Iterator[Row]:
    """Lock and release a free resource, with 1,000,000 other locks held and with 1,000."""
    with building():
        small, large = _cycles(_table_of(1_000)), _cycles(_table_of(1_000_000))
    base, mine = in_turns(ROUNDS, small, large)
    yield Row(
        "a cycle beside 1,000,000 held locks, to one beside 1,000",
        ratio(mine, base),
        goal=1.15,
        note=medians("us with 1,000 and with 1,000,000", base, mine),
    )


def handoff() -> Iterator[Row]:
    """Release a resource to the next in its wait queue, with 100,000 waiting and with 10; another one is added."""
    with building():
        small, large = handoffs(10), handoffs(100_000)
    base, mine = in_turns(ROUNDS, small, large)
    yield Row(
        "a handoff in a line of 100,000, to one in a line of 10",
        ratio(mine, base),
        goal=1.2,
        note=medians("us with 10 and with 100,000", base, mine),
    )


def three() -> Iterator[Row]:
    """Lock and release three free resources in one request, and one."""
    with building():
        one, many = _cycles(_table_of(1_000)), _cycles(_table_of(1_000), resources=3)
    base, mine = in_turns(ROUNDS, one, many)
    yield Row(
        "a cycle of three resources, to one of one resource",
        ratio(mine, base),
        goal=2,
        note=medians("us with one and with three", base, mine),
    )


def crowd() -> Iterator[Row]:
    """10,000 shared waiters join the queue of one resource and leave it, and 1,000: time grows in proportion.

    Ten times as many take ten times as long if each costs the same. The goal allows 1.3 times that:
    the data of 10,000 waiters exceeds the processor's inner caches. A quadratic algorithm would
    take ten times as long.
    """
    ways: list[tuple[str, Callable[[int], float]]] = [
        ("cancelled behind an exclusive holder", _cancelled),
        ("cancelled in the other order, the last first", _cancelled_last_first),
        ("granted at once when the holder leaves, and released", _granted_by_holder),
        ("behind sharers and an exclusive waiter, granted when that one leaves", _granted_by_waiter),
    ]
    for what, way in ways:
        base, mine = in_turns(CROWD_ROUNDS, lambda way=way: _ten_times(way), lambda way=way: way(10_000))  # type: ignore[misc]
        yield Row(
            f"10,000 sharers, to 1,000: {what}",
            10 * ratio(mine, base),
            goal=13,
            note=medians(
                "us each with 1,000 and with 10,000", [s / 10_000 * 1e6 for s in base], [s / 10_000 * 1e6 for s in mine]
            ),
        )


def _table_of(held: int) -> LockManager:
    manager = LockManager()
    for number in range(held):
        request = Request(exclusive=(f"accounts/{number:07}",), transaction_timeout_ms=LONG_MS)
        manager.step(request, number / GRANTS_PER_MS)
    return manager


def _cycles(manager: LockManager, resources: int = 1) -> Callable[[], float]:
    """Return the microseconds for each of these cycles. The names are generated before the
    measurement.
    """
    now = len(manager.table.held) / GRANTS_PER_MS
    numbers = count()

    def run() -> float:
        every = [tuple(f"free/{next(numbers):09}" for _ in range(resources)) for _ in range(STEPS)]
        step = manager.step
        began = time.perf_counter()
        for names in every:
            request = Request(exclusive=names)
            step(request, now)
            step(Release(request.id), now)
        return (time.perf_counter() - began) / STEPS * 1e6

    return run


def handoffs(waiters: int, new: Callable[[], Request] = lambda: Request(exclusive=("A",))) -> Callable[[], float]:
    """Return the microseconds for each hand-over of a lock that only one of the requests can hold, and a new waiter."""
    manager = LockManager()
    holder = new()
    manager.step(holder, 0)
    for _ in range(waiters):
        manager.step(new(), 0)

    def run() -> float:
        nonlocal holder
        step = manager.step
        began = time.perf_counter()
        for _ in range(STEPS):
            holder = _locked(step(Release(holder.id), 0))
            step(new(), 0)
        return (time.perf_counter() - began) / STEPS * 1e6

    return run


def _locked(events: list[Event]) -> Request:
    event = events[1]
    assert isinstance(event, Locked), "the next in line"  # noqa: S101 - what is measured
    return event.request


# -- a crowd: seconds for so many ----------------------------------------------------------------------------


def _ten_times(way: Callable[[int], float]) -> float:
    return sum(way(1_000) for _ in range(10))


def _ask(manager: LockManager, *, exclusive: bool = False) -> Request:
    request = Request(exclusive=("A",)) if exclusive else Request(shared=("A",))
    manager.step(request, 0)
    return request


def _come(manager: LockManager, sharers: int) -> list[Request]:
    return [_ask(manager) for _ in range(sharers)]


def _leave(manager: LockManager, requests: list[Request]) -> None:
    for request in requests:
        manager.step(Release(request.id), 0)
    assert request.id not in manager.table.held, "all have left"  # noqa: S101 - what is measured


def _cancelled(sharers: int, backward: bool = False) -> float:
    manager = LockManager()
    _ask(manager, exclusive=True)
    began = time.perf_counter()
    waiting = _come(manager, sharers)
    _leave(manager, waiting[::-1] if backward else waiting)
    return time.perf_counter() - began


def _cancelled_last_first(sharers: int) -> float:
    return _cancelled(sharers, backward=True)


def _granted_by_holder(sharers: int) -> float:
    manager = LockManager()
    holder = _ask(manager, exclusive=True)
    return _let_in(manager, sharers, holder)


def _granted_by_waiter(sharers: int) -> float:
    manager = LockManager()
    _ask(manager)
    return _let_in(manager, sharers, _ask(manager, exclusive=True))


def _let_in(manager: LockManager, sharers: int, in_the_way: Request) -> float:
    began = time.perf_counter()
    waiting = _come(manager, sharers)
    events = manager.step(Release(in_the_way.id), 0)
    assert len(events) == sharers + 1, "all are granted at once"  # noqa: S101 - what is measured
    _leave(manager, waiting)
    return time.perf_counter() - began
