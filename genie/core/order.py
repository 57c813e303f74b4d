"""Another order for the queue, where the one it has closes a cycle of waits and held locks alone do not.

Two steps. First the owners of the cycle get an order in which everyone stands behind those whose locks they wait for.
Then, in each line, the conflicting requests of these owners follow that order. Everything else stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush, merge

from genie.core.model import Owner, Request
from genie.core.resource import Line
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
            for holder in table.conflicts(request, name, exclusive)
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
    runs = _runs(sorted(inside, key=lambda i: (ranks[requests[i].owner], i)), set(exclusive))
    runs[0] = list(merge(runs[0], (i for i in others if i < exclusive[0])))
    runs[-1] = list(merge(runs[-1], (i for i in others if i > exclusive[0])))
    order = [i for run in runs for i in run]
    if order == sorted(order):
        return None
    return [
        *requests[: inside[0]],
        *(requests[i] for i in order),
        *requests[inside[-1] + 1 :],
    ]


def _runs(order: Iterable[int], exclusive: set[int]) -> list[list[int]]:
    """Cut an order into shared runs with the exclusive ones between; a run, having no conflict, keeps its old order.

    The first and the last are shared runs, maybe empty.
    """
    runs: list[list[int]] = [[]]
    for i in order:
        if i in exclusive:
            runs += [[i], []]
        else:
            runs[-1].append(i)
    return [sorted(run) for run in runs]
