"""The connection that carries the commits: one command in flight, a few lines of RESP, nothing retried behind our back.

redis-py's own connection does the rest of the work (loading, checking, writing anew). For the one thing that happens
on every batch its convenience costs five times what this does, and it must be known exactly what was sent how often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio.connection import SSLConnection, parse_url


class LinkError(Exception):
    """The connection to Redis failed, or Redis refused the command. Nothing is known about its effect."""


def bulk(value: object) -> bytes:
    """One part of a command in RESP."""
    data = str(value).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


def pack(parts: Sequence[bytes]) -> bytes:
    """A command in RESP."""
    return b"".join([b"*%d\r\n" % len(parts), *[b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]])


class Link(asyncio.Protocol):
    """One connection to Redis, one command at a time."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._then: Callable[[Any], None] | None = None

    @classmethod
    async def open(cls, url: str) -> Link:
        """Connect and log in as a Redis URL says. OSError or LinkError where that fails."""
        loop = asyncio.get_running_loop()
        options = parse_url(url)
        if "path" in options:
            _, link = await loop.create_unix_connection(cls, options["path"])
        else:
            tls = None
            if options.get("connection_class") is SSLConnection:
                plain = {key: value for key, value in options.items() if key != "connection_class"}
                tls = SSLConnection(**plain).ssl_context.get()  # type: ignore[arg-type]
            host, port = options.get("host", "localhost"), options.get("port", 6379)
            _, link = await loop.create_connection(cls, host, port, ssl=tls)
        try:
            if options.get("password"):
                user = [options["username"].encode()] if options.get("username") else []
                await link.call(b"AUTH", *user, options["password"].encode())
            if options.get("db"):
                await link.call(b"SELECT", b"%d" % options["db"])
        except BaseException:
            link.close()
            raise
        return link

    async def call(self, *parts: bytes) -> Any:
        """Send one command and wait for its reply; LinkError where it is an error."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.send(pack(parts), lambda reply: None if future.done() else future.set_result(reply))
        reply = await future
        if isinstance(reply, LinkError):
            raise reply
        return reply

    def send(self, command: bytes, then: Callable[[Any], None]) -> None:
        """Send one packed command. `then` is called with its reply, or with a LinkError.

        A call, and no future: two of those and their ways through the event loop would cost a commit more than all
        else that is done for it here.
        """
        if self._transport is None or self._transport.is_closing():
            then(LinkError("not connected"))
        else:
            self._then = then
            self._transport.write(command)

    @property
    def unsent(self) -> int:
        """Bytes of the command that have not left yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close at once. What is in flight may or may not happen."""
        if self._transport is not None:
            self._transport.abort()

    # -- from the event loop ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Some of a reply."""
        self._reader.feed(data)
        reply = self._reader.gets()
        if reply is not False:
            self._answer(LinkError(str(reply)) if isinstance(reply, Exception) else reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed, by whomever."""
        self._transport = None
        self._answer(LinkError(f"the connection ended: {exc or 'closed'}"))

    def _answer(self, reply: object) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(reply)
