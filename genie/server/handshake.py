"""Connections before they are some: accepted here, and counted, until their TLS handshake has ended.

The loops' own servers would tell of a connection only after its handshake. So whoever began many, and ended none, would
be counted by nobody.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import structlog

from genie.server.tls import FILE
from genie.tasks import end
from genie.tls import reason

if TYPE_CHECKING:
    from genie.server.connection import Connection
    from genie.server.registry import Registry
    from genie.server.tls import Tls

log = structlog.get_logger()

HANDSHAKE_S = 10.0
"""How long a handshake may take."""
GOODBYE_S = 5.0
"""How long a client may take to say that it has read all, when a connection ends. Then it is cut."""
RETRY_S = 0.5
"""After how long it accepts again where it can't: there are no more files, or no memory."""


class TlsListener:
    """Accepts on a socket that is bound. `make` makes the connection that a handshake ends in."""

    def __init__(self, tls: Tls, registry: Registry, make: Callable[[], Connection]) -> None:
        self._tls = tls
        self._registry = registry
        self._make = make
        self._sock: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def listen(self, sock: socket.socket, backlog: int) -> None:
        """Begin."""
        sock.listen(backlog)
        self._sock = sock
        self._accepting = asyncio.get_running_loop().create_task(self._accept(sock))

    async def close(self) -> None:
        """Accept no more, and cut the handshakes that are under way."""
        await end(self._accepting)
        if self._sock is not None:
            self._sock.close()
        for handshake in self._registry.handshakes:
            await end(handshake.task)

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, peer = await loop.sock_accept(sock)
            except ConnectionError:  # it has left again
                continue
            except OSError as error:
                log.warning("no connection can be accepted", why=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            handshake = Handshake(self._registry, self._make)
            if self._registry.begin(handshake, peer[0] if peer else ""):
                handshake.task = loop.create_task(handshake.run(client, self._tls))
            else:
                log.debug("too many connections: one is cut before its handshake", peer=peer)
                client.close()


class Handshake(asyncio.Protocol):
    """One, which counts as a connection from the beginning."""

    task: asyncio.Task[None] | None = None

    def __init__(self, registry: Registry, make: Callable[[], Connection]) -> None:
        self._registry = registry
        self._make = make

    async def run(self, client: socket.socket, tls: Tls) -> None:
        """Make it."""
        peer = None
        try:
            peer = client.getpeername()
            FILE.set(client.fileno())
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self,
                client,
                ssl=tls.wire,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=GOODBYE_S,
            )
        except OSError as error:  # those of TLS are some, too
            why = f"not done after {HANDSHAKE_S:g} s" if isinstance(error, ConnectionAbortedError) else reason(error)
            log.info("handshake failed", peer=peer, why=why)
        finally:
            self._registry.end(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is done: the connection takes its place, before any byte is read."""
        self._registry.end(self)
        connection = self._make()
        cast("asyncio.Transport", transport).set_protocol(connection)
        connection.connection_made(transport)
