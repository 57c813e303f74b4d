"""A request for a subtree reads many locks in little work, and what it makes others wait for is bounded.

Instructions are counted, never time.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from random import Random

import pytest

from genie.core import (
    Continue,
    Disconnect,
    Expire,
    Locked,
    LockManager,
    Moved,
    QueueFull,
    Recover,
    Release,
    Request,
    TimedOut,
    grant,
    lock_table,
    subtrees,
    view,
    wait_queue,
)
from genie.core import manager as manager_module
from genie.core.deadlock import GRANTS_PER_WAITER, WAITERS_PER_STEP, waiting_owners_below
from genie.core.model import HELD, Details, details_of
from genie.core.special import MAX_EXAMPLES, Subtree
from genie.lock_modes import S
from genie.server.sessions import Session
from simulator.invariants import check
from unit.core.lock_theory import reduce
from unit.core.test_lock_kinds import Leader, theory_of
from work.core_scenarios import InstructionCounter

NAMES = 2_000


def request_for(*exclusive: str, shared: tuple[str, ...] = (), transaction: str | None = None) -> Request:
    request = Request(shared, exclusive, transaction=transaction, queue_timeout_ms=1e12, transaction_timeout_ms=1e12)
    request.details = details_of(shared, exclusive)
    return request


def step(
    manager: LockManager, *exclusive: str, shared: tuple[str, ...] = (), transaction: str | None = None
) -> Request:
    request = request_for(*exclusive, shared=shared, transaction=transaction)
    manager.step(request, 0)
    return request


@pytest.mark.parametrize(
    ("shared", "transactions", "most"), [(False, False, 16), (False, True, 16), (True, False, 60)], ids=str
)
def test_a_subtree_over_many_locks_takes_few_instructions_for_each(shared: bool, transactions: bool, most: int) -> None:
    """A million names take 0.1 s so. There is no work for the transactions that hold them."""

    def instructions(names: int) -> int:
        counter = InstructionCounter()
        for number in range(names):
            request = Request(transaction=f"T{number}" if transactions else None)
            request.shared, request.exclusive = ((f"a/{number}",), ()) if shared else ((), (f"a/{number}",))
            counter.manager.step(request, 0)
        counter.count(request_for("a/**", transaction="T1"))
        check(counter.manager)
        return counter.instructions

    assert (instructions(NAMES) - instructions(100)) / (NAMES - 100) <= most


def test_the_subtree_of_all_names_takes_no_instructions_for_exclusive_locks() -> None:
    def instructions(names: int) -> int:
        counter = InstructionCounter()
        for number in range(names):
            step(counter.manager, str(number))
        counter.count(request_for("**"))
        return counter.instructions

    assert instructions(NAMES) == instructions(100)


def test_no_request_waits_for_a_transaction_without_locks() -> None:
    """Whether the locks below the subtree are known as examples or not: this depends on which requests ended before."""
    manager = LockManager()
    held = [step(manager, shared=("a/1",), transaction="T1") for _ in range(2)]
    step(manager, "**", transaction="T2")
    step(manager, "a/1", transaction="T3")
    special = manager.table.subtrees["**"].special
    assert isinstance(special, Subtree)
    for request in held:
        assert set(waiting_owners_below(manager.table, "**", special, "T2")) <= {"T1", "T2"}
        manager.step(Release(request.id), 0)


def test_the_locks_of_waiting_transactions_that_are_compared_with_a_subtree_count_as_steps() -> None:
    """The search for a deadlock read 100 locks of each of eight waiting transactions in one step, and took 0.1 s."""
    manager = LockManager()
    step(manager, "held", transaction="T")
    for number in range(MAX_EXAMPLES + 1):
        step(manager, f"a/{number}", transaction="T")
    step(manager, "a/**", transaction="T")
    for number in range(50):
        step(manager, *[f"{number} {index}" for index in range(100)], transaction=f"{number}")
        step(manager, "held", transaction=f"{number}")
    special = manager.table.subtrees["a/**"].special
    assert isinstance(special, Subtree)
    steps = list(waiting_owners_below(manager.table, "a/**", special, "U"))
    assert set(steps) == {"U"}
    assert len(steps) >= 50 * 100 // GRANTS_PER_WAITER // WAITERS_PER_STEP


def load(manager: LockManager, requests: list[Request], replaced: Sequence[int] = ()) -> int:
    """Load copies of requests, as a follower does. Return the instructions that this took."""
    counter = InstructionCounter()
    copies = deepcopy(requests)
    counter.run(lambda: [*manager.load_in_parts(copies, replaced)])
    check(manager)
    return counter.instructions


def test_loaded_subtrees_do_not_read_all_names_each() -> None:
    """A new leader may load thousands of subtrees beside a million names."""

    def instructions(count: int) -> int:
        original, loaded = LockManager(), LockManager()
        for number in range(NAMES):
            step(original, f"{number % 200}/{number}")
        for number in range(count):
            step(original, f"other/{number}/**")
        held = list(original.table.held.values())
        work = load(loaded, held)  # the subtrees are the last ones
        assert len(loaded.table.subtrees) == count
        return work

    assert (instructions(200) - instructions(100)) / 100 < NAMES / 2  # not even one for each name


def test_a_batch_reads_all_names_once_for_all_its_subtrees() -> None:
    def instructions(count: int) -> int:
        original, loaded = LockManager(), LockManager()
        for number in range(NAMES):
            step(original, f"{number % 200}/{number}")
        load(loaded, list(original.table.held.values()))
        new = [step(original, shared=(f"{number}/**",)) for number in range(count)]
        return load(loaded, new)

    assert (
        instructions(200) - instructions(100)
    ) / 100 < 2 * NAMES  # alone, each would read each name with 12 instructions


def test_a_change_of_a_request_for_a_subtree_does_not_read_the_names_again() -> None:
    """A follower replaces the request, for example when it is extended. Meanwhile no other request names the subtree."""

    def instructions(names: int) -> int:
        manager = LockManager()
        for number in range(names):
            step(manager, f"a/{number}", transaction="T")
        subtree = step(manager, "a/**", transaction="T")
        step(manager, "a/0")
        return load(manager, [subtree], [subtree.id])

    assert instructions(NAMES) == instructions(100)


def test_the_locks_of_a_transaction_are_counted_only_once() -> None:
    """A transaction that waits for a subtree is checked after each release below it."""

    def instructions(names: int) -> int:
        counter = InstructionCounter()
        others = [step(counter.manager, f"a/{number}") for number in range(20)]
        step(counter.manager, *(f"a/own/{number}" for number in range(names)), transaction="T")
        subtree = step(counter.manager, "a/**", transaction="T")
        for other in others:
            check(counter.manager)
            counter.count(Release(other.id))
        assert subtree.state is HELD
        counter.manager.step(Release(subtree.id), 0)
        check(counter.manager)
        return counter.instructions

    assert instructions(200) == instructions(10)


def test_the_locks_of_a_transaction_stay_counted_while_one_of_its_requests_names_the_subtree() -> None:
    def instructions(names: int) -> int:
        counter = InstructionCounter()
        step(counter.manager, "a/1")
        step(counter.manager, *(f"b/{number}" for number in range(names)), transaction="T")
        step(counter.manager, "a/**", transaction="T")
        for _ in range(3):
            later = request_for("a/**", transaction="T")
            counter.count(later)
            check(counter.manager)
            counter.count(Release(later.id))
        return counter.instructions

    assert instructions(2_000) == instructions(100)


def test_a_new_leader_counts_the_locks_of_transactions_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction with a million locks may wait for thousands of subtrees."""
    monkeypatch.setattr(grant, "NAMES_PER_READ", 32)

    def instructions(names: int) -> int:
        original, counter = LockManager(), InstructionCounter()
        step(original, *(f"b/{number}" for number in range(names)), transaction="T")
        for number in range(50):
            step(original, f"{number}/1", transaction="U")
            step(original, f"{number}/**", transaction="T")
        loaded = counter.manager
        requests = deepcopy([*original.table.held.values(), *original.table.waiting.values()])  # `check` would count
        for _ in loaded.load_in_parts(requests):
            pass
        for request in loaded.table.waiting.values():
            request.origin = Session(None, "key")
        steps = []
        command: Recover | Continue = Recover()
        while loaded.pending_grants or not steps:
            counter.instructions = 0
            counter.count(command)
            steps.append(counter.instructions)
            command = Continue()
        check(loaded)
        assert len(loaded.table.waiting) == 50
        return max(steps)

    assert instructions(5_000) - instructions(100) < 1_000_000


