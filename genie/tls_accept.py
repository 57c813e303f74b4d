"""TLS handshakes of a server, in turns.

A handshake takes about a millisecond of processor time. Thousands of clients may send the first message of a handshake at the
same moment, without authentication, so each iteration of the event loop has a limited time for handshakes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

from genie.opening_turns import OpeningTurns

CLOSED = "the client has closed the connection"

_HANDSHAKE: ContextVar[Handshake | None] = ContextVar("_HANDSHAKE", default=None)
"""The handshake that the current task runs."""


class Handshake(asyncio.Protocol):
    """Gives the TLS handshake of a connection its turns. The protocol of the transport before and after the handshake, until the
    caller sets another one.
    """

    def __init__(self, turns: OpeningTurns) -> None:
        self._turns = turns
        self._transport: asyncio.Transport | None = None
        self.received = b""
        """Bytes that were received before the handshake began, or after its end."""
        self._has_turn = False
        self._is_postponed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport below TLS."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Keep the bytes that arrive outside of the handshake. Only those of a few reads: reading pauses."""
        self.received += data
        if self._transport is not None:
            self._transport.pause_reading()

    def take_received(self) -> bytes:
        """Return the bytes that were received outside of the handshake, and forget them."""
        received, self.received = self.received, b""
        return received

    def process(self, step: Callable[[], None]) -> None:
        """Execute a step of the handshake now, or raise `SSLWantReadError` and execute it in a later iteration of the event loop.

        Until then nothing is read from the client.
        """
        if self._has_turn:
            step()
        elif self._turns.has_time and not self._is_postponed:
            self._turns.run(step)
        else:
            if not self._is_postponed:
                self._is_postponed = True
                self._turns.postpone(self._continue)
            if self._transport is not None:
                self._transport.pause_reading()
            raise ssl.SSLWantReadError

    def _continue(self) -> None:
        """Execute the postponed step, because it is its turn."""
        transport, self._is_postponed = self._transport, False
        if transport is None or transport.is_closing():
            return
        transport.resume_reading()
        self._has_turn = True
        # The TLS protocol of the event loop continues the handshake with the input that it has.
        cast("asyncio.BufferedProtocol", transport.get_protocol()).buffer_updated(0)
        self._has_turn = False

    def end(self) -> None:
        """Break the reference cycle of the handshake and the transport."""
        self._transport = None


class TurnsObject(ssl.SSLObject):
    """The TLS object of a connection, whose handshake takes turns."""

    handshake: Handshake | None
    """None after the handshake, and if the event loop has not begun it with `accept_tls`."""

    def do_handshake(self) -> None:
        """Continue the handshake if it is its turn."""
        if self.handshake is None:
            super().do_handshake()
        else:
            self.handshake.process(super().do_handshake)
            self.handshake = None


class TurnsContext(ssl.SSLContext):
    """Creates a `TurnsObject` for each connection."""

    sslobject_class = TurnsObject

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        """Create the TLS object of a connection, with the bytes that were received before."""
        tls = super().wrap_bio(incoming, outgoing, *args, **options)
        assert isinstance(tls, TurnsObject)  # noqa: S101 - `sslobject_class`
        tls.handshake = handshake = _HANDSHAKE.get()
        if handshake is not None:
            incoming.write(handshake.take_received())
        return tls


async def accept_tls(
    sock: socket.socket,
    context: ssl.SSLContext,
    turns: OpeningTurns,
    make_protocol: Callable[[], asyncio.Protocol],
    *,
    handshake_timeout_s: float,
    shutdown_timeout_s: float,
) -> None:
    """Run the TLS handshake of an accepted connection, and then connect it with a new protocol.

    The handshake takes turns if `context` is a `TurnsContext`. Raises OSError, such as `ssl.SSLError`, if it fails.
    """
    loop, handshake = asyncio.get_running_loop(), Handshake(turns)
    _HANDSHAKE.set(handshake)
    plain, _ = await loop.connect_accepted_socket(lambda: handshake, sock)
    if plain.is_closing():
        raise ConnectionResetError(CLOSED)
    try:
        transport = await loop.start_tls(
            plain,
            handshake,
            context,
            server_side=True,
            ssl_handshake_timeout=handshake_timeout_s,
            ssl_shutdown_timeout=shutdown_timeout_s,
        )
    except BaseException:
        plain.abort()
        raise
    finally:
        handshake.end()
    if transport is None or transport.is_closing():
        raise ConnectionResetError(CLOSED)
    protocol = make_protocol()
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    plain.resume_reading()
    if handshake.received:
        protocol.data_received(handshake.take_received())
