"""Invariants of the lock manager, for tests and the simulator. The checks are simple and slow: some compare all pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import combinations, pairwise

from genie.core.deadlines import NEVER
from genie.core.grant import is_grantable
from genie.core.manager import LockManager
from genie.core.model import Owner, Request, State
from genie.core.special import Counted, Subtree, contains
from genie.core.subtrees import locks_below
from genie.core.wait_queue import LockedResource, WaitQueue
from genie.lock_modes import Mode, QueueMode, S, U, is_subtree


class Violation(AssertionError):
    """Raised if an invariant of the lock manager does not hold."""


def check(manager: LockManager) -> None:
    """Raise Violation unless every invariant of the lock manager holds. `core/README.md` lists the invariants."""
    _check_tables_agree(manager)
    _check_counts_agree(manager)
    _check_no_conflicting_holders(manager)
    _check_no_grantable_waiters(manager)
    _check_queues_in_order(manager)
    _check_all_owners_finish(manager)
    _check_deadlines_set(manager)


def conflict(one: Request, other: Request, name: str) -> bool:
    """Return whether two requests cannot hold the resource `name` at the same time. Units exclude each other only by number."""
    modes = {one.mode(name), other.mode(name)}
    return one.owner != other.owner and modes not in ({Mode.SHARED}, {Mode.UNITS})


def _resources(manager: LockManager) -> list[tuple[str, LockedResource]]:
    """Return the name and the state of each resource in the lock table, contended or not.

    Raises Violation if a resource is in both the table of contended and the table of uncontended resources.
    """
    table = manager.table
    if not table.uncontended.keys().isdisjoint(table.resources):
        raise Violation("a resource is in both the table of contended and the table of uncontended resources")
    return [(name, resource) for name in table.resource_names() if (resource := table.lookup(name)) is not None]


def graph(manager: LockManager) -> dict[Owner, set[Owner]]:
    """Return the wait-for graph without units: each waiting owner with the owners that it waits for.

    A waiting owner waits for each conflicting holder, and for each conflicting request ahead in the queue. Locks on a subtree and
    below it meet in the queue of the subtree. All this is derived from the names of the requests.
    """
    requests = [*manager.table.held.values(), *manager.table.waiting.values()]
    subtrees = {name for request in requests for name in request.names() if is_subtree(name)}
    meeting: dict[str, list[tuple[Request, str, QueueMode]]] = {}
    for request in requests:
        for name, mode in request.modes():
            for resource in {name, *(subtree for subtree in subtrees if contains(subtree, name))}:
                meeting.setdefault(resource, []).append((request, name, mode))
    edges: dict[Owner, set[Owner]] = {}
    for resource, locks in meeting.items():
        for request, name, mode in locks:
            if request.state is State.WAITING:
                edges.setdefault(request.owner, set()).update(
                    other.owner
                    for other, other_name, other_mode in locks
                    if resource in (name, other_name)
                    and other.owner != request.owner
                    and _is_ahead(other, request, resource)
                    and {mode, other_mode} not in ({S}, {U})
                )
    return edges


def _is_ahead(other: Request, request: Request, resource: str) -> bool:
    """Return whether a request holds a resource, or is before another one in its queue."""
    return other.state is State.HELD or other.entry(resource)[:2] < request.entry(resource)[:2]


def _check_no_conflicting_holders(manager: LockManager) -> None:
    """Check that no two holders of a resource conflict."""
    for name, resource in _resources(manager):
        for one, other in combinations(resource.holders.values(), 2):
            if conflict(one, other, name):
                raise Violation(f"{one.id} and {other.id} both hold {name}")
    for subtree in manager.table.subtrees:
        for request in manager.table.subtrees[subtree].holders.values():
            for other in manager.table.held.values():
                below = [name for name in other.names() if contains(subtree, name)]
                modes = {request.mode(subtree), *map(other.mode, below)}
                if below and other.owner != request.owner and modes != {Mode.SHARED}:
                    raise Violation(f"{other.id} holds {below[0]}, and {request.id} holds {subtree}")


def _check_no_grantable_waiters(manager: LockManager) -> None:
    """Check that no waiting request could be granted, except in the queues whose grants are pending."""
    pending = manager.pending_grants.keys()
    for request in manager.table.waiting.values():
        if is_grantable(manager.table, request) and pending.isdisjoint(request.queues()):
            raise Violation(f"{request.id} waits, and is grantable")


def _check_all_owners_finish(manager: LockManager) -> None:
    """Check that all owners can finish one after the other: the reduction over held locks and earlier waiters completes.

    Remove owners for whom all that they ask for fits beside what the others hold and ask for earlier, until no owner is left.
    """
    blockers = graph(manager)
    left = dict.fromkeys(blockers)
    while left:
        finished = [owner for owner in left if not blockers[owner] & left.keys() and _units_fit(manager, owner, left)]
        if not finished:
            raise Violation(f"these owners wait for each other: {sorted(map(str, left))}")
        for owner in finished:
            del left[owner]


def _units_fit(manager: LockManager, owner: Owner, left: Collection[Owner]) -> bool:
    """Return whether all units fit that an owner holds and asks for, if of the owners that wait only those in `left` do not end.

    Owners that do not wait end, too. The units of earlier waiters count, and so do their limits.
    """
    requests = [*manager.table.held.values(), *manager.table.waiting.values()]
    for request in manager.table.waiting.values():
        for name, (_, limit) in request.units.items() if request.owner == owner else ():
            in_use = 0
            for other in requests:
                if name not in other.units or other.owner not in left:
                    continue
                if other.owner == owner or _is_ahead(other, request, name):
                    in_use += other.units[name][0]
                    if other.owner != owner and other.state is State.WAITING:
                        limit = min(limit, other.units[name][1])  # noqa: PLW2901
            if in_use > limit:
                return False
    return True


def _check_queues_in_order(manager: LockManager) -> None:
    """Check that wait queues are sorted, and that the entry in a queue equals the entry that the request computes."""
    for name, resource in _resources(manager):
        if resource.wait_queue is None:
            continue
        for queue in (resource.wait_queue.shared, resource.wait_queue.exclusive, *resource.wait_queue.others.values()):
            entries = list(queue)
            if any(one >= other for one, other in pairwise(entries)):
                raise Violation(f"the wait queue of {name} is out of order")
        for entry in resource.wait_queue.entries():
            *_, request = entry
            if request.entry(name) != entry:
                raise Violation(f"{request.id} has another entry than the wait queue of {name}")


def _check_tables_agree(manager: LockManager) -> None:
    """Check that the tables of requests by id have the same requests as the holders and waiters of the resources."""
    table = manager.table
    for request in table.held.values():
        if request.state is not State.HELD:
            raise Violation(f"{request.id} is in the table of held requests, with state {request.state}")
    for request in table.waiting.values():
        if request.state is not State.WAITING:
            raise Violation(f"{request.id} is in the table of waiting requests, with state {request.state}")
    holders = {(name, id_) for name, resource in _resources(manager) for id_ in resource.holders}
    if holders != {(name, request.id) for request in table.held.values() for name in request.names()}:
        raise Violation("holders by resource and by id differ")
    waiters = {
        (name, request.id)
        for name, resource in _resources(manager)
        if resource.wait_queue is not None
        for *_, request in resource.wait_queue.entries()
    }
    if waiters != {(name, request.id) for request in table.waiting.values() for name in _queues(manager, request)}:
        raise Violation("waiters by resource and by id differ")


def _queues(manager: LockManager, request: Request) -> set[str]:
    """Return the resources in whose queues a waiting request must be."""
    names = request.names()
    open_ = manager.table.subtrees.keys() - manager.table.closing
    above = {subtree for subtree in open_ if any(contains(subtree, name) for name in names)}
    return {*names, *above, *(manager.table.closing & set(request.queues()))}


def _check_counts_agree(manager: LockManager) -> None:
    """Check that counters equal a recount, and that no unused resource or transaction remains in the tables."""
    table = manager.table
    if table.locks != sum(len(request.names()) for request in table.held.values()):
        raise Violation("the number of held locks is wrong")
    if table.queue_entries != sum(len([*request.queues()]) for request in table.waiting.values()):
        raise Violation("the number of queue entries is wrong")
    if table.specials != sum(resource.special is not None for resource in table.resources.values()):
        raise Violation("the number of counted resources and subtrees is wrong")
    _check_requests_with_details(manager)
    for name, resource in _resources(manager):
        if not resource.holders and resource.wait_queue is None:
            raise Violation(f"{name} has neither holders nor waiters")
        if resource.exclusive_count != sum(name in request.exclusive for request in resource.holders.values()):
            raise Violation(f"the number of exclusive holders of {name} is wrong")
        _check_special(manager, name, resource)
    for owner, transaction in table.transactions.items():
        grants = [name for request in transaction.held.values() for name in request.names()]
        if {name: grants.count(name) for name in grants} != transaction.grants:
            raise Violation(f"the grants of {owner} are wrong")
        if not transaction.held and not transaction.waiting:
            raise Violation(f"{owner} has neither locks nor waiting requests")


def _check_requests_with_details(manager: LockManager) -> None:
    """Check the number of requests with units or subtrees, and that each void position was, or will be, reported."""
    table = manager.table
    requests = [*table.held.values(), *table.waiting.values()]
    if table.detailed != sum(bool(request.units) or any(map(is_subtree, request.names())) for request in requests):
        raise Violation("the number of requests that name units or subtrees is wrong")
    if table.unmoved and not manager.pending_grants:
        raise Violation("the void position of a waiter was not reported")


def _check_special(manager: LockManager, name: str, resource: LockedResource) -> None:
    """Check the units in use of a counted resource, and the numbers of locks below a subtree."""
    special = resource.special
    units = [(holder.owner, holder.units[name][0]) for holder in resource.holders.values() if name in holder.units]
    if isinstance(special, Counted):
        counted: Counter[Owner] = Counter()
        for holder, count in units:
            counted[holder] += count
        of_transactions = {owner: count for owner, count in counted.items() if isinstance(owner, str)}
        requests = Counter(owner for owner, _ in units if isinstance(owner, str))
        expected = counted.total(), of_transactions, len(units), requests
        if (special.in_use, special.held_by_transaction, special.unit_holder_count, special.request_counts) != expected:
            raise Violation(f"the units of {name} are wrong")
        asked: dict[str, list[tuple[int, int]]] = {}
        for request in manager.table.waiting.values():
            if request.transaction is not None and name in request.units:
                asked.setdefault(request.transaction, []).append(request.units[name])
        sums = {each: (len(waits), sum(units for units, _ in waits)) for each, waits in asked.items()}
        if {each: counts[:2] for each, counts in special.waiting_by_transaction.items()} != sums:
            raise Violation(f"the units of {name} that transactions wait for are wrong")
        if any(
            special.waiting_by_transaction[each][2] > min(limit for _, limit in waits) for each, waits in asked.items()
        ):
            raise Violation(f"the limit of a transaction that waits for units of {name} is wrong")
    elif units:
        raise Violation(f"units of {name}, which is not a counted resource")
    if isinstance(special, Subtree):
        _check_subtree(manager, name, special, resource.wait_queue)


def _check_subtree(manager: LockManager, name: str, special: Subtree, queue: WaitQueue | None) -> None:
    """Check the numbers of locks below a subtree, in all and of each transaction, and which waiters have moved in its queue."""
    if queue is not None and set(queue.moved) != {each.id for _, _, each in queue if name in (each.moved or ())}:
        raise Violation(f"the waiters that have moved in the queue of {name} are wrong")
    below = [
        (request, mode)
        for request in manager.table.held.values()
        for each, mode in request.modes()
        if contains(name, each)
    ]
    modes = [mode for _, mode in below]
    if (special.shared_count, special.exclusive_count) != (modes.count(S), len(modes) - modes.count(S)):
        raise Violation(f"the numbers of locks below {name} are wrong")
    for owner in {request.transaction for request, _ in below} | set(special.counts_by_transaction):
        own = [mode for request, mode in below if request.transaction == owner]
        counts = own.count(S), len(own) - own.count(S)
        if owner is not None and special.counts_by_transaction.get(owner, counts) != counts:
            raise Violation(f"the locks of {owner} below {name} are wrong")
        if owner is not None and locks_below(manager.table, name, special, owner) != counts:
            raise Violation(f"the locks that {owner} holds below {name} are wrong")
    requests = [*manager.table.held.values(), *manager.table.waiting.values()]
    naming = {request.transaction for request in requests if name in request.names()}
    if not special.counts_by_transaction.keys() <= naming:
        raise Violation(f"locks below {name} are counted for a transaction that does not name it")


def _check_deadlines_set(manager: LockManager) -> None:
    """Check that there is one deadline for each held request, and for each waiting request with a timeout."""
    soonest = manager.deadlines.soonest
    ids = manager.deadlines.expired(float(NEVER), 1 << 31)  # all deadlines
    manager.deadlines.soonest = soonest  # the search has replaced it: 0 tells the server that grants are pending
    waiting = [id_ for id_, request in manager.table.waiting.items() if request.deadline != NEVER]
    if sorted(ids) != sorted([*manager.table.held, *waiting]):
        raise Violation("the deadlines are not those of the held and waiting requests")
