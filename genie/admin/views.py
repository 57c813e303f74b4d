"""What stands in the tables, for people: read in slices, while the locks go on changing.

What is read in several slices is not of one moment. Whoever has gone meanwhile is left out.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from heapq import heappush, heappushpop
from importlib.metadata import version
from itertools import islice

from msgspec import UNSET

from genie.admin import models
from genie.admin.interfaces import Subject
from genie.admin.throttle import Pace
from genie.core import HELD, NEVER, WAITING, Blocker, Mode, Request, Wait
from genie.core.lock_table import LockTable
from genie.core.view import MAX_COUNTED_BLOCKERS, sample_blockers
from genie.observability.histogram import Histogram
from genie.observability.stats import Deadlock, Heat, Stats, hottest

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


async def queue_lines(table: LockTable, pace: Pace) -> tuple[list[models.Line], bool]:
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


async def still_waited(table: LockTable, now_unix_ms: float, pace: Pace) -> dict[str, float]:
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
                blockers, _, looked = sample_blockers(table, request, LOOKS, count=False)
                names, looked = {blocker.resource for blocker in blockers}, looked + NODE_WORK
            for name in names:
                waited[name] = waited.get(name, 0.0) + max(0.0, now_unix_ms - request.since_unix_ms)
        work += looked
        await pace.did(looked)
    return waited


def _length(table: LockTable, name: str) -> int:
    resource = table.resources.get(name)
    return 0 if resource is None or resource.wait_queue is None else len(resource.wait_queue)


def _line(table: LockTable, name: str, since: int) -> models.Line:
    resource = table.lookup(name)
    holders = {} if resource is None else resource.holders
    first = next(iter(holders.values()), None)
    return models.Line(
        resource=name,
        waiting=_length(table, name),
        holders=len(holders),
        since=since,
        holder=None if first is None else first.id,
        transaction_name=None if first is None else first.transaction,
    )


async def graph(table: LockTable, most: int, pace: Pace) -> models.Waits:
    """Who waits for whom: at most so many nodes."""
    nodes: dict[int, models.Node] = {}
    edges: list[models.Edge] = []
    for request in list(islice(table.waiting.values(), most)):
        if request.state is WAITING:
            node = _place(nodes, request, most)
            if node is None or len(edges) >= MOST_EDGES:
                break
            blockers, _, looked = sample_blockers(table, request, LOOKS, count=False)
            node.blockers_total = len(blockers)
            for blocker in blockers[: MOST_EDGES - len(edges)]:
                other = table.find(blocker.id)
                if other is not None and _place(nodes, other, most) is not None:
                    edges.append(_edge(request.id, blocker))
            await pace.did(looked + NODE_WORK * (1 + len(blockers)))
    waiting = sum(1 for node in nodes.values() if node.state == "queued")
    return models.Waits(
        nodes=list(nodes.values()), edges=edges, queue_total=max(waiting, len(table.waiting)), queue_shown=waiting
    )


def _place(nodes: dict[int, models.Node], request: Request, most: int) -> models.Node | None:
    """Its node, made where there is none yet; None where there is no room for it."""
    node = nodes.get(request.id)
    if node is None and len(nodes) < most:
        node = nodes[request.id] = models.Node(
            id=request.id,
            state="held" if request.state is HELD else "queued",
            since=int(request.since_unix_ms),
            transaction_name=UNSET if request.transaction is None else request.transaction,
            note=UNSET if request.note is None else request.note,
            resources=_names(request),
            resources_total=_many(request),
        )
    return node


def _edge(waiter: int, blocker: Blocker) -> models.Edge:
    return models.Edge(
        waiter=waiter,
        blocker=blocker.id,
        resource=blocker.resource,
        mode=blocker.mode,
        state="held" if blocker.held else "queued",
        since=blocker.since_unix_ms,
    )


async def resource(table: LockTable, name: str, now: float, pace: Pace) -> models.Resource:
    """Who holds a resource, and its line in order; `now` is the lock manager's time."""
    found = table.lookup(name)
    if found is None:
        return models.Resource(resource=name, holders=[], holders_total=0, queue=[], queue_total=0)
    holders = list(islice(found.holders.values(), ROWS))
    line = [] if found.wait_queue is None else [entry[2] for entry in islice(found.wait_queue, ROWS)]
    holders_total, queue_total = len(found.holders), _length(table, name)
    told = models.Resource(resource=name, holders=[], holders_total=holders_total, queue=[], queue_total=queue_total)
    for request in holders:
        if request.state is HELD:
            told.holders.append(_row(request, now))
        await pace.did(NODE_WORK)
    for request in line:
        if request.state is WAITING:
            blockers, total, looked = sample_blockers(table, request, MAX_COUNTED_BLOCKERS, count=True)
            row = _row(request, now)
            row.blockers, row.blockers_total = [_blocker(blocker) for blocker in blockers], total
            told.queue.append(row)
            await pace.did(looked // 4 + NODE_WORK * (1 + len(blockers)))
    return told


def _row(request: Request, now: float) -> models.Row:
    return models.Row(
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


def _blocker(blocker: Blocker) -> models.Blocker:
    return models.Blocker(
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
        f"{Mode.EXCLUSIVE if exclusive else Mode.SHARED}:{name}" for name, exclusive in islice(request.modes(), NAMES)
    ]


def _many(request: Request) -> int:
    return len(request.exclusive) + len(request.shared)


# -- `/api/state`, `/api/hot`, `/api/deadlocks`: made from what a server counts --------

AT_ONCE = 250
"""Hot resources that are compared in one go."""
STEPS = 1_000
"""Steps of one cycle that are told."""
_VERSION = version("genie-lock")
_BEGAN = time.monotonic()


async def state(subject: Subject, namespace: str, pace: Pace) -> models.State:
    """The server at a glance, as to one namespace. One that doesn't lead it has no locks."""
    view = subject.namespaces[namespace]
    manager, stats = view.manager, view.stats
    table = LockTable() if manager is None else manager.table
    lines, complete = await queue_lines(table, pace)
    first = next(iter(table.waiting.values()), None)
    now, speed = time.time() * 1000, stats.recent.speed()
    return models.State(
        version=_VERSION,
        namespace=namespace,
        namespaces=[
            models.Namespace(namespace=name, role=other.role, leader=other.leader)
            for name, other in subject.namespaces.items()
        ],
        role=view.role,
        leader=view.leader,
        now=int(now),
        uptime=int((time.monotonic() - _BEGAN) * 1000),
        store="memory" if subject.settings.redis.url is None else "redis",
        store_reached=view.store_available,
        store_errors=view.store_errors,
        held=len(table.held),
        waiting=len(table.waiting),
        locks=table.locks,
        resources=len(table.uncontended) + len(table.resources),
        connections=len(subject.connections),
        sessions=view.sessions,
        rates=models.Rates(
            grants=speed.grants,
            releases=speed.releases,
            waits=speed.waits,
            timeouts=speed.timeouts,
            deadlocks=speed.deadlocks,
            errors=speed.errors,
        ),
        wait_p50=stats.recent.wait_quantile(0.5),
        wait_p99=stats.recent.wait_quantile(0.99),
        longest_wait=0 if first is None else max(0, int(now - first.since_unix_ms)),
        outcomes=stats.outcomes,
        errors=dict(stats.errors),
        deadlocks=stats.deadlocked,
        reorderings=stats.reorderings + (0 if manager is None else manager.rearrangements),
        waits=_count(stats.waits),
        holds=_count(stats.holds),
        commits=_count(stats.commits),
        lag=_count(subject.stats.lag),
        lines=lines,
        lines_complete=complete,
    )


def _count(histogram: Histogram) -> models.Count:
    return models.Count(bounds=list(histogram.bounds), counts=list(histogram.counts), total=histogram.total)


async def hot(stats: Stats, table: LockTable, limit: int, pace: Pace) -> models.HotList:
    """So many of the hottest resources: by the waits that have ended lately, and by those that go on."""
    going = await still_waited(table, time.time() * 1000, pace)
    found, best = _together(stats.hot.found(), going), list[tuple[str, Heat]]()
    while more := list(islice(found, AT_ONCE)):
        best = hottest([*best, *more], limit)
        await pace.did(2 * len(more))
    return models.HotList(resources=[_hot(table, name, heat) for name, heat in best])


def _together(found: Iterator[tuple[str, Heat]], going: dict[str, float]) -> Iterator[tuple[str, Heat]]:
    """Each resource once, with the time (ms) of the waits that go on."""
    for name, heat in found:
        yield name, Heat(heat.collisions, heat.waited_ms + going.pop(name, 0.0))
    for name, waited_ms in going.items():
        yield name, Heat(0, waited_ms)


def _hot(table: LockTable, name: str, heat: Heat) -> models.HotResource:
    resource = table.lookup(name)
    return models.HotResource(
        resource=name,
        waited=heat.waited_ms,
        collisions=heat.collisions,
        waiting=0 if resource is None or resource.wait_queue is None else len(resource.wait_queue),
        holders=0 if resource is None else len(resource.holders),
    )


async def deadlocks(stats: Stats, limit: int, pace: Pace) -> models.Deadlocks:
    """So many of the latest deadlocks."""
    rows = []
    for deadlock in list(stats.deadlocks)[: -limit - 1 : -1]:
        rows.append(_deadlock(deadlock))
        await pace.did(NODE_WORK + len(rows[-1].waits))
    return models.Deadlocks(deadlocks=rows, total=stats.deadlocked)


def _deadlock(deadlock: Deadlock) -> models.DeadlockRow:
    waits = deadlock.cycle.waits
    return models.DeadlockRow(
        at=int(deadlock.at_unix_ms),
        id=deadlock.id,
        transaction_name=deadlock.transaction,
        cycle=[str(owner) for owner in deadlock.cycle.owners[:STEPS]],
        waits=[_step(wait) for wait in waits[:STEPS]],
        steps_total=len(waits),
    )


def _step(wait: Wait) -> models.Step:
    note = UNSET if wait.note is None else wait.note
    return models.Step(resource=wait.resource, waiter=wait.waiter, holder=wait.holder, note=note)
