"""How many may be connected to the admin port: its work is done between that for the locks, and must stay little."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final, cast

from aiohttp import web

MOST: Final = 64
"""Connections. Browsers have up to six each, Prometheus one or two."""
BACKLOG: Final = 16
"""Connections that are accepted in one go, and may be too many."""
SILENT_S: Final = 30.0
"""How long a connection may ask nothing whole before it is closed."""
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
            connection = server()
            self._asked.watch(connection)
            return connection

        return make


class _Asked:
    """When each connection last asked something whole, and was answered."""

    def __init__(self) -> None:
        self._at: dict[web.RequestHandler, float] = {}

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Around every answer."""
        self._at[request.protocol] = inf
        try:
            return await handler(request)
        finally:
            if request.transport is not None:
                self._at[request.protocol] = asyncio.get_running_loop().time()

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
            connection.transport.close()


class _Full(asyncio.Protocol):
    """For whom there is no place. It is told so, without a look at what it asks."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Tell it, and close."""
        full = cast("asyncio.Transport", transport)
        body = b'{"code":"too-many","message":"%d connections are open; ask again later"}' % MOST
        full.write(_HEAD % len(body) + body)
        full.close()
