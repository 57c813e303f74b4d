"""The theory of all kinds of locks holds: it is checked by brute force, without the lock manager.

Shared, exclusive and counted locks, subtrees at three depths, priorities, and transactions with several requests are mixed at random.
"""

from __future__ import annotations

from random import Random

from unit.core.lock_theory import (
    Entry,
    Lock,
    ReferenceManager,
    can_finish,
    conflict,
    finishing_order,
    leaves_room,
    meeting,
    reduce,
)

NAMES = ["a/1", "a/2", "a/b/1", "a/b/**", "a/**", "**", "c"]
MAX_OWNERS = 5
SEEDS = 30
STEPS = 60


def random_lock(random: Random) -> Lock:
    name = random.choice(NAMES)
    if name.endswith("**"):
        return Lock(name, random.choice(["shared", "exclusive"]))
    mode = random.choice(["shared", "exclusive", "units", "units", "units"])
    of = random.choice([2, 3, 3, 4])
    return Lock(name, mode, random.randint(1, of), of) if mode == "units" else Lock(name, mode)


def random_request(random: Random, id: int) -> Entry:
    locks = {lock.name: lock for lock in (random_lock(random) for _ in range(random.randint(1, 3)))}
    owner = random.choice(["T1", "T2", "T3", id])
    return Entry(id, owner, tuple(locks.values()), random.choice([0, 0, 0, 1]))


class CheckedManager(ReferenceManager):
    """Checks each deadlock and rearrangement against all orders in which the owners could finish."""

    def request(self, request: Entry) -> None:
        before = self.deadlocks
        requests = [*self.requests, request]
        order = finishing_order(requests, lambda owner, left: can_finish(owner, left, in_queue_order=False))
        deadlocked = reduce(requests, in_queue_order=False)[1]
        super().request(request)
        assert (self.deadlocks > before) == (order is None)
        assert order is not None or request.owner in deadlocked


def check_invariants(manager: ReferenceManager) -> None:
    held, waiting = manager.held(), manager.waiting()
    for index, one in enumerate(held):
        for other in held[:index]:
            assert one.owner == other.owner or not any(
                meeting(lock.name, theirs.name) is not None and conflict(lock, theirs)
                for lock in one.locks
                for theirs in other.locks
            )
    assert not any(leaves_room(request, held, waiting) for request in waiting)
    assert not reduce(manager.requests, in_queue_order=True)[1]


def test_every_deadlock_is_one_and_every_other_history_drains() -> None:
    deadlocks = rearrangements = 0
    for seed in range(SEEDS):
        random, manager = Random(seed), CheckedManager()  # noqa: S311
        for id in range(1, STEPS + 1):
            owners = {request.owner for request in manager.requests}
            if random.random() < 0.6 and len(owners) < MAX_OWNERS:
                manager.request(random_request(random, id))
            elif manager.requests:
                manager.end(random.choice(manager.requests))
            check_invariants(manager)
        deadlocks += manager.deadlocks
        rearrangements += manager.rearrangements
        drain(manager)
    assert min(deadlocks, rearrangements) > SEEDS, "the steps do not reach what they are for"


def drain(manager: ReferenceManager) -> None:
    """Let the owners finish, one after the other: none of the next one's requests may still wait."""
    while manager.requests:
        finishing = reduce(manager.requests, in_queue_order=True)[0][0]
        own = [request for request in manager.requests if request.owner == finishing]
        assert all(request.held for request in own)
        for request in own:
            manager.requests.remove(request)
        manager.grant()


def test_a_request_that_waits_only_for_units_of_its_own_transaction_is_deadlocked() -> None:
    manager = ReferenceManager()
    manager.request(Entry(1, "T", (Lock("pool", "units", 2, 3),)))
    manager.request(Entry(2, "T", (Lock("pool", "units", 2, 3),)))
    assert [request.id for request in manager.requests] == [1]


def test_a_later_request_with_a_greater_limit_does_not_delay_an_earlier_one() -> None:
    manager = ReferenceManager()
    manager.request(Entry(1, 1, (Lock("pool", "units", 3, 4),)))
    manager.request(Entry(2, 2, (Lock("pool", "units", 2, 4),)))
    manager.request(Entry(3, 3, (Lock("pool", "units", 1, 9),)))
    assert [request.id for request in manager.held()] == [1]


def test_units_exclude_shared_and_exclusive_locks_of_others() -> None:
    for mode in ("shared", "exclusive"):
        manager = ReferenceManager()
        manager.request(Entry(1, 1, (Lock("a/pool", "units", 1, 3),)))
        manager.request(Entry(2, 2, (Lock("a/pool", mode),)))
        manager.request(Entry(3, 3, (Lock("a/**", mode),)))
        assert [request.id for request in manager.held()] == [1]
