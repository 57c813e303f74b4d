"""Deadlock detection in the wait-for graph, and queue rearrangement where it avoids a deadlock.

The nodes of the graph are owners. An owner waits for another if one of its waiting requests
conflicts with a lock that the other holds (a hard edge), or with a request of the other earlier in
the same queue (a soft edge). Only a new request can close a cycle; `README.md` beside this file
explains why. A cycle of hard edges is a deadlock; any other cycle is resolved by rearranging
queues, as in PostgreSQL's `deadlock.c`.

In a queue of n exclusive requests each waits for all earlier ones: n²/2 edges. It is enough to
follow the nearest ones, because the nearest earlier exclusive request itself waits for everything
before it. So a search is linear in what it reaches.
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

Neighbours = Callable[[LockTable, Owner], Iterator[Owner]]


def successors(table: LockTable, owner: Owner) -> Iterator[Owner]:
    """Yield owners that `owner` waits for: enough edges to reach all of them transitively.

    It may yield an owner twice, or `owner` itself.
    """
    for request in table.waiting_of(owner).values():
        yield from request_successors(table, request)


def request_successors(table: LockTable, request: Request) -> Iterator[Owner]:
    """Yield owners that one request waits for: enough edges to reach all of them transitively.

    The nearest earlier exclusive request itself waits for all requests and holders before it.
    """
    for name, exclusive in request.modes():
        queue = table.wait_queue(name)
        entry = request.entry(name)
        nearest = queue.exclusive.before(entry)
        if nearest is not None:
            yield nearest[2].owner  # an entry is (negated priority, ticket, request)
        else:
            for holder in conflicting_holders(table, request, name, exclusive):
                yield holder.owner
        if exclusive:
            for other in queue.shared.between(nearest, entry):
                yield other[2].owner


def predecessors(table: LockTable, owner: Owner) -> Iterator[Owner]:
    """Yield owners that wait for `owner`: enough edges to reach all of them transitively.

    It may yield an owner twice, or `owner` itself.
    """
    yield from _predecessors_of_grants(table, owner)
    for request in table.waiting_of(owner).values():
        for name, exclusive in request.modes():
            queue = table.wait_queue(name)
            entry = request.entry(name)
            nearest = queue.exclusive.after(entry)
            if nearest is not None:
                yield nearest[2].owner  # an entry is (negated priority, ticket, request)
            if exclusive:
                for other in queue.shared.between(entry, nearest):
                    yield other[2].owner


def _predecessors_of_grants(table: LockTable, owner: Owner) -> Iterator[Owner]:
    """Yield owners that wait for a lock that `owner` holds: enough to reach all of them transitively."""
    transaction = table.transactions.get(owner) if isinstance(owner, str) else None
    for name in transaction.grants if transaction is not None else ():
        resource = table.resources.get(name)
        if resource is not None and resource.wait_queue is not None:
            nearest = resource.wait_queue.exclusive.first
            if nearest is not None:
                yield nearest[2].owner  # an entry is (negated priority, ticket, request)
            if resource.exclusives:
                for other in resource.wait_queue.shared.between(None, nearest):
                    yield other[2].owner


def creates_cycle(table: LockTable, new_request: Request) -> bool:
    """Return whether a new request closed a cycle through its owner.

    That takes other owners that wait for its owner: because of what the owner already holds or
    waits for, or because the new request is before others in a queue. There is none if the request
    is simple and in a queue of simple requests only.
    """
    if new_request.simple and not table.wait_queue(new_request.names()[0]).non_simple_count:
        return False
    overtakes = _overtakes(table, new_request)
    return (overtakes or _may_have_waiters(table, new_request)) and is_in_cycle(table, new_request, overtakes)


def _may_have_waiters(table: LockTable, new_request: Request) -> bool:
    """Return whether others may wait for the owner of a new request because of its other requests."""
    if new_request.transaction is None:
        return False
    transaction, resources = table.transactions[new_request.transaction], table.resources
    if len(transaction.waiting) > 1:
        return True
    for name in transaction.grants:  # noqa: SIM110 - a generator would cost more
        if name in resources and resources[name].wait_queue is not None:
            return True
    return False


def _overtakes(table: LockTable, new_request: Request) -> bool:
    """Return whether a new request is before another one in any queue."""
    for name in new_request.names():  # noqa: SIM110 - as above
        if table.wait_queue(name).last != new_request.entry(name):
            return True
    return False


def is_in_cycle(table: LockTable, new_request: Request, overtakes: bool) -> bool:
    """Return whether the owner of a new request waits for itself transitively.

    `overtakes`: the new request is before others in a queue. If it is not, a cycle must start with
    an edge of this very request, since there was no cycle before it.

    The search runs forward and backward, one step of each in turn; the first that ends without
    meeting the owner proves that there is no cycle. So a request at the end of a long chain, or of
    an owner without waiters, takes few steps.
    """
    owner = new_request.owner
    first = successors(table, owner) if overtakes else request_successors(table, new_request)
    sides = (_search(table, owner, successors, first), _search(table, owner, predecessors, predecessors(table, owner)))
    while True:
        for side in sides:
            reached_owner = next(side, None)  # None: this side has searched everything
            if reached_owner is not False:
                return reached_owner is True


def _search(table: LockTable, start: Owner, neighbours: Neighbours, first: Iterator[Owner]) -> Iterator[bool]:
    """Search the graph from `start`, whose neighbours are `first`.

    Yields False for each edge followed, and True each time an edge leads to `start`.
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

    These are the owners that `start` waits for, and of them those that wait for `start`.
    """
    waiters: dict[Owner, list[Owner]] = {start: []}
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
    """Return the shortest cycle of hard edges through `victim`, or None if there is none.

    A hard edge leads from a waiting owner to the holder of a lock. So no order of the wait queues
    resolves such a cycle: it is a deadlock. The search is breadth first.
    """
    steps: dict[Owner, tuple[Owner, Wait]] = {}
    searched: set[str] = set()
    queue = deque([victim])
    while queue:
        owner = queue.popleft()
        for request in table.waiting_of(owner).values():
            for name, exclusive in request.modes():
                for holder in _unsearched_holders(table, request, name, exclusive, victim, searched):
                    if holder.owner == victim:
                        return _build_cycle(victim, steps, owner, Wait(name, request.id, holder.id, request.note))
                    if holder.owner not in steps:
                        steps[holder.owner] = (owner, Wait(name, request.id, holder.id, request.note))
                        queue.append(holder.owner)
    return None


def _unsearched_holders(
    table: LockTable, request: Request, name: str, exclusive: bool, victim: Owner, searched: set[str]
) -> Iterator[Request]:
    """Yield conflicting holders of `name`, for each resource once.

    Many waiters for many holders would otherwise cost their product. The first waiter visits all
    other holders and was itself visited before, so for later waiters only `victim`, which the
    search is for, may be missing.
    """
    if name not in searched:
        for holder in conflicting_holders(table, request, name, exclusive):
            searched.add(name)
            yield holder
    elif request.owner != victim and table.grant_count(victim, name):
        yield from (holder for holder in conflicting_holders(table, request, name, exclusive) if holder.owner == victim)


def _build_cycle(victim: Owner, steps: dict[Owner, tuple[Owner, Wait]], owner: Owner, last: Wait) -> Cycle:
    """Return the cycle that the edge `last`, from `owner` to `victim`, closes.

    `steps` maps each owner to the previous one of the search, with the edge that leads from it.
    """
    owners, waits = [owner], [last]
    while owner != victim:
        owner, wait = steps[owner]
        owners.append(owner)
        waits.append(wait)
    return Cycle(tuple(reversed(owners)), tuple(reversed(waits)))


# -- Queue rearrangement ---------------------------------------------------------------


def topological_ranks(table: LockTable, owners: Sequence[Owner]) -> dict[Owner, int]:
    """Number the owners of a component so that each comes after the owners it waits for by hard edges.

    Where this leaves a choice, they keep their order in the queues. Numbers are assigned from the
    last one down, as in PostgreSQL: requests that must overtake move forward, and no other moves
    back without need. There must be no cycle of hard edges.
    """
    members = set(owners)
    holders: dict[Owner, set[Owner]] = {}
    waiters = dict.fromkeys(owners, 0)
    for owner in owners:
        holders[owner] = {
            holder.owner
            for request in table.waiting_of(owner).values()
            for name, exclusive in request.modes()
            for holder in conflicting_holders(table, request, name, exclusive)
            if holder.owner in members
        }
        for holding_owner in holders[owner]:
            waiters[holding_owner] += 1
    index = {owner: i for i, owner in enumerate(owners)}
    unblocking = [(*_reverse_queue_key(table, owner), index[owner]) for owner in owners if not waiters[owner]]
    heapify(unblocking)  # owners without unranked waiters, the last one in queue order first
    ranks: dict[Owner, int] = {}
    while unblocking:
        owner = owners[heappop(unblocking)[-1]]
        ranks[owner] = len(owners) - len(ranks)
        for holding_owner in holders[owner]:
            waiters[holding_owner] -= 1
            if not waiters[holding_owner]:
                heappush(unblocking, (*_reverse_queue_key(table, holding_owner), index[holding_owner]))
    assert len(ranks) == len(owners), "a cycle of hard edges has no topological order"  # noqa: S101 - an invariant
    return ranks


def _reverse_queue_key(table: LockTable, owner: Owner) -> tuple[float, int]:
    """Return a sort key that orders waiting owners by the first queue entry of their requests, descending."""
    first = min(request.entry(name)[:2] for request in table.waiting_of(owner).values() for name in request.names())
    return (-first[0], -first[1])


def rearranged_order(queue: WaitQueue, name: str, ranks: Mapping[Owner, int]) -> Sequence[Request] | None:
    """Return the requests of a queue ordered by the ranks of their owners, or None if the order is the same.

    `ranks` has the owners of one component of the wait-for graph; only their requests move. A
    request of another owner is never between two conflicting ones of the component, or its owner
    would be in the component, too. So there is none between the first and the last exclusive
    request of the component. Before and after these, among the component's shared requests, there
    are only shared ones of other owners, which stay on their side.
    """
    requests = [entry[2] for entry in queue.entries()]
    members = [i for i, request in enumerate(requests) if request.owner in ranks]  # positions, as below
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
    """Distribute shared requests over the runs before, between and after the exclusive ones.

    All requests are given by their positions in the queue. A shared request goes after the
    exclusive requests of lower-ranked owners and before those of higher-ranked ones. Among the
    exclusive requests of its own owner, with which it does not conflict, it goes where it swaps
    with the fewest requests. A run keeps its order. `outsiders`, of other owners, stay on their side.
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
    """Return a function that counts the requests that the one at position `i` swaps with in a given run.

    The run is one of `low` to `high`.
    """
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
