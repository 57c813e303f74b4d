"""The work of one new request is bounded, however large the queues and the wait-for graph are."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from genie import core
from genie.core import deadlock, manager, wait_queue
from genie.core.lock_table import LockTable
from genie.core.wait_queue import SortedQueue
from support.core.driver import Driver
from work.opcodes import OpcodeCounter

LENGTH = 3_000

MAX_INSTRUCTIONS = 2_000_000
"""Instructions of the most expensive arrival, about 20 ms."""


class Counts:
    """Calls that read the wait-for graph, and insertions into queues."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.owners = self.insertions = self.rearranged = 0
        waiting_of, add, rearrange = LockTable.waiting_of, SortedQueue.add, wait_queue.WaitQueue.rearrange

        def counted_waiting_of(table: LockTable, owner: object) -> object:
            self.owners += 1
            return waiting_of(table, owner)  # type: ignore[arg-type]

        def counted_add(queue: SortedQueue, entry: object) -> None:
            self.insertions += 1
            add(queue, entry)  # type: ignore[arg-type]

        def counted_rearrange(*arguments: object) -> object:
            self.rearranged += 1
            return rearrange(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(LockTable, "waiting_of", counted_waiting_of)
        monkeypatch.setattr(SortedQueue, "add", counted_add)
        monkeypatch.setattr(wait_queue.WaitQueue, "rearrange", counted_rearrange)


def limit_steps(monkeypatch: pytest.MonkeyPatch, arrival: int, search: int) -> None:
    for module in (deadlock, manager, wait_queue):
        monkeypatch.setattr(module, "MAX_ARRIVAL_STEPS", arrival)
    monkeypatch.setattr(deadlock, "MAX_SEARCH_STEPS", search)


def request(target: core.LockManager, *exclusive: str, **options: object) -> list[core.Event]:
    return target.step(core.Request(exclusive=exclusive, **options), 0)  # type: ignore[arg-type]


def chain(length: int) -> core.LockManager:
    """Transaction k holds resource k and waits for transaction k - 1."""
    target = core.LockManager()
    for number in range(length):
        request(target, f"{number}", transaction=f"t{number}")
    for number in range(1, length):
        request(target, f"{number - 1}", transaction=f"t{number}")
    return target


def inverted_queue(length: int) -> core.LockManager:
    """In the queue of `q`, T with priority 0 is before W with priority 10, and W is before `length` others."""
    target = core.LockManager()
    request(target, "q")
    request(target, "a", transaction="T")
    request(target, "a", "q", transaction="W", priority=10)
    request(target, "q", transaction="T")
    for _ in range(length):
        request(target, "q")
    return target


def queue_to_move(length: int) -> core.LockManager:
    """T holds `a`, and `length` requests are in the queue of `q` after one that waits for `a` and `q`."""
    target = core.LockManager()
    request(target, "a", transaction="T")
    request(target, "q")
    request(target, "a", "q")
    for _ in range(length):
        request(target, "q")
    return target


def chain_to_rearrange(length: int) -> core.LockManager:
    """The last transaction of a chain is waited for by a request that is in the queue of `q`."""
    target = chain(length)
    request(target, f"{length - 1}", "q")
    return target


def state_of(target: core.LockManager) -> object:
    """Return everything that a step of the lock manager can change, except the next id."""
    table = target.table
    return (
        {name: [(*entry[:2], entry[2].id) for entry in resource.wait_queue] if resource.wait_queue else []
         for name, resource in table.resources.items() if resource.wait_queue or resource.exclusive_count != 1 or
         len(resource.holders) > 1},
        list(table.held),
        list(table.waiting),
        {name: (list(of.held), list(of.waiting), dict(of.grants)) for name, of in table.transactions.items()},
        table.queue_entries,
        target.next_fence,
        {id_: each.moved and dict(each.moved) for id_, each in table.waiting.items()},
    )  # fmt: skip


def test_the_search_for_a_cycle_visits_a_bounded_number_of_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    target = chain(LENGTH)
    limit_steps(monkeypatch, 1_000, 500)
    before = state_of(target)
    counts = Counts(monkeypatch)
    events = request(target, f"{LENGTH - 1}", transaction="t0")
    assert [type(event).__name__ for event in events] == ["GraphFull"]
    assert counts.owners < 2 * 1_500
    assert state_of(target) == before


def test_the_resolution_of_a_cycle_visits_a_bounded_number_of_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    target = chain(LENGTH)
    request(target, f"{LENGTH - 1}", "q")
    limit_steps(monkeypatch, 1_000, 500)
    before = state_of(target)
    counts = Counts(monkeypatch)
    events = request(target, "q", transaction="t0")
    assert [type(event).__name__ for event in events] == ["GraphFull"]
    assert counts.owners < 2 * 1_500
    assert state_of(target) == before


def test_a_cycle_within_the_bound_is_found_although_the_search_for_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    target = chain(100)
    monkeypatch.setattr(deadlock, "MAX_SEARCH_STEPS", 10)
    events = request(target, "99", transaction="t0")
    assert isinstance(events[-1], core.Deadlocked)
    assert len(events[-1].cycle.owners) == 100
    request(target, "99", "q")
    assert isinstance(request(target, "q", transaction="t0")[0], core.Queued)
    assert target.rearrangements == 1


def test_a_try_lock_that_waits_for_a_holder_is_not_rearranged(monkeypatch: pytest.MonkeyPatch) -> None:
    target = chain(20)
    request(target, "19", "q")
    request(target, "y")
    counts = Counts(monkeypatch)
    events = request(target, "q", "y", transaction="t0", queue_timeout_ms=0)
    assert [type(event).__name__ for event in events] == ["Queued", "TimedOut"]
    assert counts.rearranged == 0


@pytest.mark.parametrize("priority", [0, 5, 10, 20])
def test_an_insertion_does_not_rebuild_a_queue_with_inverted_priorities(
    monkeypatch: pytest.MonkeyPatch, priority: int
) -> None:
    target = inverted_queue(LENGTH)
    counts = Counts(monkeypatch)
    request(target, "q", priority=priority)
    assert counts.insertions < 10


def test_a_rearrangement_moves_only_the_part_of_a_queue_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    target = core.LockManager()
    request(target, "a", transaction="T")
    request(target, "q")
    for _ in range(LENGTH):
        request(target, "q")
    request(target, "a", "q")
    counts = Counts(monkeypatch)
    request(target, "q", transaction="T")
    assert target.rearrangements == 1
    assert counts.insertions < 10


def test_a_rearrangement_that_moves_too_many_requests_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    target = core.LockManager()
    request(target, "a", transaction="T")
    request(target, "q")
    request(target, "a", "q")
    for _ in range(300):
        request(target, "q")
    before = state_of(target)
    limit_steps(monkeypatch, 1_000, 500)
    counts = Counts(monkeypatch)
    assert [type(event).__name__ for event in request(target, "q", transaction="T")] == ["GraphFull"]
    assert counts.insertions == 1
    assert state_of(target) == before


def test_an_insertion_that_moves_too_many_requests_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    target = core.LockManager()
    request(target, "q", "r")
    for number in range(50):
        request(target, f"a{number}", transaction=f"T{number}")
    for number in range(50):
        request(target, f"a{number}", "q", priority=10)
    for number in range(50):
        request(target, "q", transaction=f"T{number}")  # put before the request that waits for it
    limit_steps(monkeypatch, 100, 50)
    before = state_of(target)
    counts = Counts(monkeypatch)
    assert [type(event).__name__ for event in request(target, "r", "q", priority=5)] == ["GraphFull"]
    assert counts.insertions == 2
    assert state_of(target) == before


@pytest.mark.parametrize(("names", "is_admitted"), [(1, True), (40, False)])
def test_an_insertion_moves_requests_with_a_bounded_number_of_names(
    monkeypatch: pytest.MonkeyPatch, names: int, is_admitted: bool
) -> None:
    """Each moved request is stored again, with all its names."""
    target = core.LockManager()
    request(target, "q", "r")
    for number in range(50):
        request(target, f"a{number}", transaction=f"T{number}")
    for number in range(50):
        others = [f"w{number}-{other}" for other in range(names)]
        request(target, f"a{number}", "q", *others, priority=10)
    for number in range(50):
        request(target, "q", transaction=f"T{number}")  # put before the request that waits for it
    assert target.rearrangements == 50
    limit_steps(monkeypatch, 1_000, 500)
    before = state_of(target)
    events = request(target, "r", "q", priority=5)
    assert isinstance(events[0], core.GraphFull) is not is_admitted
    assert (state_of(target) == before) is not is_admitted


def test_a_failed_try_lock_leaves_a_queue_with_inverted_priorities_as_it_was() -> None:
    target = inverted_queue(5)
    before = state_of(target)
    for priority in (0, 5, 10, 20):
        events = request(target, "q", priority=priority, queue_timeout_ms=0)
        assert [type(event).__name__ for event in events] == ["Queued", "TimedOut"]
        assert state_of(target) == before


def test_a_queue_does_not_keep_requests_that_have_left_it_after_a_rearrangement() -> None:
    """Clients could keep the memory of any number of ended requests, which nobody is charged for, in the queues of a few."""
    target = inverted_queue(5)
    queue = target.table.wait_queue("q")
    moved = list((queue.inverted or {}).values())
    assert [each.transaction for each in moved] == ["T", "W"]
    target.step(core.Release(moved[0].id), 1)
    assert list((queue.inverted or {}).values()) == moved[1:]
    target.step(core.Release(moved[1].id), 1)
    assert queue.inverted is None


def test_a_search_reads_the_locks_of_a_transaction_one_by_one() -> None:
    target = core.LockManager()
    for number in range(LENGTH):
        request(target, f"{number}", transaction="T")
    assert list(deadlock.predecessors(target.table, "T")) == ["T"] * LENGTH


@pytest.mark.parametrize(
    ("build", "admitted", "rejected", "last"),
    [
        (chain, 2_900, 3_100, ("{}", "t0")),
        (chain_to_rearrange, 1_900, 2_100, ("q", "t0")),
        (queue_to_move, 950, 1_050, ("q", "T")),
    ],
)
def test_the_sizes_within_the_bound_and_the_work_beyond_it(
    build: Callable[[int], core.LockManager], admitted: int, rejected: int, last: tuple[str, str]
) -> None:
    """`last`: the resource and the transaction of the request whose arrival costs the most."""
    name, transaction = last
    events = request(build(admitted), name.format(admitted - 1), transaction=transaction)
    assert not isinstance(events[0], core.GraphFull)
    target, counter = build(rejected), OpcodeCounter()
    counter.start()
    events = request(target, name.format(rejected - 1), transaction=transaction)
    counter.stop()
    assert isinstance(events[0], core.GraphFull)
    assert counter.count < MAX_INSTRUCTIONS


@pytest.mark.parametrize("steps", [4, 8, 15, 30, 60])
def test_an_admitted_request_closes_no_cycle_and_a_rejected_one_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    rejected = rearranged = 0
    limit_steps(monkeypatch, steps, steps // 2)
    for seed in range(20):
        source, driver = random.Random(seed), Driver()  # noqa: S311 - not for secrets
        for _ in range(60):
            names = source.sample("ABCDE", source.randint(1, 3))
            exclusive = [name for name in names if source.random() < 0.6]
            command = core.Request(
                exclusive=tuple(exclusive),
                shared=tuple(name for name in names if name not in exclusive),
                transaction=source.choice([None, "T1", "T2", "T3", "T4", "T5"]),
                priority=source.choice([0, 0, 1, 5]),
                queue_timeout_ms=0 if source.random() < 0.2 else 10_000,
            )
            before = state_of(driver.manager)
            events = driver.step(command)  # checks the invariants: no cycle, and no grantable waiter
            if isinstance(events[0], core.GraphFull):
                rejected += 1
                assert len(events) == 1
                assert state_of(driver.manager) == before
            elif isinstance(events[-1], core.Deadlocked | core.TimedOut):
                assert state_of(driver.manager) == before
            live = [*driver.manager.table.held, *driver.manager.table.waiting]
            if live and source.random() < 0.2:
                driver.release(source.choice(live))
        rearranged += driver.manager.rearrangements
    assert rejected
    assert rearranged or steps < 30
