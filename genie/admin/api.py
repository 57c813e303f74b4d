"""What a question says, checked: each thing that is wrong is named, with what would be right."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from urllib.parse import unquote

import msgspec
import structlog
from aiohttp import web

from genie.admin import models, views
from genie.admin.interfaces import NamespaceView, Subject
from genie.admin.models import JSON, ApiError, bad, encode_small
from genie.admin.security import PRINCIPAL
from genie.admin.throttle import Body, Pace, Turns, encode
from genie.core import LockManager
from genie.errors import Code
from genie.protocol import diagnostics, messages
from genie.protocol.limits import MAX_NAMESPACE
from genie.protocol.resources import MAX_NAME, check_name


@dataclass(frozen=True)
class Limit:
    """`?limit=`: how many of something at most, from 1 to `most`."""

    usual: int
    most: int
    what: str


LIMITS = {
    "/api/waits": Limit(500, 1_000, "nodes"),
    "/api/hot": Limit(20, 100, "resources"),
    "/api/deadlocks": Limit(20, 100, "deadlocks"),
}
"""By path."""
OF_NO_NAMESPACE = frozenset({"/api/schema"})
"""Paths that tell the same of all."""


def read_limit(request: web.Request) -> int:
    """How many are asked for. That nothing else is asked for than the path has, a limit or not."""
    known = LIMITS.get(request.path)
    has = ["limit"] * (known is not None) + ["namespace"] * (request.path not in OF_NO_NAMESPACE)
    for name in request.query:
        if name not in has:
            why = f"it has {' and '.join(has) or 'none'}"
            raise bad(f"{name[:64]}: {request.path[:64]} has no such parameter; {why}")
    if known is None or "limit" not in request.query:
        return 0 if known is None else known.usual
    values = request.query.getall("limit")
    text = values[0]
    right = len(values) == 1 and text.isascii() and text.isdecimal() and len(text) <= len(str(known.most))
    if not right or not 1 <= int(text) <= known.most:
        raise bad(f"limit must be one number of {known.what}, 1 to {known.most}, not {', '.join(values)[:64]!r}")
    return int(text)


def read_namespace(request: web.Request, served: Collection[str]) -> str:
    """Which namespace is asked about, of those that are `served`: the first where none is said."""
    if "namespace" not in request.query:
        return next(iter(served))
    values = request.query.getall("namespace")
    wrong = diagnostics.namespace_error(values[0])
    if len(values) > 1 or wrong is not None:
        raise bad(f"namespace {wrong or 'must be said once'}, not {', '.join(values)[:64]!r}")
    if values[0] not in served:
        why = f"this server does not serve the namespace {values[0]!r}; it serves {', '.join(served)}"
        raise ApiError(404, "not-found", why)
    return values[0]


def read_name(request: web.Request, prefix: str) -> str:
    """The name of a resource, which is the rest of the path: in UTF-8, with %XX for whatever a URL can't have."""
    path = request.raw_path.partition("?")[0]
    try:
        return check_name(unquote(path[len(prefix) :], errors="strict"), "the name of a resource")
    except UnicodeDecodeError:
        raise bad("the name of a resource must be UTF-8 behind its %XX") from None
    except ValueError as wrong:
        raise bad(str(wrong)) from None


async def release(request: web.Request) -> models.Release:
    """What is to be released."""
    try:
        body = await request.read()
        asked = msgspec.json.decode(body.decode(), type=models.Release)
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise bad(f'the body must be {{"id": N}}, the id of a request: {wrong}') from None
    if not 0 < asked.id < 1 << 63:
        raise bad(f"id must be that of a request, a positive number of at most 63 bits, not {str(asked.id)[:40]}")
    return asked


# -- `/api/schema`: what is asked and answered where, in OpenAPI's words, made from the types of the answers --------

ANSWERS: dict[str, type[models.Answer]] = {
    "/api/state": models.State,
    "/api/waits": models.Waits,
    "/api/hot": models.HotList,
    "/api/deadlocks": models.Deadlocks,
    "/api/resources/{name}": models.Resource,
    "/api/release": models.Released,
}
_TEMPLATE = "#/components/schemas/{name}"


