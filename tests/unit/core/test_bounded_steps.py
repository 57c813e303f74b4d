"""A step reads a bounded number of requests, even if one transaction has very many. Measured in bytecode instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from genie.core import (
    Command,
    Continue,
    Event,
    Expire,
    LockManager,
    QueueFull,
    Release,
    Request,
    State,
    Take,
    Taken,
    TimedOut,
    view,
)
from genie.core.model import Details, details_of
from genie.core.wait_queue import UnitQueue
from genie.lock_modes import WHOLE_NAMESPACE, QueueMode, S, X
from genie.observability.stats import Stats
from simulator.invariants import check
from work.opcodes import OpcodeCounter

MANY = 3_000
"""Requests of one transaction: more than a step may read."""

MAX_INSTRUCTIONS = 150_000
"""Instructions of one step that reads about 1,000 requests."""


def lock(manager: LockManager, *exclusive: str, shared: tuple[str, ...] = (), **options: Any) -> Request:
    request = Request(shared, exclusive, **({"queue_timeout_ms": 1e9, "transaction_timeout_ms": 1e9} | options))
    manager.step(request, 0)
    return request


def instructions(manager: LockManager, command: Command, now: float = 0) -> int:
    return count(lambda: manager.step(command, now))


def count(work: Callable[[], object]) -> int:
    counter = OpcodeCounter()
    counter.start()
    try:
        work()
    finally:
        counter.stop()
    return counter.count


def finish(manager: LockManager) -> int:
    """Execute the pending grants, and return the most instructions of a step."""
    most = 0
    for _ in range(1_000):
        if not manager.pending_grants:
            return most
        most = max(most, instructions(manager, Continue()))
    raise AssertionError("the grants are pending for ever")


def test_a_release_does_not_read_the_requests_that_its_waiters_transaction_has_elsewhere() -> None:
    manager = LockManager()
    names = [f"{number}" for number in range(30)]
    holder = lock(manager, *names)
    lock(manager, "elsewhere")
    waiters = [lock(manager, name, transaction="T") for name in names]
    for _ in range(MANY):
        lock(manager, "elsewhere", transaction="T")
    assert instructions(manager, Release(holder.id)) < MAX_INSTRUCTIONS
    assert finish(manager) < MAX_INSTRUCTIONS
    assert all(waiter.state is State.HELD for waiter in waiters)


def test_the_waiters_of_one_transaction_in_one_queue_are_granted_in_slices() -> None:
    manager = LockManager()
    holder = lock(manager, "A")
    for _ in range(MANY):
        lock(manager, "A", transaction="T")
    assert instructions(manager, Release(holder.id)) < MAX_INSTRUCTIONS * 4
    assert finish(manager) < MAX_INSTRUCTIONS * 4
    assert len(manager.table.held) == MANY


def test_waiters_that_are_not_grantable_are_read_in_slices() -> None:
    """The transaction waits for another resource too, so that no request leaves the queue."""
    manager = LockManager()
    holder = lock(manager, "A")
    lock(manager, "B")
    for _ in range(MANY):
        lock(manager, "A", "B", transaction="T")
    assert instructions(manager, Release(holder.id)) < MAX_INSTRUCTIONS
    assert finish(manager) < MAX_INSTRUCTIONS
    assert len(manager.table.waiting) == MANY


def test_shared_waiters_of_others_between_those_of_a_transaction_are_read_in_slices() -> None:
    manager = LockManager()
    holder = lock(manager, "A")
    lock(manager, "B")
    lock(manager, "A", "B", transaction="T")
    for _ in range(MANY):
        lock(manager, shared=("A",))
    own = [lock(manager, shared=("A",), transaction="T") for _ in range(20)]
    assert instructions(manager, Release(holder.id)) < MAX_INSTRUCTIONS
    assert finish(manager) < MAX_INSTRUCTIONS
    assert all(request.state is State.HELD for request in own)
    assert len(manager.table.waiting) == MANY + 1


def test_a_new_request_does_not_read_all_earlier_ones_of_its_transaction() -> None:
    manager = LockManager()
    lock(manager, "B")
    for _ in range(MANY):
        lock(manager, "A", "B", transaction="T")
    assert instructions(manager, Request((), ("A", "B"), transaction="T", queue_timeout_ms=1e9)) < 5_000


def test_the_own_requests_before_one_that_times_out_are_not_all_read() -> None:
    manager = LockManager()
    lock(manager, "A")
    for _ in range(MANY):
        lock(manager, "A", transaction="T")
    for _ in range(100):
        lock(manager, "A", transaction="T", queue_timeout_ms=10)
    ended = 0
    while ended < 100:
        counter = OpcodeCounter()
        counter.start()
        events = manager.step(Expire(), 10)
        counter.stop()
        assert events
        assert counter.count < 4 * MAX_INSTRUCTIONS
        ended += len(events)
        assert [event.blockers_total for event in events if isinstance(event, TimedOut)] == [1] * len(events)


def test_requests_that_time_out_together_read_a_bounded_number_of_blockers() -> None:
    manager = LockManager()
    lock(manager, "A")
    for _ in range(1_100):
        lock(manager, "A")
    for _ in range(300):
        lock(manager, "A", queue_timeout_ms=10)
    totals = []
    for _ in range(5):
        counter = OpcodeCounter()
        counter.start()
        events = manager.step(Expire(), 10)
        counter.stop()
        assert events
        assert counter.count < 4 * MAX_INSTRUCTIONS
        totals += [event.blockers_total for event in events if isinstance(event, TimedOut)]
    assert set(totals) == {view.MAX_COUNTED_BLOCKERS, view.MAX_LISTED_BLOCKERS}
    assert len(totals) > 100


def test_a_new_request_of_a_transaction_that_holds_many_locks_does_not_read_them() -> None:
    manager = LockManager()
    lock(manager, "A")
    lock(manager, *(f"{number}" for number in range(MANY)), transaction="T")
    request = Request((), ("A",), transaction="T", queue_timeout_ms=0)
    assert instructions(manager, request) < 5_000


def test_inspect_by_transaction_and_resource_does_not_read_all_locks_of_the_transaction() -> None:
    manager = LockManager()
    lock(manager, "A")
    waiter = lock(manager, "A", transaction="T")
    for number in range(MANY):
        lock(manager, f"{number}", transaction="T")
    counter = OpcodeCounter()
    counter.start()
    found = view.inspect(manager.table, transaction="T", resource="A")
    counter.stop()
    assert counter.count < 5_000
    assert [row.request for row in found.queue] == [waiter]
    assert not found.holders_total


def inspect_a_of_t(manager: LockManager) -> tuple[int, view.Inspection]:
    counter = OpcodeCounter()
    counter.start()
    found = view.inspect(manager.table, transaction="T", resource="A")
    counter.stop()
    return counter.count, found


def test_inspect_by_transaction_and_resource_reads_a_bounded_number_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If there are many requests of the transaction and many for the resource, the totals are lower bounds."""
    monkeypatch.setattr(view, "MAX_INSPECTED_REQUESTS", 100)
    manager = LockManager()
    for _ in range(MANY):
        lock(manager, shared=("A",), transaction="T")
    lock(manager, "B")
    for _ in range(MANY):
        lock(manager, "A", "B", transaction="T")
    count, found = inspect_a_of_t(manager)
    assert count < 10_000
    assert found.holders_total == 100
    assert found.queue_total == 100


