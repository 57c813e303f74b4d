"""Builds the responses of the API from the lock tables and the statistics.

The lock tables may change whenever a `WorkBudget` yields, so a response is no snapshot of one moment. Requests that end
while a response is built are omitted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from heapq import heappush, heappushpop, nlargest
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

from msgspec import UNSET

from genie.admin import models
from genie.admin.interfaces import ServerView
from genie.admin.models import or_unset
from genie.admin.throttle import WorkBudget
from genie.core import HELD, NEVER, WAITING, Blocker, Request, shown_note
from genie.core.lock_order.analysis import LockOrder
from genie.core.lock_order.edges import Edge as OrderEdge
from genie.core.lock_order.inversions import Inversion
from genie.core.lock_table import LockTable
from genie.core.special import Counted, Subtree, contains
from genie.core.view import MAX_COUNTED_BLOCKERS, find_by_name, sample_blockers
from genie.lock_modes import UnitCount, is_subtree
from genie.observability.histogram import Histogram
from genie.observability.stats import Contention, Deadlock, Stats, most_contended
from genie.protocol.replies import expires_in_ms
from genie.version import VERSION

MAX_SCANNED_WAITERS = 10_000
"""Maximum number of waiting requests that are scanned to find the longest queues, oldest first."""
MAX_SCANNED_ENTRIES = 50_000
"""Maximum number of queue entries of the scanned requests. A request has one entry for each of its resources."""
MAX_QUEUES = 20
"""Maximum number of wait queues in an overview."""
MAX_LISTED_RESOURCES = 10
"""Maximum number of resources that are listed for a request."""
MAX_EDGES = 4_000
"""Maximum number of edges of the wait-for graph in a response."""
MAX_BLOCKER_CHECKS = 300
"""Maximum number of requests that are checked to find the blockers of a waiting request."""
MAX_ROWS = 100
"""Maximum number of holders, and of wait queue entries, in a response about a resource."""
LENGTH_WORK = 5
"""Work units for reading the length of a queue."""
NODE_WORK = 10
"""Work units for building a node."""


class _RankedQueue(NamedTuple):
    """A wait queue in a form that sorts by length, and among equally long queues, the oldest queue last."""

    length: int
    negated_since: int
    """The negated time (Unix ms) at which the oldest request was queued."""
    resource: str
    """The name of the resource."""


async def longest_queues(table: LockTable, budget: WorkBudget) -> tuple[list[models.QueueSummary], bool]:
    """Return the longest wait queues, and whether all waiting requests were scanned.

    If there are too many waiting requests, only the queues of the oldest requests are compared.
    """
    oldest_since, complete = await _oldest_waits(table, budget)
    longest: list[_RankedQueue] = []  # a min-heap of the `MAX_QUEUES` longest queues
    for name, since in oldest_since.items():
        length = _queue_length(table, name)
        if length:
            queue = _RankedQueue(length, -since, name)
            if len(longest) < MAX_QUEUES:
                heappush(longest, queue)
            else:
                heappushpop(longest, queue)  # drops the shortest queue
        await budget.spend(LENGTH_WORK)
    await budget.pause()
    summaries = [_queue_summary(table, queue.resource, -queue.negated_since) for queue in sorted(longest, reverse=True)]
    # A queue may have become empty while the budget yielded.
    return [summary for summary in summaries if summary.waiting], complete


async def _oldest_waits(table: LockTable, budget: WorkBudget) -> tuple[dict[str, int], bool]:
    """Return by resource when its oldest waiting request was queued (Unix ms), and whether all requests were scanned."""
    requests = list(islice(table.waiting.values(), MAX_SCANNED_WAITERS))
    oldest_since: dict[str, int] = {}
    entry_count = 0
    for request in requests:
        if entry_count >= MAX_SCANNED_ENTRIES:
            return oldest_since, False
        if request.state is not WAITING:  # the request was granted or ended while the budget yielded
            await budget.spend(1)
            continue
        names = request.names()
        entry_count += len(names)
        for name in names:
            oldest_since.setdefault(name, int(request.since_unix_ms))
        await budget.spend(len(names))
    return oldest_since, len(requests) == len(table.waiting)


async def ongoing_waits(table: LockTable, now_unix_ms: float, budget: WorkBudget) -> dict[str, float]:
    """Return the total time (ms) that waiting requests have waited so far, by resource.

    A request may wait for several resources. Its wait then counts only for the resources of its first ten blockers. If
    too much work would be needed, only the oldest waiting requests count.
    """
    waited_ms: dict[str, float] = {}
    total_work = 0
    for request in list(islice(table.waiting.values(), MAX_SCANNED_WAITERS)):
        if total_work >= MAX_SCANNED_ENTRIES:
            break
        work = 1
        if request.state is WAITING:
            names: Collection[str] = request.names()
            if len(names) > 1:
                blockers, _, checks = sample_blockers(table, request, MAX_BLOCKER_CHECKS, count=False)
                names = {blocker.resource for blocker in blockers}
                work = checks + NODE_WORK
            for name in names:
                waited_ms[name] = waited_ms.get(name, 0.0) + max(0.0, now_unix_ms - request.since_unix_ms)
        total_work += work
        await budget.spend(work)
    return waited_ms


def _queue_length(table: LockTable, name: str) -> int:
    """Return the number of requests in the wait queue of a resource."""
    resource = table.resources.get(name)
    if resource is None or resource.wait_queue is None:
        return 0
    return len(resource.wait_queue)


def _queue_summary(table: LockTable, name: str, since: int) -> models.QueueSummary:
    """Return a summary of the wait queue of a resource, whose oldest request was queued at `since` (Unix ms)."""
    holders, first_holder = _count_holders(table, name)
    return models.QueueSummary(
        resource=name,
        waiting=_queue_length(table, name),
        holders=holders,
        since=since,
        holder=None if first_holder is None else first_holder.id,
        transaction_name=None if first_holder is None else first_holder.transaction,
    )


def _count_holders(table: LockTable, name: str) -> tuple[int, Request | None]:
    """Return the number of holders of a resource and of the subtrees that contain it, and the first of them.

    For a subtree, the locks that are held below it count as well.
    """
    resource = table.lookup(name)
    groups = [subtree.holders for _, subtree in table.subtrees_above(name)]
    if resource is not None:
        groups.insert(0, resource.holders)
    count = sum(map(len, groups))
    first = next(chain.from_iterable(group.values() for group in groups), None)
    if resource is not None and isinstance(resource.special, Subtree):
        subtree = resource.special
        count += subtree.shared_count + subtree.exclusive_count
        if first is None:
            first = next((request for _, request in subtree.examples.values()), None)
    return count, first


async def graph(table: LockTable, max_nodes: int, budget: WorkBudget) -> models.Waits:
    """Return the wait-for graph of the oldest waiting requests.

    The graph has at most `max_nodes` nodes and `MAX_EDGES` edges. Requests beyond these limits are omitted.
    """
    nodes: dict[int, models.Node] = {}
    edges: list[models.Edge] = []
    for request in list(islice(table.waiting.values(), max_nodes)):
        if request.state is not WAITING:  # the request was granted or ended while the budget yielded
            continue
        node = _add_node(nodes, request, max_nodes)
        if node is None or len(edges) >= MAX_EDGES:
            break
        blockers, _, checks = sample_blockers(table, request, MAX_BLOCKER_CHECKS, count=False)
        node.blockers_total = len(blockers)
        for blocker in blockers[: MAX_EDGES - len(edges)]:
            blocking_request = table.find(blocker.id)
            if blocking_request is not None and _add_node(nodes, blocking_request, max_nodes) is not None:
                edges.append(models.Edge(waiter=request.id, blocker=blocker.id, **_blocking_fields(blocker)))
        await budget.spend(checks + NODE_WORK * (1 + len(blockers)))
    shown_count = sum(node.state == "queued" for node in nodes.values())
    return models.Waits(
        nodes=list(nodes.values()),
        edges=edges,
        queue_total=max(shown_count, len(table.waiting)),  # shown requests may have ended while the budget yielded
        queue_shown=shown_count,
    )


def _add_node(nodes: dict[int, models.Node], request: Request, max_nodes: int) -> models.Node | None:
    """Return the node of a request, from `nodes` if it is there. Otherwise create and add it.

    Returns None if the node is missing and `nodes` already has `max_nodes` nodes.
    """
    node = nodes.get(request.id)
    if node is None and len(nodes) < max_nodes:
        state = "held" if request.state is HELD else "queued"
        node = nodes[request.id] = models.Node(state=state, **_request_fields(request))
    return node


async def resource(table: LockTable, name: str, now: float, budget: WorkBudget) -> models.Resource:
    """Return the first holders of a resource, and the first entries of its wait queue: at most `MAX_ROWS` of each.

    The requests for subtrees that contain the resource are among them, and for a subtree, also those for names below
    it. `now` is the time of the lock manager (ms).
    """
    locked_resource = table.lookup(name)
    matches = find_by_name(table, name)
    holders, queue = list(islice(matches.holders, MAX_ROWS)), list(islice(matches.queue, MAX_ROWS))
    response = models.Resource(
        resource=name,
        holders=[],
        holders_total=matches.holders_total,
        queue=[],
        queue_total=matches.queue_total,
        complete=True,
    )
    if is_subtree(name):
        below, response.complete = await _requests_below(table.held, name, budget)
        response.holders_total += len(below)
        holders = [*holders, *below][:MAX_ROWS]
        if name not in table.subtrees:  # otherwise they are in its queue
            below, all_compared = await _requests_below(table.waiting, name, budget)
            response.queue_total += len(below)
            response.complete = response.complete and all_compared
            queue = [*queue, *below][:MAX_ROWS]
    special = None if locked_resource is None else locked_resource.special
    if isinstance(special, Counted):
        units = [request.units[name] for request in (*holders, *queue) if name in request.units]
        limits = [limit for _count, limit in units]
        response.units_in_use, response.units_limit = special.in_use, max(limits, default=special.in_use)
    elif isinstance(special, Subtree):
        response.held_below = special.shared_count + special.exclusive_count
    for request in holders:
        if request.state is HELD:
            response.holders.append(_request_row(request, now))
        await budget.spend(NODE_WORK)
    for request in queue:
        if request.state is WAITING:
            row, work = _waiting_row(table, request, now)
            response.queue.append(row)
            await budget.spend(work)
    return response


def _waiting_row(table: LockTable, request: Request, now: float) -> tuple[models.Row, int]:
    """Convert a waiting request to its response type, with its blockers.

    Return it with the work units of the conversion.
    """
    blockers, total, checks = sample_blockers(table, request, MAX_COUNTED_BLOCKERS, count=True)
    row = _request_row(request, now)
    row.blockers, row.blockers_total = [_blocker(blocker) for blocker in blockers], total
    counting_work = checks // 4  # to count a request takes about a quarter of a work unit
    return row, counting_work + NODE_WORK * (1 + len(blockers))


MAX_COMPARED = 20_000
"""Maximum number of held requests that are compared with a text or a subtree, the oldest first. The same for waiting
requests."""
MAX_COMPARED_RESOURCES = 100
"""Maximum number of resources of a request that are compared with a text."""
MAX_COMPARING_WORK = 500_000
"""Work units for comparing requests with a text or a subtree, after which the response is incomplete."""
CHARS_PER_WORK_UNIT = 8
"""Number of characters whose case is folded in one work unit, in a text beyond ASCII."""
NAMES_PER_WORK_UNIT = 8
"""Number of names that are compared with a subtree in one work unit."""


async def _requests_below(requests: dict[int, Request], subtree: str, budget: WorkBudget) -> tuple[list[Request], bool]:
    """Return the oldest requests that name a resource below a subtree, and whether all were compared.

    Requests that also name the subtree or one above it are omitted, because they are found without a search.
    """
    found: list[Request] = []
    compared, remaining_work = list(islice(requests.values(), MAX_COMPARED)), MAX_COMPARING_WORK
    complete = len(compared) == len(requests)
    for request in compared:
        work = 1 + request.name_count() // NAMES_PER_WORK_UNIT
        remaining_work -= work
        if remaining_work < 0:
            return found, False
        subtrees = () if request.details is None else request.details.subtrees
        is_known = any(other == subtree or contains(other, subtree) for other in subtrees)
        if not is_known and any(map(contains, repeat(subtree), request.names())):
            found.append(request)
        await budget.spend(work)
    return found, complete


async def requests(table: LockTable, text: str, limit: int, now: float, budget: WorkBudget) -> models.Requests:
    """Return the oldest held requests, or if `text` is not empty, the oldest held and waiting requests that match it.

    Returns at most `limit` requests. `text` is compared with the names of resources, transactions and notes, without
    regard to case. The holders of a resource with exactly this name are found among any number of requests. `now` is
    the time of the lock manager (ms).
    """
    if text:
        return await _matching_requests(table, text, limit, now, budget)
    return await _oldest_held(table, limit, now, budget)


async def _oldest_held(table: LockTable, limit: int, now: float, budget: WorkBudget) -> models.Requests:
    """Return the oldest held requests, at most `limit`."""
    shown = list(islice(table.held.values(), limit))
    response = models.Requests(held=[], waiting=[], complete=len(shown) == len(table.held))
    for request in shown:
        if request.state is HELD:
            response.held.append(_request_row(request, now))
        await budget.spend(NODE_WORK)
    return response


async def _matching_requests(
    table: LockTable, text: str, limit: int, now: float, budget: WorkBudget
) -> models.Requests:
    """Return the oldest held and waiting requests that match a text, at most `limit`."""
    resource = table.lookup(text)
    exact = [] if resource is None else list(islice(resource.holders.values(), limit))
    compared = [*islice(table.held.values(), MAX_COMPARED), *islice(table.waiting.values(), MAX_COMPARED)]
    response = models.Requests(held=[], waiting=[], complete=len(compared) == len(table.held) + len(table.waiting))
    folded_text, exact_ids, found_ids = text.casefold(), {request.id for request in exact}, set[int]()
    remaining_work = MAX_COMPARING_WORK
    for request in (*exact, *compared):
        if request.id in found_ids:
            continue
        matches, work = (True, 1) if request.id in exact_ids else _matches(request, folded_text)
        remaining_work -= work
        await budget.spend(work)
        if remaining_work < 0 or (matches and len(found_ids) == limit):
            response.complete = False
            break
        if not matches:
            continue
        found_ids.add(request.id)
        if request.state is HELD:
            response.held.append(_request_row(request, now))
        elif request.state is WAITING:
            response.waiting.append(_request_row(request, now))
        await budget.spend(NODE_WORK)
    return response


def _matches(request: Request, folded_text: str) -> tuple[bool, int]:
    """Return whether a text is part of a name or the note of a request, and the work units of the comparison.

    The case of the text is folded already.
    """
    names = (name for name, _ in islice(request.modes(), MAX_COMPARED_RESOURCES))
    work = 1
    for candidate in chain((request.transaction, shown_note(request)), names):
        if candidate is not None:
            work += 2 if candidate.isascii() else 2 + len(candidate) // CHARS_PER_WORK_UNIT
            if folded_text in candidate.casefold():
                return True, work
    return False, work


def _request_row(request: Request, now: float) -> models.Row:
    """Convert a held or waiting request to its response type. `now` is the time of the lock manager (ms)."""
    return models.Row(
        priority=request.priority,
        expires_in=UNSET if request.deadline >= NEVER else expires_in_ms(request, now),
        fence=request.fence or UNSET,
        **_request_fields(request),
    )


def _request_fields(request: Request) -> dict[str, Any]:
    """Return the fields that every response about a request has, with its first `MAX_LISTED_RESOURCES` resources."""
    return {
        "id": request.id,
        "resources": [request.lock_text(name, mode) for name, mode in islice(request.modes(), MAX_LISTED_RESOURCES)],
        "resources_total": request.name_count(),
        "since": int(request.since_unix_ms),
        "transaction_name": or_unset(request.transaction),
        "note": or_unset(shown_note(request)),
        "traceparent": or_unset(request.context.traceparent),
    }


def _blocker(blocker: Blocker) -> models.Blocker:
    """Convert a blocker to its response type."""
    return models.Blocker(
        id=blocker.id,
        transaction_name=or_unset(blocker.transaction),
        note=or_unset(blocker.context.note),
        traceparent=or_unset(blocker.context.traceparent),
        **_blocking_fields(blocker),
    )


def _blocking_fields(blocker: Blocker) -> dict[str, Any]:
    """Return the fields of a blocker: the lock that it holds or waits for, and since when (Unix ms)."""
    state = "held" if blocker.held else "queued"
    fields = {"resource": blocker.resource, "mode": blocker.mode, "state": state, "since": blocker.since_unix_ms}
    return fields | _unit_fields(blocker.units)


def _unit_fields(units: UnitCount | None) -> dict[str, int]:
    """Return the fields with the units of a counted resource and their limit, or no fields for another resource."""
    if units is None:
        return {}
    count, limit = units
    return {"units": count, "of": limit}


# -- `/api/state`, `/api/hot`, `/api/deadlocks`, `/api/order`: from the statistics --------

COMPARED_PER_SLICE = 250
"""Number of contended resources that are compared in one slice of work."""
MAX_STEPS = 1_000
"""Maximum number of steps of a deadlock cycle in a response."""
_START_TIME = time.monotonic()


async def state(server: ServerView, namespace: str, budget: WorkBudget) -> models.State:
    """Return an overview of a namespace.

    On a follower, which has no lock table, the numbers of locks are 0. A former leader keeps its last lock table until
    it knows the next leader.
    """
    view = server.namespaces[namespace]
    manager, stats, since = view.last_manager, view.stats, view.store_unavailable_since
    table = LockTable() if manager is None else manager.table
    queues, complete = await longest_queues(table, budget)
    oldest = next(iter(table.waiting.values()), None)
    now, rates = time.time() * 1000, stats.rate_window.rates()
    return models.State(
        version=VERSION,
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
        store_unavailable_since=None if since is None else int(since * 1000),
        store_full=view.store_full,
        history=view.history is not None,
        store_errors=view.store_errors,
        locks_age=None if view.locks_age_s is None else int(view.locks_age_s * 1000),
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
        longest_wait=0 if oldest is None else max(0, int(now - oldest.since_unix_ms)),
        outcomes=stats.outcomes,
        errors=dict(stats.errors),
        deadlocks=stats.deadlocked,
        inversions=0 if view.lock_order is None else view.lock_order.inversions.count,
        rearrangements=stats.rearrangements + (0 if manager is None else manager.rearrangements),
        waits=_histogram_data(stats.waits),
        holds=_histogram_data(stats.holds),
        commits=_histogram_data(stats.commits),
        lag=_histogram_data(server.stats.lag),
        queues=queues,
        queues_complete=complete,
    )


def _histogram_data(histogram: Histogram) -> models.HistogramData:
    """Convert a histogram to its response type."""
    return models.HistogramData(bounds=list(histogram.bounds), counts=list(histogram.counts), total=histogram.total)


async def hot(stats: Stats, table: LockTable, limit: int, budget: WorkBudget) -> models.HotList:
    """Return the `limit` resources with the longest total wait: of the waits that ended in the last minutes and ongoing waits."""
    ongoing = await ongoing_waits(table, time.time() * 1000, budget)
    entries = _add_ongoing_waits(stats.contention.entries(), ongoing)
    top: list[tuple[str, Contention]] = []
    while chunk := list(islice(entries, COMPARED_PER_SLICE)):
        top = most_contended([*top, *chunk], limit)
        await budget.spend(2 * len(chunk))
    return models.HotList(resources=[_hot_resource(table, name, contention) for name, contention in top])


def _add_ongoing_waits(
    entries: Iterator[tuple[str, Contention]], ongoing: dict[str, float]
) -> Iterator[tuple[str, Contention]]:
    """Yield each resource once, with the total time of its ended and its ongoing waits.

    `entries` are the resources with ended waits. `ongoing` has the total time (ms) of the ongoing waits by resource.
    The resources of `entries` are removed from it.
    """
    for name, contention in entries:
        yield name, Contention(contention.conflicts, contention.waited_ms + ongoing.pop(name, 0.0))
    for name, waited_ms in ongoing.items():
        yield name, Contention(conflicts=0, waited_ms=waited_ms)


def _hot_resource(table: LockTable, name: str, contention: Contention) -> models.HotResource:
    """Combine the contention of a resource with the current numbers of its waiting requests and holders."""
    return models.HotResource(
        resource=name,
        waited=contention.waited_ms,
        conflicts=contention.conflicts,
        waiting=_queue_length(table, name),
        holders=_count_holders(table, name)[0],
    )


async def deadlocks(stats: Stats, limit: int, budget: WorkBudget) -> models.Deadlocks:
    """Return the latest deadlocks, newest first."""
    rows = []
    latest = list(islice(reversed(stats.deadlocks), limit))
    for deadlock in latest:
        row = _deadlock_row(deadlock)
        rows.append(row)
        await budget.spend(NODE_WORK + len(row.waits))
    return models.Deadlocks(deadlocks=rows, total=stats.deadlocked)


async def order(lock_order: LockOrder, limit: int, budget: WorkBudget) -> models.Order:
    """Return the inversions of the lock order, newest first, and its `limit` most frequent edges."""
    by_key, inversions = lock_order.graph.by_key, lock_order.inversions
    frequent = nlargest(limit, by_key.values(), key=lambda edge: edge.count)
    await budget.spend(2 * len(by_key))
    edges = []
    for edge in frequent:
        edges.append(_order_edge(edge))
        await budget.spend(NODE_WORK)
    return models.Order(
        inversions=[_inversion(inversion) for inversion in reversed(inversions.found)],
        total=inversions.count,
        guarded=[_inversion(inversion) for inversion in reversed(inversions.guarded)],
        edges=edges,
        edges_total=len(by_key),
        classes=len(lock_order.classes.by_name),
        dropped=lock_order.dropped,
    )


def _inversion(inversion: Inversion) -> models.Inversion:
    """Convert an inversion to its response type."""
    return models.Inversion(
        kind=inversion.kind,
        classes=list(inversion.classes),
        description=inversion.description,
        offender=inversion.offender,
        at=int(inversion.found_unix_ms),
        edges=[_order_edge(edge) for edge in inversion.edges],
        guards=list(inversion.guards),
    )


def _order_edge(edge: OrderEdge) -> models.OrderEdge:
    """Convert an edge of the lock order to its response type."""
    example = edge.example
    return models.OrderEdge(
        held=edge.held.name,
        held_mode=edge.held_mode,
        asked=edge.asked.name,
        asked_mode=edge.asked_mode,
        relation=edge.relation,
        count=edge.count,
        last_at=int(edge.last_unix_ms),
        guards=list(edge.guards),
        example=models.OrderExample(
            at=int(example.at_unix_ms),
            id=example.id,
            transaction_name=example.transaction,
            held=example.held,
            asked=example.asked,
            principal=or_unset(example.context.principal),
            note=or_unset(example.context.note),
        ),
    )


def _deadlock_row(deadlock: Deadlock) -> models.DeadlockRow:
    """Convert a deadlock to its response type, with the first `MAX_STEPS` steps of its cycle."""
    waits = deadlock.cycle.waits
    return models.DeadlockRow(
        at=int(deadlock.at_unix_ms),
        id=deadlock.id,
        transaction_name=deadlock.transaction,
        cycle=[str(owner) for owner in deadlock.cycle.owners[:MAX_STEPS]],
        waits=[
            models.Step(
                resource=wait.resource,
                waiter=wait.waiter,
                holder=wait.holder,
                note=or_unset(wait.context.note),
                traceparent=or_unset(wait.context.traceparent),
                **_unit_fields(wait.units),
            )
            for wait in waits[:MAX_STEPS]
        ],
        steps_total=len(waits),
    )
