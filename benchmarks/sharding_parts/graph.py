"""Who waits for whom, as a shard shows it to others: pairs of owners, and whether only the order of a queue makes it."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.sharding_parts.world import Shard
from genie.core import LockManager, Request

Graph = dict[str, dict[str, bool]]
"""The owners whom an owner waits for; True where one of these holds what it waits for."""


def waits_of(manager: LockManager) -> Graph:
    """All waits of one shard, of owners that are transactions."""
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
    """One graph of several."""
    whole: Graph = {}
    for graph in graphs:
        for owner, others in graph.items():
            waits = whole.setdefault(owner, {})
            for other, hard in others.items():
                waits[other] = waits.get(other, False) or hard
    return whole


def truth(shards: Iterable[Shard]) -> Graph:
    """What is so at this moment. Only a model can know it: no message shows two shards at one moment."""
    return merged(waits_of(shard.manager) for shard in shards)


def cycle(graph: Graph, start: str, *, hard_only: bool = False) -> list[str] | None:
    """The shortest cycle through an owner, from it on, or None."""
    came: dict[str, str] = {}
    row = [start]
    while row:
        following: list[str] = []
        for owner in row:
            for other, hard in graph.get(owner, {}).items():
                if hard_only and not hard:
                    continue
                if other == start:
                    return _back(came, start, owner)
                if other not in came:
                    came[other] = owner
                    following.append(other)
        row = following
    return None


def _back(came: dict[str, str], start: str, owner: str) -> list[str]:
    found = [owner]
    while owner != start:
        owner = came[owner]
        found.append(owner)
    return found[::-1]
