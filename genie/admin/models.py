"""The request, response and error types of the API. The OpenAPI document is generated from these types.

A field that also exists in the wire format has the same name. Durations are in ms. The fields `since` and `at` are Unix
times in ms.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
import structlog
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from genie.errors import Code

T = TypeVar("T")


class ApiModel(Struct, rename="camel", omit_defaults=False, kw_only=True, gc=False):
    """Base of all request and response types."""


def or_unset(value: T | None) -> T | UnsetType:
    """Return the value of an optional field, or UNSET for None, so that the response lacks the field."""
    return UNSET if value is None else value


class HistogramData(ApiModel):
    """A histogram."""

    bounds: list[float]
    """Upper bounds of the buckets, ascending."""
    counts: list[int]
    """Number of values in each bucket, not cumulative. One more bucket, the last, has the values above all bounds."""
    total: float
    """Sum of all values."""


class Rates(ApiModel):
    """Events per second, over the last ten seconds."""

    grants: float
    releases: float
    waits: float
    """Requests that could not be granted immediately."""
    timeouts: float
    deadlocks: float
    errors: float


class QueueSummary(ApiModel):
    """The wait queue of a resource."""

    resource: str
    waiting: int
    holders: int
    """Number of requests that hold the resource or a subtree that contains it. For a subtree, the locks held below it
    count, too."""
    since: int
    """When the oldest waiting request was queued."""
    holder: int | None
    """Id of one of these holders. None if there is none."""
    transaction_name: str | None
    """Transaction of `holder`."""


class Namespace(ApiModel):
    """A namespace that the server leads or follows."""

    namespace: str
    role: str
    """`starting` (the store has not answered yet), `waiting` (no leader is known), `follower`, `unavailable` (the store
    cannot be used), `leader` or `stopping`."""
    leader: str | None
    """Address of the leading server, if this server is a follower and knows the leader."""


class State(ApiModel):
    """`/api/state`: overview of the requested namespace. `connections` and `lag` belong to the whole server."""

    # More than 16 fields: the page reads everything that it shows all the time in one request.
    version: str
    namespace: str
    namespaces: list[Namespace]
    """All namespaces of the server. The first is the default."""
    role: str
    """Role of this server in the requested namespace, as in `namespaces`."""
    leader: str | None
    """Address of the leading server, if this server is a follower and knows the leader."""
    now: int
    """Current time (unix ms)."""
    uptime: int
    """Time since the start of the server (ms)."""
    store: str
    """`redis` or `memory`."""
    store_available: bool
    store_unavailable_since: int | None
    """When the interruption of the store began (Unix ms). None if the store is not interrupted."""
    store_full: bool
    """True if the store is out of memory, so that the leader rejects requests."""
    history: bool
    """True if this server records a history."""
    store_errors: int
    """How often the store failed, or exceeded the store timeout, since the start."""
    locks_age: int | None
    """Age (ms) of the numbers of locks: 0 on the leader. A former leader reports its last locks until it knows the next
    leader. None on other servers, whose numbers of locks are 0."""
    held: int
    """Held requests."""
    waiting: int
    """Waiting requests."""
    locks: int
    """Held locks. A resource that is locked shared counts once for each holder."""
    resources: int
    """Resources that requests hold or wait for."""
    connections: int
    """Open connections to this server, for all namespaces."""
    sessions: int
    rates: Rates
    wait_p50: float | None
    """Median wait (ms) of the requests that were granted after a wait within the last minute. None if there were none."""
    wait_p99: float | None
    """99th percentile of the same waits (ms)."""
    longest_wait: int
    """Age of the oldest waiting request (ms)."""
    outcomes: dict[str, int]
    """Requests since the start by outcome: `granted` (immediately), `waited` (granted after a wait), `cancelled`, or
    the reason why the request ended without a grant."""
    errors: dict[str, int]
    """Rejected commands since the start by error code."""
    deadlocks: int
    """Deadlocks since the start."""
    inversions: int
    """Lock order inversions found since the start. 0 if the analysis is off."""
    rearrangements: int
    """Wait queues that were rearranged to avoid a deadlock, since the start."""
    waits: HistogramData
    """Wait times of requests that were granted after a wait (ms)."""
    holds: HistogramData
    """Hold times (ms)."""
    commits: HistogramData
    """Commit latency (ms)."""
    lag: HistogramData
    """Event-loop lag (ms)."""
    queues: list[QueueSummary]
    """The longest wait queues, longest first, at most 20."""
    queues_complete: bool
    """False if there were too many waiting requests, so that only the queues of the oldest were compared."""


class Node(ApiModel, omit_defaults=True, kw_only=True, gc=False):
    """A node of the wait-for graph: a waiting request, or one that blocks a waiting request."""

    id: int
    state: str
    """`held` or `queued`."""
    since: int
    transaction_name: str | UnsetType = UNSET
    note: str | UnsetType = UNSET
    traceparent: str | UnsetType = UNSET
    resources: list[str]
    """The first ten resources of the request, as `MODE:NAME`."""
    resources_total: int
    """Number of all resources of the request."""
    blockers_total: int | UnsetType = UNSET
    """Number of blockers found, at most ten. Only for waiting requests."""


class Edge(ApiModel):
    """`waiter` waits for `blocker`, which holds the resource (`held`) or is ahead in its queue (`queued`)."""

    waiter: int
    blocker: int
    resource: str
    mode: str
    """Mode of the blocker."""
    state: str
    since: int
    """When the blocker was granted or queued."""
    units: int | UnsetType = UNSET
    """With the mode `units`: the units that the blocker holds or asks for, of at most `of` in use."""
    of: int | UnsetType = UNSET


class Waits(ApiModel):
    """`/api/waits`: the wait-for graph, oldest waiting requests first."""

    nodes: list[Node]
    edges: list[Edge]
    queue_total: int
    """Waiting requests."""
    queue_shown: int
    """Waiting requests among the nodes."""


class HotResource(ApiModel):
    """A contended resource."""

    resource: str
    waited: float
    """Total time (ms) that requests waited for the resource: ended and ongoing waits."""
    conflicts: int
    """Requests that could not lock the resource immediately in the last five to ten minutes."""
    waiting: int
    """Requests that wait for the resource now."""
    holders: int
    """Requests that hold the resource or a subtree that contains it now. For a subtree, the locks held below it count,
    too."""


class HotList(ApiModel):
    """`/api/hot`: the most contended resources of the last five to ten minutes, by total wait time, descending."""

    resources: list[HotResource]


class Step(ApiModel):
    """One step of a cycle: request `waiter` waits for `resource`, which request `holder` holds."""

    resource: str
    waiter: int
    holder: int
    note: str | UnsetType = UNSET
    """Note of the waiter."""
    traceparent: str | UnsetType = UNSET
    """Trace context of the waiter."""
    units: int | UnsetType = UNSET
    """Units of a counted resource that the waiter asks for, of at most `of` in use. It waits until enough units are
    free, and not for this holder alone."""
    of: int | UnsetType = UNSET


class DeadlockRow(ApiModel):
    """A deadlock. Its victim is the request that the server ended because the request would have created a cycle."""

    at: int
    """When the deadlock was detected."""
    id: int
    """Id of the victim."""
    transaction_name: str | None
    """Transaction of the victim."""
    cycle: list[str]
    """The transactions of the cycle, starting with that of the victim. Each transaction waits for the next one, and the
    last transaction waits for the first."""
    waits: list[Step]
    """The first thousand steps of the cycle."""
    steps_total: int = 0
    """Number of all steps of the cycle."""


class Deadlocks(ApiModel):
    """`/api/deadlocks`: the latest deadlocks, newest first."""

    deadlocks: list[DeadlockRow]
    total: int
    """Deadlocks since the start of the server."""


class OrderExample(ApiModel, omit_defaults=True, kw_only=True, gc=False):
    """The first request that took locks in an order: it asked for `asked` while its transaction held `held`."""

    at: int
    id: int
    transaction_name: str
    held: str
    asked: str
    principal: str | UnsetType = UNSET
    """The authenticated client that made the request."""
    note: str | UnsetType = UNSET


class OrderEdge(ApiModel):
    """Transactions that held a name of the class `held` asked for a name of the class `asked`."""

    held: str
    held_mode: str
    asked: str
    asked_mode: str
    relation: str
    """`classes` for two classes. For two names of one class: `ascending`, `descending`, `upgrade` (the same name),
    `descending by number` (ascending if digits are compared as characters) or `descending by text` (ascending if digits
    are compared as numbers)."""
    count: int
    """Number of requests that took the locks in this order."""
    last_at: int
    guards: list[str]
    """Locks that all of these transactions also held."""
    example: OrderExample


class Inversion(ApiModel):
    """Classes of locks that are taken in orders which can deadlock."""

    kind: str
    """`cycle` (classes in both orders, or in an order that forms a cycle), `members` (names of one class, not in
    ascending order) or `upgrade` (of a shared lock to an exclusive lock of the same name)."""
    classes: list[str]
    description: str
    """What is wrong, in one sentence without a full stop."""
    offender: str
    """The stem of the names of the transactions that completed the inversion, such as `pay-*` for `pay-17`. If
    transactions with another stem complete an inversion of the same kind and classes, that is another inversion."""
    at: int
    """When the inversion was found."""
    edges: list[OrderEdge]
    """The orders that form the inversion. Each asks for the class that the next one holds."""
    guards: list[str]
    """Locks that all transactions of the inversion held, so that they could not deadlock."""


class Order(ApiModel):
    """`/api/order`: the order in which transactions take locks, by classes of names."""

    inversions: list[Inversion]
    """Newest first."""
    total: int
    """Inversions found since the start of the server."""
    guarded: list[Inversion]
    """Inversions that cannot deadlock while their transactions also hold a common lock."""
    edges: list[OrderEdge]
    """The most frequent edges."""
    edges_total: int
    classes: int
    dropped: int
    """Requests that were not analysed completely, because of a limit."""


class Blocker(ApiModel, omit_defaults=True, kw_only=True, gc=False):
    """A request that blocks a waiting request."""

    id: int
    resource: str
    """The resource that blocks: one that the waiting request names, or one that contains it or is below it if one of
    the two is a subtree."""
    mode: str
    """`exclusive`, `shared` or `units`."""
    state: str
    since: int
    units: int | UnsetType = UNSET
    """With the mode `units`: the units that the blocker holds or asks for, of at most `of` in use."""
    of: int | UnsetType = UNSET
    transaction_name: str | UnsetType = UNSET
    note: str | UnsetType = UNSET
    traceparent: str | UnsetType = UNSET


class Row(ApiModel, omit_defaults=True, kw_only=True, gc=False):
    """A request, with the same fields as in the message `inspected` of the wire format."""

    id: int
    resources: list[str]
    """The first ten locks, as `exclusive:NAME`, `shared:NAME` or `2/10:NAME`."""
    resources_total: int
    priority: float
    since: int
    expires_in: int | UnsetType = UNSET
    """Time until the lock or the waiting request times out (ms). Missing if the wait has no limit."""
    transaction_name: str | UnsetType = UNSET
    note: str | UnsetType = UNSET
    traceparent: str | UnsetType = UNSET
    fence: int | UnsetType = UNSET
    blockers: list[Blocker] | UnsetType = UNSET
    blockers_total: int | UnsetType = UNSET


class Resource(ApiModel):
    """`/api/resources/NAME`: the holders of a resource, and its wait queue in order."""

    resource: str
    holders: list[Row]
    """The first holders, with those of subtrees that contain the resource, and for a subtree also those of names below
    it."""
    holders_total: int
    queue: list[Row]
    """The first waiting requests, with those for such subtrees and names. If no request names the subtree itself, they
    are in order of arrival."""
    queue_total: int
    complete: bool
    """False if not all requests were compared with the subtree, so that the totals are lower bounds."""
    units_in_use: int | UnsetType = UNSET
    """The units of all holders. Only for a counted resource."""
    units_limit: int | UnsetType = UNSET
    """The greatest limit of the listed requests. Only for a counted resource."""
    held_below: int | UnsetType = UNSET
    """The number of locks that are held below the subtree. Only for a subtree that is locked or waited for."""


class Requests(ApiModel):
    """`/api/requests`: the locks that are held for longest, or the requests that match a text."""

    held: list[Row]
    """Without a text: the requests that hold locks, the oldest first."""
    waiting: list[Row]
    """The waiting requests that match the text. Empty without a text."""
    complete: bool
    """False if further requests may match, because the limit was reached, or not all requests were compared."""


class PastRequest(ApiModel, kw_only=True, gc=False):
    """A request of the history. Times are Unix ms. A time is missing if it is unknown or has not come."""

    id: int
    resources: list[str]
    """At most ten of the requested locks, with the lock of the resource, as `exclusive:NAME`, `shared:NAME` or
    `2/10:NAME`."""
    resources_total: int
    mode: str
    """The mode in which the request asked for the resource, or for a subtree that contains it: `exclusive`, `shared` or
    `units`."""
    asked_at: float | UnsetType = UNSET
    granted_at: float | UnsetType = UNSET
    ended_at: float | UnsetType = UNSET
    record_ends_at: float | UnsetType = UNSET
    """When the record of the request ends without its end: the record of its leadership ends then, and no later leader
    has recorded the request."""
    reason: str | UnsetType = UNSET
    """Why the request ended."""
    fence: int | UnsetType = UNSET
    transaction_name: str | UnsetType = UNSET
    principal: str | UnsetType = UNSET
    note: str | UnsetType = UNSET
    priority: float | UnsetType = UNSET
    waited_for: list[int]
    """Ids of the first requests that the request waited for when it arrived."""


class History(ApiModel, kw_only=True):
    """`/api/history/NAME`: the latest requests for a resource that this server has recorded, by arrival."""

    resource: str
    requests: list[PastRequest]
    more: bool
    """True if earlier requests were recorded as well."""
    gaps: int
    """In how many places events are missing, because the disk was too slow, or the history was full."""
    begins_at: float | None
    """The time of the earliest event in the history (Unix ms). None if nothing is recorded."""


class Release(ApiModel):
    """Body of `POST /api/release`."""

    id: int


class Released(ApiModel):
    """Response to `POST /api/release`: the reason why the request has ended."""

    id: int
    reason: str
    """`success`, or an earlier reason if the request had already ended."""


class Problem(ApiModel, omit_defaults=True, kw_only=True, gc=False):
    """Body of every response with a status of 400 or more."""

    code: str
    """An error code of the wire format, or `not-found`, `not-allowed` (the HTTP method) or `defect` (a bug)."""
    message: str
    leader: str | UnsetType = UNSET
    """Address of the leading server, if the client should send the request to that server."""


def encode_small(response: ApiModel) -> bytes:
    """Encode a response at once. It must be too small to need a work budget."""
    encoded: bytes = msgspec.json.encode(response)
    return encoded


# -- Errors: always JSON --------

log = structlog.get_logger()

MAX_BODY: Final = 4096
"""Maximum size of a request body, in bytes."""
JSON: Final = "application/json"
DEFECT: Final = "internal error; the log of the server has details"


class ApiError(Exception):
    """An error that is sent to the client as JSON. `leader` is the server to which the client should send the request instead."""

    def __init__(self, status: int, code: str, message: str, leader: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem = Problem(code=code, message=message, leader=UNSET if leader is None else leader)


def bad_request(message: str) -> ApiError:
    """Return an error with status 400, for an invalid request."""
    return ApiError(400, Code.BAD_REQUEST, message)


@web.middleware
async def error_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert exceptions of handlers into JSON error responses. Unexpected exceptions are logged."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except ApiError as caught:
        error = caught.with_traceback(None)  # its frames, which may have a response of many megabytes, refer to `error`
        if error.status == web.HTTPServiceUnavailable.status_code:
            headers["Retry-After"] = "1"
    except web.HTTPNotFound as rejection:
        rejection.with_traceback(None)  # its frames refer to the request, which refers to `rejection`
        error = ApiError(404, "not-found", f"{request.path[:200]} does not exist; /api/schema lists the paths")
    except web.HTTPMethodNotAllowed as rejection:
        rejection.with_traceback(None)
        allowed = ", ".join(sorted(rejection.allowed_methods))
        headers["Allow"] = allowed
        error = ApiError(405, "not-allowed", f"{request.path[:200]} allows {allowed}, not {request.method}")
    except web.HTTPRequestEntityTooLarge:
        error = ApiError(413, Code.BAD_REQUEST, f"the body exceeds {MAX_BODY} bytes")
    except (web.HTTPException, ConnectionError):
        raise  # aiohttp handles these exceptions
    except Exception:
        log.exception("admin request failed", path=request.path[:200])
        error = ApiError(500, "defect", DEFECT)
    return web.Response(status=error.status, body=encode_small(error.problem), content_type=JSON, headers=headers)
