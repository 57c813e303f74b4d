"""A connection before it is one: from when TCP is accepted until the TLS handshake has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import structlog

from genie.server.tls import FILE
from genie.tls import name_of, reason

if TYPE_CHECKING:
    from genie.server.connection import Connection
    from genie.server.registry import Registry
    from genie.server.tls import Tls

log = structlog.get_logger()

HANDSHAKE_S = 10.0
"""How long a handshake may take."""
GOODBYE_S = 5.0
"""How long a client may take to say that it has read all, when a connection ends. Then it is cut."""


class Handshake(asyncio.Protocol):
    """Counts as a connection from the beginning. When it has succeeded `make` makes the connection that takes over."""

    def __init__(self, tls: Tls, registry: Registry, make: Callable[[], Connection]) -> None:
        self._tls = tls
        self._registry = registry
        self._make = make
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless there are far too many."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        if not self._registry.begin(self, peer[0] if peer else ""):
            log.debug("too many connections: one is cut before its handshake", peer=peer)
            self._transport.abort()
            return
        self._transport.pause_reading()  # the first bytes are for the handshake
        self._task = asyncio.get_running_loop().create_task(self._shake(self._transport))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - it is gone, however it ended
        """It ended before the handshake began."""
        self._registry.end(self)

    def abort(self) -> None:
        """Cut it."""
        if self._transport is not None:
            self._transport.abort()

    async def _shake(self, transport: asyncio.Transport) -> None:
        peer = transport.get_extra_info("peername")
        early = _Early()
        try:
            if transport.is_closing():
                return
            FILE.set(transport.get_extra_info("socket").fileno())
            encrypted = await asyncio.get_running_loop().start_tls(
                transport,
                early,
                self._tls.wire,
                server_side=True,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=GOODBYE_S,
            )
        except OSError as error:  # those of ssl are some, too
            tell = log.debug if isinstance(error, ConnectionResetError) else log.info
            tell("handshake failed", peer=peer, why=reason(error))
            return
        finally:
            self._registry.end(self)
        if encrypted is None or early.lost:  # the loops give None for what ended meanwhile
            return
        connection = self._make()
        connection.certificate = name_of(encrypted.get_extra_info("peercert"))
        encrypted.set_protocol(connection)
        connection.connection_made(encrypted)
        early.hand_over(connection)


class _Early(asyncio.Protocol):
    """Keeps what comes between the end of a handshake and the moment when the connection takes over."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._ended = False
        self.lost = False
        self._connection: Connection | None = None

    def data_received(self, data: bytes) -> None:
        self._data.append(data)

    def eof_received(self) -> bool:
        self._ended = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._connection is not None:  # the loop had made up its mind whom to tell
            self._connection.connection_lost(exc)

    def hand_over(self, connection: Connection) -> None:
        """From now on all goes there."""
        self._connection = connection
        for data in self._data:
            connection.data_received(data)
        if self._ended:
            connection.eof_received()
