"""One arrival is cheap although thousands of transactions wait for counted resources. Instructions are counted, never time."""

from __future__ import annotations

from random import Random

import pytest

from genie.core import (
    Continue,
    Deadlocked,
    GraphFull,
    Locked,
    LockManager,
    Queued,
    Release,
    Request,
    deadlock,
    reduction,
)
from genie.core.deadlock import StepBudget, strongly_connected_component
from genie.core.lock_table import LockTable
from genie.core.model import Owner, details_of
from work.core_scenarios import InstructionCounter

POOL = 32


def ask(transaction: str, *exclusive: str, units: int = 0, of: int = POOL) -> Request:
    request = Request((), exclusive, transaction=transaction, queue_timeout_ms=1e12, transaction_timeout_ms=1e12)
    request.details = details_of((), exclusive, {"pool": (units, of)} if units else {})
    return request


def pool_with_waiters(waiters: int) -> InstructionCounter:
    """32 transactions hold a unit each. Others hold a job each and wait for a unit."""
    counter = InstructionCounter()
    for number in range(POOL):
        counter.manager.step(ask(f"holder-{number}", units=1), 0)
    for number in range(waiters):
        counter.manager.step(ask(f"{number}", f"job-{number}"), 0)
        counter.manager.step(ask(f"{number}", units=1), 0)
    assert len(counter.manager.table.waiting) == waiters
    return counter


@pytest.mark.parametrize("request_", [ask("new", units=1), ask("holder-0", "job-0")], ids=["unit", "job of the first"])
def test_an_arrival_that_closes_no_cycle_takes_the_same_work_with_many_waiters(request_: Request) -> None:
    def instructions(waiters: int) -> int:
        counter = pool_with_waiters(waiters)
        counter.manager.step(ask("new", "mine"), 0)
        counter.manager.step(ask("other", "mine"), 0)
        request = ask(str(request_.transaction), *request_.exclusive, units=1 if request_.units else 0)
        assert [type(event) for event in counter.count(request)] == [Queued]
        return counter.instructions

    assert instructions(2_000) < 1.1 * instructions(20)


def test_a_holder_that_waits_for_the_last_of_many_waiters_reads_each_of_them_once() -> None:
    """The wait closes a cycle in the wait-for graph, but no deadlock: all other holders give their units back."""

    def instructions(waiters: int) -> int:
        counter = pool_with_waiters(waiters)
        assert [type(event) for event in counter.count(ask("holder-0", f"job-{waiters - 1}"))] == [Queued]
        return counter.instructions

    assert (instructions(6_000) - instructions(3_000)) / 3_000 < 200


def test_a_deadlock_of_few_is_found_among_many_waiters() -> None:
    counter = pool_with_waiters(4_000)
    for number in range(POOL - 1):
        events = counter.manager.step(ask(f"holder-{number}", f"job-{3_000 + number}"), 0)
        assert [type(event) for event in events] == [Queued]
    events = counter.manager.step(ask(f"holder-{POOL - 1}", "job-3999"), 0)
    assert isinstance(events[-1], Deadlocked)
    assert len(events[-1].cycle.owners) == 2


def test_many_transactions_that_hold_and_wait_for_the_same_pool_are_not_rejected() -> None:
    manager, count = LockManager(), 400
    for number in range(count):
        manager.step(ask(str(number), units=1, of=count), 0)
    for number in range(count - 2):
        assert [type(event) for event in manager.step(ask(str(number), units=2, of=count), 0)] == [Queued]


# -- The quick answer is that of the reduction -------------------------------------------------


@pytest.fixture
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Check each quick answer against the reduction over all owners that the new owner waits for."""
    answers: list[bool] = []
    original = reduction.finishes_in_queue_order

    def checked(table: LockTable, owner: Owner) -> bool:
        answers.append(original(table, owner))
        if answers[-1]:
            budget = StepBudget(deadlock.MAX_ARRIVAL_STEPS - (1 << 30))
            reachable = strongly_connected_component(table, owner, budget)[1]
            whole = reduction.Reduction(table, owner, reachable, budget)
            assert whole.find_deadlock() is None
            assert whole.find_rearrangement() == {}
        return answers[-1]

    monkeypatch.setattr(reduction, "finishes_in_queue_order", checked)
    return answers


def test_the_quick_answer_is_that_of_the_reduction(quick_answers: list[bool]) -> None:
    for seed in range(25):
        random, manager = Random(seed), LockManager()  # noqa: S311
        for _ in range(150):
            live = [*manager.table.held.values(), *manager.table.waiting.values()]
            if live and (random.random() < 0.3 or len(live) > 40):
                manager.step(Release(random.choice(live).id), 0)
                while manager.pending_grants:
                    manager.step(Continue(), 0)
            else:
                manager.step(random_request(random), 0)
    assert quick_answers.count(True) > 100
    assert quick_answers.count(False) > 100


def random_request(random: Random) -> Request:
    units: dict[str, tuple[int, int]] = {}
    names: dict[str, bool] = {}
    for _ in range(random.choice([1, 1, 1, 2])):
        if random.random() < 0.7:
            units[random.choice("PQ")] = random.choice([1, 1, 1, 2]), random.choice([4, 6, 6, 6])
        else:
            names[random.choice(["a/1", "a/2", "b", "c", "R", "a/**"])] = random.random() < 0.7
    shared = tuple(name for name, exclusive in names.items() if not exclusive)
    exclusive = tuple(name for name, exclusive in names.items() if exclusive)
    transaction = random.choice([None, *(f"T{number}" for number in range(8))])
    request = Request(shared, exclusive, 1e12, 1e12, transaction, random.choice([0, 0, 0, 0, 1]))
    request.details = details_of(shared, exclusive, units)
    return request


def test_a_long_cycle_is_rejected_and_a_shorter_one_is_a_deadlock() -> None:
    for length, expected in ((500, Deadlocked), (700, GraphFull)):
        manager = LockManager()
        for number in range(length):
            request = ask(f"T{number}")
            request.details = details_of((), (), {str(number): (1, 1)})
            manager.step(request, 0)
        for number in range(length):
            request = ask(f"T{number}")
            request.details = details_of((), (), {str((number + 1) % length): (1, 1)})
            events = manager.step(request, 0)
        assert isinstance(events[-1], expected)


def test_the_requests_of_a_rearranged_special_queue_are_bounded() -> None:
    """Requests of others wait below the subtree, between the two requests that must change their order."""
    for others, expected in ((270, Locked), (320, GraphFull)):
        manager = LockManager()
        for request in (Request(("a/held",)), ask("T", "x"), ask("R", "x", "a/**")):
            manager.step(request, 0)
        for number in range(others):
            manager.step(Request((), (f"a/other/{number}",)), 0)
        events = manager.step(ask("T", "a/1"), 0)
        assert isinstance(events[-1 if expected is GraphFull else 1], expected)
        assert manager.rearrangements == (expected is Locked)
