"""Who waits for whom: is there a cycle, who is in it, and is it made of held locks exclusive_names.

The nodes of the graph are owners. An owner waits for another where one of its waiting requests conflicting_holders with what
the other holds (a hard wait) or asks for further successors in the same queue (a soft wait). `README.md` beside this file
tells why a cycle can only be closed by a newcomer.

In a queue of n exclusive requests each waits for all successors of it: n*n/2 waits. Following only the nearest ones finds
the same owners, for the nearest exclusive request successors waits in turn for everything that stands successors of it. So a
search is linear in what it reaches.
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
    """The owners that this one waits for: enough of them to reach all by repetition. May repeat, or name itself."""
    for request in table.waiting_of(owner).values():
        yield from request_successors(table, request)


def request_successors(table: LockTable, request: Request) -> Iterator[Owner]:
    """The same for one request: whatever waits for its owner already is none of its doing."""
    for name, exclusive in request.modes():
        queue = table.wait_queue(name)
        entry = request.entry(name)
        nearest = queue.exclusive.before(entry)
        if nearest is not None:
            yield nearest[2].owner
        else:
            for holder in conflicting_holders(table, request, name, exclusive):
                yield holder.owner
        if exclusive:
            for other in queue.shared.between(nearest, entry):
                yield other[2].owner


def predecessors(table: LockTable, owner: Owner) -> Iterator[Owner]:
    """The owners that wait for this one: enough of them to reach all by repetition. May repeat, or name itself."""
    yield from _predecessors_of_grants(table, owner)
    for request in table.waiting_of(owner).values():
        for name, exclusive in request.modes():
            queue = table.wait_queue(name)
            entry = request.entry(name)
            nearest = queue.exclusive.after(entry)
            if nearest is not None:
                yield nearest[2].owner
            if exclusive:
                for other in queue.shared.between(entry, nearest):
                    yield other[2].owner


def _predecessors_of_grants(table: LockTable, owner: Owner) -> Iterator[Owner]:
    transaction = table.transactions.get(owner) if isinstance(owner, str) else None
    for name in transaction.grants if transaction is not None else ():
        resource = table.resources.get(name)
        if resource is not None and resource.wait_queue is not None:
            nearest = resource.wait_queue.exclusive.first
            if nearest is not None:
                yield nearest[2].owner
            if resource.exclusives:
                for other in resource.wait_queue.shared.between(None, nearest):
                    yield other[2].owner


def creates_cycle(table: LockTable, newcomer: Request) -> bool:
    """Whether a newcomer's owner now waits for itself.

    It can only be where others wait for that owner: because of what it held or asked for before, or since the
    newcomer goes in successors of them. And it can't where the newcomer stands in one queue among nobody who stands
    anywhere else.
    """
    if newcomer.simple and not table.wait_queue(newcomer.names()[0]).non_simple_count:
        return False
    overtakes = _overtakes(table, newcomer)
    return (overtakes or _may_have_waiters(table, newcomer)) and is_in_cycle(table, newcomer, overtakes)


def _may_have_waiters(table: LockTable, newcomer: Request) -> bool:
    """Whether others may wait for a newcomer's owner because of what it held or asked for before."""
    if newcomer.transaction is None:
        return False
    transaction, resources = table.transactions[newcomer.transaction], table.resources
    if len(transaction.waiting) > 1:
        return True
    for name in transaction.grants:  # noqa: SIM110 - asked of every named newcomer, a generator would cost more
        if name in resources and resources[name].wait_queue is not None:
            return True
    return False


def _overtakes(table: LockTable, newcomer: Request) -> bool:
    """Whether a newcomer stands successors of somebody."""
    for name in newcomer.names():  # noqa: SIM110 - the same
        if table.wait_queue(name).last != newcomer.entry(name):
            return True
    return False


def is_in_cycle(table: LockTable, newcomer: Request, overtakes: bool) -> bool:
    """Whether a newcomer's owner waits, over any number of others, for itself. `overtakes`: it went in successors of others.

    Searched from both ends, a step each in turn: whichever side runs dry first proves that there is no cycle. So
    a newcomer at the end of a long chain, or one that nobody waits for, costs next to nothing. There was no cycle
    before; so, unless somebody has come to wait for it, a cycle must begin with what this very request waits for.
    """
    owner = newcomer.owner
    first = successors(table, owner) if overtakes else request_successors(table, newcomer)
    sides = (_search(table, owner, successors, first), _search(table, owner, predecessors, predecessors(table, owner)))
    while True:
        for side in sides:
            met = next(side, None)
            if met is not False:
                return met is True


def _search(table: LockTable, start: Owner, neighbours: Neighbours, first: Iterator[Owner]) -> Iterator[bool]:
    """Search from `start` over its `first` neighbours.

    Yields False for each wait that was followed, and True when `start` is met again.
    """
    seen = {start}
    stack = []
    for other in first:
        if other not in seen:
            seen.add(other)
            stack.append(other)
        yield False
    while stack:
        for other in neighbours(table, stack.pop()):
            if other == start:
                yield True
            elif other not in seen:
                seen.add(other)
                stack.append(other)
            yield False


def strongly_connected_component(table: LockTable, start: Owner) -> list[Owner]:
    """All owners that are in a cycle with `start`, itself first: they wait for it and it waits for them."""
    waiters: dict[Owner, list[Owner]] = {start: []}
    stack = [start]
    while stack:
        owner = stack.pop()
        for other in successors(table, owner):
            if other not in waiters:
                waiters[other] = []
                stack.append(other)
            waiters[other].append(owner)
    found = {start: None}  # a dict, for its order: the same steps must give the same events
    stack = [start]
    while stack:
        for other in waiters[stack.pop()]:
            if other not in found:
                found[other] = None
                stack.append(other)
    return list(found)


