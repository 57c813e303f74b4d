"""One connection to Redis: RESP, one command in flight, no retries.

The commit path does not use redis-py's connection: it costs five times as much per batch (measured), and a commit must
know which bytes were sent, and how often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final, NamedTuple, cast

import hiredis
from redis.asyncio.connection import SSLConnection

from genie.storage.redis.url import Address, Login

MAX_REPLY_BYTES: Final = 1 << 30
"""Bytes of the replies to one command. The 1,000 records of an `HSCAN` that follow small ones have about as many if each of them is
as long as possible."""


class RedisFailure(Exception):
    """A command failed: Redis is unreachable, or replied with an error.

    Whether the command had an effect is unknown.
    """


def describe_failure(error: BaseException) -> str:
    """Return the text of an error for the log, or its type if it has none, like that of `asyncio.timeout`."""
    return str(error) or type(error).__name__


class ErrorReply(RedisFailure):
    """Redis replied with an error."""

    @property
    def code(self) -> str:
        """The error code: the first word of the reply, such as `READONLY`."""
        return str(self).partition(" ")[0]


def encode_bulk(value: object) -> bytes:
    """Encode one argument of a command as a RESP bulk string. Values other than bytes are converted with `str`."""
    data = value if isinstance(value, bytes) else str(value).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


def encode_command(parts: Sequence[object]) -> bytes:
    """Encode a command, its name and arguments, as a RESP array."""
    return b"".join([b"*%d\r\n" % len(parts), *map(encode_bulk, parts)])


ASKING = encode_command(["ASKING"])


def _redacted(password: str | None, error: ErrorReply) -> ErrorReply:
    """Return the error reply to AUTH without the password.

    A server that does not know AUTH repeats the arguments in its error message: `..., with args beginning with: ...`.
    """
    text = str(error).partition(", with args")[0]
    if password is not None and password in text:
        text = f"{error.code} the password was rejected"
    return ErrorReply(text)


class RedisRun(NamedTuple):
    """One run of a Redis process. A Redis that restarts may have lost its last writes."""

    id: str
    """The run id that Redis reports. Empty if unknown."""
    started_at: float
    """The latest event-loop time at which the run may have started, or `-inf` if unknown."""


UNKNOWN_RUN = RedisRun("", -inf)


class RedisConnection(asyncio.Protocol):
    """One connection to Redis. The caller sends the next command only after the reply to the previous one."""

    asking = False
    """True if ASKING is sent before each command. A cluster node that is importing the hash slot requires it."""
    version = 0, 0
    """The (major, minor) version of this Redis, or (0, 0) if unknown."""
    run = UNKNOWN_RUN
    """Which run of this Redis accepted the connection."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(replyError=ErrorReply)
        self._transport: asyncio.Transport | None = None
        self._on_reply: Callable[[Any], None] | None = None
        """The callback of the command in flight. None if the connection is idle."""
        self._replies: list[Any] = []
        """The replies received so far, if several are expected."""
        self._received_bytes = 0
        """Bytes of the incomplete replies."""
        self._reply_count = 1
        """How many replies the command in flight has, including the reply to ASKING."""
        self._expected_reply = b""
        """If Redis sends exactly these bytes, they are not parsed. Empty if the reply must be parsed."""
        self.address = Address("", 0)

    @classmethod
    async def open(cls, address: Address, login: Login) -> RedisConnection:
        """Connect, log in and select the database. Raises OSError or RedisFailure if any of these fails."""
        loop = asyncio.get_running_loop()
        if not address.port:  # a Unix socket
            _, connection = await loop.create_unix_connection(cls, address.host)
        else:
            tls = None if login.tls is None else SSLConnection(**login.tls).ssl_context.get()
            try:
                _, connection = await loop.create_connection(cls, address.host, address.port, ssl=tls)
            except UnicodeError:  # for example an empty part, as in `a..b`
                raise OSError(f"{address.host!r} is not a host name") from None
        connection.address = address
        try:
            if login.password is not None:
                username = [] if login.username is None else [login.username]
                await connection.call("AUTH", *username, login.password)
            if login.db:
                await connection.call("SELECT", login.db)
        except ErrorReply as error:
            connection.close()
            raise _redacted(login.password, error) from None
        except BaseException:
            connection.close()
            raise
        return connection

    async def call(self, *parts: object) -> Any:
        """Send one command and return its reply.

        Raises ErrorReply if Redis replies with an error, and RedisFailure if the connection ends before the reply.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def on_reply(reply: object) -> None:
            if not future.done():  # it is done if the caller was cancelled
                future.set_result(reply)

        self.send(encode_command(parts), on_reply)
        reply = await future
        if isinstance(reply, RedisFailure):
            raise reply
        return reply

    def send(
        self, command: bytes, on_reply: Callable[[Any], None], reply_count: int = 1, expected_reply: bytes = b""
    ) -> None:
        """Send one or more encoded commands, to which Redis sends `reply_count` replies, and call `on_reply` once.

        The argument of `on_reply` is the reply, which may be an ErrorReply, or a list if `reply_count` is greater than
        one. It is a RedisFailure if the connection ends before all replies have arrived. If Redis sends exactly the
        bytes of `expected_reply`, they are not parsed, and the argument is the object `expected_reply` itself.

        `send` takes a callback instead of returning a future, because a future and its iteration of the event loop
        would cost a commit more than the rest of this module (measured).
        """
        if self._transport is None or self._transport.is_closing():
            on_reply(RedisFailure("not connected to Redis"))
            return
        if self.asking:
            command, reply_count = ASKING + command, reply_count + 1
        self._on_reply, self._reply_count, self._expected_reply = on_reply, reply_count, expected_reply
        self._transport.write(command)

    @property
    def unsent_bytes(self) -> int:
        """How many bytes of the command in flight are still in the send buffer."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close the connection without sending buffered bytes. Redis may or may not execute a command in flight."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, to which `send` writes."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Deliver the expected reply, or parse the received bytes. Close the connection if they are not valid RESP."""
        if data == self._expected_reply and not self._replies and self._on_reply is not None:
            self._deliver(self._expected_reply)
            return
        try:
            self._parse(data)
        except hiredis.ProtocolError as error:
            self._reject(f"{self.address} sent no valid RESP: {error}")

    def _parse(self, data: bytes) -> None:
        """Collect the replies to the command in flight, and deliver them when all have arrived.

        Close the connection if there are more: a later command would take them for its own replies, and a commit would
        be acknowledged before Redis has it.
        """
        self._received_bytes += len(data)
        if self._received_bytes > MAX_REPLY_BYTES:
            self._reject(f"{self.address} sent a reply of more than {MAX_REPLY_BYTES} bytes")
            return
        self._reader.feed(data)
        replies = self._replies
        while (reply := self._reader.gets()) is not False:  # False means that the next reply is incomplete
            replies.append(reply)
        missing_count = self._reply_count - len(replies)
        has_excess = missing_count < 0 or (missing_count == 0 and self._reader.has_data())
        if self._on_reply is None or has_excess:
            self._reject(f"{self.address} sent a reply to no command, so the connection was closed")
        elif missing_count == 0:
            self._received_bytes = 0
            self._replies = []
            if self.asking:
                del replies[0]  # the reply to ASKING
            self._deliver(replies[0] if len(replies) == 1 else replies)

    def _reject(self, reason: str) -> None:
        """Close the connection, because Redis has sent invalid replies, and fail the command in flight."""
        self.close()
        self._deliver(RedisFailure(reason))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the command in flight with a RedisFailure, if there is one."""
        self._transport = None
        self._deliver(RedisFailure(f"the connection to {self.address} ended: {exc or 'closed'}"))

    def _deliver(self, reply: object) -> None:
        """Pass a reply to the callback of the command in flight, if there is one.

        The connection is idle from here on.
        """
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            on_reply(reply)
