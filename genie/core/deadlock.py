"""Deadlock detection in the wait-for graph, and queue rearrangement where it avoids a deadlock.

The nodes of the graph are owners. Owner A waits for owner B if a waiting request of A conflicts with
a lock that B holds (a hard edge), or with a request of B that is earlier in the same queue (a soft
edge). Only a new request can close a cycle; `genie/core/README.md` explains why. A cycle of hard
edges is a deadlock; any other cycle is resolved by rearranging queues, as in PostgreSQL's
`deadlock.c`.

In a queue of n exclusive requests each request waits for all earlier requests: n²/2 edges. It is
enough to follow the nearest edges, because the nearest earlier exclusive request itself waits for
everything before it. So the cost of a search is linear in the number of owners that it reaches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import zip_longest

from genie.core.events import Cycle, Wait
from genie.core.grant import conflicting_holders
from genie.core.lock_table import LockTable
from genie.core.model import Owner, Request
from genie.core.wait_queue import WaitQueue

MAX_READ_GRANTS = 100
"""Maximum number of resources held by a transaction that are all read to find whether others wait for them."""

Neighbours = Callable[[LockTable, Owner], Iterator[Owner]]
"""`successors` or `predecessors`: yields the neighbours of an owner in the wait-for graph."""


def successors(table: LockTable, owner: Owner) -> Iterator[Owner]:
    """Yield owners that `owner` waits for: enough owners to reach all others transitively.

    May yield an owner twice, or `owner` itself. Each next owner is found in bounded time.
    """
    for request in table.waiting_of(owner).values():
        yield from request_successors(table, request)


def request_successors(table: LockTable, request: Request) -> Iterator[Owner]:
    """Yield owners that one request waits for: enough owners to reach all others transitively.

    The nearest earlier exclusive request in a queue itself waits for all earlier requests and for the
    holders, so nothing before it needs to be yielded.
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
        if exclusive:
            for other in queue.shared.between(nearest, entry):
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
    transaction = table.transactions.get(owner) if isinstance(owner, str) else None
    for name in transaction.grants if transaction is not None else ():
        resource = table.resources.get(name)
        if resource is None or resource.wait_queue is None:
            yield owner
        else:
            nearest = resource.wait_queue.exclusive.first
            if nearest is not None:
                yield nearest[2].owner  # an entry is (negated priority, ticket, request)
            if resource.exclusive_count:
                for other in resource.wait_queue.shared.between(None, nearest):
                    yield other[2].owner


def creates_cycle(table: LockTable, new_request: Request) -> bool:
    """Return whether a new request closed a cycle in the wait-for graph.

    In a cycle, another owner waits for the owner of the new request. The other owner waits either for
    an earlier lock or request of this owner, or for the new request, which overtook it in a queue. No
    cycle is possible if all requests in the queue, including the new request, are simple.
    """
    if new_request.simple and not table.wait_queue(new_request.names()[0]).non_simple_count:
        return False
    overtakes = _overtakes(table, new_request)
    return (overtakes or _may_have_waiters(table, new_request)) and is_in_cycle(table, new_request, overtakes)


def _may_have_waiters(table: LockTable, new_request: Request) -> bool:
    """Return whether other owners may wait for the owner of a new request because of its earlier requests.

    Reads few grants of a transaction that holds many. Then the search for a cycle reads them, and ends when either of its two
    directions ends.
    """
    if new_request.transaction is None:
        return False
    transaction, resources = table.transactions[new_request.transaction], table.resources
    if len(transaction.waiting) > 1:  # others may wait for an earlier waiting request
        return True
    if len(transaction.grants) > MAX_READ_GRANTS:
        return True
    for name in transaction.grants:  # noqa: SIM110 - a generator would cost more
        if name in resources and resources[name].wait_queue is not None:
            return True
    return False


def _overtakes(table: LockTable, new_request: Request) -> bool:
    """Return whether a new request is before another request in any queue."""
    for name in new_request.names():  # noqa: SIM110 - a generator would cost more
        if table.wait_queue(name).last != new_request.entry(name):
            return True
    return False


