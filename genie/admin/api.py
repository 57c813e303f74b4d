"""The JSON API under `/api/`: request parameters, the OpenAPI document, and the handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec
import structlog
from aiohttp import web

from genie.admin import models, views
from genie.admin.history import HistorySearches
from genie.admin.interfaces import NamespaceView, ServerView
from genie.admin.models import JSON, ApiError, bad_request, encode_small
from genie.admin.security import PRINCIPAL
from genie.admin.throttle import Body, ResponseCache, encode
from genie.core import LockManager
from genie.errors import Code
from genie.protocol import diagnostics, messages
from genie.protocol.limits import MAX_NAMESPACE
from genie.protocol.resources import MAX_NAME, check_name
from genie.version import VERSION


@dataclass(frozen=True)
class Limit:
    """The query parameter `?limit=` of a path: how many items a response may contain, from 1 to `maximum`."""

    default: int
    maximum: int
    items: str
    """The noun for the limited objects in messages, such as `nodes`."""


LIMITS = {
    "/api/waits": Limit(default=500, maximum=1_000, items="nodes"),
    "/api/hot": Limit(default=20, maximum=100, items="resources"),
    "/api/requests": Limit(default=100, maximum=500, items="requests"),
    "/api/deadlocks": Limit(default=20, maximum=100, items="deadlocks"),
    "/api/order": Limit(default=100, maximum=1_000, items="edges"),
}
"""The limits by path."""
SEARCH_PATH = "/api/requests"
"""The path that accepts the query parameter `?search=`."""
MAX_SEARCH = 512
"""Maximum number of characters of a search, that of a name."""
PATHS_WITHOUT_NAMESPACE = frozenset({"/api/schema"})
"""Paths that do not accept the query parameter `?namespace=`."""


def check_parameters(request: web.Request) -> None:
    """Raise ApiError 400 if a request has a query parameter that its path does not accept."""
    path = request.path
    accepted = []
    if path in LIMITS:
        accepted.append("limit")
    if path == SEARCH_PATH:
        accepted.append("search")
    if path not in PATHS_WITHOUT_NAMESPACE:
        accepted.append("namespace")
    for name in request.query:
        if name not in accepted:
            raise bad_request(f"unknown parameter {name[:64]!r} of {path[:64]}; known: {', '.join(accepted) or 'none'}")


def read_limit(request: web.Request) -> int:
    """Return the value of `?limit=`, or the default of the path if the parameter is missing.

    The path must be in `LIMITS`. Raises ApiError 400 if the limit is invalid, or if the request has unknown parameters.
    """
    check_parameters(request)
    limit = LIMITS[request.path]
    if "limit" not in request.query:
        return limit.default
    values = request.query.getall("limit")
    text = values[0]
    is_number = text.isascii() and text.isdecimal()
    is_short = len(text) <= len(str(limit.maximum))  # to convert a very long number would take long
    if len(values) > 1 or not is_number or not is_short or not 1 <= int(text) <= limit.maximum:
        raise bad_request(
            f"limit must be one number of {limit.items} from 1 to {limit.maximum}, not {', '.join(values)[:64]!r}"
        )
    return int(text)


def read_search(request: web.Request) -> str:
    """Return the value of `?search=`, or an empty text if it is missing. Raises ApiError 400 if it is too long."""
    text = request.query.get("search", "")
    if len(text) > MAX_SEARCH:
        raise bad_request(f"search must have at most {MAX_SEARCH} characters, not {len(text)}")
    return text


def read_namespace(request: web.Request, served: Collection[str]) -> str:
    """Return the value of `?namespace=`, or the first of the `served` namespaces if the parameter is missing.

    Raises ApiError 400 if the name is invalid, and 404 if the namespace is not served.
    """
    if "namespace" not in request.query:
        return next(iter(served))
    values = request.query.getall("namespace")
    namespace = values[0]
    error = diagnostics.namespace_error(namespace)
    if len(values) > 1 or error is not None:
        raise bad_request(f"namespace {error or 'must be given once'}, not {', '.join(values)[:64]!r}")
    if namespace not in served:
        message = f"unknown namespace {namespace!r}; this server serves {', '.join(served)}"
        raise ApiError(404, "not-found", message)
    return namespace


def read_resource_name(request: web.Request, prefix: str) -> str:
    """Return the name of a resource, which is the percent-encoded part of the path after `prefix`.

    Raises ApiError 400 if the encoding or the name is invalid.
    """
    path = request.raw_path.partition("?")[0]
    encoded_name = path.removeprefix(prefix)
    try:
        return check_name(unquote(encoded_name, errors="strict"), "the name of a resource")
    except UnicodeDecodeError:
        raise bad_request("the name of a resource must be percent-encoded UTF-8") from None
    except ValueError as error:
        raise bad_request(str(error)) from None


async def read_release(request: web.Request) -> models.Release:
    """Decode the body of `POST /api/release`. Raises ApiError 400 if the body is invalid."""
    try:
        body = await request.read()
        command = msgspec.json.decode(body.decode(), type=models.Release)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f'the body must be {{"id": N}}, the id of a request: {error}') from None
    if not 0 < command.id < 1 << 63:
        raise bad_request(
            f"id must be the id of a request, a positive number of at most 63 bits, not {str(command.id)[:40]}"
        )
    return command


# -- `/api/schema`: the OpenAPI document, generated from the response types --------

RESPONSES: dict[str, type[models.ApiModel]] = {
    "/api/state": models.State,
    "/api/waits": models.Waits,
    "/api/hot": models.HotList,
    "/api/deadlocks": models.Deadlocks,
    "/api/order": models.Order,
    "/api/requests": models.Requests,
    "/api/resources/{name}": models.Resource,
    "/api/history/{name}": models.History,
    "/api/release": models.Released,
}
"""The response types by path."""
_SEARCH = {
    "name": "search",
    "in": "query",
    "description": "a part of the name of a resource or a transaction, or of a note",
    "schema": {"type": "string", "maxLength": MAX_SEARCH},
}
_REF_TEMPLATE = "#/components/schemas/{name}"


def schema() -> bytes:
    """Return the OpenAPI document of the API, encoded as JSON."""
    types = [*RESPONSES.values(), models.Release, models.Problem]
    refs, components = msgspec.json.schema_components(types, ref_template=_REF_TEMPLATE)
    content_by_type = {type_: _json_content(ref) for type_, ref in zip(types, refs, strict=True)}
    problem = {"description": "The error, and what would be valid", **content_by_type[models.Problem]}
    paths: dict[str, Any] = {}
    for path, response_type in RESPONSES.items():
        summary = (response_type.__doc__ or "").partition("\n")[0]
        success = {"description": summary, **content_by_type[response_type]}
        operation: dict[str, Any] = {"parameters": _parameters(path), "responses": {"200": success, "default": problem}}
        if path == "/api/release":
            operation["requestBody"] = {"required": True, **content_by_type[models.Release]}
            paths[path] = {"post": operation}
        else:
            paths[path] = {"get": operation}
    info = {"title": "Genie admin API", "version": VERSION}
    return msgspec.json.encode(
        {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
    )


def _json_content(ref: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of a JSON body whose schema is the reference `ref`."""
    return {"content": {"application/json": {"schema": ref}}}


