"""Blockers of a waiting request are found in bounded time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from genie.core import LockManager, Request, view
from genie.core.view import MAX_COUNTED_BLOCKERS, MAX_LISTED_BLOCKERS, find_blockers, sample_blockers


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
