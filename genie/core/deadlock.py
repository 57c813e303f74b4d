"""Deadlock detection in the wait-for graph, and queue rearrangement where it avoids a deadlock.

The nodes of the graph are owners. Owner A waits for owner B if a waiting request of A conflicts with
a lock that B holds (a hard edge), or with a request of B that is earlier in the same queue (a soft
edge). Only a new request can close a cycle; `genie/core/README.md` explains why. A cycle of hard
edges is a deadlock; any other cycle is resolved by rearranging queues, as in PostgreSQL's
`deadlock.c`.

In a queue of n exclusive requests each request waits for all earlier requests: n²/2 edges. It is
enough to follow the nearest edges, because the nearest earlier exclusive request itself waits for
everything before it. So the cost of a search is linear in the number of owners that it reaches.

This number is bounded: a search that would exceed `MAX_ARRIVAL_STEPS` raises `GraphTooLarge`, and the new request is rejected.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat

from genie.core.context import shown_context
from genie.core.events import Cycle, Wait
from genie.core.lock_table import LockTable
from genie.core.model import Owner, QueueEntry, Request
from genie.core.special import Counted, Subtree, range_below
from genie.core.wait_queue import MAX_ARRIVAL_STEPS, LockedResource, move_steps
from genie.lock_modes import CONFLICTS, IS, IX, SIX, WHOLE_NAMESPACE, QueueMode, S, U, X

MAX_SEARCH_STEPS = 3_000
"""Number of edges of the wait-for graph after which the search for a cycle ends without a result. Then the resolution of a
cycle, which may take more steps, searches again."""

MAX_SPECIAL_SEARCH_STEPS = 1_000
"""`MAX_SEARCH_STEPS` in a table with counted resources or subtrees. It is smaller, because `reduction.finishes_in_queue_order`,
which follows, reads a long queue faster."""

MAX_READ_GRANTS = 100
"""Maximum number of locks of a transaction that are all read before the search, to find out whether other owners wait for them.
A transaction with more locks counts as waited for."""

WAITERS_PER_STEP = 8
"""Number of waiting requests for which one step finds out whether their transactions hold a lock below a subtree."""

GRANTS_PER_WAITER = 4
"""Number of locks of a waiting transaction that count as one waiting request, when they are compared with a subtree."""

_MODES_OF_OTHER_EDGES = tuple([tuple([other for other in others if other not in (X, U)]) for others in CONFLICTS])
"""By the mode of a waiter, the conflicting modes whose waiters are further edges, beside the nearest earlier waiter that waits for
all before it (`_modes_that_need_all`)."""

Neighbours = Callable[[LockTable, Owner], Iterator[Owner]]
"""`successors`, `predecessors` or their variants for special resources: yields the neighbours of an owner in the wait-for
graph."""

Rearrangement = dict[str, tuple[list[QueueEntry], list[Request]]]
"""For each resource whose queue changes: contiguous entries of the queue, and the new order of their requests."""


class GraphTooLarge(Exception):
    """A search in the wait-for graph would exceed `MAX_ARRIVAL_STEPS`, so a deadlock could remain undetected."""


class StepBudget:
    """Counts the steps of the resolution of a cycle, at most `MAX_ARRIVAL_STEPS`.

    `used` steps were already taken by the insertion into the wait queues.
    """

    __slots__ = ("left",)

    def __init__(self, used: int) -> None:
        self.left = MAX_ARRIVAL_STEPS - used

    def spend(self, steps: int = 1) -> None:
        """Count steps. Raises GraphTooLarge if none are left."""
        self.left -= steps
        if self.left < 0:
            raise GraphTooLarge


# -- The wait-for graph ------------------------------------------------------------------
#
# Each item of these iterators takes constant or logarithmic time, so that the caller can count the work. A resource that
# leads to no other owner yields the given owner itself.


def successors(table: LockTable, owner: Owner) -> Iterator[Owner]:
    """Yield owners that `owner` waits for: enough owners to reach all others transitively.

    May yield an owner twice, or `owner` itself. Each next owner is found in bounded time.
    """
    for request in table.waiting_of(owner).values():
        yield from request_successors(table, request)


def request_successors(table: LockTable, request: Request) -> Iterator[Owner]:
    """Yield owners that one request waits for: enough owners to reach all others transitively.

    May yield an owner twice, or the owner of `request`. The nearest earlier exclusive request in a queue itself waits for all
    earlier requests and for the holders, so nothing before it needs to be yielded.
    """
    for name, exclusive in request.modes():
        queue = table.wait_queue(name)
        entry = request.entry(name)
        nearest = queue.exclusive.before(entry)
        if nearest is not None:
            yield nearest[2].owner  # an entry is (negated priority, ticket, request)
        else:
            resource = table.resources[name]
            if resource.exclusive_count:  # then all holders have the same owner
                yield next(iter(resource.holders.values())).owner
            elif exclusive:
                for holder in resource.holders.values():
                    yield holder.owner
            else:
                yield request.owner
        if exclusive:
            for other in queue.shared.between(nearest, entry):
                yield other[2].owner


def special_successors(table: LockTable, owner: Owner) -> Iterator[Owner]:
    """Yield owners that `owner` waits for, as `successors`, in a table with counted resources or subtrees.

    Two requests for units of one resource count as a conflict.
    """
    for request in table.waiting_of(owner).values():
        for name, mode in request.queue_modes():
            yield from _special_successors(table, request, name, mode)


def special_predecessors(table: LockTable, owner: Owner) -> Iterator[Owner]:
    """Yield owners that wait for `owner`, as `predecessors`, in a table with counted resources or subtrees.

    Two requests for units of one resource count as a conflict.
    """
    for name in table.grants_of(owner):
        for _, subtree in table.subtrees_above(name):  # only waiters in these modes wait for locks below it
            yield from _special_predecessors(subtree, owner, (S, X, SIX), None)
        yield from _special_predecessors(table.resources.get(name), owner, (S, X, U, IS, IX, SIX), None)
    for request in table.waiting_of(owner).values():
        for name, mode in request.queue_modes():
            blocked_modes = [each for each, others in enumerate(CONFLICTS) if mode in others]
            yield from _special_predecessors(table.resources[name], owner, blocked_modes, request.entry(name))


def _modes_that_need_all(resource: LockedResource) -> tuple[QueueMode, ...]:
    """Return the modes whose waiters conflict with all other waiters of the resource.

    Such a waiter waits for all entries before it, and so has the nearest of them as its only edge.
    """
    return (X, U) if isinstance(resource.special, Counted) else (X,)


def _special_successors(table: LockTable, request: Request, name: str, mode: QueueMode) -> Iterator[Owner]:
    """Yield owners that one request waits for on one resource, in a table with counted resources or subtrees.

    Yields enough owners to reach all others transitively, as `request_successors`. Two requests for units count as a conflict.
    """
    resource, entry = table.resources[name], request.entry(name)
    queue, special = resource.wait_queue, resource.special
    assert queue is not None, "a waiting request is in the queue of each of its resources"  # noqa: S101
    nearest = queue.exclusive.before(entry) if queue.exclusive else None
    units = queue.others.get(U)  # of a counted resource
    if units is not None:
        nearest_units = units.before(entry)
        nearest = max(nearest, nearest_units) if nearest and nearest_units else nearest or nearest_units
    if nearest is not None:
        yield nearest[2].owner  # an entry is (negated priority, ticket, request)
    elif resource.exclusive_count:  # then all holders have the same owner
        yield next(iter(resource.holders.values())).owner
    else:
        yield request.owner
        if mode != IS:
            for holder in resource.holders.values():
                yield holder.owner
        if isinstance(special, Subtree) and mode in (S, X, SIX):
            yield from waiting_owners_below(table, name, special, request.owner)
    for each in _MODES_OF_OTHER_EDGES[mode]:
        others = queue.others.get(each) if each else queue.shared
        if others:
            for other in others.between(nearest, entry):
                yield other[2].owner


def waiting_owners_below(table: LockTable, subtree: str, special: Subtree, owner: Owner) -> Iterator[Owner]:
    """Yield the waiting transactions that hold locks below a subtree. Owners that do not wait are in no cycle.

    A transaction with more than `MAX_READ_GRANTS` locks may be yielded although none of them is below the subtree. The
    caller counts each yielded owner as a step of its search. Reads without a result are steps, too: for each
    `WAITERS_PER_STEP` of them `owner` is yielded, the owner of the request for the subtree, which adds no edge.
    """
    if special.shared_count + special.exclusive_count == len(special.examples):  # the examples are all locks below it
        for _, holder in special.examples.values():
            yield holder.owner
        return
    first, end = range_below(subtree)
    seen: set[str] = set()
    reads = 0
    for request in table.waiting.values():
        reads += 1
        transaction = request.transaction
        if transaction is not None and transaction not in seen:
            seen.add(transaction)
            grants = table.transactions[transaction].grants
            reads += min(len(grants), MAX_READ_GRANTS) // GRANTS_PER_WAITER
            if grants and (
                subtree == WHOLE_NAMESPACE
                or len(grants) > MAX_READ_GRANTS
                or any(first <= name < end for name in grants)
            ):
                yield transaction
                continue
        yield from repeat(owner, reads // WAITERS_PER_STEP)
        reads %= WAITERS_PER_STEP


def _special_predecessors(
    resource: LockedResource | None, owner: Owner, modes: Sequence[QueueMode], entry: QueueEntry | None
) -> Iterator[Owner]:
    """Yield owners that wait for `owner` on one resource: enough owners to reach all others transitively.

    They wait for its `entry` in the queue, or if `entry` is None, for its lock. Only waiters in `modes` wait for it. `owner`
    itself is yielded first.
    """
    yield owner
    queue = None if resource is None else resource.wait_queue
    if queue is not None and resource is not None:
        all_needed = _modes_that_need_all(resource)
        after = [queue.of_mode(each).after(entry) if entry else queue.of_mode(each).first for each in all_needed]
        nearest = min(filter(None, after), default=None)
        if nearest is not None:
            yield nearest[2].owner  # an entry is (negated priority, ticket, request)
        for each in modes:
            if each not in all_needed:
                for other in queue.of_mode(each).between(entry, nearest):
                    yield other[2].owner


def predecessors(table: LockTable, owner: Owner) -> Iterator[Owner]:
    """Yield owners that wait for `owner`: enough owners to reach all others transitively.

    May yield an owner twice, or `owner` itself: it is yielded for each grant and each entry that no other owner waits for. So
    each next owner is found in bounded time.
    """
    yield from _predecessors_of_grants(table, owner)
    for request in table.waiting_of(owner).values():
        for name, exclusive in request.modes():
            queue = table.wait_queue(name)
            entry = request.entry(name)
            nearest = queue.exclusive.after(entry)
            yield owner if nearest is None else nearest[2].owner  # an entry is (negated priority, ticket, request)
            if exclusive:
                for other in queue.shared.between(entry, nearest):
                    yield other[2].owner


def _predecessors_of_grants(table: LockTable, owner: Owner) -> Iterator[Owner]:
    """Yield owners that wait for a lock that `owner` holds: enough owners to reach all others transitively."""
    for name in table.grants_of(owner):
        resource = table.resources.get(name)
        if resource is None or resource.wait_queue is None:
            yield owner
        else:
            nearest = resource.wait_queue.exclusive.first
            yield owner if nearest is None else nearest[2].owner  # an entry is (negated priority, ticket, request)
            if resource.exclusive_count:
                for other in resource.wait_queue.shared.between(None, nearest):
                    yield other[2].owner


def may_create_cycle(table: LockTable, new_request: Request) -> bool:
    """Return whether a new request closed a cycle in the wait-for graph, or may have closed one.

    In a cycle, another owner waits for the owner of the new request. The other owner waits either for
    an earlier lock or request of this owner, or for the new request, which overtook it in a queue. No
    cycle is possible if all requests in the queue, including the new request, are simple.
    """
    if new_request.simple and not table.wait_queue((new_request.exclusive or new_request.names())[0]).non_simple_count:
        return False
    if table.specials and new_request.transaction is not None:
        for name in new_request.units:
            if table.counted(name).may_exceed_own_limit(new_request.transaction):
                return True  # its owner may wait for itself
    overtakes = _overtakes(table, new_request)
    return (overtakes or _may_have_waiters(table, new_request)) and may_be_in_cycle(table, new_request, overtakes)


def _may_have_waiters(table: LockTable, new_request: Request) -> bool:
    """Return whether other owners may wait for the owner of a new request because of its earlier requests.

    True for a transaction with many locks, which are not read here: the search for a cycle reads them, and may end earlier.
    """
    if new_request.transaction is None:
        return False
    transaction, resources = table.transactions[new_request.transaction], table.resources
    if len(transaction.waiting) > 1:  # others may wait for an earlier waiting request
        return True
    if len(transaction.grants) > MAX_READ_GRANTS:
        return True
    for name in transaction.grants:
        if name in resources and resources[name].wait_queue is not None:
            return True
    if not table.subtrees:
        return False
    above = (resource for name in transaction.grants for _, resource in table.subtrees_above(name))
    return any(resource.wait_queue is not None for resource in above)


def _overtakes(table: LockTable, new_request: Request) -> bool:
    """Return whether a new request is before another request in any queue."""
    for name in new_request.queues() if table.specials else new_request.names():
        queue = table.resources[name].wait_queue
        assert queue is not None, "a waiting request is in the queue of each of its resources"  # noqa: S101
        if queue.last != new_request.entry(name):
            return True
    return False


def may_be_in_cycle(table: LockTable, new_request: Request, overtakes: bool) -> bool:
    """Return whether the owner of a new request waits for itself transitively, or may do so.

    True if there is a cycle, or if the search has not ended after `MAX_SEARCH_STEPS` edges.

    `overtakes` is true if the new request is before other requests in a queue. Otherwise every cycle contains an edge that
    starts at the new request, since there was no cycle before the request arrived.

    A forward and a backward search take one step each in turn. The first search that ends without reaching the owner proves
    that there is no cycle. So few steps suffice for a request at the end of a long chain, and for an owner without waiters.
    """
    owner = new_request.owner
    if table.specials:
        # With units, there may have been a cycle that was no deadlock, because a waiter needs only enough of its blockers.
        forward, backward = special_successors, special_predecessors
        first = forward(table, owner)
    else:
        forward, backward = successors, predecessors
        first = forward(table, owner) if overtakes else request_successors(table, new_request)
    sides = (_search(table, owner, forward, first), _search(table, owner, backward, backward(table, owner)))
    for _ in range((MAX_SPECIAL_SEARCH_STEPS if table.specials else MAX_SEARCH_STEPS) // 2):
        for side in sides:
            reached_owner = next(side, None)  # None if this search has followed all its edges
            if reached_owner is not False:
                return reached_owner is True
    return True


def _search(table: LockTable, start: Owner, neighbours: Neighbours, first: Iterator[Owner]) -> Iterator[bool]:
    """Search the graph depth first from `start`. `first` yields the neighbours of `start`.

    Yields after each edge, so that the caller can interrupt the search: True if the edge closes a cycle through `start`, else False.
    """
    visited = {start}
    stack = []
    for other in first:
        if other not in visited:
            visited.add(other)
            stack.append(other)
        yield False
    while stack:
        for other in neighbours(table, stack.pop()):
            if other == start:
                yield True
            elif other not in visited:
                visited.add(other)
                stack.append(other)
            yield False


def strongly_connected_component(table: LockTable, start: Owner, budget: StepBudget) -> tuple[list[Owner], list[Owner]]:
    """Return the owners of the strongly connected component of `start`, `start` first, and all owners that `start` waits for.

    The component contains `start`, and each owner that waits for `start` while `start` waits for this owner, transitively.
    """
    waiters: dict[Owner, list[Owner]] = {start: []}  # of each owner that `start` waits for
    next_owners = special_successors if table.specials else successors
    stack = [start]
    while stack:
        owner = stack.pop()
        for other in next_owners(table, owner):
            budget.spend()
            if other not in waiters:
                waiters[other] = []
                stack.append(other)
            waiters[other].append(owner)
    component = {start: None}  # a dict, not a set: its order makes the events deterministic
    stack = [start]
    while stack:
        for other in waiters[stack.pop()]:
            if other not in component:
                component[other] = None
                stack.append(other)
    return list(component), list(waiters)


def find_deadlock(table: LockTable, victim: Owner, budget: StepBudget) -> Cycle | None:
    """Return the shortest cycle of hard edges through `victim` (a deadlock), or None if there is none.

    A hard edge leads from a waiting owner to the holder of a lock. A cycle of hard edges cannot be
    resolved by rearranging wait queues. The search is breadth first, so it finds a shortest cycle.
    """
    steps: dict[Owner, HardEdge] = {}  # the edge by which each owner was reached
    searched: set[str] = set()
    queue = deque([victim])
    while queue:
        owner = queue.popleft()
        for request in table.waiting_of(owner).values():
            for name, exclusive in request.modes():
                budget.spend()
                for holder in _unsearched_holders(table, request, name, exclusive, victim, searched):
                    budget.spend()
                    conflicts = exclusive or table.resources[name].holder_mode(name, holder) == X
                    if holder.owner == owner or not conflicts:
                        continue
                    if holder.owner == victim:
                        return _build_cycle(victim, steps, (request, name, holder))
                    if holder.owner not in steps:
                        steps[holder.owner] = (request, name, holder)
                        queue.append(holder.owner)
    return None


HardEdge = tuple[Request, str, Request]
"""A waiting request, the resource that it waits for, and a request that holds this resource."""


def _unsearched_holders(
    table: LockTable, request: Request, name: str, exclusive: QueueMode, victim: Owner, searched: set[str]
) -> Iterable[Request]:
    """Return the holders of `name` that may block a waiting request, unless an earlier call has returned them.

    Returning m holders for each of n waiters would cost n·m steps. After the first waiter, all holders are visited, except
    `victim`, the target of the search. So the holders are returned again only if `victim` is among them.
    """
    resource = table.resources[name]
    if not exclusive and not resource.exclusive_count:
        return ()
    if name in searched and (request.owner == victim or name not in table.grants_of(victim)):
        return ()
    searched.add(name)
    return resource.holders.values()


def _build_cycle(victim: Owner, steps: dict[Owner, HardEdge], last: HardEdge) -> Cycle:
    """Return the cycle that the edge `last` to `victim` closes. `steps` maps each owner to the edge by which it was reached."""
    edges = [last]
    while edges[-1][0].owner != victim:
        edges.append(steps[edges[-1][0].owner])
    edges.reverse()
    waits = [Wait(name, request.id, holder.id, shown_context(request)) for request, name, holder in edges]
    return Cycle(tuple([request.owner for request, _, _ in edges]), tuple(waits))


# -- Queue rearrangement ---------------------------------------------------------------


def find_rearrangement(table: LockTable, owner: Owner, budget: StepBudget) -> Rearrangement:
    """Return how to rearrange wait queues so that `owner` is no longer in a cycle. There must be no cycle of hard edges.

    Raises GraphTooLarge. Changes nothing.
    """
    component, _ = strongly_connected_component(table, owner, budget)
    ranks = topological_ranks(table, component, budget)
    entries_by_name: dict[str, list[QueueEntry]] = {}  # those of the component
    for member in ranks:
        for request in table.waiting_of(member).values():
            for name in request.names():
                entries_by_name.setdefault(name, []).append(request.entry(name))
    rearrangement: Rearrangement = {}
    for name, members in entries_by_name.items():
        if len(members) > 1:
            first, last = min(members), max(members)
            between = table.wait_queue(name).entries_between(first, last, budget.left + len(members))
            entries = [first, *between, last]
            budget.spend(len(entries) - len(members))  # reading the members was counted before
            order = rearranged_order([entry[2] for entry in entries], name, ranks)
            if order is not None:
                moves = [request for entry, request in zip(entries, order, strict=True) if entry[2] is not request]
                budget.spend(move_steps(moves))
                rearrangement[name] = (entries, order)
    return rearrangement


def topological_ranks(table: LockTable, owners: Sequence[Owner], budget: StepBudget) -> dict[Owner, int]:
    """Return a rank for each owner of a component. In the queues, lower ranks are before higher ranks.

    An owner ranks after all owners that hold a lock for which it waits (its hard edges). Otherwise the order of the queues is
    kept. There must be no cycle of hard edges.

    Kahn's algorithm, from the last rank to the first, as in PostgreSQL, so that as few requests as possible move back.
    """
    members = set(owners)
    blockers: dict[Owner, set[Owner]] = {}
    """For each owner, the targets of its hard edges."""
    unranked_waiters = dict.fromkeys(owners, 0)
    """For each owner, the number of owners without a rank that wait for it by a hard edge."""
    keys: dict[Owner, tuple[float, int]] = {}
    budget.spend(len(owners))  # one step for each rank, in addition to the search of the blockers
    for owner in owners:
        blockers[owner] = _holding_owners(table, owner, budget) & members
        for blocker in blockers[owner]:
            unranked_waiters[blocker] += 1
        keys[owner] = _reverse_queue_key(table, owner)
    index = {owner: i for i, owner in enumerate(owners)}
    # A heap of the owners for which no unranked owner waits. Its first item is the owner that is last in the queues.
    ready = [(*keys[owner], index[owner]) for owner in owners if not unranked_waiters[owner]]
    heapify(ready)
    ranks: dict[Owner, int] = {}
    while ready:
        owner = owners[heappop(ready)[-1]]
        ranks[owner] = len(owners) - len(ranks)
        for blocker in blockers[owner]:
            unranked_waiters[blocker] -= 1
            if not unranked_waiters[blocker]:
                heappush(ready, (*keys[blocker], index[blocker]))
    assert len(ranks) == len(owners), "a cycle of hard edges has no topological order"  # noqa: S101 - an invariant
    return ranks


def _holding_owners(table: LockTable, owner: Owner, budget: StepBudget) -> set[Owner]:
    """Return the other owners that hold locks that `owner` waits for: the targets of its hard edges."""
    found: set[Owner] = set()
    for request in table.waiting_of(owner).values():
        for name, exclusive in request.modes():
            resource = table.resources[name]
            budget.spend()
            if resource.exclusive_count:  # then all holders have the same owner
                found.add(next(iter(resource.holders.values())).owner)
            elif exclusive:
                budget.spend(len(resource.holders))
                found.update([holder.owner for holder in resource.holders.values()])
    found.discard(owner)
    return found


def _reverse_queue_key(table: LockTable, owner: Owner) -> tuple[float, int]:
    """Return a sort key by which the waiting owner that is last in the queues is first.

    Owners are compared by their first position in any queue: (negated priority, ticket).
    """
    first = min(request.entry(name)[:2] for request in table.waiting_of(owner).values() for name in request.names())
    return (-first[0], -first[1])


def rearranged_order(requests: Sequence[Request], name: str, ranks: Mapping[Owner, int]) -> list[Request] | None:
    """Return contiguous requests of a queue ordered by the ranks of their owners, or None if the order does not change.

    `ranks` contains the owners of one component of the wait-for graph. The first and the last request belong to owners of the
    component, and only requests of these owners move.

    Requests of all other owners (outsiders) keep their places. An outsider between two conflicting requests of the component
    would be in the component as well. So no outsider is between the first and the last exclusive request of the component.
    Outsiders between its shared requests are shared, too, and stay before or after the exclusive requests.
    """
    # All following lists contain positions in `requests`.
    members = [i for i, request in enumerate(requests) if request.owner in ranks]
    exclusive = [i for i in members if requests[i].queue_mode(name)]
    if not exclusive:
        return None
    outsiders = [i for i, request in enumerate(requests) if request.owner not in ranks]
    shared = [i for i in members if not requests[i].queue_mode(name)]
    rank_of = {i: ranks[requests[i].owner] for i in members}
    exclusive.sort(key=lambda i: (rank_of[i], i))
    first_run, *later_runs = _assign_runs(shared, exclusive, rank_of, outsiders)
    order = [*first_run]
    for position, run in zip(exclusive, later_runs, strict=True):
        order += [position, *run]
    return None if order == sorted(order) else [requests[i] for i in order]


def _assign_runs(
    shared: list[int], exclusive: list[int], rank_of: Mapping[int, int], outsiders: list[int]
) -> list[list[int]]:
    """Distribute shared requests over runs: one before, between and after each of the exclusive requests.

    All requests are given and returned by their positions in the queue; `exclusive` is sorted by rank. A shared request is put
    after the exclusive requests of owners of lower rank, and before those of owners of higher rank. Among the exclusive
    requests of its own owner, it is put where it swaps with the fewest requests. `outsiders`, the requests of owners without a
    rank, stay before or after all exclusive requests. The requests within a run keep their order.
    """
    exclusive_ranks = [rank_of[i] for i in exclusive]
    first = min(exclusive)
    runs: list[list[int]] = [[] for _ in range(len(exclusive) + 1)]
    runs[0] += (i for i in outsiders if i < first)
    runs[-1] += (i for i in outsiders if i > first)
    of_same_owner = []
    for i in shared:
        low, high = bisect_left(exclusive_ranks, rank_of[i]), bisect_right(exclusive_ranks, rank_of[i])
        if low == high:
            runs[low].append(i)
        else:
            of_same_owner.append((i, low, high))
    for run in runs:
        run.sort()
    chosen = [(_best_run(i, low, high, exclusive, runs), i) for i, low, high in of_same_owner]
    for index, i in chosen:
        runs[index].append(i)
    return [sorted(run) for run in runs]


def _best_run(i: int, low: int, high: int, exclusive: list[int], runs: list[list[int]]) -> int:
    """Return the run, from `low` to `high`, in which the shared request at position `i` swaps with the fewest requests.

    `exclusive[low:high]` are the positions of the exclusive requests of its owner, and ascend. The runs are sorted.
    """
    unmoved = bisect_left(exclusive, i, low, high)  # the run in which it swaps with no exclusive request of its owner
    # Shared requests with which it swaps if it is put after the run `low`, or before the run `high`.
    after_low = len(runs[low]) - bisect_left(runs[low], i)
    before_high = bisect_left(runs[high], i)

    def count_swaps(run: int) -> int:
        return abs(run - unmoved) + (after_low if run > low else 0) + (before_high if run < high else 0)

    return min((low, unmoved, high), key=count_swaps)