def _parameters(path: str) -> list[dict[str, Any]]:
    """Return the OpenAPI descriptions of all parameters of a path."""
    parameters: list[dict[str, Any]] = []
    if path in LIMITS:
        limit = LIMITS[path]
        value_schema = {"type": "integer", "minimum": 1, "maximum": limit.maximum, "default": limit.default}
        description = f"maximum number of {limit.items}"
        parameters.append({"name": "limit", "in": "query", "description": description, "schema": value_schema})
    if path == SEARCH_PATH:
        parameters.append(_SEARCH)
    if "{name}" in path:
        value_schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}
        parameters.append({"name": "name", "in": "path", "required": True, "schema": value_schema})
    value_schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAMESPACE}
    description = "the namespace; by default the first that the server serves"
    return [*parameters, {"name": "namespace", "in": "query", "description": description, "schema": value_schema}]


# -- The handlers --------

log = structlog.get_logger()

RESOURCES = "/api/resources/"
"""The path before the name of a resource."""
HISTORY = "/api/history/"
"""The path before the name of a resource whose history is requested."""
SEND_TIMEOUT_S = 30.0
"""Maximum time that a client may take to read a response."""
STATUS_BY_CODE: dict[str, int] = {
    Code.UNKNOWN_ID: 404,
    Code.UNAVAILABLE: 503,
    Code.TOO_MANY: 503,
    Code.UNAUTHORIZED: 403,
}
"""HTTP status by the error code of a rejected command. Other error codes have the status 400."""


