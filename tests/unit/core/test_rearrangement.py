"""A rearrangement moves no request without need."""

from __future__ import annotations

from itertools import combinations

import pytest

from genie.core import LockManager
from genie.core.deadlock import Rearrangement
from genie.core.model import Owner
from genie.core.reduction import Reduction
from support.core.driver import Driver
from unit.core import test_lock_kinds as kinds
from unit.core.lock_theory import depends, meeting


def test_a_shared_request_stays_when_its_owners_exclusive_one_overtakes() -> None:
    driver = Driver()
    driver.request("A", "shared:B", transaction="T")
    for _ in range(3):
        driver.request("shared:A")
    driver.request("shared:B")
    driver.request("shared:A", "B", transaction="T")  # waits for the other sharer of B
    assert driver.request("A", transaction="T")[-1] == ("locked", 7)
    driver.request("D")
    assert driver.request("A", "D", transaction="T") == [("queued", 9)]  # overtakes the sharers, and waits for D
    assert driver.queue("A") == [9, 2, 3, 4, 6]


@pytest.mark.soak
@kinds.searches
def test_no_request_overtakes_without_need(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units and subtrees: a request of an owner overtakes one of another owner only for an owner that is at least as early in
    the queues: itself, or one that waits for its held locks, also indirectly. All kinds are mixed.
    """
    managers: list[LockManager] = []
    original = Reduction.find_rearrangement

    def checked(reduction: Reduction) -> Rearrangement:
        rearrangement = original(reduction)
        first, blockers = first_positions(managers[-1]), held_blockers(managers[-1])
        needing = {owner: waiting_for(owner, blockers) for owner in first}
        for name, (_, order) in rearrangement.items():
            for earlier, later in combinations(order, 2):
                if earlier.owner == later.owner or earlier.entry(name) < later.entry(name):
                    continue
                if kinds.may_exclude(kinds.to_entry(earlier), kinds.to_entry(later), name):
                    assert min(first[each] for each in needing[earlier.owner]) <= first[later.owner]
        return rearrangement

    class Manager(LockManager):
        def __init__(self) -> None:
            super().__init__()
            managers.append(self)

    monkeypatch.setattr(Reduction, "find_rearrangement", checked)
    monkeypatch.setattr(kinds, "LockManager", Manager)
    kinds.run(seed, kinds.STEPS)


def first_positions(manager: LockManager) -> dict[Owner, tuple[float, int]]:
    """Return the first position of each waiting owner in a queue."""
    first: dict[Owner, tuple[float, int]] = {}
    for queue in kinds.queues(manager).values():
        for priority, ticket, id_, _ in queue:
            owner = manager.table.waiting[id_].owner
            first[owner] = min((priority, ticket), first.get(owner, (priority, ticket)))
    return first


def held_blockers(manager: LockManager) -> dict[Owner, set[Owner]]:
    """Return for each waiting owner the owners whose held locks it may have to wait for."""
    theory = kinds.theory_of(manager)
    blockers: dict[Owner, set[Owner]] = {request.owner: set() for request in theory.waiting()}
    for request in theory.waiting():
        for other in theory.held():
            if other.owner != request.owner and any(
                depends(one, held) and meeting(one.name, held.name) for one in request.locks for held in other.locks
            ):
                blockers[request.owner].add(other.owner)
    return blockers


def waiting_for(owner: Owner, blockers: dict[Owner, set[Owner]]) -> set[Owner]:
    """Return `owner`, and the owners that wait for locks that it holds, also indirectly."""
    found, stack = {owner}, [owner]
    while stack:
        held_by = stack.pop()
        for other, others in blockers.items():
            if held_by in others and other not in found:
                found.add(other)
                stack.append(other)
    return found
