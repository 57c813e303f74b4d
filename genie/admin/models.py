"""What the API answers, as types: they are encoded from here, and the schema that the API tells is made of them.

Names are the wire's where it has them. Durations are ms; `since` and `at` are unix ms.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
import structlog
from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from genie.errors import Code


class Answer(Struct, rename="camel", omit_defaults=False, kw_only=True, gc=False):
    """Whatever the API answers."""


class Count(Answer):
    """How many values fell into each bucket: `counts` has one more than `bounds`, for what is above the last."""

    bounds: list[float]
    counts: list[int]
    total: float
    """The sum of all values."""


class Rates(Answer):
    """A second, over the last ten seconds."""

    grants: float
    releases: float
    waits: float
    """Requests that could not be held at once."""
    timeouts: float
    deadlocks: float
    errors: float


class Line(Answer):
    """A resource for which requests wait."""

    resource: str
    waiting: int
    holders: int
    since: int
    """When the one came that has waited longest."""
    holder: int | None
    """The id of a request that holds it; None where nobody does."""
    transaction_name: str | None
    """That of the holder."""


class Namespace(Answer):
    """One that the server leads, or follows who does."""

    namespace: str
    role: str
    """`starting` (nobody is known to lead), `leader`, `follower` or `stopping`."""
    leader: str | None
    """The address of the server that leads, where this one follows it."""


class State(Answer):
    """`/api/state`: the server at a glance. Of the namespace that was asked for, but for `connections` and `lag`."""

    version: str
    namespace: str
    namespaces: list[Namespace]
    """All that the server has; the first is that of who says none."""
    role: str
    leader: str | None
    """The address of the server that leads, where this one follows it."""
    now: int
    uptime: int
    store: str
    """`redis` or `memory`."""
    store_reached: bool
    store_errors: int
    held: int
    """Requests that are held."""
    waiting: int
    """Requests that wait."""
    locks: int
    """Resources that are held, each as often as there are grants on it."""
    resources: int
    """Names that are held or waited for."""
    connections: int
    """Those of all namespaces."""
    sessions: int
    rates: Rates
    wait_p50: float | None
    """Of the requests that were granted after they had waited, within the last minute (ms); None where there were none."""
    wait_p99: float | None
    longest_wait: int
    """How long the one that has waited longest does so."""
    outcomes: dict[str, int]
    """Requests since the start, by how they went: `granted` (at once), `waited` (granted later), `cancelled`, else the reason."""
    errors: dict[str, int]
    """Commands that were refused, by code."""
    deadlocks: int
    reorderings: int
    waits: Count
    """How long those waited that were granted later (ms)."""
    holds: Count
    """How long holds lasted (ms)."""
    commits: Count
    """How long commits took (ms)."""
    lag: Count
    """How late the event loop was (ms)."""
    lines: list[Line]
    """The longest lines, the longest first, at most 20."""
    lines_complete: bool
    """False where so many wait that only those were looked at that came first."""


class Node(Answer, omit_defaults=True, kw_only=True, gc=False):
    """A request that waits, or that stands in the way of one."""

    id: int
    state: str
    """`held` or `queued`."""
    since: int
    transaction_name: str | UnsetType = UNSET
    note: str | UnsetType = UNSET
    resources: list[str]
    """What it asks for or holds, `MODE:NAME`, at most ten."""
    resources_total: int
    blockers_total: int | UnsetType = UNSET
    """How many are in its way, as far as they were looked for: at most ten. Of one that waits."""


class Edge(Answer):
    """`waiter` waits for `blocker`, which holds the resource (`held`) or is ahead in its line (`queued`)."""

    waiter: int
    blocker: int
    resource: str
    mode: str
    """The blocker's."""
    state: str
    since: int
    """Since when the blocker is in the way."""


class Waits(Answer):
    """`/api/waits`: who waits for whom. Those first that have waited longest."""

    nodes: list[Node]
    edges: list[Edge]
    queue_total: int
    """Requests that wait."""
    queue_shown: int
    """Those of them that are among the nodes."""


class HotResource(Answer):
    """A resource that is fought for."""

    resource: str
    waited: float
    """ms, of all who have waited for it: those who do no more, and up to now those who still do."""
    collisions: int
    """Requests that could not have it at once, in that time."""
    waiting: int
    """Requests that wait for it now."""
    holders: int