def is_in_cycle(table: LockTable, new_request: Request, overtakes: bool) -> bool:
    """Return whether the owner of a new request waits for itself transitively.

    `overtakes`: the new request is before others in a queue. If not, a cycle must contain an edge
    that starts at the new request, since there was no cycle before the request arrived.

    A forward and a backward search run in turn, one step each. The first search that ends without
    reaching the owner proves that there is no cycle. So few steps suffice for a request at the end
    of a long chain, and for an owner without waiters.
    """
    owner = new_request.owner
    first = successors(table, owner) if overtakes else request_successors(table, new_request)
    sides = (_search(table, owner, successors, first), _search(table, owner, predecessors, predecessors(table, owner)))
    while True:
        for side in sides:
            reached_owner = next(side, None)  # None: this search has followed all its edges
            if reached_owner is not False:
                return reached_owner is True


def _search(table: LockTable, start: Owner, neighbours: Neighbours, first: Iterator[Owner]) -> Iterator[bool]:
    """Search the graph depth first from `start`. `first` yields the neighbours of `start`.

    Yields after each edge, so that the caller can interrupt the search: True if the edge leads back to
    `start`, else False.
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


def strongly_connected_component(table: LockTable, start: Owner) -> list[Owner]:
    """Return the owners of the strongly connected component of `start`, `start` first.

    These are the owners that both wait for `start` and are waited for by `start`, transitively.
    """
    waiters: dict[Owner, list[Owner]] = {start: []}  # of each owner that `start` waits for
    stack = [start]
    while stack:
        owner = stack.pop()
        for other in successors(table, owner):
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
    return list(component)


def find_deadlock(table: LockTable, victim: Owner) -> Cycle | None:
    """Return the shortest cycle of hard edges through `victim` (a deadlock), or None if there is none.

    A hard edge leads from a waiting owner to the holder of a lock. A cycle of hard edges cannot be
    resolved by rearranging wait queues. The search is breadth first, so it finds a shortest cycle.
    """
    steps: dict[Owner, tuple[Owner, Wait]] = {}  # the edge by which each owner was reached, and its start
    searched: set[str] = set()
    queue = deque([victim])
    while queue:
        owner = queue.popleft()
        for request in table.waiting_of(owner).values():
            for name, exclusive in request.modes():
                for holder in _unsearched_holders(table, request, name, exclusive, victim, searched):
                    if holder.owner == victim:
                        last_wait = Wait(name, request.id, holder.id, request.shown_note, request.traceparent)
                        return _build_cycle(victim, steps, owner, last_wait)
                    if holder.owner not in steps:
                        wait = Wait(name, request.id, holder.id, request.shown_note, request.traceparent)
                        steps[holder.owner] = (owner, wait)
                        queue.append(holder.owner)
    return None


def _unsearched_holders(
    table: LockTable, request: Request, name: str, exclusive: bool, victim: Owner, searched: set[str]
) -> Iterator[Request]:
    """Yield the holders of `name` that block a waiting request, but yield all holders only once for each resource.

    Yielding them for each of n waiters would cost n·m steps for m holders. For later waiters of the
    resource, all holders are already visited, except `victim`, the target of the search: only requests
    of `victim` are yielded again.
    """
    if name not in searched:
        for holder in conflicting_holders(table, request, name, exclusive):
            searched.add(name)
            yield holder
    elif request.owner != victim and table.grant_count(victim, name):
        yield from (holder for holder in conflicting_holders(table, request, name, exclusive) if holder.owner == victim)


def _build_cycle(victim: Owner, steps: dict[Owner, tuple[Owner, Wait]], owner: Owner, last_wait: Wait) -> Cycle:
    """Return the cycle that `last_wait` closes: the edge from `owner` to `victim`.

    `steps` maps each owner to the previous owner on the search path, and to the edge between them.
    """
    owners, waits = [owner], [last_wait]
    while owner != victim:
        owner, wait = steps[owner]
        owners.append(owner)
        waits.append(wait)
    return Cycle(tuple(reversed(owners)), tuple(reversed(waits)))


# -- Queue rearrangement ---------------------------------------------------------------


def topological_ranks(table: LockTable, owners: Sequence[Owner]) -> dict[Owner, int]:
    """Return a rank for each owner of a component. In the queues, lower ranks are before higher ranks.

    The rank of an owner is greater than the ranks of all owners for which it waits by hard edges. Owners
    that this rule does not order keep their order in the queues. Ranks are assigned from the last to the
    first, as in PostgreSQL, so that as few requests as possible move back. There must be no cycle of hard
    edges.
    """
    members = set(owners)
    holders: dict[Owner, set[Owner]] = {}
    waiter_count = dict.fromkeys(owners, 0)  # owners without a rank that wait for this owner by a hard edge
    for owner in owners:
        holders[owner] = {
            holder.owner
            for request in table.waiting_of(owner).values()
            for name, exclusive in request.modes()
            for holder in conflicting_holders(table, request, name, exclusive)
            if holder.owner in members
        }
        for holding_owner in holders[owner]:
            waiter_count[holding_owner] += 1
    index = {owner: i for i, owner in enumerate(owners)}
    unblocking = [(*_reverse_queue_key(table, owner), index[owner]) for owner in owners if not waiter_count[owner]]
    heapify(unblocking)  # owners for which no owner without a rank waits; the last in queue order is the first
    ranks: dict[Owner, int] = {}
    while unblocking:
        owner = owners[heappop(unblocking)[-1]]
        ranks[owner] = len(owners) - len(ranks)
        for holding_owner in holders[owner]:
            waiter_count[holding_owner] -= 1
            if not waiter_count[holding_owner]:
                heappush(unblocking, (*_reverse_queue_key(table, holding_owner), index[holding_owner]))
    assert len(ranks) == len(owners), "a cycle of hard edges has no topological order"  # noqa: S101 - an invariant
    return ranks


def _reverse_queue_key(table: LockTable, owner: Owner) -> tuple[float, int]:
    """Return a key that sorts waiting owners by the earliest queue entry of their requests, in descending order."""
    first = min(request.entry(name)[:2] for request in table.waiting_of(owner).values() for name in request.names())
    return (-first[0], -first[1])


def rearranged_order(queue: WaitQueue, name: str, ranks: Mapping[Owner, int]) -> Sequence[Request] | None:
    """Return the requests of a queue ordered by the ranks of their owners, or None if the order does not change.

    `ranks` contains the owners of one component of the wait-for graph; only their requests move. A
    request of another owner (an outsider) is never between two conflicting requests of the
    component, because then its owner would also be in the component. So no outsider is between the
    first and the last exclusive request of the component. Outsiders between the component's shared
    requests are shared as well, and stay before or after these exclusive requests.
    """
    requests = [entry[2] for entry in queue.entries()]
    # All following lists contain positions in the queue.
    members = [i for i, request in enumerate(requests) if request.owner in ranks]
    exclusive = [i for i in members if name in requests[i].exclusive]
    if len(members) == 1 or not exclusive:
        return None
    outsiders = [i for i in range(members[0], members[-1]) if requests[i].owner not in ranks]
    shared = [i for i in members if name not in requests[i].exclusive]
    rank_of = {i: ranks[requests[i].owner] for i in members}
    exclusive.sort(key=lambda i: (rank_of[i], i))
    runs = _assign_runs(shared, exclusive, rank_of, outsiders)
    order = [i for run, last in zip_longest(runs, exclusive) for i in ([*run] if last is None else [*run, last])]
    if order == sorted(order):
        return None
    return [
        *requests[: members[0]],
        *(requests[i] for i in order),
        *requests[members[-1] + 1 :],
    ]


def _assign_runs(
    shared: list[int], exclusive: list[int], rank_of: Mapping[int, int], outsiders: list[int]
) -> list[list[int]]:
    """Distribute shared requests over runs: before, between and after the exclusive requests.

    All requests are given by their positions in the queue. A shared request goes after the exclusive
    requests of lower-ranked owners, and before the exclusive requests of higher-ranked owners. It
    does not conflict with the exclusive requests of its own owner: among them it goes where it swaps
    with the fewest requests. `outsiders`, requests of owners without a rank, stay before or after all
    exclusive requests. The requests within a run keep their order.
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
    chosen = [
        (min(range(low, high + 1), key=_swap_counter(i, low, high, exclusive, runs)), i)
        for i, low, high in of_same_owner
    ]
    for run, i in chosen:
        runs[run].append(i)
    return [sorted(run) for run in runs]


def _swap_counter(i: int, low: int, high: int, exclusive: list[int], runs: list[list[int]]) -> Callable[[int], int]:
    """Return a function that counts the swaps needed to put the shared request at position `i` into a run.

    The argument of the function is the index of the run, from `low` to `high`.
    """
    # Shared requests that swap with position `i` unless it joins their run: later ones in `low`, earlier ones in `high`.
    after_low = sum(j > i for j in runs[low])
    before_high = sum(j < i for j in runs[high])

    def count_swaps(run: int) -> int:
        return (
            (after_low if run > low else 0)
            + (before_high if run < high else 0)
            + sum(j > i for j in exclusive[low:run])
            + sum(j < i for j in exclusive[run:high])
        )

    return count_swaps