def test_requests_that_time_out_do_not_count_very_many_locks_of_their_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(view, "MAX_INSPECTED_NAMES", 1_000)

    def instructions(names: int) -> int:
        counter = InstructionCounter()
        step(counter.manager, *(f"b/{number}" for number in range(names)), transaction="T")
        step(counter.manager, "a/**", "a/1", transaction="U")
        later = request_for("a/**", transaction="T")
        later.queue_timeout_ms = 1
        counter.manager.step(later, 0)
        [event] = counter.count(Expire(250), 2)
        assert isinstance(event, TimedOut)
        assert event.blockers_total == 2
        return counter.instructions

    assert instructions(2_000) == instructions(1_500)


def test_a_request_for_several_subtrees_of_a_transaction_with_very_many_locks_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subtrees, "MAX_COMPARED_NAMES", 1_000)
    manager = LockManager()
    step(manager, "a/**", "b/**", transaction="U")
    step(manager, *(f"c/{number}" for number in range(600)), transaction="T")
    rejected = request_for("a/**", "b/**", transaction="T")
    assert manager.step(rejected, 0) == [QueueFull(rejected, is_opening=True)]
    check(manager)
    assert step(manager, "a/**", transaction="T").id in manager.table.waiting


def test_a_request_for_a_subtree_with_too_many_waiters_below_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtrees, "MAX_WAITERS_BELOW", 10)
    manager = LockManager()
    for number in range(12):
        step(manager, f"a/{number % 2}")
    assert len(manager.table.waiting) == 10
    step(manager, "b/1")
    rejected = request_for("a/**", "b/**")
    before = step(manager, "a/0", "a/1")
    assert manager.step(rejected, 0) == [QueueFull(rejected, is_opening=True)]
    assert (manager.table.specials, manager.table.subtrees, manager.table.queue_entries) == (0, {}, 12)
    check(manager)
    manager.step(Release(before.id), 0)
    accepted = step(manager, "a/**", "b/**")
    assert accepted.id in manager.table.waiting
    check(manager)
    for _ in range(12):  # later requests are not limited
        step(manager, "a/0")
    check(manager)


