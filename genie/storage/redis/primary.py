"""The connection to the current primary: found, checked after each connect, and called."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

import structlog

from genie.storage.redis.connection import ErrorReply, RedisConnection, RedisFailure
from genie.storage.redis.discovery import PrimaryLocation, discovery_for
from genie.storage.redis.url import Address, RedisUrl

log = structlog.get_logger()

CALL_TIMEOUT_S = 5.0
"""Time limit of one call, in addition to the time for which the command itself may block."""
MOVE_CHECK_INTERVAL_S = 0.5
"""How often discovery is asked whether the primary has changed, while a call has no reply."""
CONNECT_TIMEOUT_S = 2.0
"""Time limit for discovery, connecting and logging in together."""
UNSUPPORTED_CODES = ("ERR", "NOPERM")
"""Error codes of commands that do not exist, or that this user may not run."""
ALLOW_OOM_SHEBANG = b"#!lua flags=allow-oom\n"
"""Lets a script run while Redis is out of memory. Redis 7 or newer."""
VERSION = re.compile(rb"^redis_version:(\d+)(?:\.(\d+))?", re.MULTILINE)
SCRIPTS = files("genie.storage.redis").joinpath("lua")
CALL_SCRIPT = SCRIPTS.joinpath("call.lua").read_bytes()


class Primary:
    """Calls the Redis that is currently the primary for `key`, which is any key of the namespace.

    A primary is rejected if it has fewer than `min_replicas` connected replicas or, with `fsync`, does not support WAITAOF.
    """

    def __init__(self, url: RedisUrl, key: str, min_replicas: int = 0, *, fsync: bool = False) -> None:
        self._login = url.login
        self.has_sentinels = url.kind == "sentinel"
        """Whether sentinels can be queried whether this is still the primary."""
        self._discovery = discovery_for(url, key)
        self._min_replicas = min_replicas
        self._fsync = fsync
        self._connection: RedisConnection | None = None
        self._call_lock = asyncio.Lock()

    async def connect(self) -> RedisConnection:
        """Discover the current primary, and open a connection to it. RedisFailure if that fails, or if it is no primary."""
        location: PrimaryLocation | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                location = await self._discovery.find()
                connection = await RedisConnection.open(location.address, self._login)
                try:
                    await self._check_role(connection)
                except BaseException:
                    connection.close()
                    raise
        except TimeoutError:
            step = "discovery of the primary" if location is None else f"connecting to {location.address}"
            raise RedisFailure(f"{step} took longer than {CONNECT_TIMEOUT_S} s") from None
        except ErrorReply as error:
            if location is None:
                raise
            self.on_error(error, location.address)
            raise RedisFailure(f"{location.address} rejected the connection: {error}") from None
        except OSError as error:
            raise RedisFailure(str(error) if location is None else f"{location.address}: {error}") from error
        connection.asking = location.asking
        if self._connection is not None and self._connection.address != connection.address:
            self.drop()  # a demoted primary may not know that it was demoted, and would accept writes
        return connection

    async def call(self, *parts: object, wait_s: float = 0.0) -> Any:
        """Run one command, which may block for `wait_s`. RedisFailure if it failed; even then it may have had an effect."""
        async with self._call_lock:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S + wait_s):
                    if self._connection is None:
                        self._connection = await self.connect()
                    async with self._abort_if_moved(self._connection, wait_s):
                        return await self._connection.call(*parts)
            except TimeoutError:
                self.drop()
                raise RedisFailure(f"no reply of Redis within {CALL_TIMEOUT_S} s") from None
            except ErrorReply as error:
                if self._connection is not None:
                    self.on_error(error, self._connection.address)
                self.drop()
                if error.code == "MOVED" and not self._discovery.primary_may_change:
                    raise RedisFailure(f"a cluster node needs a URL with redis+cluster:// ({error})") from None
                raise
            except BaseException:
                self.drop()
                raise

    async def eval(self, script: bytes, keys: list[str], *arguments: object) -> Any:
        """Run a script, also while Redis is out of memory."""
        async with self._call_lock:
            if self._connection is None:
                self._connection = await self.connect()
            script = allowing_oom(script, self._connection)
        return await self.call("EVAL", script, len(keys), *keys, *arguments)

    async def read(self, keys: list[str], command: str, *arguments: object) -> Any:
        """Run one command that reads the first of `keys`. RedisFailure if another of them is missing on this node.

        During a slot migration of a cluster, the importing node replies with nothing for a key that has not arrived yet;
        but a script with several keys, of which some are missing, fails. The script is sent without the allow-oom flag:
        with it Redis rejects the script where writes are not accepted, and followers must be able to read there.
        """
        return await self.call("EVAL", CALL_SCRIPT, len(keys), *keys, command, *arguments)

    async def write(self, command: str, key: str, *arguments: object) -> Any:
        """Run one command that writes `key`, also while Redis is out of memory."""
        return await self.eval(CALL_SCRIPT, [key], command, *arguments)

    def on_error(self, error: object, address: Address) -> None:
        """Pass an error of the Redis at `address` to discovery: it may name the new primary."""
        if isinstance(error, ErrorReply):
            self._discovery.on_error_reply(error, address)

    async def has_moved(self, connection: RedisConnection) -> bool:
        """Return whether discovery reports another primary than the Redis of this connection.

        An isolated or suspended primary does not know that it was replaced, and accepts writes until it does.
        """
        if self._discovery.primary_may_change and not connection.asking:
            with suppress(RedisFailure):  # no node replied: assume that nothing has changed
                return (await self._discovery.find()).address != connection.address
        return False

    @property
    def may_change(self) -> bool:
        """Whether another Redis may become the primary, which may lack commits."""
        return self._discovery.primary_may_change

    async def is_discoverable(self) -> bool:
        """Return whether discovery finds a primary: otherwise no new connection can be made."""
        with suppress(RedisFailure):
            await self._discovery.find()
            return True
        return False

    async def verify(self) -> None:
        """Raise RedisFailure if the connected Redis is no longer the primary."""
        if self._connection is not None and await self.has_moved(self._connection):
            former = self._connection.address
            self.drop()
            raise RedisFailure(f"{former} is no longer the primary")

    @asynccontextmanager
    async def _abort_if_moved(self, connection: RedisConnection, wait_s: float) -> AsyncIterator[None]:
        """Close the connection if the primary changes during a slow call: the old primary may never reply.

        `wait_s` is how long the command may block; checking starts after that.
        """

        async def watch_primary() -> None:
            await asyncio.sleep(wait_s)
            while True:
                await asyncio.sleep(MOVE_CHECK_INTERVAL_S)
                if await self.has_moved(connection):
                    connection.close()
                    return

        if not self._discovery.primary_may_change:
            yield
            return
        watch = asyncio.create_task(watch_primary())
        try:
            yield
        finally:
            watch.cancel()

    @property
    def asking(self) -> bool:
        """Whether the connected node is importing the slot, and may not have all of its keys yet."""
        return self._connection is not None and self._connection.asking

    @property
    def address(self) -> Address | None:
        """The address of the connected Redis; None without a connection."""
        return None if self._connection is None else self._connection.address

    def drop(self) -> None:
        """Close the connection; the next call discovers the primary again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _check_role(self, connection: RedisConnection) -> None:
        """Raise RedisFailure unless this Redis is a primary with enough replicas and a sufficient version.

        A standalone Redis that does not support ROLE, such as some proxies, is accepted.
        """
        try:
            reply = await connection.call("ROLE")
        except ErrorReply as error:
            if self._discovery.primary_may_change or self._min_replicas or error.code not in UNSUPPORTED_CODES:
                raise
            return
        role = reply[0]
        if role != b"master":
            raise RedisFailure(f"{connection.address} is not a master, its role is {role.decode()}")
        replicas = len(reply[2])
        if replicas < self._min_replicas:
            raise RedisFailure(f"{connection.address} has {replicas} replicas, and must have {self._min_replicas}")
        connection.version = await _version(connection)
        if self._fsync and (0, 0) < connection.version < (7, 2):
            raise RedisFailure(
                f"{connection.address} is Redis {connection.version[0]}.{connection.version[1]}; GENIE_REDIS_FSYNC needs 7.2"
            )


