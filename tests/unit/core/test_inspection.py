"""`inspect` with subtrees: a resource matches the subtrees that contain it, and a subtree also matches the names below it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from genie.core import LockManager, Release, Request, view
from genie.core.model import details_of
from genie.core.special import contains
from genie.lock_modes import is_subtree
from work.opcodes import OpcodeCounter

NAMES = ("a/1", "a/2", "a/b/1", "b/1", "a/**", "a/b/**", "**")
INSPECTED = (*NAMES, "a/3", "a/b/c/**", "c", "c/**", "a")


def request(*locks: str, transaction: str | None = None, priority: float = 0) -> Request:
    """Return a request for locks such as `x:a/1`, `s:a/**` and `2:pool`, the last with a limit of 3 units."""
    by_mode = {mode: tuple(lock[2:] for lock in locks if lock.startswith(mode)) for mode in "sx12"}
    units = {name: (number, 3) for number in (1, 2) for name in by_mode[str(number)]}
    new = Request(by_mode["s"], by_mode["x"], transaction=transaction, priority=priority)
    new.details = details_of(new.shared, new.exclusive, units)
    return new


def matches(each: Request, name: str) -> bool:
    """Return whether a request should be listed for `name`, from its names alone."""
    return any(
        named == name or (is_subtree(named) and contains(named, name)) or (is_subtree(name) and contains(name, named))
        for named in each.names()
    )


def inspected(manager: LockManager, **filters: object) -> tuple[list[Request], list[Request], int, int]:
    found = view.inspect(manager.table, limit=1_000, **filters)  # type: ignore[arg-type]
    return (
        [row.request for row in found.holders],
        [row.request for row in found.queue],
        found.holders_total,
        found.queue_total,
    )


def random_manager(chance: random.Random) -> LockManager:
    manager, live = LockManager(), list[Request]()
    for _ in range(40):
        if live and chance.random() < 0.3:
            manager.step(Release(live.pop(chance.randrange(len(live))).id), 0)
        names = chance.sample(NAMES, chance.choice([1, 1, 1, 2, 3]))
        locks = [f"{chance.choice('s' if is_subtree(name) else 'sx1')}:{name}" for name in names]
        if chance.random() < 0.1:
            locks = ["x" + lock[1:] for lock in locks]
        new = request(*locks, transaction=chance.choice([None, "t", "u"]), priority=chance.choice([0, 0, 1]))
        manager.step(new, 0)
        live = [each for each in [*live, new] if manager.table.find(each.id) is each]
    return manager


def test_the_requests_of_an_inspection_follow_from_their_names() -> None:
    chance = random.Random(5)  # noqa: S311
    seen = 0
    for _ in range(50):
        manager = random_manager(chance)
        table = manager.table
        for name in INSPECTED:
            holders, queue, holders_total, queue_total = inspected(manager, resource=name)
            assert (holders_total, queue_total) == (len(set(holders)), len(set(queue)))
            assert set(holders) == {each for each in table.held.values() if matches(each, name)}
            assert set(queue) == {each for each in table.waiting.values() if matches(each, name)}
            seen += sum(name not in each.names() for each in (*holders, *queue))
            of_owner = inspected(manager, resource=name, transaction="t")[:2]
            for found, every in zip(of_owner, (holders, queue), strict=True):
                assert set(found) == {each for each in every if each.transaction == "t"}
            if is_subtree(name):
                assert queue == sorted(queue, key=lambda each: each.id)
                continue
            for first, second in pairwise(queue):
                common = set(first.queues()) & set(second.queues())
                for resource in common & {name, *(subtree for subtree, _ in table.subtrees_above(name))}:
                    if first.moved is None and second.moved is None:
                        assert first.entry(resource)[:2] < second.entry(resource)[:2]
    assert seen > 1_000, "many are listed because of a subtree"


def test_the_holder_of_a_subtree_is_listed_before_the_holders_of_a_name_below_it() -> None:
    manager = LockManager()
    below = [request("s:a/2") for _ in range(3)]
    subtree, other = request("s:a/**"), request("s:b/**")
    waiting = [request("x:a/2"), request("x:a/**", priority=1), request("x:a/3"), request("x:a/2")]
    for each in (*below, subtree, other, *waiting):
        manager.step(each, 0)
    holders, queue, *_ = inspected(manager, resource="a/2")
    assert holders == [subtree, *below]
    assert queue == [waiting[1], waiting[0], waiting[3]]
    assert inspected(manager, resource="a/4")[:2] == ([subtree], [waiting[1]])
    assert inspected(manager, resource="a/2", id=subtree.id)[0] == [subtree]
    assert inspected(manager, resource="a/2", id=other.id)[0] == []


def test_a_bounded_number_of_requests_for_subtrees_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "MAX_INSPECTED_REQUESTS", 10)
    manager = LockManager()
    for lock in ("s:a/**", "s:a/2", "x:a/**", "x:a/2"):
        for _ in range(20):
            manager.step(request(lock), 0)
    assert inspected(manager, resource="a/2")[2:] == (30, 30)


def test_an_inspection_of_a_subtree_reads_the_names_in_the_table_and_not_those_of_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = LockManager()
    held = [request(f"x:a/{number}", f"x:b/{number}") for number in range(20)]
    shared, waiting = request("s:a/s"), request("x:a/0")
    for each in (*held, shared, waiting):
        manager.step(each, 0)
    monkeypatch.delattr(Request, "names")
    assert inspected(manager, resource="a/**")[:2] == ([*held, shared], [waiting])
    assert inspected(manager, resource="c/**")[:2] == ([], [])


def instructions(manager: LockManager, **filters: object) -> int:
    counter = OpcodeCounter()
    counter.start()
    try:
        view.inspect(manager.table, **filters)  # type: ignore[arg-type] # without rows, which are made later
    finally:
        counter.stop()
    return counter.count


def test_an_inspection_of_a_subtree_reads_a_bounded_number_of_holders_and_waiters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def count(names: int) -> int:
        manager = LockManager()
        for number in range(names):
            manager.step(request(f"x:a/{number}"), 0)
            manager.step(request(f"x:a/{number}"), 0)
            manager.step(request("s:a/s"), 0)
        for _ in range(names):
            manager.step(request("x:a/s"), 0)
        return instructions(manager, resource="a/**")

    monkeypatch.setattr(view, "MAX_INSPECTED_NAMES", 100)
    monkeypatch.setattr(view, "MAX_READ_RESOURCES", 50)
    monkeypatch.setattr(view, "MAX_INSPECTED_REQUESTS", 50)
    assert count(1_200) == count(600)


def test_the_waiters_of_several_subtrees_above_a_name_are_sorted_and_not_merged() -> None:
    manager = LockManager()
    for lock in ("s:a/**", "s:a/b/**"):
        for _ in range(1_000):
            manager.step(request("x" + lock[1:] if manager.table.find(1) else lock), 0)
    assert len(manager.table.waiting) > 1_000
    assert instructions(manager, resource="a/b/1") < 50_000