def test_waiters_with_many_names_below_a_new_subtree_count_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtrees, "MAX_WAITERS_BELOW", 10)
    manager = LockManager()
    names = ["a/0", *(f"b/{number}" for number in range(39))]  # those outside the subtree are read, too
    step(manager, *names)
    for _ in range(4):
        step(manager, *names)
    assert manager.step(rejected := request_for("a/**"), 0) == [QueueFull(rejected, is_opening=True)]
    assert manager.table.specials == 0
    manager.step(Release(max(manager.table.waiting)), 0)
    assert step(manager, "a/**").id in manager.table.waiting
    check(manager)


@pytest.mark.parametrize(("names", "is_admitted"), [(1, True), (200, False)])
def test_a_rearrangement_moves_waiters_with_a_bounded_number_of_names(names: int, is_admitted: bool) -> None:
    """Each moved request is stored again, with all its names."""
    manager = LockManager()
    step(manager, "a/**")
    step(manager, "r", transaction="P")
    step(manager, "a/**", "r", transaction="T")
    for number in range(40):
        step(manager, *(f"a/{number}/{other}" for other in range(names)))
    last = step(manager, "a/p", transaction="P")  # put before the request of T, so that all others move
    assert manager.rearrangements == is_admitted
    assert (last.id in manager.table.waiting) is is_admitted
    check(manager)


def test_the_waiters_below_a_new_subtree_count_as_entries_of_the_wait_queues() -> None:
    manager = LockManager()
    for _ in range(5):
        step(manager, "a/1")
    rejected, limit = request_for("a/**"), 7
    assert manager.request(rejected, 0, limit) == [QueueFull(rejected, is_opening=True)]
    assert manager.table.queue_entries == 4
    check(manager)
    manager.request(request_for("a/**"), 0, 9)
    assert manager.table.queue_entries == 9
    check(manager)


