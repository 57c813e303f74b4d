"""The HTTP server of the admin port, with limits on connections and on their idle time.

The HTTP server runs in the event loop that serves the locks, so its load must stay small. The classes
of this module extend the runner and the request handler of aiohttp 3, whose interfaces are partly internal.
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
from genie.net import bind_all
from genie.tls import certificate_name

log = structlog.get_logger()

MAX_CONNECTIONS: Final = 64
"""Maximum open connections. A browser opens up to six connections, Prometheus one or two."""
BACKLOG: Final = 16
"""Listen backlog. asyncio accepts queued connections immediately, even beyond `MAX_CONNECTIONS`."""
IDLE_TIMEOUT_S: Final = 30.0
"""Maximum time that a connection may stay open without a further request."""
FIRST_REQUEST_TIMEOUT_S: Final = 5.0
"""Maximum time until the first request of a connection is complete."""
RESPONSE_TIMEOUT_S: Final = 60.0
"""Maximum time for handling a request, in addition to the idle timeout."""
SHUTDOWN_TIMEOUT_S: Final = 1.0
"""Maximum time that a stopping server waits for responses in progress."""

_REJECTION_HEAD: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BoundedRunner(web.AppRunner):
    """An aiohttp runner that limits the number of connections and closes idle ones.

    A connection beyond the limit takes the place of one that has no request in progress. So a client that opens many
    connections, and sends nothing or very slowly, does not keep a health check out.
    """

    def __init__(self, app: web.Application) -> None:
        self._idle_timer = _IdleTimer()
        app.middlewares.insert(0, self._idle_timer.middleware)
        super().__init__(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_TIMEOUT_S)

    @property
    def server(self) -> web.Server | None:
        """The protocol factory that asyncio calls for each connection, with a limit on the number of connections.

        None before `setup`.
        """
        server = super().server
        return None if server is None else cast("web.Server", self._limited_factory(server))

    def _limited_factory(self, server: web.Server) -> Callable[[], asyncio.BaseProtocol]:
        """Return a protocol factory that keeps the limit, and starts the idle timer of each connection."""

        def make_protocol() -> asyncio.BaseProtocol:
            if len(server.connections) >= MAX_CONNECTIONS and not self._idle_timer.close_idle():
                return _ConnectionRejector()
            connection = _Connection(server, loop=asyncio.get_running_loop(), access_log=cast("Logger", None))
            self._idle_timer.start(connection)
            return connection

        return make_protocol


class _Connection(web.RequestHandler):
    """A connection that neither logs nor echoes invalid HTTP input, because the input may contain a token."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - not used, because aiohttp's message quotes the input
    ) -> web.StreamResponse:
        """Return a JSON error response, log the error, and close the connection after the response.

        aiohttp calls this method if a request could not be parsed or if its handler failed.
        """
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
    """Closes connections that have not sent a complete request for `IDLE_TIMEOUT_S`.

    A connection whose request is being handled is closed `RESPONSE_TIMEOUT_S` later than an idle one.
    """

    def __init__(self) -> None:
        self._last_active: dict[web.RequestHandler, float] = {}
        """Event-loop time from which the idle timeout of a connection counts. Lies in the future during a request."""

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Call the handler of a request. The idle timeout of the connection restarts when the handler has finished.

        While the handler runs, the timeout is `RESPONSE_TIMEOUT_S` longer.
        """
        now = asyncio.get_running_loop().time
        self._last_active[request.protocol] = now() + RESPONSE_TIMEOUT_S
        try:
            return await handler(request)
        finally:
            if request.protocol in self._last_active:  # absent if the connection was closed in the meantime
                self._last_active[request.protocol] = now()

    def start(self, connection: web.RequestHandler) -> None:
        """Start the timer of a new connection."""
        loop = asyncio.get_running_loop()
        self._last_active[connection] = loop.time() + FIRST_REQUEST_TIMEOUT_S - IDLE_TIMEOUT_S
        loop.call_later(FIRST_REQUEST_TIMEOUT_S, self._close_if_idle, connection)

    def close_idle(self) -> bool:
        """Close the connection that has been idle for longest, of the address with the most idle connections.

        Returns False if no connection is idle.
        """
        now = asyncio.get_running_loop().time()
        by_address: dict[str, list[web.RequestHandler]] = {}
        for connection, last_active in self._last_active.items():
            transport = connection.transport
            if transport is not None and not transport.is_closing() and last_active <= now:
                peer = transport.get_extra_info("peername")
                by_address.setdefault(peer[0] if peer else "", []).append(connection)
        if not by_address:
            return False
        most: list[web.RequestHandler] = max(by_address.values(), key=len)
        connection = min(most, key=self._last_active.__getitem__)
        del self._last_active[connection]
        cast("asyncio.Transport", connection.transport).abort()
        return True

    def _close_if_idle(self, connection: web.RequestHandler) -> None:
        """Close a connection that has been idle for too long; else schedule the next check of the connection."""
        if connection.transport is None or connection not in self._last_active:  # already closed
            self._last_active.pop(connection, None)
            return
        remaining_s = self._last_active[connection] + IDLE_TIMEOUT_S - asyncio.get_running_loop().time()
        if remaining_s > 0:
            # The deadline is earlier once a running request ends: check again after at most the idle timeout.
            asyncio.get_running_loop().call_later(min(remaining_s, IDLE_TIMEOUT_S), self._close_if_idle, connection)
        else:
            del self._last_active[connection]
            connection.transport.abort()


class _ConnectionRejector(asyncio.Protocol):
    """Responds 503 to a connection beyond the limit, without reading the request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)
        body = b'{"code":"too-many","message":"%d connections are already open; try again later"}' % MAX_CONNECTIONS
        transport.write(_REJECTION_HEAD % len(body) + body)
        transport.close()


