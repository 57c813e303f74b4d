"""Checks the invariants of a recovered set of requests, in linear time, before a lock manager leads with them.

`genie.testing` has slower checks of a lock manager in operation. A recovered state lacks waiting requests without a session,
which end with the process of the server. So a recovered request may wait without a blocker, which is no violation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from genie.core.deadlock import StepBudget, special_successors, strongly_connected_component, successors
from genie.core.lock_table import LockTable
from genie.core.manager import LockManager
from genie.core.model import HELD, Owner, Request
from genie.core.reduction import Reduction
from genie.core.special import possible_subtrees
from genie.lock_modes import CONFLICTS, QueueMode, S, U, is_subtree


def find_violations(requests: Iterable[Request]) -> Iterator[str]:
    """Yield a sentence for each violated invariant. The requests are in their stored states, held or waiting.

    The invariants:

    - No two holders of a resource conflict, and no holder of a subtree conflicts with a holder of a name below it.
    - When a holder was granted, the units in use were within its limit.
    - Each fence is unique.
    - No two requests of a queue have the same position.

    If no invariant is violated, the waiting owners are checked for cycles.
    """
    requests = list(requests)
    held: list[Request] = []
    waiting: list[Request] = []
    for request in requests:
        (held if request.state is HELD else waiting).append(request)
    sound = True
    for check in (
        _invalid_names(requests),
        _conflicting_holders(held),
        _exceeded_limits(held),
        _duplicate_fences(held),
        _duplicate_positions(waiting, requests),
    ):
        for violation in check:
            sound = False
            yield violation
    if sound:
        yield from _cycle(waiting, requests)


def _invalid_names(requests: Iterable[Request]) -> Iterator[str]:
    """Yield a violation for each request that names no resource, names a resource twice, or asks for impossible units."""
    for request in requests:
        names = request.names()
        if not names:
            yield f"request {request.id} names no resource"
        elif len(set(names)) != len(names):
            yield f"request {request.id} names a resource twice"
        for name, (units, limit) in request.units.items():
            if is_subtree(name) or not 1 <= units <= limit:
                yield f"request {request.id} names {request.lock_text(name, U)!r}, which cannot be granted"


def _conflicting_holders(held: Sequence[Request]) -> Iterator[str]:
    """Yield violations for requests of different owners that hold conflicting locks: not for each pair, but for a few pairs of
    each request.
    """
    holders: dict[str, dict[QueueMode, list[Request]]] = {}
    """By name and mode, the first holder, and the first holder of another owner."""
    for request in held:
        for name, mode in request.modes():
            first = holders.setdefault(name, {}).setdefault(mode, [])
            if not first or (len(first) == 1 and first[0].owner != request.owner):
                first.append(request)
    subtrees = {name: by_mode for name, by_mode in holders.items() if is_subtree(name)}
    found: set[frozenset[int]] = set()
    for request in held:
        for name, mode in request.modes():
            above = [each for each in possible_subtrees(name) if each in subtrees] if subtrees else []
            for other_name in (name, *above):
                for other_mode, first in holders[other_name].items():
                    are_shared = mode == other_mode == S
                    if other_mode not in CONFLICTS[mode] and (other_name == name or are_shared):
                        continue  # no conflict: only shared locks of a subtree and of a name below it are compatible
                    other = next((other for other in first if other.owner != request.owner), None)
                    if other is not None and (pair := frozenset((request.id, other.id))) not in found:
                        found.add(pair)
                        other_lock = other.lock_text(other_name, other_mode)
                        locks = {request.id: request.lock_text(name, mode), other.id: other_lock}
                        (one, first_lock), (two, second_lock) = sorted(locks.items())
                        what = repr(name) if other_name == name else f"names of {other_name!r}"
                        yield f"requests {one} and {two} both hold {what}, and {first_lock} conflicts with {second_lock}"


def _exceeded_limits(held: Iterable[Request]) -> Iterator[str]:
    """Yield a violation for each holder whose limit was exceeded when it was granted.

    A grant must fit beside the units of earlier grants, so each limit is compared with the units of the holders up to its
    own grant. Later holders do not count: they may have a greater limit. Units that were released meanwhile are unknown.
    """
    in_use: dict[str, int] = {}
    with_units = [request for request in held if request.units]
    for request in sorted(with_units, key=lambda each: each.fence):  # the order of the grants
        for name, (units, limit) in request.units.items():
            total = in_use[name] = in_use.get(name, 0) + units
            if total > limit:
                yield f"request {request.id} holds {request.lock_text(name, U)!r}, and {total} units were in use with it"


def _duplicate_fences(held: Iterable[Request]) -> Iterator[str]:
    """Yield a violation for each held request with the fencing token of an earlier request."""
    by_fence: dict[int, Request] = {}
    for request in held:
        other = by_fence.setdefault(request.fence, request)
        if other is not request:
            yield f"requests {other.id} and {request.id} both have the fencing token {request.fence}"


def _duplicate_positions(waiting: Iterable[Request], requests: Iterable[Request]) -> Iterator[str]:
    """Yield a violation for each waiting request that has the same position in a queue as another request.

    A request also waits in the queue of each subtree that contains one of its names and that any request names.
    """
    subtrees = {name for request in requests if request.details is not None for name in request.details.subtrees}
    by_position: dict[tuple[str, float, int], Request] = {}
    for request in waiting:
        queues = dict.fromkeys(request.names())
        if subtrees:
            queues |= dict.fromkeys(
                each for name in request.names() for each in possible_subtrees(name) if each in subtrees
            )
        for name in queues:
            other = by_position.setdefault((name, *request.entry(name)[:2]), request)
            if other is not request:
                yield f"requests {other.id} and {request.id} have the same position in the queue of {name!r}"


def _cycle(waiting: Sequence[Request], requests: Collection[Request]) -> Iterator[str]:
    """Yield a violation if owners wait for each other in a cycle, so that none of their requests can ever be granted.

    Removes owners that wait for no other owner, until each remaining owner waits for a remaining owner. With units or
    subtrees this is not yet a deadlock, because there may be room beside an owner: a reduction decides about the remaining
    owners.
    """
    manager = LockManager()
    for _ in manager.load_in_parts(requests):
        pass
    remaining: dict[Owner, int] = {}
    blocked_by: dict[Owner, list[Owner]] = {}
    owners = dict.fromkeys(request.owner for request in waiting)
    next_owners = special_successors if manager.table.specials else successors
    for owner in owners:
        others = {other for other in next_owners(manager.table, owner) if other in owners and other != owner}
        remaining[owner] = len(others)
        for other in others:
            blocked_by.setdefault(other, []).append(owner)
    free = [owner for owner, count in remaining.items() if not count]
    while free:
        owner = free.pop()
        del remaining[owner]
        for other in blocked_by.get(owner, ()):
            remaining[other] -= 1
            if not remaining[other]:
                free.append(other)
    if manager.table.specials:
        # A transaction may wait for its own units. The last waiters first: they wait for the earlier ones.
        own = [request.owner for request in reversed(waiting) if request.units and request.transaction is not None]
        remaining = dict.fromkeys(_deadlocked(manager.table, [*remaining, *own]), 0)
    if remaining:
        some = ", ".join(repr(owner) for owner in list(remaining)[:5])
        yield f"{len(remaining)} owners wait for each other in a cycle, or for such a cycle, among them {some}"


def _deadlocked(table: LockTable, owners: Iterable[Owner]) -> Iterator[Owner]:
    """Yield each owner that cannot finish in queue order, among the given waiting owners and the owners that they wait for."""
    seen: set[Owner] = set()
    for owner in owners:
        if owner not in seen:
            budget = StepBudget(0)
            budget.left = 1 << 62  # unlimited: no command waits for this
            _, waited_for = strongly_connected_component(table, owner, budget)
            reduction = Reduction(table, owner, waited_for, budget)
            finishing = set(reduction.finishing_owners())
            seen.update(reduction.owners)
            yield from (each for each in reduction.owners if each not in finishing)
