"""Invariants of the lock manager, for tests and the simulator. The checks are simple and slow: some compare all pairs."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

from genie.core.deadlines import NEVER
from genie.core.grant import is_grantable
from genie.core.lock_table import LockTable
from genie.core.manager import LockManager
from genie.core.model import Owner, Request, State
from genie.core.special import Counted, Subtree, contains
from genie.core.wait_queue import LockedResource
from genie.lock_modes import Mode, S, is_subtree


class Violation(AssertionError):
    """Raised if an invariant of the lock manager does not hold."""


def check(manager: LockManager) -> None:
    """Raise Violation unless every invariant of the lock manager holds. `core/README.md` lists the invariants."""
    _check_tables_agree(manager)
    _check_counts_agree(manager)
    _check_no_conflicting_holders(manager)
    _check_no_grantable_waiters(manager)
    _check_queues_in_order(manager)
    _check_no_cycle(manager)
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
    """Return the wait-for graph: each waiting owner with the owners that it waits for.

    A waiting owner waits for each conflicting holder, and for each conflicting request ahead in the queue.
    """
    edges: dict[Owner, set[Owner]] = {}
    for name, resource in _resources(manager):
        queue = [] if resource.wait_queue is None else [request for *_, request in resource.wait_queue.entries()]
        for position, request in enumerate(queue):
            ahead = [*resource.holders.values(), *queue[:position]]
            edges.setdefault(request.owner, set()).update(
                other.owner for other in ahead if conflict(request, other, name)
            )
    return edges


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
    pending = {name for name, _, _ in manager.pending_grants}
    for request in manager.table.waiting.values():
        if is_grantable(manager.table, request) and pending.isdisjoint(request.queues()):
            raise Violation(f"{request.id} waits, and is grantable")


def _check_no_cycle(manager: LockManager) -> None:
    """Check that the wait-for graph has no cycle: remove owners that wait for no other, until no owner is left.

    With units a cycle may be no deadlock, so then nothing is checked here.
    """
    if manager.table.specials:
        return
    blockers = graph(manager)
    while True:
        unblocked = [owner for owner, others in blockers.items() if not others & blockers.keys()]
        if not unblocked:
            break
        for owner in unblocked:
            del blockers[owner]
    if blockers:
        raise Violation(f"a cycle of waits among {sorted(map(str, blockers))}")


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
    return {*names, *(subtree for subtree in manager.table.subtrees if any(contains(subtree, name) for name in names))}


def _check_counts_agree(manager: LockManager) -> None:
    """Check that counters equal a recount, and that no unused resource or transaction remains in the tables."""
    table = manager.table
    if table.locks != sum(len(request.names()) for request in table.held.values()):
        raise Violation("the number of held locks is wrong")
    if table.queue_entries != sum(len([*request.queues()]) for request in table.waiting.values()):
        raise Violation("the number of queue entries is wrong")
    if table.specials != sum(resource.special is not None for resource in table.resources.values()):
        raise Violation("the number of counted resources and subtrees is wrong")
    _check_requests_with_details(table)
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


def _check_requests_with_details(table: LockTable) -> None:
    """Check the number of requests with units or subtrees, and that each void position was reported."""
    requests = [*table.held.values(), *table.waiting.values()]
    if table.detailed != sum(bool(request.units) or any(map(is_subtree, request.names())) for request in requests):
        raise Violation("the number of requests that name units or subtrees is wrong")
    if table.unmoved:
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
        expected = counted.total(), of_transactions, len(units)
        if (special.in_use, special.by_transaction, special.holders) != expected:
            raise Violation(f"the units of {name} are wrong")
    elif units:
        raise Violation(f"units of {name}, which is not a counted resource")
    if isinstance(special, Subtree):
        below = [
            (request, mode)
            for request in manager.table.held.values()
            for each, mode in request.modes()
            if contains(name, each)
        ]
        modes = [mode for _, mode in below]
        if (special.shared, special.exclusive) != (modes.count(S), len(modes) - modes.count(S)):
            raise Violation(f"the numbers of locks below {name} are wrong")
        for owner in {request.transaction for request, _ in below} | set(special.by_transaction):
            own = [mode for request, mode in below if request.transaction == owner]
            counts = (own.count(S), len(own) - own.count(S)) if own else None
            if owner is not None and special.by_transaction.get(owner) != counts:
                raise Violation(f"the locks of {owner} below {name} are wrong")


def _check_deadlines_set(manager: LockManager) -> None:
    """Check that there is one deadline for each held request, and for each waiting request with a timeout."""
    ids = manager.deadlines.expired(float(NEVER), 1 << 31)  # all deadlines
    waiting = [id_ for id_, request in manager.table.waiting.items() if request.deadline != NEVER]
    if sorted(ids) != sorted([*manager.table.held, *waiting]):
        raise Violation("the deadlines are not those of the held and waiting requests")