def schema() -> bytes:
    """The whole, as JSON."""
    kinds = [*ANSWERS.values(), models.Release, models.Problem]
    refs, components = msgspec.json.schema_components(kinds, ref_template=_TEMPLATE)
    ref = dict(zip(kinds, refs, strict=True))
    problem = {"description": "Why not, and what would be right", **_body(ref[models.Problem])}
    paths: dict[str, Any] = {}
    for path, kind in ANSWERS.items():
        asked: dict[str, Any] = {
            "parameters": _parameters(path),
            "responses": {"200": {"description": _first_line(kind), **_body(ref[kind])}, "default": problem},
        }
        if path == "/api/release":
            asked["requestBody"] = {"required": True, **_body(ref[models.Release])}
            paths[path] = {"post": asked}
        else:
            paths[path] = {"get": asked}
    info = {"title": "Genie's admin port", "version": version("genie-lock")}
    return msgspec.json.encode(
        {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
    )


def _body(ref: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": ref}}}


def _first_line(kind: type[models.Answer]) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _parameters(path: str) -> list[dict[str, Any]]:
    bounds = {"type": "string", "minLength": 1, "maxLength": MAX_NAMESPACE}
    what = "which namespace; that of who says none is the server's first"
    return [*_own(path), {"name": "namespace", "in": "query", "description": what, "schema": bounds}]


def _own(path: str) -> list[dict[str, Any]]:
    if path in LIMITS:
        known = LIMITS[path]
        bounds = {"type": "integer", "minimum": 1, "maximum": known.most, "default": known.usual}
        return [{"name": "limit", "in": "query", "description": f"{known.what} at most", "schema": bounds}]
    if "{name}" in path:
        bounds = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}
        return [{"name": "name", "in": "path", "required": True, "schema": bounds}]
    return []


# -- `/api/…`: what a server does, as JSON; and one thing that can be asked of it, a release --------

log = structlog.get_logger()

RESOURCES = "/api/resources/"
SEND_S = 30.0
"""How long a client may take to read its answer."""
STATUS: dict[str, int] = {
    Code.UNKNOWN_ID: 404,
    Code.UNAVAILABLE: 503,
    Code.TOO_MANY: 503,
    Code.UNAUTHORIZED: 403,
}
"""Of what the wire refuses. Else it is 400."""


class Api:
    """Answers from what a server counts and holds."""

    def __init__(self, subject: Subject, turns: Turns) -> None:
        self._subject = subject
        self._turns = turns
        self._schema = schema()  # made before anybody waits for it

    def routes(self) -> Iterable[web.RouteDef]:
        """Where each is."""
        return [
            web.get("/api/state", self.state, allow_head=False),
            web.get("/api/waits", self.waits, allow_head=False),
            web.get("/api/hot", self.hot, allow_head=False),
            web.get("/api/deadlocks", self.deadlocks, allow_head=False),
            web.get(RESOURCES + "{name:.*}", self.resource, allow_head=False),
            web.post("/api/release", self.release),
            web.get("/api/schema", self.schema, allow_head=False),
        ]

    async def state(self, request: web.Request) -> web.StreamResponse:
        """The server at a glance, whether it leads or not."""
        read_limit(request)
        subject, namespace = self._subject, self._namespace(request)
        key = "state", namespace, *((view.role, view.leader) for view in subject.namespaces.values())
        body = await self._turns.answer(key, lambda: self._made(views.state(subject, namespace, self._pace)))
        return await send(request, body)

    async def waits(self, request: web.Request) -> web.StreamResponse:
        """Who waits for whom."""
        limit = read_limit(request)
        return await self._look(
            request, ("waits", limit), lambda _, manager: views.graph(manager.table, limit, self._pace)
        )

    async def hot(self, request: web.Request) -> web.StreamResponse:
        """Where most was waited."""
        limit = read_limit(request)
        return await self._look(
            request, ("hot", limit), lambda view, manager: views.hot(view.stats, manager.table, limit, self._pace)
        )

    async def deadlocks(self, request: web.Request) -> web.StreamResponse:
        """Which there were."""
        limit = read_limit(request)
        return await self._look(
            request, ("deadlocks", limit), lambda view, _: views.deadlocks(view.stats, limit, self._pace)
        )

    async def resource(self, request: web.Request) -> web.StreamResponse:
        """Who holds one, and who waits for it."""
        read_limit(request)
        name = read_name(request, RESOURCES)
        return await self._look(
            request,
            ("resource", name),
            lambda view, manager: views.resource(manager.table, name, view.now, self._pace),
        )

    async def schema(self, request: web.Request) -> web.StreamResponse:
        """What is asked and answered where."""
        read_limit(request)
        return web.Response(body=self._schema, content_type=JSON)

    async def release(self, request: web.Request) -> web.StreamResponse:
        """End a lock, or cancel a request that waits. The holder is told, as of any release by somebody else."""
        read_limit(request)
        asked = await release(request)
        namespace = self._namespace(request)
        view = self._subject.namespaces[namespace]
        _leads(view)
        told = await self._carry_out(view, messages.command("release", id=asked.id))
        if isinstance(told, messages.Released):
            by = PRINCIPAL.get()
            name = {} if by is None else {"by": by.name}
            log.info(
                "released by an operator",
                namespace=namespace,
                id=asked.id,
                reason=told.payload.reason,
                peer=request.remote,
                **name,
            )
            answer = models.Released(id=asked.id, reason=told.payload.reason)
            return web.Response(body=encode_small(answer), content_type=JSON)
        if isinstance(told, messages.Error):
            error = told.payload
            raise ApiError(STATUS.get(error.code, 400), error.code, error.message, error.leader)
        raise ApiError(500, "defect", f"a release was answered by {type(told).__name__}")

    async def _carry_out(self, view: NamespaceView, line: bytes) -> messages.Message | None:
        patience_s = self._subject.settings.store_timeout_ms / 1000 + 1
        try:
            async with asyncio.timeout(patience_s):
                return messages.read((await view.execute(line)).partition(b"\n")[0])
        except TimeoutError:
            why = f"there was no answer within {patience_s:.0f} s; the release may be carried out yet"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            why = "this server has stopped leading meanwhile; the release may have been carried out"
        raise ApiError(503, Code.UNAVAILABLE, why, view.leader)

    # -- what they have in common -------------------------------------------------------------------------

    @property
    def _pace(self) -> Pace:
        return self._turns.pace

    def _namespace(self, request: web.Request) -> str:
        return read_namespace(request, self._subject.namespaces)

    async def _look(
        self,
        request: web.Request,
        key: tuple[str, int | str],
        make: Callable[[NamespaceView, LockManager], Awaitable[models.Answer]],
    ) -> web.StreamResponse:
        """Answer what only the server knows that leads the namespace: from before the first look until after the last."""
        namespace = self._namespace(request)
        view = self._subject.namespaces[namespace]
        manager = _leads(view)

        async def made() -> Body:
            return await self._made(make(view, manager))

        body = await self._turns.answer((namespace, *key), made)
        _leads(view)
        return await send(request, body)

    async def _made(self, making: Awaitable[models.Answer]) -> Body:
        return await encode(await making, self._pace)


def _leads(view: NamespaceView) -> LockManager:
    manager = view.manager
    if manager is None:
        where = "no server is known to lead" if view.leader is None else f"{view.leader} leads"
        raise ApiError(503, Code.UNAVAILABLE, f"this server has no locks to show; {where}", view.leader)
    return manager


async def send(request: web.Request, body: Body) -> web.StreamResponse:
    """Send an answer piece by piece. A client that does not read on for long is left."""
    if len(body) == 1:
        return web.Response(body=body[0], content_type=JSON)
    response = web.StreamResponse(headers={"Content-Type": JSON})
    response.content_length = sum(map(len, body))
    try:
        async with asyncio.timeout(SEND_S):
            await response.prepare(request)
            for piece in body:
                await response.write(piece)
                await asyncio.sleep(0)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    return response