@pytest.mark.parametrize(("name_of_others", "owner_of_others"), [("B", "T"), ("A", None)])
def test_inspect_by_transaction_and_resource_is_complete_if_one_of_the_tables_is_short(
    name_of_others: str, owner_of_others: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "MAX_INSPECTED_REQUESTS", 100)
    manager = LockManager()
    for name in "AB":
        lock(manager, name)
    for _ in range(MANY):
        lock(manager, name_of_others, transaction=owner_of_others)
    waiters = [lock(manager, "A", transaction="T") for _ in range(2)]
    count, found = inspect_a_of_t(manager)
    assert count < 10_000
    assert [row.request for row in found.queue] == waiters


def ask(manager: LockManager, units: dict[str, tuple[int, int]], **options: Any) -> Request:
    request = Request(**({"queue_timeout_ms": 1e9, "transaction_timeout_ms": 1e9} | options))
    request.details = details_of((), (), units)
    manager.step(request, 0)
    return request


def test_waiters_for_units_do_not_read_all_earlier_ones() -> None:
    """The waiters fit into the limit of `a`, and wait for `b`."""
    manager = LockManager()
    holder = ask(manager, {"a": (1, 1_000_000)})
    ask(manager, {"b": (1, 1)})
    both = {"a": (1, 1_000_000), "b": (1, 1)}
    for _ in range(MANY):
        ask(manager, both, queue_timeout_ms=10)
    new = Request(queue_timeout_ms=10)
    new.details = details_of((), (), both)
    assert instructions(manager, new) < 5_000
    stats = Stats()
    assert count(lambda: stats.record_queued(new, manager.table)) < 5_000
    rows = view.inspect(manager.table, resource="a", only="queue", limit=500)
    assert count(lambda: [*rows.queue]) < 25 * MAX_INSTRUCTIONS
    assert instructions(manager, Release(holder.id)) < 5 * MAX_INSTRUCTIONS
    assert finish(manager) < 5 * MAX_INSTRUCTIONS
    assert max(instructions(manager, Expire(), 20) for _ in range(3)) < 10 * MAX_INSTRUCTIONS