def test_a_request_waits_in_a_bounded_number_of_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name may have subtrees of its own above it, and each step of the request reads all its queues."""
    for module in (grant, manager_module, lock_table, subtrees):
        monkeypatch.setattr(module, "MAX_QUEUES", 30)
    manager = LockManager()
    names = [f"{number}/a/b" for number in range(16)]
    early = step(manager, *names, transaction="T")
    waiting = step(manager, *names)
    for number in range(14):
        step(manager, shared=(f"{number}/**",))
    assert waiting.queue_count() == 30
    before = manager.table.queue_entries
    rejected = request_for(shared=("14/**",))
    assert manager.step(rejected, 0) == [QueueFull(rejected, is_opening=True)]
    assert manager.table.queue_entries == before
    assert step(manager, *names).queue_count() == 30
    check(manager)
    for request in [*manager.table.waiting.values(), early]:
        if request.exclusive:
            manager.step(Release(request.id), 0)
    for number in range(16):
        assert step(manager, shared=(f"{number}/**", f"{number}/a/**")).state is HELD
    for mode in ((names, ()), ((), names)):
        rejected = request_for(*mode[0], shared=tuple(mode[1]))
        assert manager.step(rejected, 0) == [QueueFull(rejected, is_opening=True)]
    check(manager)


def test_the_units_of_a_transaction_below_a_subtree_are_not_counted_one_by_one() -> None:
    """Very many requests may hold units of the same resources."""
    manager = LockManager()
    step(manager, shared=("a/s",), transaction="T")
    for _ in range(400):
        request = Request(transaction="T", transaction_timeout_ms=1e12)
        request.details = Details({f"a/{number}": (1, 1_000) for number in range(20)})
        manager.step(request, 0)
    assert manager.table.locks == 8_001
    subtree, counter = request_for(shared=("a/**",), transaction="T"), InstructionCounter()
    counter.run(manager.step, subtree, 0)
    assert subtree.state is HELD
    assert counter.instructions < 10_000
    check(manager)


def test_a_request_for_many_subtrees_over_many_names_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtrees, "MAX_COMPARED_NAMES", 100)
    manager = LockManager()
    for number in range(40):
        step(manager, f"a/{number}")
    rejected = request_for("b/**", "c/**", "d/**")
    assert manager.step(rejected, 0) == [QueueFull(rejected, is_opening=True)]
    assert manager.table.specials == 0
    assert step(manager, "b/**", "c/**").state is HELD
    assert step(manager, "d/**").state is HELD
    check(manager)


def test_the_comparisons_with_all_names_and_with_the_locks_of_the_transaction_are_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subtrees, "MAX_COMPARED_NAMES", 150)
    manager = LockManager()
    step(manager, *(f"a/{number}" for number in range(40)), transaction="T")
    assert step(manager, "b/**", "c/**").state is HELD, "80 comparisons"
    rejected = request_for("d/**", "e/**", transaction="T")
    assert manager.step(rejected, 0) == [QueueFull(rejected, is_opening=True)], "84 and 80 comparisons"
    check(manager)


# -- The end of a subtree lock --------------------------------------------------------------


def test_the_waiters_below_a_released_subtree_are_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtrees, "MAX_CLOSED_WAITERS", 20)
    monkeypatch.setattr(wait_queue.SortedQueue, "max_chunk", 10)
    counter = InstructionCounter()
    manager = counter.manager
    subtree = step(manager, "a/**")
    waiting = [step(manager, f"a/{number}") for number in range(200)]
    events, most, steps = counter.count(Release(subtree.id)), counter.instructions, 1
    while manager.pending_grants:
        counter.instructions = 0
        events += counter.count(Continue())
        most, steps = max(most, counter.instructions), steps + 1
    assert {event.request for event in events if isinstance(event, Locked)} == set(waiting)
    assert steps == 10
    assert most < 20 * 2_000
    assert manager.table.specials == 0
    check(manager)


def test_waiters_for_the_same_name_are_read_in_slices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtrees, "MAX_CLOSED_WAITERS", 20)
    monkeypatch.setattr(wait_queue.SortedQueue, "max_chunk", 10)
    manager = LockManager()
    subtree = step(manager, "a/**")
    for _ in range(200):
        step(manager, "a/1")
    manager.step(Release(subtree.id), 0)
    assert 350 < manager.table.queue_entries < 400
    check(manager)


def test_a_subtree_is_requested_again_while_the_waiters_below_it_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtrees, "MAX_CLOSED_WAITERS", 20)
    monkeypatch.setattr(wait_queue.SortedQueue, "max_chunk", 10)
    manager = LockManager()
    subtree = step(manager, "a/**")
    held = step(manager, "b/1")
    for number in range(100):
        step(manager, "b/1", f"a/{number}")
    manager.step(Release(subtree.id), 0)
    manager.step(Continue(), 0)
    assert manager.table.closing == {"a/**"}
    check(manager)
    again = step(manager, "a/**")
    assert not manager.table.closing
    check(manager)
    while manager.pending_grants:
        manager.step(Continue(), 0)
    assert again.id in manager.table.waiting
    manager.step(Release(held.id), 0)
    manager.step(Release(again.id), 0)
    while manager.pending_grants:
        manager.step(Continue(), 0)
    check(manager)
    assert manager.table.specials == 0


def move_waiters(manager: LockManager, group: int, count: int) -> bool:
    """Add waiters below `a/**`, and move them by a rearrangement of its queue. Return whether it was admitted."""
    options = {"priority": group, "queue_timeout_ms": 1e12}

    def later(*names: str, transaction: str | None = None) -> Request:
        request = Request((), names, transaction=transaction, **options)  # type: ignore[arg-type]
        request.details = details_of((), names)
        manager.step(request, 0)
        return request

    step(manager, f"r{group}", transaction=f"P{group}")
    blocker = later("a/**", f"r{group}", transaction=f"T{group}")
    for number in range(count):
        later(f"a/{group}/{number}")
    last = later(f"a/p{group}", transaction=f"P{group}")
    manager.step(Release(blocker.id), 0)
    return last.id in manager.table.waiting


def test_few_waiters_have_moved_in_the_queue_of_a_subtree(monkeypatch: pytest.MonkeyPatch) -> None:
    """All moves are undone in one step, when the subtree is no longer locked."""
    monkeypatch.setattr(wait_queue, "MAX_MOVED_STEPS", 100)
    manager = LockManager()
    subtree = step(manager, "a/**")
    assert move_waiters(manager, 0, 10)
    assert move_waiters(manager, 1, 10)
    assert not move_waiters(manager, 2, 20)
    queue = manager.table.subtrees["a/**"].wait_queue
    assert queue is not None
    assert 20 <= len(queue.moved) <= 24
    check(manager)
    for waiter in [*manager.table.waiting.values()][:10]:
        manager.step(Release(waiter.id), 0)  # then others may move
    assert move_waiters(manager, 3, 8)
    check(manager)
    events = manager.step(Release(subtree.id), 0)
    assert {type(event) for event in events} >= {Moved}
    assert not any(each.moved for each in manager.table.waiting.values())
    check(manager)


def test_a_search_for_pending_grants_begins_again_if_waiters_return_to_their_original_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two requests would have the position at which it was to continue: a waiter, and one that has left."""
    monkeypatch.setattr(subtrees, "MAX_CLOSED_WAITERS", 1)
    monkeypatch.setattr(wait_queue.SortedQueue, "max_chunk", 2)
    manager = LockManager()
    step(
        manager, "other", *(f"a/0/{number}" for number in range(10)), transaction="T"
    )  # so that the waiters still wait
    subtree = step(manager, "a/**", transaction="T")
    assert move_waiters(manager, 0, 10)
    for _ in range(10):
        step(manager, "a/0/0")
    queue = manager.table.subtrees["a/**"].wait_queue
    assert queue is not None
    original = {each.queue_entry[:2] for each in queue.moved.values() if each.queue_entry is not None}
    left = next(each for each in queue.moved.values() if each.entry("a/**")[:2] in original)
    position = left.entry("a/**")
    manager.step(Release(left.id), 0)
    manager.table.add_pending_grants([("a/**", S, position)])
    manager.step(Release(subtree.id), 0)
    assert manager.table.closing
    step(manager, shared=("a/**", "other"))  # before all waiters have left its queue
    assert not manager.table.closing
    while manager.pending_grants:
        manager.step(Continue(), 0)
    check(manager)


