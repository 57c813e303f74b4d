"""A connection to Redis: one command in flight, a few lines of RESP, nothing retried behind our back.

redis-py's own costs five times what this does on every batch, and it must be known exactly what was sent how often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio.connection import SSLConnection

from genie.storage.redis.url import Address, Login


class RedisFailure(Exception):
    """The connection to Redis failed, or Redis refused the command. Nothing is known about its effect."""


class ErrorReply(RedisFailure):
    """Redis answered with an error; `code` is its first word (`READONLY`, `MOVED`, ...)."""

    @property
    def code(self) -> str:
        """What kind of error it is."""
        return str(self).partition(" ")[0]


def bulk(value: object) -> bytes:
    """One part of a command in RESP."""
    data = value if isinstance(value, bytes) else str(value).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


def pack(parts: Sequence[object]) -> bytes:
    """A command in RESP."""
    return b"".join([b"*%d\r\n" % len(parts), *map(bulk, parts)])


ASKING = pack(["ASKING"])


def _without(password: str | None, error: ErrorReply) -> ErrorReply:
    """The same without what was said: a Redis that does not know a command repeats how it begins."""
    said = str(error).partition(", with args")[0]
    return ErrorReply(said if password is None or password not in said else f"{error.code} the password is refused")


class RedisConnection(asyncio.Protocol):
    """One connection to Redis, one command at a time.

    `asking`: every command is said with the leave that a node of a cluster needs which is to take this slot over.
    """

    asking = False
    version = 0, 0
    """Of this Redis, as far as it is known."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._then: Callable[[Any], None] | None = None
        self._replies: list[Any] = []
        self._expected = 1
        self.address = Address("", 0)

    @classmethod
    async def open(cls, address: Address, login: Login) -> RedisConnection:
        """Connect and log in. OSError or RedisFailure where that fails."""
        loop = asyncio.get_running_loop()
        if not address.port:
            _, link = await loop.create_unix_connection(cls, address.host)
        else:
            tls = None if login.tls is None else SSLConnection(**login.tls).ssl_context.get()
            _, link = await loop.create_connection(cls, address.host, address.port, ssl=tls)
        link.address = address
        try:
            if login.password is not None:
                await link.call("AUTH", *([] if login.username is None else [login.username]), login.password)
            if login.db:
                await link.call("SELECT", login.db)
        except ErrorReply as error:
            link.close()
            raise _without(login.password, error) from None
        except BaseException:
            link.close()
            raise
        return link

    async def call(self, *parts: object) -> Any:
        """Send one command and wait for its reply; RedisFailure where it is an error."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.send(pack(parts), lambda reply: None if future.done() else future.set_result(reply))
        reply = await future
        if isinstance(reply, RedisFailure):
            raise reply
        return reply

    def send(self, command: bytes, then: Callable[[Any], None], replies: int = 1) -> None:
        """Send a packed command, or several, and call `then` with the reply to the first, or with a RedisFailure.

        With several it is a list of all replies, some of which may be errors, or one RedisFailure where not all have come.

        A call, and no future: two of those and their ways through the event loop would cost a commit more than all
        else that is done for it here.
        """
        if self._transport is None or self._transport.is_closing():
            then(RedisFailure("not connected"))
            return
        if self.asking:
            command, replies = ASKING + command, replies + 1
        self._then, self._expected = then, replies
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
        try:
            self._take(data)
        except hiredis.ProtocolError as error:
            self.close()
            self._answer(RedisFailure(f"{self.address} does not talk as Redis does: {error}"))

    def _take(self, data: bytes) -> None:
        self._reader.feed(data)
        reply = self._reader.gets()
        while reply is not False:
            if isinstance(reply, Exception):
                reply = ErrorReply(str(reply))
            if self._expected == 1:
                self._answer(reply)
            else:
                self._collect(reply)
            reply = self._reader.gets()

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed, by whomever."""
        self._transport = None
        self._answer(RedisFailure(f"the connection to {self.address} ended: {exc or 'closed'}"))

    def _collect(self, reply: object) -> None:
        self._replies.append(reply)
        if len(self._replies) == self._expected:
            replies, self._replies = self._replies, []
            if self.asking:
                del replies[0]
            self._answer(replies[0] if len(replies) == 1 else replies)

    def _answer(self, reply: object) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(reply)
