"""Blockers of a waiting request are found in bounded time, and the first ones are kept for a request with a trace context."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from genie.core import (
    Disconnect,
    Event,
    Expire,
    Locked,
    LockedAfterBlockers,
    LockManager,
    Moved,
    Queued,
    Release,
    Request,
    TimedOut,
    view,
)
from genie.core.view import (
    MAX_COUNTED_BLOCKERS,
    MAX_COUNTED_ON_ARRIVAL,
    MAX_LISTED_BLOCKERS,
    find_blockers,
    sample_blockers,
)
from simulator.invariants import check
from support.core.driver import Driver, names


def test_a_sample_without_limit_equals_all_blockers() -> None:
    chance = random.Random(7)  # noqa: S311
    seen = 0
    for _ in range(10):
        manager = LockManager()
        for _ in range(40):
            names = chance.sample("abcdef", chance.randint(1, 3))
            cut = chance.randint(0, len(names))
            request = Request(
                tuple(names[:cut]),
                tuple(names[cut:]),
                transaction=chance.choice([None, "t", "u", "v"]),
                priority=chance.randint(0, 2),
            )
            manager.step(request, 0)
        for request in manager.table.waiting.values():
            named, total = find_blockers(manager.table, request)
            assert sample_blockers(manager.table, request, MAX_COUNTED_BLOCKERS, count=True)[:2] == (named, total)
            assert sample_blockers(manager.table, request, MAX_COUNTED_BLOCKERS, count=False)[:2] == (
                named,
                min(total, MAX_LISTED_BLOCKERS),
            )
            seen += total > 0
    assert seen > 50, "many of them wait"


def test_a_sample_reads_at_most_its_limit() -> None:
    """Requests of one transaction do not block each other, but fill a queue by the thousand."""
    manager = LockManager()
    manager.step(Request(exclusive=("a",)), 0)
    for _ in range(3_000):
        manager.step(Request(exclusive=("a",), transaction="t"), 0)
    last = list(manager.table.waiting.values())[-1]
    named, total, scanned = sample_blockers(manager.table, last, 300, count=True)
    assert (len(named), total, scanned) == (1, 1, 300)


def test_a_sample_without_count_ends_with_the_tenth_blocker() -> None:
    manager = LockManager()
    for _ in range(3_000):
        manager.step(Request(exclusive=("a",)), 0)
    last = list(manager.table.waiting.values())[-1]
    named, total, scanned = sample_blockers(manager.table, last, 300, count=False)
    assert (len(named), total, scanned) == (MAX_LISTED_BLOCKERS, MAX_LISTED_BLOCKERS, MAX_LISTED_BLOCKERS + 1)
    assert sample_blockers(manager.table, last, 300, count=True)[1:] == (299, 300)


def test_the_names_of_a_holder_of_thousands_are_not_searched() -> None:
    manager = LockManager()
    holder = Request(exclusive=tuple(f"{number}" for number in range(10_000)))
    manager.step(holder, 0)
    waiter = Request(shared=("7",))
    manager.step(waiter, 0)
    ((blocker,), _, _) = sample_blockers(manager.table, waiter, 300, count=True)
    assert (blocker.id, blocker.mode) == (holder.id, "exclusive")
    assert holder.exclusive_names is None


# -- the first blockers of requests with a trace context ------------------------------------------------


def step(driver: Driver, *resources: str, **options: object) -> list[Event]:
    return driver.step(Request(**names(*resources), **options))  # type: ignore[arg-type]


def test_a_grant_after_a_wait_has_the_blockers_of_the_time_when_the_wait_began() -> None:
    driver = Driver()
    driver.request("A", traceparent="holder", note="cron", transaction="T")
    driver.now = 5
    driver.request("A", "B")
    driver.now = 7
    driver.request("shared:A", traceparent="waiter", priority=1)
    driver.request("A", traceparent="later", priority=2)  # overtakes, so it is no first blocker
    driver.release(4)
    (_, granted) = driver.step(Release(1))
    assert isinstance(granted, LockedAfterBlockers)
    assert (granted.request.id, granted.waited_ms, granted.blockers_total) == (3, 0, 1)
    (holder,) = granted.blockers
    assert (holder.id, holder.transaction, holder.resource, str(holder.mode)) == (1, "T", "A", "exclusive")
    assert (holder.held, holder.since_unix_ms, holder.note, holder.traceparent) == (True, 0, "cron", "holder")


def test_the_blockers_are_those_after_a_rearrangement() -> None:
    """Request 4 would close a cycle of T and V, so it overtakes request 3, and waits for the holder only."""
    driver = Driver()
    driver.request("a", transaction="T")
    driver.request("b", transaction="U")
    driver.request("a", "b", transaction="V")
    driver.request("b", transaction="T", traceparent="R")
    (_, granted, *_) = driver.step(Release(2))
    assert isinstance(granted, LockedAfterBlockers)
    assert (granted.request.id, [(blocker.id, blocker.held) for blocker in granted.blockers]) == (4, [(2, True)])


def test_a_request_that_is_granted_in_its_own_step_had_no_blockers() -> None:
    driver = Driver()
    driver.request("A", transaction="T")
    driver.request("A", "B")
    events = step(driver, "B", transaction="T", traceparent="overtakes")
    assert [type(event) for event in events] == [Queued, Locked, Moved]
    assert driver.manager.first_blockers == {}


def test_a_request_without_trace_context_has_no_first_blockers() -> None:
    driver = Driver()
    driver.request("A", traceparent="holder")
    driver.request("A")
    assert driver.manager.first_blockers == {}
    assert [type(event) for event in driver.step(Release(1))][1:] == [Locked]


def test_the_blockers_of_an_adopted_request_are_not_known() -> None:
    driver = Driver()
    driver.request("A")
    driver.request("A", traceparent="waiter")
    assert list(driver.manager.first_blockers) == [2]
    driver.reload()
    assert [type(event) for event in driver.step(Release(1))][1:] == [Locked]


def test_a_discarded_request_keeps_no_blockers() -> None:
    driver = Driver()
    driver.request("A")
    driver.request("A", traceparent="waiter")
    driver.manager.discard(2)
    check(driver.manager)


def test_blockers_are_listed_and_counted_up_to_a_limit() -> None:
    driver = Driver()
    count = 2 * MAX_COUNTED_ON_ARRIVAL
    for _ in range(count):
        driver.manager.step(Request(shared=("A",)), 0)
    step(driver, "A", traceparent="waiter")
    driver.manager.step(Disconnect([driver.requests[count + 1]]), 0)
    assert driver.manager.first_blockers == {}
    step(driver, "A", traceparent="waiter")
    blockers, total = driver.manager.first_blockers[count + 2]
    assert (len(blockers), total) == (MAX_LISTED_BLOCKERS, MAX_COUNTED_ON_ARRIVAL)
    assert [blocker.id for blocker in blockers] == list(range(1, MAX_LISTED_BLOCKERS + 1))


def test_first_blockers_do_not_outlive_the_wait() -> None:
    """Random steps: each grant after a wait has the blockers that were found at its begin, and other ends drop them."""
    chance = random.Random(3)  # noqa: S311
    manager = LockManager(max_queue_entries=40)
    first: dict[int, object] = {}
    granted = timed_out = 0
    for now in range(3_000):
        taken = chance.sample("abcdef", chance.randint(1, 2))
        live = [*manager.table.held.values(), *manager.table.waiting.values()]
        command = chance.choice(
            [
                Request(
                    tuple(taken[1:]),
                    tuple(taken[:1]),
                    queue_timeout_ms=chance.choice([0, 10, 100]),
                    transaction_timeout_ms=200,
                    transaction=chance.choice([None, "t", "u", "v"]),
                    priority=chance.randint(0, 1),
                    traceparent=chance.choice([None, "traced"]),
                ),
                Expire() if not live or chance.random() < 0.3 else Release(chance.choice(live).id),
                Disconnect(chance.sample(live, 1)) if live and chance.random() < 0.1 else Expire(),
            ]
        )
        events = manager.step(command, now)
        check(manager)
        if isinstance(command, Request) and command in manager.table.waiting.values() and command.traceparent:
            first[command.id] = find_blockers(manager.table, command)
        for event in events:
            timed_out += isinstance(event, TimedOut) and event.request.id in first
            if isinstance(event, Locked):
                blockers = first.pop(event.request.id, None)
                assert isinstance(event, LockedAfterBlockers) == (blockers is not None)
                if isinstance(event, LockedAfterBlockers):
                    granted += 1
                    assert (event.blockers, event.blockers_total) == blockers
    assert granted > 40
    assert timed_out > 40


def test_an_inspection_of_many_waiting_requests_reads_a_bounded_number_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = 0

    def counting(*arguments: Any) -> Iterator[Any]:
        nonlocal reads
        for item in scan(*arguments):
            reads += 1
            yield item

    scan = view._scan
    monkeypatch.setattr(view, "_scan", counting)
    manager = LockManager()
    for _ in range(1_001):
        manager.step(Request(exclusive=("k",)), 0)
    inspection = view.inspect(manager.table, limit=1_000)
    assert len(list(inspection.holders)) == 1
    rows = list(inspection.queue)
    assert [row.blockers_total for row in rows[:150]] == list(range(1, 151))
    assert {row.blockers_total for row in rows[300:]} == {view.MAX_LISTED_BLOCKERS}
    assert reads <= view.MAX_INSPECTED_REQUESTS + 1_000 + 1_000 * (view.MAX_LISTED_BLOCKERS + 2)
    reads = 0
    for _ in view.inspect(manager.table, limit=1_000).holders:
        pass
    assert reads == 0, "rows that are not sent cost nothing"