def test_a_request_that_has_ended_is_not_stored_because_it_had_moved() -> None:
    """Its record may be a retained reply now, which a later leader needs."""
    manager = LockManager()
    step(manager, "other", *(f"a/0/{number}" for number in range(10)), transaction="T")
    subtree = step(manager, "a/**", transaction="T")
    assert move_waiters(manager, 0, 10)
    queue = manager.table.subtrees["a/**"].wait_queue
    assert queue is not None
    moved = [*queue.moved.values()]
    manager.table.close_room = 0  # as if other subtrees with many waiters had ended
    manager.step(Release(subtree.id), 0)
    assert manager.table.closing
    step(manager, shared=("a/**", "other"))  # the waiters return to their original positions
    events = manager.step(Release(moved[0].id), 0)
    assert {event.request for event in events if isinstance(event, Moved)} == {*moved[1:]}
    check(manager)


def test_the_end_of_a_subtree_lock_reads_few_of_the_waiters_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtrees, "MAX_CLOSED_WAITERS", 20)
    monkeypatch.setattr(wait_queue.SortedQueue, "max_chunk", 10)

    def instructions(waiters: int) -> int:
        counter = InstructionCounter()
        step(counter.manager, "b")
        subtree = step(counter.manager, "a/**")
        for number in range(waiters):
            step(counter.manager, f"a/{number}", "b")
        counter.count(Release(subtree.id))
        check(counter.manager)
        return counter.instructions

    assert instructions(100) == instructions(300)


