"""Blockers of a waiting request are found in bounded time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from genie.core import Expire, LockManager, Request, view
from genie.core.model import details_of
from genie.core.view import MAX_COUNTED_BLOCKERS, MAX_LISTED_BLOCKERS, find_blockers, sample_blockers
from genie.core.wait_queue import LockedResource
from genie.lock_modes import QueueMode


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
    assert holder.details is None


def test_the_names_of_holders_that_hold_a_resource_in_several_modes_count_as_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which mode a holder has is found among its names: 1,000 holders with 1,024 names took 13 ms for each waiting request."""
    searched: list[int] = []
    holder_mode = LockedResource.holder_mode

    def count_search(resource: LockedResource, name: str, holder: Request) -> QueueMode:
        searched.append(holder.name_count())
        return holder_mode(resource, name, holder)

    manager = LockManager()
    names = [f"{number}" for number in range(200)]
    for _ in range(100):
        manager.step(Request(shared=("a", *names[100:]), exclusive=tuple(names[:100]), transaction="t"), 0)
    manager.step(Request(exclusive=("a",), transaction="t"), 0)
    waiter = Request(shared=("a",))
    manager.step(waiter, 0)
    monkeypatch.setattr(LockedResource, "holder_mode", count_search)
    _, _, reads = sample_blockers(manager.table, waiter, 300, count=True)
    assert reads == 300
    assert sum(searched) < 300 * view.NAMES_PER_READ + 300


def test_the_names_of_waiters_below_a_subtree_count_as_read_where_one_of_them_is_listed() -> None:
    """Ten requests with 1,024 names wait below a subtree, before the requests for the subtree, which time out together."""
    manager = LockManager()
    manager.step(Request(exclusive=("held", "a/held"), transaction="holder"), 0)
    manager.step(subtree_request(transaction="holder"), 0)
    for number in range(MAX_LISTED_BLOCKERS):
        names = tuple(f"{number} {index}" for index in range(1_022))
        manager.step(Request(exclusive=("held", *names, f"a/{number}"), queue_timeout_ms=1e6), 0)
    waiting = [subtree_request(queue_timeout_ms=1_000) for _ in range(50)]
    for request in waiting:
        manager.step(request, 0)
    _, _, reads = sample_blockers(manager.table, waiting[0], 300, count=True)
    assert reads >= 8 * 1_024 // view.NAMES_PER_READ
    assert len(manager.step(Expire(250), 1_000)) < 10


def subtree_request(**options: Any) -> Request:
    request = Request(exclusive=("a/**",), **options)
    request.details = details_of((), request.exclusive)
    return request


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