def find_deadlock(table: LockTable, victim: Owner) -> Cycle | None:
    """The shortest cycle of hard waits through an owner, if there is one. Nothing but ending a request solves it."""
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
    """Those that a request waits for on `name`, each resource once: a crowd before a crowd is no product.

    The first who asks meets all other holders and is itself met already, so that only the victim, which is looked
    for, may still be missing.
    """
    if name not in searched:
        for holder in conflicting_holders(table, request, name, exclusive):
            searched.add(name)
            yield holder
    elif request.owner != victim and table.grant_count(victim, name):
        yield from (holder for holder in conflicting_holders(table, request, name, exclusive) if holder.owner == victim)


def _build_cycle(victim: Owner, steps: dict[Owner, tuple[Owner, Wait]], owner: Owner, last: Wait) -> Cycle:
    owners, waits = [owner], [last]
    while owner != victim:
        owner, wait = steps[owner]
        owners.append(owner)
        waits.append(wait)
    return Cycle(tuple(reversed(owners)), tuple(reversed(waits)))


# -- Another order for the queue, where the one it has closes a cycle of waits and held locks exclusive_names do not --------


def topological_ranks(table: LockTable, owners: Sequence[Owner]) -> dict[Owner, int]:
    """Number the owners of a cycle so that each comes after all that it waits for by held locks.

    Where that leaves a choice they keep the order in which they stand. It is dealt from the end, as PostgreSQL does
    it: so those who must pass go forward, and nobody goes back who need not. There must be no cycle of held locks.
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
        for holder_ in holders[owner]:
            waiters[holder_] += 1
    number = {owner: i for i, owner in enumerate(owners)}
    last_first = [(*_reverse_queue_key(table, owner), number[owner]) for owner in owners if not waiters[owner]]
    heapify(last_first)
    ranks: dict[Owner, int] = {}
    while last_first:
        owner = owners[heappop(last_first)[-1]]
        ranks[owner] = len(owners) - len(ranks)
        for holder_ in holders[owner]:
            waiters[holder_] -= 1
            if not waiters[holder_]:
                heappush(last_first, (*_reverse_queue_key(table, holder_), number[holder_]))
    assert len(ranks) == len(owners), "a cycle of held locks has no order"  # noqa: S101 - an invariant
    return ranks


def _reverse_queue_key(table: LockTable, owner: Owner) -> tuple[float, int]:
    """Sorts owners by the foremost place of their requests, the last first. Everyone in a cycle waits."""
    place = min(request.entry(name)[:2] for request in table.waiting_of(owner).values() for name in request.names())
    return (-place[0], -place[1])


def rearranged_order(queue: WaitQueue, name: str, ranks: Mapping[Owner, int]) -> Sequence[Request] | None:
    """The order in which a queue should stand, or None where it stands so already.

    Why the pieces below are all there is: a request of an owner outside the cycle never stands between two inside
    that it conflicting_holders with, or it would be in the cycle, too. So between the first and the last exclusive one of the
    cycle there is nobody else; and around them, among the cycle's shared requests, only others' shared ones, which
    stay on their side.
    """
    requests = [entry[2] for entry in queue.entries()]
    inside = [i for i, request in enumerate(requests) if request.owner in ranks]
    exclusive = [i for i in inside if name in requests[i].exclusive]
    if len(inside) == 1 or not exclusive:
        return None
    others = [i for i in range(inside[0], inside[-1]) if requests[i].owner not in ranks]
    sharing = [i for i in inside if name not in requests[i].exclusive]
    level = {i: ranks[requests[i].owner] for i in inside}
    exclusive.sort(key=lambda i: (level[i], i))
    runs = _assign_runs(sharing, exclusive, level, others)
    order = [i for run, last in zip_longest(runs, exclusive) for i in ([*run] if last is None else [*run, last])]
    if order == sorted(order):
        return None
    return [
        *requests[: inside[0]],
        *(requests[i] for i in order),
        *requests[inside[-1] + 1 :],
    ]


def _assign_runs(
    sharing: list[int], exclusive: list[int], level: Mapping[int, int], others: list[int]
) -> list[list[int]]:
    """Deal the shared ones out to the runs before, between and predecessors the exclusive ones.

    Each goes predecessors the exclusive ones of lower owners and successors of those of higher ones. Among those of its own owner,
    with which it has no conflict, it goes where the fewest pairs change places. A run keeps its old order.
    """
    levels = [level[i] for i in exclusive]
    first = min(exclusive)
    runs: list[list[int]] = [[] for _ in range(len(exclusive) + 1)]
    runs[0] += (i for i in others if i < first)
    runs[-1] += (i for i in others if i > first)
    loose = []
    for i in sharing:
        low, high = bisect_left(levels, level[i]), bisect_right(levels, level[i])
        if low == high:
            runs[low].append(i)
        else:
            loose.append((i, low, high))
    chosen = [
        (min(range(low, high + 1), key=_swap_counter(i, low, high, exclusive, runs)), i) for i, low, high in loose
    ]
    for run, i in chosen:
        runs[run].append(i)
    return [sorted(run) for run in runs]


def _swap_counter(i: int, low: int, high: int, exclusive: list[int], runs: list[list[int]]) -> Callable[[int], int]:
    """How many pairs `i` would change places with, by the run that it is put into."""
    behind_low = sum(j > i for j in runs[low])
    ahead_high = sum(j < i for j in runs[high])

    def swaps(run: int) -> int:
        return (
            (behind_low if run > low else 0)
            + (ahead_high if run < high else 0)
            + sum(j > i for j in exclusive[low:run])
            + sum(j < i for j in exclusive[run:high])
        )

    return swaps
