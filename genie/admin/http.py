"""The HTTP server of the admin port.

The HTTP server runs in the event loop that serves the locks, so its load must stay small. `genie.admin.connections`
accepts the connections and limits their number. The class of a connection extends the request handler of aiohttp 3,
whose interface is partly internal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from logging import Logger
from typing import Final, cast

import structlog
from aiohttp import web

from genie.admin.api import Api
from genie.admin.connections import MAX_CONNECTIONS, MAX_UNPARSED_BYTES, PART_BYTES, AdminConnections, Admitted
from genie.admin.endpoints import HEALTH_PATHS, HealthEndpoints, MetricsEndpoint, PageFiles
from genie.admin.interfaces import ServerView
from genie.admin.models import DEFECT, JSON, MAX_BODY, ApiError, Problem, encode_small, error_middleware
from genie.admin.security import HEADERS, RequestGuard
from genie.admin.throttle import ResponseCache, WorkBudget
from genie.errors import Code
from genie.net import bind_all
from genie.protocol.resources import MAX_NAME
from genie.tls import certificate_name

log = structlog.get_logger()

SHUTDOWN_TIMEOUT_S: Final = 1.0
"""Maximum time that a stopping server waits for responses in progress."""

MAX_SLASHES: Final = MAX_NAME + 8
"""Maximum number of slashes in the path and the query of a request: those of a resource name, and a few. aiohttp looks up
the path before each slash, so 8,000 of them would take 10 ms."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Connection(web.RequestHandler):
    """A connection that neither logs nor echoes invalid HTTP input, because the input may contain a token.

    Compressed bodies are not decompressed, because a body of 256 KiB can become 256 MiB.
    """

    __slots__ = ("_connections", "_counted_requests", "_parsed_bytes", "_unparsed", "admitted")

    def __init__(self, server: web.Server, admitted: Admitted, connections: AdminConnections) -> None:
        no_access_log = cast("Logger", None)  # aiohttp permits None, but its type does not
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=no_access_log, auto_decompress=False)
        self.admitted = admitted
        """The same connection, for `AdminConnections`."""
        self._connections = connections
        self._unparsed = bytearray()
        """Input that waits until it is parsed."""
        self._parsed_bytes = 0
        """Parsed bytes of the request that is not complete, and of requests that wait until earlier ones are handled."""
        self._counted_requests = 0
        """Number of requests when `_parsed_bytes` was last 0."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle the end of the TLS handshake, or of `accept` without TLS."""
        if self._connections.opened(self.admitted, cast("asyncio.Transport", transport)):
            super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Queue input, which `InputTurns` parses, or close the connection if too much is queued."""
        if not data:  # aiohttp calls this method without data to parse pipelined requests that it has kept
            self._parse_http(data)
        elif len(self._unparsed) + len(data) > MAX_UNPARSED_BYTES:
            self.admitted.abort()
        else:
            if not self._unparsed:
                self._connections.input_turns.add(self._parse)
            self._unparsed += data

    def _parse(self) -> tuple[int, bool]:
        """Parse the next part of the input. Return the number of bytes in the part, and whether more input is left.

        Close the connection instead if the requests that are not handled yet have too many bytes: aiohttp accepts a MiB of
        headers in each of them, and keeps 32 of them.
        """
        if self.transport is None or self.transport.is_closing():  # aiohttp fails if a request arrives then
            return 0, False
        part = bytes(self._unparsed[:PART_BYTES])
        del self._unparsed[:PART_BYTES]
        if not self._messages and self._request_count != self._counted_requests:
            self._parsed_bytes, self._counted_requests = 0, self._request_count
        self._parsed_bytes += len(part)
        if self._parsed_bytes > MAX_UNPARSED_BYTES:
            self.admitted.abort()
            return len(part), False
        self._parse_http(part)
        return len(part), bool(self._unparsed)

    def _parse_http(self, data: bytes) -> None:
        """Let aiohttp parse input. The error of invalid input must not refer to its frames, one of which refers to the error."""
        super().data_received(data)
        if self._messages and isinstance(error := getattr(self._messages[-1][0], "exc", None), BaseException):
            error.with_traceback(None)

    async def _handle_request(
        self,
        request: web.BaseRequest,
        start_time: float | None,
        request_handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ) -> tuple[web.StreamResponse, bool]:
        """Handle a request, or reject it before its path is looked up, if that has too many slashes."""
        if request.raw_path.count("/") > MAX_SLASHES:
            request_handler = self._reject
        return await super()._handle_request(request, start_time, request_handler)

    async def _reject(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the response to an invalid request."""
        return self.handle_error(request, web.HTTPBadRequest.status_code)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Drop the input, and remove the connection from `AdminConnections`."""
        self._connections.discard(self.admitted)
        self._unparsed.clear()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - not used, because aiohttp's message quotes the input
    ) -> web.StreamResponse:
        """Log an error, and return a JSON response after which the connection is closed.

        aiohttp calls this method if a request could not be parsed or if its handler failed.
        """
        if isinstance(exc, ConnectionError):
            log.debug("admin connection lost during a request", peer=request.remote)
            problem = Problem(code=Code.BAD_REQUEST, message="connection lost")
        elif status >= web.HTTPInternalServerError.status_code:
            log.error("admin request failed", peer=request.remote, exc_info=exc)
            problem = Problem(code="defect", message=DEFECT)
        else:
            log.debug("invalid HTTP request rejected on the admin port", peer=request.remote)
            problem = Problem(code=Code.BAD_REQUEST, message="invalid HTTP request")
        if exc is not None:
            exc.with_traceback(None)  # its frames refer to the lost connection, which refers to the error
        response = web.Response(status=status, body=encode_small(problem), content_type=JSON, headers=HEADERS)
        response.force_close()
        return response


# -- The admin server --------


class AdminServer:
    """Serves the admin port of a server. Does nothing if the settings do not contain an admin port."""

    def __init__(self, server: ServerView) -> None:
        self._server = server
        self._runner: web.AppRunner | None = None
        """Runs the aiohttp application. None before `start`."""
        self.connections = AdminConnections(server.admin_tls, self._make_connection)
        """All connections, with limits on their number and their time."""
        self.address: tuple[str, int] | None = None
        """The bound host and port. None before `start`."""
        self.budget = WorkBudget()
        """Counts the work of all endpoints together, so that they yield to the event loop often enough."""

    async def start(self) -> None:
        """Bind the port and accept connections. Raises OSError if the port cannot be bound."""
        settings = self._server.settings
        if settings.admin.port is None:
            return
        self._runner = web.AppRunner(
            self._make_app(), access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )
        await self._runner.setup()
        # One socket for each address of the host name.
        sockets = bind_all(settings.admin.host, settings.admin.port)
        for sock in sockets:
            self.connections.listen(sock)
        self.address = sockets[0].getsockname()[:2]

    def _make_connection(self, admitted: Admitted) -> _Connection:
        """Return the protocol of an accepted connection."""
        assert self._runner is not None  # noqa: S101 - set by `start`, before a connection is accepted
        assert self._runner.server is not None  # noqa: S101 - set by `setup`
        return _Connection(self._runner.server, admitted, self.connections)

    def _make_app(self) -> web.Application:
        """Return the aiohttp application with its middlewares and all endpoints."""
        app = web.Application(middlewares=[error_middleware, self._limit_requests], client_max_size=MAX_BODY)
        guard = RequestGuard(
            get_access=lambda: self._server.access,
            host=self._server.settings.admin.host,
            get_certificate_name=lambda request: certificate_name(request.get_extra_info("peercert")),
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

    @web.middleware
    async def _limit_requests(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Read the body of a request, then handle the request, or respond 503 if too many connections have one in progress.

        The connection counts as idle while the body is read, because a client may send it slowly.
        """
        await asyncio.sleep(0)  # since Python 3.12, requests that arrive together would all be handled in one iteration
        connection = cast("_Connection", request.protocol).admitted
        if request.transport is None:  # the connection was lost before this task began
            raise ConnectionResetError
        try:
            await request.read()
        except web.RequestPayloadError:  # for example a chunk without its length
            raise ApiError(400, Code.BAD_REQUEST, "invalid HTTP request") from None
        if self.connections.begin_request(connection):
            try:
                return await handler(request)
            finally:
                self.connections.end_request(connection)
        if request.path in HEALTH_PATHS:  # an orchestrator restarts a server whose health checks fail
            response = await handler(request)
        else:
            message = f"{MAX_CONNECTIONS} connections have a request in progress; try again later"
            body = encode_small(Problem(code=Code.TOO_MANY, message=message))
            response = web.Response(status=503, body=body, content_type=JSON, headers={"Retry-After": "1"})
        response.force_close()
        return response

    def _count_unauthorized(self) -> None:
        """Count a request with a missing or unknown token."""
        self._server.stats.errors[Code.UNAUTHORIZED] += 1

    async def stop(self) -> None:
        """Stop listening, and close the connections when their responses are sent, but after at most `SHUTDOWN_TIMEOUT_S`."""
        await self.connections.close()
        if self._runner is not None:
            await self._runner.cleanup()


async def _disable_caching(_: web.Request, response: web.StreamResponse) -> None:
    """Forbid browsers to cache a response, unless the handler has set a cache policy."""
    response.headers.setdefault("Cache-Control", "no-store")
