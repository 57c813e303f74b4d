"""The lock manager decides about all kinds of locks as the theory does: the same grants, deadlocks and queues at every step.

Shared, exclusive and counted locks, subtrees at three depths, priorities, and transactions with several requests are mixed at random.
"""

from __future__ import annotations

from random import Random

import pytest

from genie.core import Continue, Deadlocked, GraphFull, LockManager, Moved, Release, Request
from genie.core.model import State, details_of
from genie.lock_modes import S, U, X
from simulator.invariants import check
from unit.core.lock_theory import Entry, Lock, ReferenceManager, leaves_room, reduce
from unit.core.test_lock_theory import MAX_OWNERS, random_request

SEEDS = 40
STEPS = 120


def to_request(entry: Entry) -> Request:
    shared = tuple(lock.name for lock in entry.locks if lock.mode == "shared")
    exclusive = tuple(lock.name for lock in entry.locks if lock.mode == "exclusive")
    units = {lock.name: (lock.units, lock.of) for lock in entry.locks if lock.mode == "units"}
    request = Request(
        shared=shared,
        exclusive=exclusive,
        transaction=entry.owner if isinstance(entry.owner, str) else None,
        priority=entry.priority,
        queue_timeout_ms=1e12,
        transaction_timeout_ms=1e12,
    )
    request.details = details_of(shared, exclusive, units)
    return request


def theory_of(manager: LockManager) -> ReferenceManager:
    """Return the theory in the state of a lock manager."""
    theory = ReferenceManager()
    for request in sorted([*manager.table.held.values(), *manager.table.waiting.values()], key=lambda each: each.id):
        theory.requests.append(to_entry(request))
    return theory


def to_entry(request: Request) -> Entry:
    modes = {S: "shared", X: "exclusive", U: "units"}
    locks = [Lock(name, modes[mode], *request.units.get(name, ())) for name, mode in request.modes()]
    moved = {name: entry[:2] for name, entry in (request.moved or {}).items()}
    held = request.state is State.HELD
    return Entry(request.id, request.owner, tuple(locks), request.priority, held, moved)


class Checked:
    """A lock manager, each step of which is compared with what the theory does in the same state."""

    def __init__(self) -> None:
        self.manager = LockManager()
        self.deadlocks = 0

    def request(self, entry: Entry) -> None:
        theory, rearrangements = theory_of(self.manager), self.manager.rearrangements
        was_moved = any(other.moved for other in theory.requests)  # then the place of a new request differs
        theory.request(entry)
        events = self.manager.step(to_request(entry), 0)
        assert not isinstance(events[0], GraphFull)
        deadlocked = any(isinstance(event, Deadlocked) for event in events)
        assert deadlocked == (theory.deadlocks > 0), (entry, events)
        self.deadlocks += deadlocked
        rearranged = self.manager.rearrangements > rearrangements
        assert theory.rearrangements or not rearranged or was_moved
        took_another_place = any(isinstance(event, Moved) for event in events)
        self.check(None if rearranged or theory.rearrangements or took_another_place else theory)

    def end(self, id: int) -> None:
        theory = theory_of(self.manager)
        theory.end(next(entry for entry in theory.requests if entry.id == id))
        self.manager.step(Release(id), 0)
        self.check(theory)

    def check(self, expected: ReferenceManager | None = None) -> None:
        while self.manager.pending_grants:
            self.manager.step(Continue(), 0)
        check(self.manager)
        theory, table = theory_of(self.manager), self.manager.table
        if expected is not None:
            assert [(entry.id, entry.held) for entry in theory.requests] == [
                (entry.id, entry.held) for entry in expected.requests
            ]
        assert not any(leaves_room(entry, theory.held(), theory.waiting()) for entry in theory.waiting())
        assert not reduce(theory.requests, in_queue_order=True)[1]
        named = {lock.name for entry in theory.requests for lock in entry.locks}
        assert set(table.subtrees) == {name for name in named if name.endswith("**")}
        for name in named:
            resource = table.resources.get(name)
            queue = [] if resource is None or resource.wait_queue is None else resource.wait_queue.entries()
            assert [request.id for *_, request in queue] == [entry.id for entry in theory.queue(name)]


def run(seed: int, steps: int) -> Checked:
    random, checked = Random(seed), Checked()  # noqa: S311
    for _ in range(steps):
        table = checked.manager.table
        requests = [*table.held.values(), *table.waiting.values()]
        owners = {request.owner for request in requests}
        if random.random() < 0.6 and len(owners) < MAX_OWNERS:
            checked.request(random_request(random, checked.manager.next_id))
        elif requests:
            checked.end(random.choice(requests).id)
    return checked


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_lock_manager_decides_as_the_theory(seed: int) -> None:
    run(seed, STEPS)
