"""What stands in the tables, for people: read in slices, while the locks go on changing.

What is read in several slices is not of one moment. Whoever has gone meanwhile is left out.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappush, heappushpop
from itertools import islice

from msgspec import UNSET

from genie.admin import answers
from genie.admin.pace import Pace
from genie.core import HELD, NEVER, WAITING, Blocker, Mode, Request
from genie.core.blame import COUNTED, glance
from genie.core.table import Table

LOOKED_AT = 10_000
"""Waiting requests that are looked at for the longest lines: those that have waited longest."""
PLACES = 50_000
"""Their places in lines that are looked at."""
LINES = 20
NAMES = 10
"""Resources of one request that are told."""
MOST_EDGES = 4_000
LOOKS = 300
"""At how many is looked for those in the way of one node."""
ROWS = 100
"""Holders of a resource that are told, and places of its line."""
LENGTH_WORK = 5
"""What it takes to know how long a line is, in looks."""
NODE_WORK = 10
"""What it takes to make one, in looks."""


async def lines(table: Table, pace: Pace) -> tuple[list[answers.Line], bool]:
    """The longest lines in which those stand that came first, and whether that is everybody."""
    requests = list(islice(table.waiting.values(), LOOKED_AT))
    complete, places = len(requests) == len(table.waiting), 0
    since: dict[str, int] = {}
    for request in requests:
        if places >= PLACES:
            complete = False
            break
        if request.state is WAITING:
            names = request.names()
            places += len(names)
            for name in names:
                since.setdefault(name, int(request.since_unix_ms))
        await pace.did(len(names) if request.state is WAITING else 1)
    longest: list[tuple[int, int, str]] = []
    for name, came in since.items():
        length = _length(table, name)
        if length:
            (heappush if len(longest) < LINES else heappushpop)(longest, (length, -came, name))
        await pace.did(LENGTH_WORK)
    await pace.pause()
    found = [_line(table, name, -came) for _, came, name in sorted(longest, reverse=True)]
    return [line for line in found if line.waiting], complete


async def still_waited(table: Table, now_unix_ms: float, pace: Pace) -> dict[str, float]:
    """How long has been waited (ms) for the resources in the way of those that came first, by all of them together.

    Of a request for several it is those of the first ten that are in its way.
    """
    waited: dict[str, float] = {}
    work = 0
    for request in list(islice(table.waiting.values(), LOOKED_AT)):
        if work >= PLACES:
            break
        looked = 1
        if request.state is WAITING:
            names: Collection[str] = request.names()
            if len(names) > 1:
                blockers, _, looked = glance(table, request, LOOKS, count=False)
                names, looked = {blocker.resource for blocker in blockers}, looked + NODE_WORK
            for name in names:
                waited[name] = waited.get(name, 0.0) + max(0.0, now_unix_ms - request.since_unix_ms)
        work += looked
        await pace.did(looked)
    return waited


def _length(table: Table, name: str) -> int:
    resource = table.resources.get(name)
    return 0 if resource is None or resource.line is None else len(resource.line)


def _line(table: Table, name: str, since: int) -> answers.Line:
    resource = table.look(name)
    holders = {} if resource is None else resource.holders
    first = next(iter(holders.values()), None)
    return answers.Line(
        resource=name,
        waiting=_length(table, name),
        holders=len(holders),
        since=since,
        holder=None if first is None else first.id,
        transaction_name=None if first is None else first.transaction,
    )


async def graph(table: Table, most: int, pace: Pace) -> answers.Waits:
    """Who waits for whom: at most so many nodes."""
    nodes: dict[int, answers.Node] = {}
    edges: list[answers.Edge] = []
    for request in list(islice(table.waiting.values(), most)):
        if request.state is WAITING:
            node = _place(nodes, request, most)
            if node is None or len(edges) >= MOST_EDGES:
                break
            blockers, _, looked = glance(table, request, LOOKS, count=False)
            node.blockers_total = len(blockers)
            for blocker in blockers[: MOST_EDGES - len(edges)]:
                other = table.find(blocker.id)
                if other is not None and _place(nodes, other, most) is not None:
                    edges.append(_edge(request.id, blocker))
            await pace.did(looked + NODE_WORK * (1 + len(blockers)))
    waiting = sum(1 for node in nodes.values() if node.state == "queued")
    return answers.Waits(
        nodes=list(nodes.values()), edges=edges, queue_total=max(waiting, len(table.waiting)), queue_shown=waiting
    )


def _place(nodes: dict[int, answers.Node], request: Request, most: int) -> answers.Node | None:
    """Its node, made where there is none yet; None where there is no room for it."""
    node = nodes.get(request.id)
    if node is None and len(nodes) < most:
        node = nodes[request.id] = answers.Node(
            id=request.id,
            state="held" if request.state is HELD else "queued",
            since=int(request.since_unix_ms),
            transaction_name=UNSET if request.transaction is None else request.transaction,
            note=UNSET if request.note is None else request.note,
            resources=_names(request),
            resources_total=_many(request),
        )
    return node


def _edge(waiter: int, blocker: Blocker) -> answers.Edge:
    return answers.Edge(
        waiter=waiter,
        blocker=blocker.id,
        resource=blocker.resource,
        mode=blocker.mode,
        state="held" if blocker.held else "queued",
        since=blocker.since_unix_ms,
    )


async def resource(table: Table, name: str, now: float, pace: Pace) -> answers.Resource:
    """Who holds a resource, and its line in order; `now` is the lock manager's time."""
    found = table.look(name)
    if found is None:
        return answers.Resource(resource=name, holders=[], holders_total=0, queue=[], queue_total=0)
    holders = list(islice(found.holders.values(), ROWS))
    line = [] if found.line is None else [entry[2] for entry in islice(found.line, ROWS)]
    holders_total, queue_total = len(found.holders), _length(table, name)
    told = answers.Resource(resource=name, holders=[], holders_total=holders_total, queue=[], queue_total=queue_total)
    for request in holders:
        if request.state is HELD:
            told.holders.append(_row(request, now))
        await pace.did(NODE_WORK)
    for request in line:
        if request.state is WAITING:
            blockers, total, looked = glance(table, request, COUNTED, count=True)
            row = _row(request, now)
            row.blockers, row.blockers_total = [_blocker(blocker) for blocker in blockers], total
            told.queue.append(row)
            await pace.did(looked // 4 + NODE_WORK * (1 + len(blockers)))
    return told


def _row(request: Request, now: float) -> answers.Row:
    return answers.Row(
        id=request.id,
        resources=_names(request),
        resources_total=_many(request),
        priority=request.priority,
        since=int(request.since_unix_ms),
        expires_in=UNSET if request.deadline >= NEVER else max(0.0, request.deadline - now),
        transaction_name=UNSET if request.transaction is None else request.transaction,
        note=UNSET if request.note is None else request.note,
        fence=request.fence or UNSET,
    )


def _blocker(blocker: Blocker) -> answers.Blocker:
    return answers.Blocker(
        id=blocker.id,
        resource=blocker.resource,
        mode=blocker.mode,
        state="held" if blocker.held else "queued",
        since=blocker.since_unix_ms,
        transaction_name=UNSET if blocker.transaction is None else blocker.transaction,
        note=UNSET if blocker.note is None else blocker.note,
    )


def _names(request: Request) -> list[str]:
    return [
        f"{Mode.EXCLUSIVE if exclusive else Mode.SHARED}:{name}" for name, exclusive in islice(request.wants(), NAMES)
    ]


def _many(request: Request) -> int:
    return len(request.exclusive) + len(request.shared)
