"""Wait-for graphs of shards: edges between transactions, each a hard one (to a holder) or a soft
one (to the order of a queue).
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.sharding_parts.world import Shard
from genie.core import LockManager, Request

Graph = dict[str, dict[str, bool]]
"""For each waiting owner its blockers; True if a blocker holds a lock that it waits for (a hard
edge).
"""


def waits_of(manager: LockManager) -> Graph:
    """Return the wait-for graph of one shard, for owners that are transactions."""
    graph: Graph = {}
    table = manager.table
    for request in table.waiting.values():
        for name, exclusive in request.modes():
            resource = table.resources[name]
            for holder in resource.holders.values():
                _add(graph, request, holder, name, exclusive, hard=True)
            for entry in resource.wait_queue or ():
                if entry[2] is request:
                    break
                _add(graph, request, entry[2], name, exclusive, hard=False)
    return graph


def _add(graph: Graph, request: Request, other: Request, name: str, exclusive: bool, *, hard: bool) -> None:
    if other.owner != request.owner and (exclusive or other.is_exclusive(name)):
        waits = graph.setdefault(str(request.owner), {})
        waits[str(other.owner)] = waits.get(str(other.owner), False) or hard


def merged(graphs: Iterable[Graph]) -> Graph:
    """Merge the graphs of several shards."""
    whole: Graph = {}
    for graph in graphs:
        for owner, others in graph.items():
            waits = whole.setdefault(owner, {})
            for other, hard in others.items():
                waits[other] = waits.get(other, False) or hard
    return whole


def truth(shards: Iterable[Shard]) -> Graph:
    """Return the graph of all shards at one point in time. Only a simulation can know it: messages
    show shards at different times.
    """
    return merged(waits_of(shard.manager) for shard in shards)


def cycle(graph: Graph, start: str, *, hard_only: bool = False) -> list[str] | None:
    """Return the shortest cycle that begins with an owner, or None."""
    predecessors: dict[str, str] = {}
    row = [start]
    while row:
        following: list[str] = []
        for owner in row:
            for other, hard in graph.get(owner, {}).items():
                if hard_only and not hard:
                    continue
                if other == start:
                    return _back(predecessors, start, owner)
                if other not in predecessors:
                    predecessors[other] = owner
                    following.append(other)
        row = following
    return None


def _back(predecessors: dict[str, str], start: str, owner: str) -> list[str]:
    found = [owner]
    while owner != start:
        owner = predecessors[owner]
        found.append(owner)
    return found[::-1]
