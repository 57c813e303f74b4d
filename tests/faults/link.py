"""One connection of the bare wire: lines come in when they come, also where nobody waits for them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import orjson

from faults.watch import Watch
from servers import WAIT_S

Address = tuple[str, int]
CONNECT_S = 1.0
"""How long one who can go elsewhere waits to be connected, or to be answered: a server that is stopped says nothing."""


class Lost(Exception):
    """The connection has ended."""


class Link(asyncio.Protocol):
    """A connection to a server, told to the watch line by line."""

    def __init__(self, watch: Watch, address: Address, open_links: set[Link]) -> None:
        self.address = address
        self.connected_at = time.monotonic()
        self.heard_at: float | None = None
        """When the first line came: since then the server knows it."""
        self.closed = False
        self._watch = watch
        self._open = open_links
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._messages: deque[tuple[str, dict[str, Any]]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, watch: Watch, address: Address, open_links: set[Link], timeout_s: float = WAIT_S) -> Link:
        """Connect, or OSError."""
        async with asyncio.timeout(timeout_s):
            _, link = await asyncio.get_running_loop().create_connection(
                lambda: cls(watch, address, open_links), *address
            )
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = orjson.loads(line)
            self.heard_at = self.heard_at or time.monotonic()
            self._watch.heard(self.address, self.heard_at, message["command"], message["payload"])
            self._messages.append((message["command"], message["payload"]))
        self._wake()

    def connection_lost(self, _: Exception | None) -> None:
        self.closed = True
        self._open.discard(self)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def send(self, command: str, **payload: Any) -> None:
        """Send a command, if anybody is there."""
        if not self.closed and self._transport is not None:
            self._transport.write(orjson.dumps({"command": command, "payload": payload}) + b"\n")

    async def next(self, timeout_s: float = WAIT_S) -> tuple[str, dict[str, Any]]:
        """The next message; TimeoutError, or Lost at the end."""
        while not self._messages:
            if self.closed:
                raise Lost
            self._waiter = asyncio.get_running_loop().create_future()
            async with asyncio.timeout(timeout_s):
                await self._waiter
        return self._messages.popleft()

    def abort(self) -> None:
        """End it at once."""
        if self._transport is not None:
            self._transport.abort()


async def ask(watch: Watch, address: Address, command: str, **payload: Any) -> tuple[str, dict[str, Any]]:
    """One command on a connection of its own. OSError, TimeoutError or Lost where there is no answer."""
    link = await Link.open(watch, address, set(), CONNECT_S)
    try:
        link.send(command, **payload)
        return await link.next(CONNECT_S)
    finally:
        link.abort()
