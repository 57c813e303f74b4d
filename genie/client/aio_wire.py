"""One TCP connection of the asyncio client."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from genie.client.reach import Address
from genie.tls import reason


class Owner(Protocol):
    """Whoever a connection belongs to."""

    def reached(self, wire: Wire) -> None:
        """There is a connection."""

    def received(self, wire: Wire, data: bytes) -> None:
        """Bytes have come."""

    def lost(self, wire: Wire, why: str) -> None:
        """It has ended."""


class Wire(asyncio.Protocol):
    """Tells its owner what happens to it."""

    def __init__(self, link: Owner, address: Address) -> None:
        self.link = link
        self.address = address
        self.transport: asyncio.Transport | None = None
        self.left = False
        """Whether nobody wants it any more."""
        self.settled = asyncio.Event()
        """Set when the server has taken this client, or won't."""
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """By the event loop."""
        self.transport = cast("asyncio.Transport", transport)
        self.link.reached(self)

    def data_received(self, data: bytes) -> None:
        """By the event loop."""
        self.link.received(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """By the event loop."""
        self.gone.set()
        self.link.lost(self, "the server closed it" if exc is None else reason(exc))
