"""Very many waiters that one step could grant: the rest is granted by later steps, with the same result."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from genie.core import Continue, Disconnect, Event, Expire, LockManager, Moved, Release, Request, State, grant
from genie.core import manager as manager_module
from genie.core.commands import Command
from genie.core.model import details_of
from simulator.invariants import check


def shared(*names: str) -> Request:
    return Request(names, (), queue_timeout_ms=1e9, transaction_timeout_ms=1e9)


def test_a_step_checks_a_bounded_number_of_candidates() -> None:
    manager = LockManager()
    holder = Request((), ("hot",), transaction_timeout_ms=1e9)
    manager.step(holder, 0)
    for _ in range(5_000):
        manager.step(shared("hot"), 0)
    events = manager.step(Release(holder.id), 0)
    assert len(events) == 1 + grant.MAX_CANDIDATES
    steps = 0
    while manager.pending_grants:
        assert manager.deadlines.soonest == 0, "the caller is to look what is due"
        assert len(manager.step(Continue(), 0)) <= grant.MAX_CANDIDATES
        steps += 1
    assert len(manager.table.held) == 5_000
    assert steps <= 5


def test_the_resources_that_the_candidates_name_are_bounded_too() -> None:
    manager = LockManager()
    names = [f"{number}" for number in range(100)]
    holder = Request((), tuple(names), transaction_timeout_ms=1e9)
    manager.step(holder, 0)
    for _ in range(100):
        manager.step(shared(*names), 0)
    assert len(manager.step(Release(holder.id), 0)) == 1 + grant.MAX_CANDIDATES // 100
    while manager.pending_grants:
        assert len(manager.step(Continue(), 0)) <= grant.MAX_CANDIDATES // 100
    assert len(manager.table.held) == 100


def test_the_grants_of_an_expiry_are_bounded_too() -> None:
    manager = LockManager()
    for number in range(100):
        manager.step(Request((), (f"{number}",), transaction_timeout_ms=1_000), 0)
    for number in range(10_000):
        manager.step(shared(f"{number % 100}"), 0)
    steps = 0
    while len(manager.table.held) < 10_000:
        assert len(manager.step(Expire(), 2_000)) <= 1_200
        steps += 1
        assert steps < 20
    assert not manager.pending_grants


def commands(seed: int) -> Iterator[tuple[bool, object]]:
    """Yield random steps: (whether it is a request, the numbers from which the command is made)."""
    chance = random.Random(seed)  # noqa: S311
    for _ in range(180):
        if chance.random() < 0.65:
            names = chance.sample("abcd", chance.randint(1, 3))
            cut = chance.choice([0, 0, 0, 1])
            owner = chance.choice([None, None, None, "t", "u"])
            yield True, (tuple(names[:cut]), tuple(names[cut:]), owner, chance.choice([0, 0, 1]))
        else:
            yield False, (chance.random(), chance.choice(["release", "release", "disconnect", "expire"]))


def command_for(manager: LockManager, step: tuple[bool, object], live: list[int]) -> Command | None:
    is_request, detail = step
    if is_request:
        exclusive, shared_names, owner, priority = detail  # type: ignore[misc]
        return Request(
            shared_names,
            exclusive,
            transaction=owner,
            priority=priority,
            queue_timeout_ms=1e9,
            transaction_timeout_ms=1e9,
        )
    position, kind = detail  # type: ignore[misc]
    if kind == "expire" or not live:
        return Expire()
    id_ = live[int(position * len(live))]
    if kind == "release":
        return Release(id_)
    found = [manager.table.find(each) for each in live[int(position * len(live)) :][:3]]
    return Disconnect([request for request in found if request is not None])


def states(manager: LockManager) -> dict[int, State]:
    return {request.id: request.state for request in (*manager.table.held.values(), *manager.table.waiting.values())}


@pytest.mark.parametrize(("limit", "filtered"), [(1, 0), (2, 16), (3, 0)])
@pytest.mark.parametrize("seed", range(8))
def test_the_result_is_that_of_one_step(seed: int, limit: int, filtered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing happens between the steps, the same requests hold and wait. So they do if queues of owners are read."""
    monkeypatch.setattr(grant, "MAX_FILTERED_WAITERS", 1_000)
    whole, sliced = LockManager(), LockManager()
    continued = 0
    for now, step in enumerate(commands(seed)):
        live = sorted(states(whole))
        whole.step(command_for(whole, step, live), now)
        with monkeypatch.context() as patch:
            patch.setattr(grant, "MAX_CANDIDATES", limit)
            patch.setattr(grant, "MAX_FILTERED_WAITERS", filtered)
            patch.setattr(manager_module, "MAX_CONTINUED_QUEUES", limit)
            sliced.step(command_for(sliced, step, live), now)
            check(sliced)
            while sliced.pending_grants:
                continued += 1
                assert continued < 10_000
                sliced.step(Continue(), now)
                check(sliced)
        assert states(sliced) == states(whole)
    assert continued > 10


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_between_the_steps_every_grantable_request_is_granted(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The invariants hold after each step: a waiting request is grantable only in a queue whose grants are pending."""
    monkeypatch.setattr(grant, "MAX_CANDIDATES", 1)
    monkeypatch.setattr(grant, "MAX_FILTERED_WAITERS", 16 * (seed % 2))
    chance = random.Random(seed)  # noqa: S311
    manager = LockManager()
    pending = 0
    for now, step in enumerate(commands(seed)):
        manager.step(command_for(manager, step, sorted(states(manager))), now)
        check(manager)
        if manager.pending_grants and chance.random() < 0.3:
            manager.step(Continue(), now)
            check(manager)
        pending += bool(manager.pending_grants)
    for _ in range(10_000):
        if not manager.pending_grants:
            break
        manager.step(Continue(), 1_000)
    check(manager)
    assert not manager.pending_grants
    assert pending > 20


def lock_many(manager: LockManager, *exclusive: str, owner: str | None = None) -> Request:
    request = Request((), exclusive, transaction=owner, queue_timeout_ms=1e9, transaction_timeout_ms=1e9)
    manager.step(request, 0)
    return request


def leave_many_queues(monkeypatch: pytest.MonkeyPatch) -> tuple[LockManager, list[str], Request]:
    """Return a lock manager in which the cancellation of a request leaves nearly all its queues for later, and its holder."""
    monkeypatch.setattr(grant, "MAX_CANDIDATES", 1)
    manager, names = LockManager(), [f"{number}" for number in range(1_000)]
    lock_many(manager, "blocked")
    holder = lock_many(manager, *names, owner="T")
    lock_many(manager, *names, "blocked", owner="T")
    manager.step(Release(lock_many(manager, *names, "blocked").id), 0)
    assert len(manager.pending_grants) > 900
    return manager, names, holder


def test_a_queue_whose_grants_are_pending_is_left_for_later_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a client could leave its queues again and again, and the list would grow without limit."""
    manager, names, _ = leave_many_queues(monkeypatch)
    for _ in range(5):
        manager.step(Release(lock_many(manager, *names, "blocked").id), 0)
    assert len(manager.pending_grants) <= len(names)


def test_no_grants_are_pending_in_a_queue_without_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, _, _ = leave_many_queues(monkeypatch)
    for request in [*manager.table.waiting.values()]:
        manager.step(Release(request.id), 0)
    assert not manager.pending_grants


def test_locks_expire_while_the_grants_of_many_queues_are_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client could keep these grants pending for ever."""
    monkeypatch.setattr(manager_module, "MAX_CONTINUED_QUEUES", 100)
    manager, _, _ = leave_many_queues(monkeypatch)
    expired = Request((), ("other",), transaction_timeout_ms=1_000)
    manager.step(expired, 0)
    manager.step(Expire(), 1_000)
    assert expired.state is State.ENDED


# -- while others lock and release all the time ---------------------------------------------------------


class Busy:
    """A lock manager in which `x` is held, so that no request for it is granted."""

    def __init__(self) -> None:
        self.manager = LockManager()
        self.lock("x")

    def lock(
        self, *exclusive: str, shared: tuple[str, ...] = (), priority: int = 0, owner: str | None = None
    ) -> Request:
        request = Request(
            shared, exclusive, priority=priority, transaction=owner, queue_timeout_ms=1e9, transaction_timeout_ms=1e9
        )
        self.manager.step(request, 0)
        return request

    def release(self, request: Request) -> None:
        self.manager.step(Release(request.id), 0)

    def continue_until_held(self, waiters: list[Request], disturb: Callable[[], None]) -> int:
        """Continue with pending grants, each time after `disturb`, until all requests are held. Return the number of steps."""
        for count in range(50):
            if all(request.state is State.HELD for request in waiters):
                return count
            assert self.manager.pending_grants
            disturb()
            self.manager.step(Continue(), 0)
        raise AssertionError("others delay the grants for ever")


def test_queues_with_pending_grants_take_turns() -> None:
    busy = Busy()
    holders = busy.lock("A"), busy.lock("B")
    for _ in range(3_000):
        busy.lock(shared=("A", "x"))
    waiters = [busy.lock(shared=("B",)) for _ in range(3_000)]
    for holder in holders:
        busy.release(holder)
    assert busy.continue_until_held(waiters, lambda: busy.release(busy.lock("A", priority=1))) < 10


def test_shared_locks_that_come_and_go_do_not_delay_pending_grants() -> None:
    busy = Busy()
    holders = busy.lock("A"), busy.lock("R")
    for name in "AR":
        for _ in range(2_000):
            busy.lock(shared=(name, "x"))
    waiters = [busy.lock(shared=("R",)) for _ in range(10)]
    for holder in holders:
        busy.release(holder)
    assert busy.continue_until_held(waiters, lambda: busy.release(busy.lock("A", shared=("R",), priority=1))) < 20


def test_a_rearrangement_of_another_queue_does_not_delay_pending_grants() -> None:
    busy = Busy()
    busy.lock("q")  # in the queue of `q`, T is before W, which has a higher priority
    busy.lock("a", owner="T")
    busy.lock("a", "q", owner="W", priority=10)
    busy.lock("q", owner="T")
    busy.lock("q")
    holder = busy.lock("R")
    for _ in range(3_000):
        busy.lock(shared=("R", "x"))
    waiters = [busy.lock(shared=("R",)) for _ in range(10)]
    busy.release(holder)
    moved: list[Event] = []

    def disturb() -> None:
        request = Request((), ("q",), priority=5 + len(moved) / 100, queue_timeout_ms=1e9)
        moved.extend(event for event in busy.manager.step(request, 0) if isinstance(event, Moved))
        busy.release(request)

    steps = busy.continue_until_held(waiters, disturb)
    assert steps < 10
    assert len(moved) == steps


def test_an_exclusive_request_that_comes_and_goes_delays_pending_grants_no_longer_than_its_wait() -> None:
    """While it waits before them, no request after it is grantable. So its end is the first change that counts."""
    busy = Busy()
    holder = busy.lock("R")
    for _ in range(3_000):
        busy.lock(shared=("R", "x"))
    waiters = [busy.lock(shared=("R",)) for _ in range(10)]
    busy.release(holder)
    reader = busy.lock(shared=("R",), priority=2)
    writer = busy.lock("R", priority=1)
    assert (reader.state, writer.state) == (State.HELD, State.WAITING)
    while busy.manager.pending_grants:
        busy.manager.step(Continue(), 0)
    assert not any(request.state is State.HELD for request in waiters)
    busy.release(writer)
    assert busy.continue_until_held(waiters, lambda: None) < 10


@pytest.mark.parametrize("seed", [13, 0, 1])
def test_pending_grants_below_subtrees_begin_again_after_a_move(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the queue of a subtree in which the request that moved the others does not wait any more: it was granted."""
    monkeypatch.setattr(grant, "MAX_CANDIDATES", 1)
    monkeypatch.setattr(grant, "MAX_FILTERED_WAITERS", 0)
    chance = random.Random(seed)  # noqa: S311
    manager = LockManager()
    for now in range(150):
        live = sorted(states(manager))
        if live and chance.random() < 0.35:
            manager.step(Release(chance.choice(live)), now)
        else:
            known = [
                "a",
                "b",
                "p/x",
                "p/y",
                "p/q/z",
                "p/q/w",
                *(["p/**", "p/q/**", "**"] if chance.random() < 0.4 else []),
            ]
            names = tuple(chance.sample(known, chance.randint(1, 3)))
            cut = chance.choice([0, 0, 1, 3])
            owner, priority = chance.choice([None, None, None, "t", "u", "v"]), chance.choice([0, 0, 0, 1])
            request = Request(
                names[:cut],
                names[cut:],
                transaction=owner,
                priority=priority,
                queue_timeout_ms=1e9,
                transaction_timeout_ms=1e9,
            )
            request.details = details_of(names[:cut], names[cut:])
            manager.step(request, now)
        if manager.pending_grants and chance.random() < 0.4:
            manager.step(Continue(), now)
        check(manager)