class Api:
    """The handlers of `/api/`. They read the statistics and the lock tables of a server."""

    def __init__(self, server: ServerView, cache: ResponseCache) -> None:
        self._server = server
        self._cache = cache
        self._budget = cache.budget
        self._history_searches = HistorySearches()
        self._schema = schema()  # computed once, before the first request

    def routes(self) -> Iterable[web.RouteDef]:
        """Return the routes of the API."""
        return [
            web.get("/api/state", self.state, allow_head=False),
            web.get("/api/waits", self.waits, allow_head=False),
            web.get("/api/hot", self.hot, allow_head=False),
            web.get("/api/deadlocks", self.deadlocks, allow_head=False),
            web.get("/api/order", self.order, allow_head=False),
            web.get(SEARCH_PATH, self.requests, allow_head=False),
            web.get(RESOURCES + "{name:.*}", self.resource, allow_head=False),
            web.get(HISTORY + "{name:.*}", self.history, allow_head=False),
            web.post("/api/release", self.release),
            web.get("/api/schema", self.schema, allow_head=False),
        ]

    async def state(self, request: web.Request) -> web.StreamResponse:
        """Respond with an overview of the server. On a follower the numbers of locks are 0."""
        check_parameters(request)
        server, namespace = self._server, self._namespace(request)
        roles = [(view.role, view.leader) for view in server.namespaces.values()]
        key = "state", namespace, *roles  # so a change of leadership invalidates the cached responses
        body = await self._cache.get_or_compute(key, lambda: self._encode(views.state(server, namespace, self._budget)))
        return await self._send(request, body)

    async def waits(self, request: web.Request) -> web.StreamResponse:
        """Respond with the wait-for graph."""
        limit = read_limit(request)
        return await self._respond(
            request, ("waits", limit), lambda _, manager: views.graph(manager.table, limit, self._budget)
        )

    async def hot(self, request: web.Request) -> web.StreamResponse:
        """Respond with the most contended resources."""
        limit = read_limit(request)
        return await self._respond(
            request, ("hot", limit), lambda view, manager: views.hot(view.stats, manager.table, limit, self._budget)
        )

    async def deadlocks(self, request: web.Request) -> web.StreamResponse:
        """Respond with the latest deadlocks."""
        limit = read_limit(request)
        return await self._respond(
            request, ("deadlocks", limit), lambda view, _: views.deadlocks(view.stats, limit, self._budget)
        )

    async def order(self, request: web.Request) -> web.StreamResponse:
        """Respond with the lock order and its inversions. Raises ApiError 404 if the analysis is off."""
        limit = read_limit(request)
        lock_order = self._server.namespaces[self._namespace(request)].lock_order
        if lock_order is None:
            raise ApiError(
                404, "not-found", "the analysis of the lock order is off: start the server with --lock-order on"
            )
        return await self._respond(
            request, ("order", limit), lambda _view, _manager: views.order(lock_order, limit, self._budget)
        )

    async def requests(self, request: web.Request) -> web.StreamResponse:
        """Respond with the locks that are held for longest, or with the requests that match `?search=`."""
        limit, text = read_limit(request), read_search(request)
        return await self._respond(
            request,
            ("requests", limit, text),
            lambda view, manager: views.requests(manager.table, text, limit, view.now, self._budget),
        )

    async def resource(self, request: web.Request) -> web.StreamResponse:
        """Respond with the holders and the wait queue of a resource."""
        check_parameters(request)
        name = read_resource_name(request, RESOURCES)
        return await self._respond(
            request,
            ("resource", name),
            lambda view, manager: views.resource(manager.table, name, view.now, self._budget),
        )

    async def history(self, request: web.Request) -> web.StreamResponse:
        """Respond with the latest requests for a resource. Raises ApiError 404 if this server records no history."""
        check_parameters(request)
        name = read_resource_name(request, HISTORY)
        recorded = self._server.namespaces[self._namespace(request)].history
        if recorded is None:
            raise ApiError(404, "not-found", "the history is off: start the server with --history-dir DIRECTORY")
        response = await self._history_searches.find(recorded.directory, name)
        return await self._send(request, await encode(response, self._budget))

    async def schema(self, request: web.Request) -> web.StreamResponse:
        """Respond with the OpenAPI document."""
        check_parameters(request)
        return web.Response(body=self._schema, content_type=JSON)

    async def release(self, request: web.Request) -> web.StreamResponse:
        """Release a lock or cancel a waiting request by id. The server notifies the client that owns the request.

        Raises ApiError if this server is not the leader, or if the release is rejected.
        """
        check_parameters(request)
        command = await read_release(request)
        namespace = self._namespace(request)
        view = self._server.namespaces[namespace]
        _manager_of_leader(view)  # raises if this server is not the leader
        reply = await self._execute(view, messages.command("release", id=command.id))
        if isinstance(reply, messages.Error):
            error = reply.payload
            status = STATUS_BY_CODE.get(error.code, 400)
            raise ApiError(status, error.code, error.message, leader=error.leader)
        if not isinstance(reply, messages.Released):
            raise ApiError(500, "defect", f"unexpected reply to a release: {type(reply).__name__}")
        principal = PRINCIPAL.get()
        principal_field = {} if principal is None else {"principal": principal.name}
        log.info(
            "request released by operator",
            namespace=namespace,
            id=command.id,
            reason=reply.payload.reason,
            peer=request.remote,
            **principal_field,
        )
        response = models.Released(id=command.id, reason=reply.payload.reason)
        return web.Response(body=encode_small(response), content_type=JSON)

    async def _execute(self, view: NamespaceView, line: bytes) -> messages.Message | None:
        """Execute a command, an encoded line, in a namespace, and return the decoded reply.

        Raises ApiError 503 if the outcome is unknown, because of a timeout or because this server lost its leadership.
        """
        timeout_s = self._server.settings.store_timeout_ms / 1000 + 1
        try:
            async with asyncio.timeout(timeout_s):
                reply = await view.execute(line)
            first_line = reply.partition(b"\n")[0]
            return messages.read(first_line)
        except TimeoutError:
            reason = f"no reply within {timeout_s:.0f} s; the release may still take effect"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # aiohttp has cancelled this handler, e.g. because the HTTP connection ended
            # The command was cancelled, not this handler: a server cancels its commands when it loses the leadership.
            reason = "this server lost its leadership; the release may have taken effect"
        raise ApiError(503, Code.UNAVAILABLE, reason, leader=view.leader)

    # -- shared by the handlers -----------------------------------------------------------------------------

    def _namespace(self, request: web.Request) -> str:
        """Return the requested namespace, by default the first one. Raises ApiError like `read_namespace`."""
        return read_namespace(request, self._server.namespaces)

    async def _respond(
        self,
        request: web.Request,
        key: tuple[str | int, ...],
        build: Callable[[NamespaceView, LockManager], Awaitable[models.ApiModel]],
    ) -> web.StreamResponse:
        """Respond with data that only the leader of the namespace has.

        The response comes from the cache under `key`. If it is not cached, `build` computes it. Raises ApiError 503 if
        this server is not the leader, or loses the leadership while the response is built.
        """
        namespace = self._namespace(request)
        view = self._server.namespaces[namespace]
        manager = _manager_of_leader(view)

        async def compute() -> Body:
            return await self._encode(build(view, manager))

        body = await self._cache.get_or_compute((namespace, *key), compute)
        _manager_of_leader(view)  # raises if this server has lost the leadership in the meantime
        return await self._send(request, body)

    async def _encode(self, response: Awaitable[models.ApiModel]) -> Body:
        """Wait for a response, and encode it in chunks."""
        return await encode(await response, self._budget)

    async def _send(self, request: web.Request, body: Body) -> web.StreamResponse:
        """Send an encoded response with status 200 in chunks, between which the event loop serves other clients.

        A client that does not read the response within `SEND_TIMEOUT_S` is disconnected. Raises ApiError 503 if too
        many bytes are being sent already.
        """
        if len(body) == 1:
            (only_chunk,) = body
            return web.Response(body=only_chunk, content_type=JSON)
        response = web.StreamResponse(headers={"Content-Type": JSON})
        response.content_length = sum(map(len, body))
        with self._cache.sending(body):
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await response.prepare(request)
                    for chunk in body:
                        await response.write(chunk)
                        await asyncio.sleep(0)
                    await response.write_eof()
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
        return response


def _manager_of_leader(view: NamespaceView) -> LockManager:
    """Return the lock manager of a namespace, which only the leader has.

    Raises ApiError 503 if this server is not the leader. The error contains the address of the leader, if known.
    """
    manager = view.manager
    if manager is None:
        leader = "no leader is known" if view.leader is None else f"the leader is {view.leader}"
        raise ApiError(503, Code.UNAVAILABLE, f"this server is not the leader; {leader}", leader=view.leader)
    return manager