def test_the_first_check_of_a_long_queue_for_units_does_not_read_all_waiters() -> None:
    """They could not be granted, so their units were never added before."""

    for ended in 1, 5 * MANY // UnitQueue.max_chunk:  # of each chunk, one waiter has ended
        manager = LockManager()
        holder = lock(manager, "a")
        waiters = [ask(manager, {"a": (1, 1_000_000)}) for _ in range(5 * MANY)]
        for waiter in waiters[:: 5 * MANY // ended]:
            manager.step(Release(waiter.id), 0)
        manager.step(Release(holder.id), 0)
        new = Request(queue_timeout_ms=1e9)
        new.details = details_of((), (), {"a": (1, 1_000_000)})
        assert instructions(manager, new) < 2 * len(waiters), "one addition for each chunk"


def test_a_transaction_may_wait_for_more_units_than_the_limit_of_a_request_that_has_ended() -> None:
    manager = LockManager()
    ask(manager, {"a": (10, 10)})
    ask(manager, {"a": (1, 10)}, transaction="T")
    small = ask(manager, {"a": (1, 3)}, transaction="T")
    manager.step(Release(small.id), 0)
    assert ask(manager, {"a": (5, 10)}, transaction="T").state is State.WAITING
    assert ask(manager, {"a": (5, 10)}, transaction="T").state is State.ENDED, "eleven of ten"
    check(manager)


def test_the_units_that_a_transaction_waits_for_are_counted_and_not_summed_for_each_request() -> None:
    manager = LockManager()
    holder = ask(manager, {"pool": (1_000, 1_000)})
    counted, steps = manager.table.counted("pool"), []
    for waiters in range(1, 401):
        ask(manager, {"pool": (2, 1_000)}, transaction="T", queue_timeout_ms=waiters)
        assert counted.waiting_by_transaction == {"T": (waiters, 2 * waiters, 1_000)}
        steps.append(count(lambda: counted.may_exceed_own_limit("T")))
    assert set(steps) == {steps[0]}
    for waiters in range(399, 100, -1):
        command = Expire(1) if waiters % 2 else Release(max(manager.table.waiting))
        manager.step(command, 400)
        assert counted.waiting_by_transaction == {"T": (waiters, 2 * waiters, 1_000)}
    manager.step(Release(holder.id), 400)
    finish(manager)
    assert counted.waiting_by_transaction == {}, "no memory is left of the waits"
    check(manager)


def test_a_name_with_many_slashes_is_compared_with_few_subtrees() -> None:
    manager = LockManager()
    request = Request(("z/**",), ())
    request.details = details_of(request.shared, ())
    manager.step(request, 0)
    names = tuple(f"{'/' * 500}{number}" for number in range(1_000))
    assert instructions(manager, Request((), names)) < 12 * MAX_INSTRUCTIONS
    assert instructions(manager, Release(manager.next_id - 1)) < 8 * MAX_INSTRUCTIONS
    assert count(lambda: manager.grant_if_uncontended(Request((), names), 0)) < 4 * MAX_INSTRUCTIONS
    id_, found = manager.next_id - 1, list[Request | None]()
    assert count(lambda: found.append(manager.release_if_uncontended(id_, None))) < 100  # type: ignore[arg-type]
    assert found == [None], "its release is a step, of which the server measures the duration"
    assert instructions(manager, Release(id_)) < 8 * MAX_INSTRUCTIONS
    assert not manager.table.uncontended
    take = Take(Request(), [(name, X) for name in names], [1] * 1_000, 2_000)
    assert instructions(manager, take) < 3 * MAX_INSTRUCTIONS
    for levels in range(16):
        request = Request(("/" * levels + "/**",), ())
        request.details = details_of(request.shared, ())
        manager.step(request, 0)
    assert instructions(manager, take) < 3 * MAX_INSTRUCTIONS


def test_the_names_of_waiters_below_a_subtree_are_not_searched_for_each_of_its_waiters() -> None:
    """Each of the waiters below names one resource below the subtree after 1,000 others."""
    manager = LockManager()
    lock(manager, "a/x")
    below = [lock(manager, shared=(*(f"z/{number}" for number in range(1_000)), "a/x")) for _ in range(50)]
    for _ in range(5):
        subtree = Request((), ("a/**",), queue_timeout_ms=10)
        subtree.details = details_of((), subtree.exclusive)
        manager.step(subtree, 0)
    rows = list[view.Row]()
    inspection = view.inspect(manager.table, id=subtree.id)
    assert count(lambda: rows.extend(inspection.queue)) < MAX_INSTRUCTIONS
    blockers = [
        [(each.id, each.resource) for each in row.blockers if not each.held] for row in rows if row.request is subtree
    ]
    assert blockers == [
        [*((subtree.id + number, "a/**") for number in range(-4, 0)), *((each.id, "a/x") for each in below[:5])]
    ]
    assert rows[-1].blockers_total == 1 + 50 + 4
    assert instructions(manager, Expire(), 20) < MAX_INSTRUCTIONS


def test_the_names_of_holders_of_units_are_not_searched() -> None:
    manager = LockManager()
    for number in range(100):
        request = Request((), tuple(f"{number}/{name}" for name in range(1_000)))
        request.details = details_of((), request.exclusive, {"a": (1, 100)})
        manager.step(request, 0)
    ask(manager, {"a": (1, 100)})
    rows = list[view.Row]()
    assert count(lambda: rows.extend(view.inspect(manager.table, resource="a", only="queue").queue)) < MAX_INSTRUCTIONS
    (row,) = rows
    assert row.blockers_total == 100
    assert {blocker.mode for blocker in row.blockers} == {"units"}
    assert not any(request.details.queue_modes for request in manager.table.held.values() if request.details)


def test_an_inspection_reads_few_of_the_names_of_many_waiters() -> None:
    """Each of the waiters is blocked by its last name only."""
    manager = LockManager()
    lock(manager, "a")
    for _ in range(100):
        lock(manager, shared=(*(f"z/{number}" for number in range(1_000)), "a"))
    inspection = view.inspect(manager.table)
    assert inspection.queue_total == 100
    rows = list[view.Row]()
    assert count(lambda: rows.extend(inspection.queue)) < 40 * MAX_INSTRUCTIONS
    assert [row.blockers_total for row in rows] == [1] * 40


def test_the_names_of_holders_are_not_read_when_a_request_arrives() -> None:
    """A dict of the names of each of 1,000 holders, with 1,024 names, would take 0.1 s. It is one instruction."""
    manager = LockManager()
    others = [f"other/{number}" for number in range(50)]
    holders = [lock(manager, *(f"{n}/{other}" for other in others), shared=("A",)) for n in range(20)]
    pool = Request((), (), transaction_timeout_ms=1e9)
    pool.details = details_of((), (), {"pool": (1, 2)})
    manager.step(pool, 0)
    lock(manager, "B", transaction="T")
    for _ in range(700):  # so many that the search for a cycle ends, and a reduction follows
        lock(manager, shared=("B",))
    for _ in range(600):
        lock(manager, shared=("A",))
    lock(manager, "A", transaction="T")
    assert all(holder.details is None for holder in holders)


def test_the_names_of_holders_in_two_modes_are_not_read_for_a_request_that_fails() -> None:
    manager = LockManager()
    holders = []
    for number in range(20):
        names = [f"{number}/{other}" for other in range(50)]
        shared = ("A",) if number % 2 else ()
        holders.append(lock(manager, *names, *(() if shared else ("A",)), shared=shared, transaction="H"))
    assert lock(manager, shared=("A",), queue_timeout_ms=0).state is State.ENDED
    assert all(holder.details is None for holder in holders)


def test_the_names_of_waiters_beside_those_of_one_transaction_are_not_read() -> None:
    manager = LockManager()
    holder = ask(manager, {"pool": (100, 100)})
    first = lock(manager, "pool", transaction="T")
    waiters = []
    for number in range(40):
        names = tuple(f"{number}/{name}" for name in range(50))
        waiter = Request((), names, transaction=f"{number}" if number % 2 else "T", queue_timeout_ms=1e9)
        waiter.details = details_of((), names, {"pool": (1, 100)})
        manager.step(waiter, 0)
        waiters.append(waiter)
    manager.step(Release(holder.id), 0)
    assert first.state is State.HELD
    assert [waiter.details.queue_modes for waiter in waiters if waiter.details is not None] == [None] * 40


@pytest.mark.parametrize("mode", [S, X])
@pytest.mark.parametrize("name", ["{subtree}z/{number}", "{subtree}{number}/z"])
def test_very_many_names_below_nested_subtrees_are_read_once_for_all_subtrees(mode: QueueMode, name: str) -> None:
    """The names of one request with `anyOf`, and those of one request that waits, when it is granted and when it is released."""
    manager, levels = LockManager(), "abcdefghijklmno"
    subtrees = [WHOLE_NAMESPACE] + [f"{'/'.join(levels[:number])}/**" for number in range(1, len(levels) + 1)]
    held = (subtrees, ()) if mode == S else ((), subtrees)
    request = Request(*map(tuple, held), transaction="T", transaction_timeout_ms=1e9)
    request.details = Details(subtrees=tuple(subtrees))
    manager.step(request, 0)
    names = [name.format(subtree=subtrees[-1][:-2], number=number) for number in range(MANY)]
    choices = [(each, mode) for each in names]
    taken = Request((), (), transaction="T", transaction_timeout_ms=1e9)
    assert instructions(manager, Take(taken, choices, [1] * MANY, MANY)) < 500 * MANY
    assert taken.state is State.HELD
    for subtree in subtrees:
        waiting = Request((), (subtree,), queue_timeout_ms=1e9)
        waiting.details = Details(subtrees=(subtree,))
        manager.step(waiting, 0)
    assert instructions(manager, Release(taken.id)) < 500 * MANY
    few = names[: MANY // 10]
    few_in_mode = (few, ()) if mode == S else ((), few)
    other = Request(*map(tuple, few_in_mode), queue_timeout_ms=1e9)
    assert instructions(manager, other) < 1_300 * len(few)
    check(manager)
    assert instructions(manager, Release(other.id)) < 1_300 * len(few)


def test_few_waiting_requests_of_a_transaction_with_many_names_are_granted_in_slices() -> None:
    manager = LockManager()
    holder = lock(manager, "first")
    names = tuple(f"{number}" for number in range(1_000))
    waiters = [lock(manager, "first", shared=names, transaction="T") for _ in range(16)]
    assert instructions(manager, Release(holder.id)) < 2 * MAX_INSTRUCTIONS
    assert finish(manager) < 2 * MAX_INSTRUCTIONS
    assert all(waiter.state is State.HELD for waiter in waiters)


def test_a_request_is_checked_once_although_very_many_of_its_queues_have_changed() -> None:
    """Otherwise the grants of all other queues would wait for as many steps."""
    manager = LockManager()
    lock(manager, "blocked")
    names = [f"{number}" for number in range(1_000)]
    holder = lock(manager, *names)
    waiter = lock(manager, *names, "blocked", transaction="T")
    manager.step(Release(holder.id), 0)
    steps = 0
    while manager.pending_grants:
        manager.step(Continue(), 0)
        steps += 1
    assert steps < 3
    assert waiter.state is State.WAITING


def test_choices_in_very_many_directories_of_many_levels_are_rejected_while_subtrees_are_locked() -> None:
    """The subtrees above each directory are searched for level by level."""

    def take(names: int, name: str) -> tuple[Event, int]:
        request = Request((), (), transaction_timeout_ms=1e9)
        command = Take(request, [(name.format(number), X) for number in range(names)], [1] * names, names)
        events = list[Event]()
        steps = count(lambda: events.extend(manager.step(command, 0)))
        manager.step(Release(request.id), 0)
        return events[0], steps

    manager, levels = LockManager(), "/".join("abcdefghijklmno")
    assert type(take(MANY, f"{{}}/{levels}/z")[0]) is Taken, "no subtree is locked"
    subtree = Request((), ("x/**",), transaction_timeout_ms=1e9)
    subtree.details = Details(subtrees=("x/**",))
    manager.step(subtree, 0)
    event, steps = take(MANY, f"{{}}/{levels}/z")
    assert type(event) is QueueFull
    assert steps < 50 * MANY
    assert type(take(MANY, f"{levels}/{{}}/a/z")[0]) is QueueFull
    for names, allowed in (
        (10_000, f"{levels}/z/{{}}"),
        (4_900, f"{levels}/{{}}/z"),
        (2_500, "{}/a/z"),
        (10_000, "{}"),
    ):
        event, steps = take(names, allowed)
        assert type(event) is Taken
        assert steps < 3_000_000, "as docs/concepts/security.md says"
    event, steps = take(312, f"{{}}/{levels}/z")
    assert type(event) is Taken
    assert steps < 500_000, "about 10 ms"
    check(manager)
