"""Build the responses of the API from the lock tables and the statistics.

The tables change between the slices of a `WorkBudget`, so a response is not one snapshot: requests
that end while it is built are left out.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from heapq import heappush, heappushpop
from importlib.metadata import version
from itertools import islice

from msgspec import UNSET

from genie.admin import models
from genie.admin.interfaces import ServerView
from genie.admin.throttle import WorkBudget
from genie.core import HELD, NEVER, WAITING, Blocker, Mode, Request, Wait
from genie.core.lock_table import LockTable
from genie.core.view import MAX_COUNTED_BLOCKERS, sample_blockers
from genie.observability.histogram import Histogram
from genie.observability.stats import Contention, Deadlock, Stats, most_contended

MAX_SCANNED_WAITERS = 10_000
"""Waiting requests that are scanned for the longest queues, oldest first."""
MAX_SCANNED_ENTRIES = 50_000
"""Queue entries of those requests that are scanned."""
MAX_QUEUES = 20
MAX_LISTED_RESOURCES = 10
"""Resources of one request that are listed."""
MAX_EDGES = 4_000
MAX_BLOCKER_CHECKS = 300
"""Requests that are checked to find the blockers of one node."""
MAX_ROWS = 100
"""Holders of a resource, and entries of its queue, that are listed."""
LENGTH_WORK = 5
"""Work of reading the length of a queue."""
NODE_WORK = 10
"""Work of building a node."""


async def longest_queues(table: LockTable, budget: WorkBudget) -> tuple[list[models.QueueSummary], bool]:
    """Return the longest wait queues among the oldest waiting requests, and whether all requests were scanned."""
    requests = list(islice(table.waiting.values(), MAX_SCANNED_WAITERS))
    complete, entries = len(requests) == len(table.waiting), 0
    since: dict[str, int] = {}
    for request in requests:
        if entries >= MAX_SCANNED_ENTRIES:
            complete = False
            break
        if request.state is WAITING:
            names = request.names()
            entries += len(names)
            for name in names:
                since.setdefault(name, int(request.since_unix_ms))
        await budget.spend(len(names) if request.state is WAITING else 1)
    longest: list[tuple[int, int, str]] = []
    for name, oldest in since.items():
        length = _length(table, name)
        if length:
            (heappush if len(longest) < MAX_QUEUES else heappushpop)(longest, (length, -oldest, name))
        await budget.spend(LENGTH_WORK)
    await budget.pause()
    queues = [_queue_summary(table, name, -oldest) for _, oldest, name in sorted(longest, reverse=True)]
    return [queue for queue in queues if queue.waiting], complete


async def ongoing_waits(table: LockTable, now_unix_ms: float, budget: WorkBudget) -> dict[str, float]:
    """Return the total time (ms) of ongoing waits by resource, of the oldest waiting requests.

    A request for several resources counts for those of its first ten blockers.
    """
    waited: dict[str, float] = {}
    work = 0
    for request in list(islice(table.waiting.values(), MAX_SCANNED_WAITERS)):
        if work >= MAX_SCANNED_ENTRIES:
            break
        checked = 1
        if request.state is WAITING:
            names: Collection[str] = request.names()
            if len(names) > 1:
                blockers, _, checked = sample_blockers(table, request, MAX_BLOCKER_CHECKS, count=False)
                names, checked = {blocker.resource for blocker in blockers}, checked + NODE_WORK
            for name in names:
                waited[name] = waited.get(name, 0.0) + max(0.0, now_unix_ms - request.since_unix_ms)
        work += checked
        await budget.spend(checked)
    return waited


def _length(table: LockTable, name: str) -> int:
    resource = table.resources.get(name)
    return 0 if resource is None or resource.wait_queue is None else len(resource.wait_queue)


def _queue_summary(table: LockTable, name: str, since: int) -> models.QueueSummary:
    resource = table.lookup(name)
    holders = {} if resource is None else resource.holders
    first = next(iter(holders.values()), None)
    return models.QueueSummary(
        resource=name,
        waiting=_length(table, name),
        holders=len(holders),
        since=since,
        holder=None if first is None else first.id,
        transaction_name=None if first is None else first.transaction,
    )


async def graph(table: LockTable, maximum: int, budget: WorkBudget) -> models.Waits:
    """Return the wait-for graph of the oldest waiting requests, with at most `maximum` nodes."""
    nodes: dict[int, models.Node] = {}
    edges: list[models.Edge] = []
    for request in list(islice(table.waiting.values(), maximum)):
        if request.state is WAITING:
            node = _add_node(nodes, request, maximum)
            if node is None or len(edges) >= MAX_EDGES:
                break
            blockers, _, checked = sample_blockers(table, request, MAX_BLOCKER_CHECKS, count=False)
            node.blockers_total = len(blockers)
            for blocker in blockers[: MAX_EDGES - len(edges)]:
                other = table.find(blocker.id)
                if other is not None and _add_node(nodes, other, maximum) is not None:
                    edges.append(_edge(request.id, blocker))
            await budget.spend(checked + NODE_WORK * (1 + len(blockers)))
    waiting = sum(1 for node in nodes.values() if node.state == "queued")
    return models.Waits(
        nodes=list(nodes.values()), edges=edges, queue_total=max(waiting, len(table.waiting)), queue_shown=waiting
    )


def _add_node(nodes: dict[int, models.Node], request: Request, maximum: int) -> models.Node | None:
    """Return the node of a request, adding it if necessary; None if the graph is full."""
    node = nodes.get(request.id)
    if node is None and len(nodes) < maximum:
        node = nodes[request.id] = models.Node(
            id=request.id,
            state="held" if request.state is HELD else "queued",
            since=int(request.since_unix_ms),
            transaction_name=UNSET if request.transaction is None else request.transaction,
            note=UNSET if request.note is None else request.note,
            resources=_names(request),
            resources_total=_resource_count(request),
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


async def resource(table: LockTable, name: str, now: float, budget: WorkBudget) -> models.Resource:
    """Return the holders of a resource and its wait queue in order. `now` is the lock manager's time (ms)."""
    found = table.lookup(name)
    if found is None:
        return models.Resource(resource=name, holders=[], holders_total=0, queue=[], queue_total=0)
    holders = list(islice(found.holders.values(), MAX_ROWS))
    queue = [] if found.wait_queue is None else [entry[2] for entry in islice(found.wait_queue, MAX_ROWS)]
    holders_total, queue_total = len(found.holders), _length(table, name)
    response = models.Resource(
        resource=name, holders=[], holders_total=holders_total, queue=[], queue_total=queue_total
    )
    for request in holders:
        if request.state is HELD:
            response.holders.append(_row(request, now))
        await budget.spend(NODE_WORK)
    for request in queue:
        if request.state is WAITING:
            blockers, total, checked = sample_blockers(table, request, MAX_COUNTED_BLOCKERS, count=True)
            row = _row(request, now)
            row.blockers, row.blockers_total = [_blocker(blocker) for blocker in blockers], total
            response.queue.append(row)
            await budget.spend(checked // 4 + NODE_WORK * (1 + len(blockers)))
    return response


def _row(request: Request, now: float) -> models.Row:
    return models.Row(
        id=request.id,
        resources=_names(request),
        resources_total=_resource_count(request),
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
        f"{Mode.EXCLUSIVE if exclusive else Mode.SHARED}:{name}"
        for name, exclusive in islice(request.modes(), MAX_LISTED_RESOURCES)
    ]


def _resource_count(request: Request) -> int:
    return len(request.exclusive) + len(request.shared)


# -- `/api/state`, `/api/hot`, `/api/deadlocks`: from the statistics --------

COMPARED_PER_STEP = 250
"""Contended resources that are compared in one slice."""
STEPS = 1_000
"""Steps of one cycle that are listed."""
_VERSION = version("genie-lock")
_START_TIME = time.monotonic()


async def state(server: ServerView, namespace: str, budget: WorkBudget) -> models.State:
    """Return the overview of a namespace. A server that does not lead it has no locks to show."""
    view = server.namespaces[namespace]
    manager, stats = view.manager, view.stats
    table = LockTable() if manager is None else manager.table
    queues, complete = await longest_queues(table, budget)
    first = next(iter(table.waiting.values()), None)
    now, rates = time.time() * 1000, stats.rate_window.rates()
    return models.State(
        version=_VERSION,
        namespace=namespace,
        namespaces=[
            models.Namespace(namespace=name, role=other.role, leader=other.leader)
            for name, other in server.namespaces.items()
        ],
        role=view.role,
        leader=view.leader,
        now=int(now),
        uptime=int((time.monotonic() - _START_TIME) * 1000),
        store="memory" if server.settings.redis.url is None else "redis",
        store_available=view.store_available,
        store_errors=view.store_errors,
        held=len(table.held),
        waiting=len(table.waiting),
        locks=table.locks,
        resources=len(table.uncontended) + len(table.resources),
        connections=len(server.connections),
        sessions=view.sessions,
        rates=models.Rates(
            grants=rates.grants,
            releases=rates.releases,
            waits=rates.waits,
            timeouts=rates.timeouts,
            deadlocks=rates.deadlocks,
            errors=rates.errors,
        ),
        wait_p50=stats.rate_window.wait_quantile(0.5),
        wait_p99=stats.rate_window.wait_quantile(0.99),
        longest_wait=0 if first is None else max(0, int(now - first.since_unix_ms)),
        outcomes=stats.outcomes,
        errors=dict(stats.errors),
        deadlocks=stats.deadlocked,
        rearrangements=stats.rearrangements + (0 if manager is None else manager.rearrangements),
        waits=_histogram_data(stats.waits),
        holds=_histogram_data(stats.holds),
        commits=_histogram_data(stats.commits),
        lag=_histogram_data(server.stats.lag),
        queues=queues,
        queues_complete=complete,
    )


def _histogram_data(histogram: Histogram) -> models.HistogramData:
    return models.HistogramData(bounds=list(histogram.bounds), counts=list(histogram.counts), total=histogram.total)


async def hot(stats: Stats, table: LockTable, limit: int, budget: WorkBudget) -> models.HotList:
    """Return the `limit` most contended resources, by the waits that ended recently and the ongoing ones."""
    ongoing = await ongoing_waits(table, time.time() * 1000, budget)
    entries, best = _merge_ongoing(stats.contention.entries(), ongoing), list[tuple[str, Contention]]()
    while more := list(islice(entries, COMPARED_PER_STEP)):
        best = most_contended([*best, *more], limit)
        await budget.spend(2 * len(more))
    return models.HotList(resources=[_hot(table, name, contention) for name, contention in best])


def _merge_ongoing(
    entries: Iterator[tuple[str, Contention]], ongoing: dict[str, float]
) -> Iterator[tuple[str, Contention]]:
    """Yield each resource once, with the time (ms) of its ongoing waits added."""
    for name, contention in entries:
        yield name, Contention(contention.conflicts, contention.waited_ms + ongoing.pop(name, 0.0))
    for name, waited_ms in ongoing.items():
        yield name, Contention(0, waited_ms)


def _hot(table: LockTable, name: str, contention: Contention) -> models.HotResource:
    resource = table.lookup(name)
    return models.HotResource(
        resource=name,
        waited=contention.waited_ms,
        conflicts=contention.conflicts,
        waiting=0 if resource is None or resource.wait_queue is None else len(resource.wait_queue),
        holders=0 if resource is None else len(resource.holders),
    )


async def deadlocks(stats: Stats, limit: int, budget: WorkBudget) -> models.Deadlocks:
    """Return the latest deadlocks, newest first."""
    rows = []
    for deadlock in list(stats.deadlocks)[: -limit - 1 : -1]:
        rows.append(_deadlock(deadlock))
        await budget.spend(NODE_WORK + len(rows[-1].waits))
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
