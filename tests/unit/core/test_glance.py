"""Who is in the way, in a bounded time."""

from __future__ import annotations

import random

from genie.core import LockManager, Request
from genie.core.view import MAX_COUNTED_BLOCKERS, MAX_LISTED_BLOCKERS, find_blockers, sample_blockers


def test_with_enough_looks_it_tells_what_blame_tells() -> None:
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


def test_it_looks_no_further_than_it_may() -> None:
    """The requests of one transaction are never in each other's way, and stand in one line by the thousand."""
    manager = LockManager()
    manager.step(Request(exclusive=("a",)), 0)
    for _ in range(3_000):
        manager.step(Request(exclusive=("a",), transaction="t"), 0)
    last = list(manager.table.waiting.values())[-1]
    named, total, looked = sample_blockers(manager.table, last, 300, count=True)
    assert (len(named), total, looked) == (1, 1, 300)


def test_it_ends_with_the_tenth() -> None:
    manager = LockManager()
    for _ in range(3_000):
        manager.step(Request(exclusive=("a",)), 0)
    last = list(manager.table.waiting.values())[-1]
    named, total, looked = sample_blockers(manager.table, last, 300, count=False)
    assert (len(named), total, looked) == (MAX_LISTED_BLOCKERS, MAX_LISTED_BLOCKERS, MAX_LISTED_BLOCKERS + 1)
    assert sample_blockers(manager.table, last, 300, count=True)[1:] == (299, 300)


def test_who_holds_thousands_is_not_searched() -> None:
    manager = LockManager()
    holder = Request(exclusive=tuple(f"{number}" for number in range(10_000)))
    manager.step(holder, 0)
    waiter = Request(shared=("7",))
    manager.step(waiter, 0)
    ((blocker,), _, _) = sample_blockers(manager.table, waiter, 300, count=True)
    assert (blocker.id, blocker.mode) == (holder.id, "exclusive")
    assert holder.exclusive_names is None