# -- The admin server --------

TLS_HANDSHAKE_TIMEOUT_S: Final = 5.0
"""Maximum time of a TLS handshake. Connections in a handshake do not count towards `MAX_CONNECTIONS`."""


class AdminServer:
    """Serves the admin port of a server. Does nothing if the settings do not contain an admin port."""

    def __init__(self, server: ServerView) -> None:
        self._server = server
        self._runner: web.AppRunner | None = None
        """Runs the aiohttp application; None before `start`."""
        self._listeners: list[asyncio.Server] = []
        """The listening sockets, one for each address of the host name; empty before `start`."""
        self.address: tuple[str, int] | None = None
        """The bound host and port; None before `start`."""
        self.budget = WorkBudget()
        """Shared by all endpoints, so that together they yield to the event loop often enough."""

    async def start(self) -> None:
        """Bind the port and accept connections. Raises OSError if the port cannot be bound."""
        settings = self._server.settings
        if settings.admin.port is None:
            return
        self._runner = BoundedRunner(self._make_app())
        await self._runner.setup()
        try:
            tls = self._server.admin_tls
            for sock in bind_all(settings.admin.host, settings.admin.port):
                listener = await asyncio.get_running_loop().create_server(
                    cast("Callable[[], asyncio.Protocol]", self._runner.server),
                    sock=sock,
                    ssl=tls,
                    ssl_handshake_timeout=None if tls is None else TLS_HANDSHAKE_TIMEOUT_S,
                    backlog=BACKLOG,
                )
                self._listeners.append(listener)
        except BaseException:
            await self.stop()
            raise
        self.address = self._listeners[0].sockets[0].getsockname()[:2]

    def _make_app(self) -> web.Application:
        """Return the aiohttp application with its middlewares and all endpoints."""
        app = web.Application(middlewares=[error_middleware], client_max_size=MAX_BODY)
        guard = RequestGuard(
            get_access=lambda: self._server.access,
            host=self._server.settings.admin.host,
            get_certificate_name=_certificate_name,
            on_unauthenticated=self._count_unauthorized,
        )
        guard.install(app)
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
        """Stop listening, and close the connections after at most `SHUTDOWN_TIMEOUT_S`."""
        for listener in self._listeners:
            listener.close()
        if self._runner is not None:
            await self._runner.cleanup()


def _certificate_name(request: web.Request) -> str | None:
    """Return the name in the verified client certificate of a request; None if there is no certificate."""
    return certificate_name(request.get_extra_info("peercert"))


async def _disable_caching(_: web.Request, response: web.StreamResponse) -> None:
    """Forbid browsers to cache a response, unless the handler has set a cache policy."""
    response.headers.setdefault("Cache-Control", "no-store")
