"""How many may be connected to the admin port: its work is done between that for the locks, and must stay little."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from logging import Logger
from typing import Final, cast

import structlog
from aiohttp import web

from genie.admin.api import Api
from genie.admin.endpoints import Health, Page, Scrape
from genie.admin.interfaces import Subject
from genie.admin.models import JSON, MAX_BODY, Problem, as_answers, encode_small
from genie.admin.security import HEADERS, Guard
from genie.admin.throttle import Pace, Turns
from genie.errors import Code
from genie.tls import name_of

log = structlog.get_logger()

MOST: Final = 64
"""Connections. Browsers have up to six each, Prometheus one or two."""
BACKLOG: Final = 16
"""Connections that are accepted in one go, and may be too many."""
SILENT_S: Final = 30.0
"""How long a connection may ask nothing whole before it is closed."""
ANSWERED_S: Final = 60.0
"""How long an answer may take until it is sent, beyond that."""
STOP_S: Final = 1.0
"""How long who is being answered when the server stops is waited for."""

_HEAD: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Door(web.AppRunner):
    """A runner that lets no more in than it may, and none stay that asks nothing."""

    def __init__(self, app: web.Application) -> None:
        self._asked = _Asked()
        app.middlewares.insert(0, self._asked.note)
        super().__init__(app, access_log=None, handle_signals=False, shutdown_timeout=STOP_S)

    @property
    def server(self) -> web.Server | None:
        """What is called for each connection, to make its protocol."""
        made = super().server
        return None if made is None else cast("web.Server", self._bounded(made))

    def _bounded(self, server: web.Server) -> Callable[[], asyncio.BaseProtocol]:
        def make() -> asyncio.BaseProtocol:
            if len(server.connections) >= MOST:
                return _Full()
            connection = _Speaker(server, loop=asyncio.get_running_loop(), access_log=cast("Logger", None))
            self._asked.watch(connection)
            return connection

        return make


class _Speaker(web.RequestHandler):
    """One connection. What comes on it that is no HTTP may be anything, also a token: it is not repeated."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - what was wrong, with what was said
    ) -> web.StreamResponse:
        """Answer what could not be read, or what failed in an unforeseen way."""
        if status >= web.HTTPInternalServerError.status_code:
            log.error("a defect in the admin port", exc_info=exc)
            problem = Problem(code="defect", message="this is a defect of the server; its log says more")
        else:
            log.debug("no HTTP on the admin port", peer=request.remote)
            problem = Problem(code=Code.BAD_REQUEST, message="this is not HTTP as it is understood here")
        answer = web.Response(status=status, body=encode_small(problem), content_type=JSON, headers=HEADERS)
        answer.force_close()
        return answer


class _Asked:
    """When each connection last asked something whole, and was answered."""

    def __init__(self) -> None:
        self._at: dict[web.RequestHandler, float] = {}

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Around every answer."""
        now = asyncio.get_running_loop().time
        self._at[request.protocol] = now() + ANSWERED_S
        try:
            return await handler(request)
        finally:
            if request.protocol in self._at:
                self._at[request.protocol] = now()

    def watch(self, connection: web.RequestHandler) -> None:
        """Close it, if it says nothing."""
        loop = asyncio.get_running_loop()
        self._at[connection] = loop.time()
        loop.call_later(SILENT_S, self._look, connection)

    def _look(self, connection: web.RequestHandler) -> None:
        if connection.transport is None:
            self._at.pop(connection, None)
            return
        left = self._at[connection] + SILENT_S - asyncio.get_running_loop().time()
        if left > 0:
            asyncio.get_running_loop().call_later(min(left, SILENT_S), self._look, connection)
        else:
            del self._at[connection]
            connection.transport.abort()


class _Full(asyncio.Protocol):
    """For whom there is no place. It is told so, without a look at what it asks."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Tell it, and close."""
        full = cast("asyncio.Transport", transport)
        body = b'{"code":"too-many","message":"%d connections are open; ask again later"}' % MOST
        full.write(_HEAD % len(body) + body)
        full.close()


# -- The admin port as a whole: where it listens, and what is answered where --------

HANDSHAKE_S: Final = 5.0
"""How long a client may take to agree on TLS. Until it has, it is none of those that may be connected."""


class Admin:
    """Answers on a port of its own. With none in the settings it does nothing.

    `address` is where it listens, once it does.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self.address: tuple[str, int] | None = None
        self.pace = Pace()

    async def start(self) -> None:
        """Listen; OSError where the port can't be had."""
        settings = self._subject.settings
        if settings.admin.port is None:
            return
        app = web.Application(middlewares=[as_answers], client_max_size=MAX_BODY)
        Guard(lambda: self._subject.access, settings.admin.host, _certificate, self._refused).protect(app)
        app.on_response_prepare.append(_not_to_be_kept)
        turns = Turns(self.pace)
        app.add_routes(Health(self._subject).routes())
        app.add_routes(Page().routes())
        app.add_routes(Api(self._subject, turns).routes())
        app.add_routes(Scrape(self._subject, turns).routes())
        self._runner = Door(app)
        await self._runner.setup()
        try:
            tls = self._subject.admin_tls
            self._listener = await asyncio.get_running_loop().create_server(
                cast("Callable[[], asyncio.Protocol]", self._runner.server),
                settings.admin.host,
                settings.admin.port,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
                backlog=BACKLOG,
            )
        except BaseException:
            await self._runner.cleanup()
            raise
        self.address = self._listener.sockets[0].getsockname()[:2]

    def _refused(self) -> None:
        self._subject.stats.errors[Code.UNAUTHORIZED] += 1

    async def stop(self) -> None:
        """Answer no more."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()


def _certificate(request: web.Request) -> str | None:
    """The name in the certificate that was shown, if any: it was verified."""
    return name_of(request.get_extra_info("peercert"))


async def _not_to_be_kept(_: web.Request, response: web.StreamResponse) -> None:
    """What was true a moment ago is of no use to anybody, unless the answer says otherwise."""
    response.headers.setdefault("Cache-Control", "no-store")
