"""One connection of a wire client, which records every message when it arrives."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import orjson

from faults.checker import Checker
from support.processes.servers import WAIT_S

Address = tuple[str, int]
CONNECT_TIMEOUT_S = 1.0
"""Time limit for connecting, or for a reply, where another server can be tried: a stopped server does not reply."""


class ConnectionEnded(Exception):
    """The connection has ended."""


class Connection(asyncio.Protocol):
    """A connection to a server. The checker gets each message when it arrives."""

    def __init__(self, checker: Checker, address: Address, open_connections: set[Connection]) -> None:
        self.address = address
        self.connected_at = time.monotonic()
        self.first_message_at: float | None = None
        """When the first message arrived: since then the server knows the connection."""
        self.closed = False
        self._checker = checker
        self._open = open_connections
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._messages: deque[tuple[str, dict[str, Any]]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    async def open(
        cls, checker: Checker, address: Address, open_connections: set[Connection], timeout_s: float = WAIT_S
    ) -> Connection:
        """Connect; OSError if that fails."""
        async with asyncio.timeout(timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: cls(checker, address, open_connections), *address
            )
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = orjson.loads(line)
            self.first_message_at = self.first_message_at or time.monotonic()
            self._checker.message_received(self.address, self.first_message_at, message["command"], message["payload"])
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
        """Send a command, unless the connection has ended."""
        if not self.closed and self._transport is not None:
            self._transport.write(orjson.dumps({"command": command, "payload": payload}) + b"\n")

    async def next(self, timeout_s: float = WAIT_S) -> tuple[str, dict[str, Any]]:
        """Return the next message; TimeoutError if none arrives, ConnectionEnded at the end."""
        while not self._messages:
            if self.closed:
                raise ConnectionEnded
            self._waiter = asyncio.get_running_loop().create_future()
            async with asyncio.timeout(timeout_s):
                await self._waiter
        return self._messages.popleft()

    def abort(self) -> None:
        """Abort the connection."""
        if self._transport is not None:
            self._transport.abort()


async def query(checker: Checker, address: Address, command: str, **payload: Any) -> tuple[str, dict[str, Any]]:
    """Send a command on a connection of its own, and return the reply; OSError, TimeoutError or ConnectionEnded without."""
    connection = await Connection.open(checker, address, set(), CONNECT_TIMEOUT_S)
    try:
        connection.send(command, **payload)
        return await connection.next(CONNECT_TIMEOUT_S)
    finally:
        connection.abort()
