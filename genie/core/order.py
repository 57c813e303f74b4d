"""Another order for the queue, where the one it has closes a cycle of waits and held locks alone do not.

Two steps. First the owners of the cycle get an order in which everyone stands behind those whose locks they wait for.
Then, in each line, the conflicting requests of these owners follow that order. Everything else stays.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import zip_longest

from genie.core.model import Owner, Request
from genie.core.resource import Line
from genie.core.rule import conflicts
from genie.core.table import Table


def rank(table: Table, owners: Sequence[Owner]) -> dict[Owner, int]:
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
            for name, exclusive in request.wants()
            for holder in conflicts(table, request, name, exclusive)
            if holder.owner in members
        }
        for holder_ in holders[owner]:
            waiters[holder_] += 1
    number = {owner: i for i, owner in enumerate(owners)}
    last_first = [(*_backward(table, owner), number[owner]) for owner in owners if not waiters[owner]]
    heapify(last_first)
    ranks: dict[Owner, int] = {}
    while last_first:
        owner = owners[heappop(last_first)[-1]]
        ranks[owner] = len(owners) - len(ranks)
        for holder_ in holders[owner]:
            waiters[holder_] -= 1
            if not waiters[holder_]:
                heappush(last_first, (*_backward(table, holder_), number[holder_]))
    assert len(ranks) == len(owners), "a cycle of held locks has no order"  # noqa: S101 - an invariant
    return ranks


def _backward(table: Table, owner: Owner) -> tuple[float, int]:
    """Sorts owners by the foremost place of their requests, the last first. Everyone in a cycle waits."""
    place = min(request.entry(name)[:2] for request in table.waiting_of(owner).values() for name in request.names())
    return (-place[0], -place[1])


def reorder(line: Line, name: str, ranks: Mapping[Owner, int]) -> Sequence[Request] | None:
    """The order in which a line should stand, or None where it stands so already.

    Why the pieces below are all there is: a request of an owner outside the cycle never stands between two inside
    that it conflicts with, or it would be in the cycle, too. So between the first and the last exclusive one of the
    cycle there is nobody else; and around them, among the cycle's shared requests, only others' shared ones, which
    stay on their side.
    """
    requests = [entry[2] for entry in line.entries()]
    inside = [i for i, request in enumerate(requests) if request.owner in ranks]
    exclusive = [i for i in inside if name in requests[i].exclusive]
    if len(inside) == 1 or not exclusive:
        return None
    others = [i for i in range(inside[0], inside[-1]) if requests[i].owner not in ranks]
    sharing = [i for i in inside if name not in requests[i].exclusive]
    level = {i: ranks[requests[i].owner] for i in inside}
    exclusive.sort(key=lambda i: (level[i], i))
    runs = _runs(sharing, exclusive, level, others)
    order = [i for run, last in zip_longest(runs, exclusive) for i in ([*run] if last is None else [*run, last])]
    if order == sorted(order):
        return None
    return [
        *requests[: inside[0]],
        *(requests[i] for i in order),
        *requests[inside[-1] + 1 :],
    ]


def _runs(sharing: list[int], exclusive: list[int], level: Mapping[int, int], others: list[int]) -> list[list[int]]:
    """Deal the shared ones out to the runs before, between and behind the exclusive ones.

    Each goes behind the exclusive ones of lower owners and ahead of those of higher ones. Among those of its own owner,
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
    chosen = [(min(range(low, high + 1), key=_swaps(i, low, high, exclusive, runs)), i) for i, low, high in loose]
    for run, i in chosen:
        runs[run].append(i)
    return [sorted(run) for run in runs]


def _swaps(i: int, low: int, high: int, exclusive: list[int], runs: list[list[int]]) -> Callable[[int], int]:
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
