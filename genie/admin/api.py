"""`/api/…`: what a server does, as JSON; and one thing that can be asked of it, a release."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog
from aiohttp import web

from genie.admin import answers, looks, parameters, state
from genie.admin.encoding import Body, at_once, encode
from genie.admin.guard import PRINCIPAL
from genie.admin.pace import Pace
from genie.admin.problems import JSON, Problem
from genie.admin.schema import schema
from genie.admin.subject import Seat, Subject
from genie.admin.turns import Turns
from genie.core import LockManager
from genie.errors import Code
from genie.protocol import messages

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
        parameters.limit(request)
        subject, namespace = self._subject, self._namespace(request)
        key = "state", namespace, *((seat.role, seat.leader) for seat in subject.seats.values())
        body = await self._turns.answer(key, lambda: self._made(state.state(subject, namespace, self._pace)))
        return await send(request, body)

    async def waits(self, request: web.Request) -> web.StreamResponse:
        """Who waits for whom."""
        limit = parameters.limit(request)
        return await self._look(
            request, ("waits", limit), lambda _, manager: looks.graph(manager.table, limit, self._pace)
        )

    async def hot(self, request: web.Request) -> web.StreamResponse:
        """Where most was waited."""
        limit = parameters.limit(request)
        return await self._look(
            request, ("hot", limit), lambda seat, manager: state.hot(seat.stats, manager.table, limit, self._pace)
        )

    async def deadlocks(self, request: web.Request) -> web.StreamResponse:
        """Which there were."""
        limit = parameters.limit(request)
        return await self._look(
            request, ("deadlocks", limit), lambda seat, _: state.deadlocks(seat.stats, limit, self._pace)
        )

    async def resource(self, request: web.Request) -> web.StreamResponse:
        """Who holds one, and who waits for it."""
        parameters.limit(request)
        name = parameters.name(request, RESOURCES)
        return await self._look(
            request,
            ("resource", name),
            lambda seat, manager: looks.resource(manager.table, name, seat.now, self._pace),
        )

    async def schema(self, request: web.Request) -> web.StreamResponse:
        """What is asked and answered where."""
        parameters.limit(request)
        return web.Response(body=self._schema, content_type=JSON)

    async def release(self, request: web.Request) -> web.StreamResponse:
        """End a lock, or cancel a request that waits. The holder is told, as of any release by somebody else."""
        parameters.limit(request)
        asked = await parameters.release(request)
        namespace = self._namespace(request)
        seat = self._subject.seats[namespace]
        _leads(seat)
        told = await self._carry_out(seat, messages.command("release", id=asked.id))
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
            answer = answers.Released(id=asked.id, reason=told.payload.reason)
            return web.Response(body=at_once(answer), content_type=JSON)
        if isinstance(told, messages.Error):
            error = told.payload
            raise Problem(STATUS.get(error.code, 400), error.code, error.message, error.leader)
        raise Problem(500, "defect", f"a release was answered by {type(told).__name__}")

    async def _carry_out(self, seat: Seat, line: bytes) -> messages.Message | None:
        patience_s = self._subject.settings.store_timeout_ms / 1000 + 1
        try:
            async with asyncio.timeout(patience_s):
                return messages.read((await seat.carry_out(line)).partition(b"\n")[0])
        except TimeoutError:
            why = f"there was no answer within {patience_s:.0f} s; the release may be carried out yet"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            why = "this server has stopped leading meanwhile; the release may have been carried out"
        raise Problem(503, Code.UNAVAILABLE, why, seat.leader)

    # -- what they have in common -------------------------------------------------------------------------

    @property
    def _pace(self) -> Pace:
        return self._turns.pace

    def _namespace(self, request: web.Request) -> str:
        return parameters.namespace(request, self._subject.seats)

    async def _look(
        self,
        request: web.Request,
        key: tuple[str, int | str],
        make: Callable[[Seat, LockManager], Awaitable[answers.Answer]],
    ) -> web.StreamResponse:
        """Answer what only the server knows that leads the namespace: from before the first look until after the last."""
        namespace = self._namespace(request)
        seat = self._subject.seats[namespace]
        manager = _leads(seat)

        async def made() -> Body:
            return await self._made(make(seat, manager))

        body = await self._turns.answer((namespace, *key), made)
        _leads(seat)
        return await send(request, body)

    async def _made(self, making: Awaitable[answers.Answer]) -> Body:
        return await encode(await making, self._pace)


def _leads(seat: Seat) -> LockManager:
    manager = seat.manager
    if manager is None:
        where = "no server is known to lead" if seat.leader is None else f"{seat.leader} leads"
        raise Problem(503, Code.UNAVAILABLE, f"this server has no locks to show; {where}", seat.leader)
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