async def _version(connection: RedisConnection) -> tuple[int, int]:
    """Return the version of this Redis, or the one that a compatible server reports; (0, 0) if it reports none."""
    try:
        match = VERSION.search(await connection.call("INFO", "server"))
    except ErrorReply as error:
        if error.code not in UNSUPPORTED_CODES:
            raise
        return 0, 0
    return (0, 0) if match is None else (int(match[1]), int(match[2] or 0))


def allowing_oom(script: bytes, connection: RedisConnection) -> bytes:
    """Return a variant of the script that also runs while Redis is out of memory, or the script if that is unsupported."""
    return ALLOW_OOM_SHEBANG + script if connection.version >= (7, 0) else script


async def warn_if_lossy(primary: Primary) -> None:
    """Log a warning for each setting of Redis with which it loses acknowledged commits."""
    settings: dict[bytes, bytes] = {}
    try:
        for setting in ("appendonly", "maxmemory-policy"):  # Redis before version 7 takes one setting at a time
            reply = await primary.call("CONFIG", "GET", setting)
            settings |= zip(reply[::2], reply[1::2], strict=True)
    except ErrorReply as error:
        log.warning("redis configuration unreadable, check that appendonly is yes", error=str(error))
        return
    if settings.get(b"appendonly") == b"no":
        log.warning("redis persistence disabled, a restart loses all locks; set appendonly yes")
    policy = settings.get(b"maxmemory-policy", b"noeviction").decode()
    if policy != "noeviction":
        log.warning("redis eviction enabled, it may drop locks; set maxmemory-policy noeviction", policy=policy)