def test_subtree_locks_that_end_together_share_the_room_to_read_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session with a thousand locks of subtrees ends, and a thousand requests wait below each."""
    monkeypatch.setattr(subtrees, "MAX_CLOSED_WAITERS", 50)
    monkeypatch.setattr(wait_queue.SortedQueue, "max_chunk", 20)
    manager = LockManager()
    manager.table.close_room = 50
    locked = [step(manager, f"{number}/**") for number in range(10)]
    waiters = [step(manager, f"{number % 10}/{number}") for number in range(400)]
    entries = manager.table.queue_entries
    manager.step(Disconnect(locked), 0)
    assert entries - manager.table.queue_entries < 200
    assert len(manager.table.closing) > 5
    check(manager)
    while manager.pending_grants:
        manager.step(Continue(), 0)
        check(manager)
    assert not manager.table.subtrees
    assert all(waiter.state is HELD for waiter in waiters)


def test_a_follower_removes_the_waiters_below_many_ended_subtrees_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtrees, "MAX_CLOSED_WAITERS", 50)
    monkeypatch.setattr(lock_table, "MAX_CLOSED_WAITERS", 50)
    monkeypatch.setattr(wait_queue.SortedQueue, "max_chunk", 10)
    manager = LockManager()
    held = [step(manager, f"{number}/**") for number in range(20)]
    for number in range(20):
        for each in range(30):
            step(manager, f"{number}/{each}")
    entries = [manager.table.queue_entries]
    for _ in manager.discard_in_parts([request.id for request in held]):
        entries.append(manager.table.queue_entries)
        assert entries[-2] - entries[-1] < 50 + 30
    assert entries[-1] == 20 * 30
    assert not manager.table.subtrees
    assert not manager.table.closing


def test_whatever_happens_while_subtrees_are_closed_the_state_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtrees, "MAX_CLOSED_WAITERS", 1)
    monkeypatch.setattr(wait_queue.SortedQueue, "max_chunk", 2)
    closing = 0
    for seed in range(30):
        random = Random(seed)  # noqa: S311
        leader = Leader(random, LockManager())
        manager = leader.manager
        for _ in range(100):
            leader.step_alone()
            check(manager)
            closing += bool(manager.table.closing)
            if manager.pending_grants and random.random() < 0.3:
                manager.step(Continue(), 0)
                check(manager)
        while manager.pending_grants:
            manager.step(Continue(), 0)
        check(manager)
        assert not manager.table.closing
        assert not reduce(theory_of(manager).requests, in_queue_order=True)[1]
        requests = (*manager.table.held.values(), *manager.table.waiting.values())
        named = {name for request in requests for name in request.names()}
        assert set(manager.table.subtrees) == {name for name in named if name.endswith("**")}
    assert closing > 20
