"""How many may be connected to the admin port: its work is done between that for the locks, and must stay little."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from aiohttp import web

MOST: Final = 64
"""Connections. Browsers have up to six each, Prometheus one or two."""
BACKLOG: Final = 16
"""Connections that are accepted in one go, and may be too many."""
STOP_S: Final = 1.0
"""How long who is being answered when the server stops is waited for."""

_HEAD: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


class Door(web.AppRunner):
    """A runner that lets no more in than it may."""

    def __init__(self, app: web.Application) -> None:
        super().__init__(app, access_log=None, handle_signals=False, shutdown_timeout=STOP_S)

    @property
    def server(self) -> web.Server | None:
        """What is called for each connection, to make its protocol."""
        made = super().server
        return None if made is None else cast("web.Server", _bounded(made))


def _bounded(server: web.Server) -> Callable[[], asyncio.BaseProtocol]:
    return lambda: server() if len(server.connections) < MOST else _Full()


class _Full(asyncio.Protocol):
    """For whom there is no place. It is told so, without a look at what it asks."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Tell it, and close."""
        full = cast("asyncio.Transport", transport)
        body = b'{"code":"too-many","message":"%d connections are open; ask again later"}' % MOST
        full.write(_HEAD % len(body) + body)
        full.close()
