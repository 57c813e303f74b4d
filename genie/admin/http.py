"""The HTTP server of the admin port, with limits on connections and on their idle time.

It runs in the event loop that serves the locks, so its load must stay small. The classes here
extend aiohttp's runner and request handler; they were written against aiohttp 3.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from logging import Logger
from typing import Final, cast

import structlog
from aiohttp import web

from genie.admin.api import Api
from genie.admin.endpoints import HealthEndpoints, MetricsEndpoint, PageFiles
from genie.admin.interfaces import ServerView
from genie.admin.models import DEFECT, JSON, MAX_BODY, Problem, encode_small, error_middleware
from genie.admin.security import HEADERS, RequestGuard
from genie.admin.throttle import ResponseCache, WorkBudget
from genie.errors import Code
from genie.tls import certificate_name

log = structlog.get_logger()

MAX_CONNECTIONS: Final = 64
"""Maximum open connections. A browser opens up to six, Prometheus one or two."""
BACKLOG: Final = 16
"""Listen backlog. asyncio accepts queued connections immediately, also beyond `MAX_CONNECTIONS`."""
IDLE_TIMEOUT_S: Final = 30.0
"""How long a connection may stay open without a complete request."""
RESPONSE_TIMEOUT_S: Final = 60.0
"""Time for a response, in addition to the idle timeout."""
SHUTDOWN_TIMEOUT_S: Final = 1.0
"""How long a stopping server waits for responses in progress."""

_REJECTION_HEAD: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BoundedRunner(web.AppRunner):
    """An aiohttp runner that limits the number of connections and closes idle ones."""

    def __init__(self, app: web.Application) -> None:
        self._idle_timer = _IdleTimer()
        app.middlewares.insert(0, self._idle_timer.middleware)
        super().__init__(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_TIMEOUT_S)

    @property
    def server(self) -> web.Server | None:
        """Return the protocol factory that asyncio calls for each connection, with the limit of connections added."""
        server = super().server
        return None if server is None else cast("web.Server", self._limited_factory(server))

    def _limited_factory(self, server: web.Server) -> Callable[[], asyncio.BaseProtocol]:
        """Wrap the protocol factory of aiohttp: reject connections beyond the limit, start the idle timer of others."""

        def make_protocol() -> asyncio.BaseProtocol:
            if len(server.connections) >= MAX_CONNECTIONS:
                return _ConnectionRejector()
            connection = _Connection(server, loop=asyncio.get_running_loop(), access_log=cast("Logger", None))
            self._idle_timer.start(connection)
            return connection

        return make_protocol


class _Connection(web.RequestHandler):
    """A connection that neither logs nor echoes input that is not HTTP: it may contain a token."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - not used: it quotes the input
    ) -> web.StreamResponse:
        """Return the JSON response to a request that could not be parsed, or whose handler failed."""
        if status >= web.HTTPInternalServerError.status_code:
            log.error("admin request failed", exc_info=exc)
            problem = Problem(code="defect", message=DEFECT)
        else:
            log.debug("invalid HTTP request received", peer=request.remote)
            problem = Problem(code=Code.BAD_REQUEST, message="invalid HTTP request")
        response = web.Response(status=status, body=encode_small(problem), content_type=JSON, headers=HEADERS)
        response.force_close()
        return response


class _IdleTimer:
    """Closes connections that have sent no complete request for `IDLE_TIMEOUT_S`.

    While a request is handled, its connection counts as active for `RESPONSE_TIMEOUT_S` more.
    """

    def __init__(self) -> None:
        self._last_active: dict[web.RequestHandler, float] = {}

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record the time of each request and of its response."""
        now = asyncio.get_running_loop().time
        self._last_active[request.protocol] = now() + RESPONSE_TIMEOUT_S
        try:
            return await handler(request)
        finally:
            if request.protocol in self._last_active:
                self._last_active[request.protocol] = now()

    def start(self, connection: web.RequestHandler) -> None:
        """Start the timer of a new connection."""
        loop = asyncio.get_running_loop()
        self._last_active[connection] = loop.time()
        loop.call_later(IDLE_TIMEOUT_S, self._check, connection)

    def _check(self, connection: web.RequestHandler) -> None:
        """Close an idle connection, or check it again when its timeout will have passed."""
        if connection.transport is None:
            self._last_active.pop(connection, None)
            return
        remaining_s = self._last_active[connection] + IDLE_TIMEOUT_S - asyncio.get_running_loop().time()
        if remaining_s > 0:
            asyncio.get_running_loop().call_later(min(remaining_s, IDLE_TIMEOUT_S), self._check, connection)
        else:
            del self._last_active[connection]
            connection.transport.abort()


class _ConnectionRejector(asyncio.Protocol):
    """Responds 503 to a connection beyond the limit, without reading its request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        body = b'{"code":"too-many","message":"%d connections are already open; try again later"}' % MAX_CONNECTIONS
        transport.write(_REJECTION_HEAD % len(body) + body)
        transport.close()


# -- The admin server --------

TLS_HANDSHAKE_TIMEOUT_S: Final = 5.0
"""How long a TLS handshake may take. Connections in a handshake do not count towards the limit."""


class AdminServer:
    """Serves the admin port, if the settings contain one. After `start`, `address` is the bound host and port."""

    def __init__(self, server: ServerView) -> None:
        self._server = server
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self.address: tuple[str, int] | None = None
        self.budget = WorkBudget()

    async def start(self) -> None:
        """Bind the port and accept connections. OSError if the port cannot be bound."""
        settings = self._server.settings
        if settings.admin.port is None:
            return
        self._runner = BoundedRunner(self._make_app())
        await self._runner.setup()
        try:
            tls = self._server.admin_tls
            self._listener = await asyncio.get_running_loop().create_server(
                cast("Callable[[], asyncio.Protocol]", self._runner.server),
                settings.admin.host,
                settings.admin.port,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else TLS_HANDSHAKE_TIMEOUT_S,
                backlog=BACKLOG,
            )
        except BaseException:
            await self._runner.cleanup()
            raise
        self.address = self._listener.sockets[0].getsockname()[:2]

    def _make_app(self) -> web.Application:
        """Return the application: middlewares first, then the endpoints."""
        app = web.Application(middlewares=[error_middleware], client_max_size=MAX_BODY)
        host = self._server.settings.admin.host
        RequestGuard(lambda: self._server.access, host, _certificate_name, self._count_unauthorized).install(app)
        app.on_response_prepare.append(_disable_caching)
        cache = ResponseCache(self.budget)
        app.add_routes(HealthEndpoints(self._server).routes())
        app.add_routes(PageFiles().routes())
        app.add_routes(Api(self._server, cache).routes())
        app.add_routes(MetricsEndpoint(self._server, cache).routes())
        return app

    def _count_unauthorized(self) -> None:
        self._server.stats.errors[Code.UNAUTHORIZED] += 1

    async def stop(self) -> None:
        """Stop listening and close the connections."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()


def _certificate_name(request: web.Request) -> str | None:
    """Return the name in the verified client certificate of a request, if any."""
    return certificate_name(request.get_extra_info("peercert"))


async def _disable_caching(_: web.Request, response: web.StreamResponse) -> None:
    """Disable caching, unless the response sets its own policy."""
    response.headers.setdefault("Cache-Control", "no-store")