class HotList(Answer):
    """`/api/hot`: where most was waited: by who stopped within the last five to ten minutes, or still waits; the hottest first."""

    resources: list[HotResource]


class Step(Answer):
    """One step of a cycle: request `waiter` asks for `resource`, which request `holder` holds."""

    resource: str
    waiter: int
    holder: int
    note: str | UnsetType = UNSET
    """That of the waiter."""


class DeadlockRow(Answer):
    """A request that would have closed a cycle, and so was ended: the victim."""

    at: int
    id: int
    transaction_name: str | None
    cycle: list[str]
    """The transactions, each waiting for the next and the last for the first, which is the victim's."""
    waits: list[Step]
    steps_total: int = 0
    """Steps of the cycle, of which the first thousand are told."""


class Deadlocks(Answer):
    """`/api/deadlocks`: the latest, the newest first."""

    deadlocks: list[DeadlockRow]
    total: int
    """Since the start of the server."""


class Blocker(Answer, omit_defaults=True, kw_only=True, gc=False):
    """Who is in the way of a request that waits."""

    id: int
    resource: str
    mode: str
    state: str
    since: int
    transaction_name: str | UnsetType = UNSET
    note: str | UnsetType = UNSET


class Row(Answer, omit_defaults=True, kw_only=True, gc=False):
    """A request, as in the wire's `inspected`."""

    id: int
    resources: list[str]
    resources_total: int
    priority: float
    since: int
    expires_in: float | UnsetType = UNSET
    """ms until the lock, or the request, times out; missing where it waits without a limit."""
    transaction_name: str | UnsetType = UNSET
    note: str | UnsetType = UNSET
    fence: int | UnsetType = UNSET
    blockers: list[Blocker] | UnsetType = UNSET
    blockers_total: int | UnsetType = UNSET


class Resource(Answer):
    """`/api/resources/NAME`: who holds it, and its line in order."""

    resource: str
    holders: list[Row]
    holders_total: int
    queue: list[Row]
    queue_total: int


class Release(Answer):
    """What `POST /api/release` is sent."""

    id: int


class Released(Answer):
    """What it answers: the request has ended, as `reason` says."""

    id: int
    reason: str


class Problem(Answer, omit_defaults=True, kw_only=True, gc=False):
    """Any answer from 400 on."""

    code: str
    """One of the wire's, `not-found`, `not-allowed` (the method) or `defect`."""
    message: str
    leader: str | UnsetType = UNSET
    """The address of the server that leads, where that would know."""


def encode_small(answer: Answer) -> bytes:
    """Encode an answer that is too small to be worth pausing for."""
    encoded: bytes = msgspec.json.encode(answer)
    return encoded


# -- What is answered to a question that can't be: always JSON, with what is wrong and what would be right --------

log = structlog.get_logger()

MAX_BODY: Final = 4096
"""Bytes that a client may send."""
JSON: Final = "application/json"


class ApiError(Exception):
    """Ends a request with this status; `leader` is the address of the server that would know."""

    def __init__(self, status: int, code: str, message: str, leader: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.answer = Problem(code=code, message=message, leader=UNSET if leader is None else leader)


def bad(message: str) -> ApiError:
    """A question that is wrong in itself."""
    return ApiError(400, Code.BAD_REQUEST, message)


@web.middleware
async def as_answers(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer whatever goes wrong."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except ApiError as caught:
        problem = caught
        if problem.status == web.HTTPServiceUnavailable.status_code:
            headers["Retry-After"] = "1"
    except web.HTTPNotFound:
        problem = ApiError(404, "not-found", f"nothing is at {request.path[:200]}; /api/schema says what is where")
    except web.HTTPMethodNotAllowed as wrong:
        allowed = ", ".join(sorted(wrong.allowed_methods))
        headers["Allow"] = allowed
        problem = ApiError(405, "not-allowed", f"{request.path[:200]} takes {allowed}, not {request.method}")
    except web.HTTPRequestEntityTooLarge:
        problem = ApiError(413, Code.BAD_REQUEST, f"a body has at most {MAX_BODY} bytes")
    except (web.HTTPException, ConnectionError):
        raise
    except Exception:
        log.exception("a defect in the admin port", path=request.path[:200])
        problem = ApiError(500, "defect", "this is a defect of the server; its log says more")
    return web.Response(status=problem.status, body=encode_small(problem.answer), content_type=JSON, headers=headers)
