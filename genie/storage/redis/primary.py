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
"""How long one call may take, beyond the time for which the command itself blocks."""
MOVE_CHECK_INTERVAL_S = 0.5
"""How often discovery is asked whether the primary has changed, while a call has no reply."""
CONNECT_TIMEOUT_S = 2.0
"""How long discovery, connecting and logging in may take together."""
UNSUPPORTED_CODES = ("ERR", "NOPERM")
"""Error codes of commands that do not exist, or that this user may not run."""
ALLOW_OOM_SHEBANG = b"#!lua flags=allow-oom\n"
"""Lets a script run while Redis is out of memory. Redis 7 or newer."""
VERSION = re.compile(rb"^redis_version:(\d+)(?:\.(\d+))?", re.MULTILINE)
SCRIPTS = files("genie.storage.redis").joinpath("lua")
CALL_SCRIPT = SCRIPTS.joinpath("call.lua").read_bytes()


class Primary:
    """Calls the Redis that is currently the primary for `key`, which is any key of the namespace.

    A primary is accepted only with `min_replicas` connected replicas, and with `fsync` only if it supports WAITAOF.
    """

    def __init__(self, url: RedisUrl, key: str, min_replicas: int = 0, *, fsync: bool = False) -> None:
        self._login = url.login
        self.has_sentinels = url.kind == "sentinel"
        """Whether sentinels can be asked if this is still the primary."""
        self._discovery = discovery_for(url, key)
        self._min_replicas = min_replicas
        self._fsync = fsync
        self._connection: RedisConnection | None = None
        self._call_lock = asyncio.Lock()

    async def connect(self) -> RedisConnection:
        """Open another connection to the current primary. RedisFailure where there is none."""
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
            where = "discovery of the primary" if location is None else str(location.address)
            raise RedisFailure(f"{where} does not answer") from None
        except ErrorReply as error:
            if location is None:
                raise
            self.on_error(error, location.address)
            raise RedisFailure(f"{location.address} refuses: {error}") from None
        except OSError as error:
            raise RedisFailure(str(error) if location is None else f"{location.address}: {error}") from error
        connection.asking = location.asking
        if self._connection is not None and self._connection.address != connection.address:
            self.drop()  # a demoted primary may not know that it was demoted, and would accept writes
        return connection

    async def call(self, *parts: object, wait_s: float = 0.0) -> Any:
        """Run one command, which may block for `wait_s`. RedisFailure where it failed; it may have had an effect then."""
        async with self._call_lock:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S + wait_s):
                    if self._connection is None:
                        self._connection = await self.connect()
                    async with self._abort_if_moved(self._connection, wait_s):
                        return await self._connection.call(*parts)
            except TimeoutError:
                self.drop()
                raise RedisFailure("Redis does not answer") from None
            except ErrorReply as error:
                if self._connection is not None:
                    self.on_error(error, self._connection.address)
                self.drop()
                if error.code == "MOVED" and not self._discovery.primary_may_change:
                    raise RedisFailure(f"it is a node of a cluster, and needs redis+cluster:// ({error})") from None
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
        """Run one command that reads the first of `keys`. RedisFailure where one of them is elsewhere.

        While a slot of a cluster is moved, the importing node shows nothing for a key that has not arrived; but a script
        with several keys, of which some are missing, fails. The script is sent without the allow-oom flag: scripts that
        may write fail on a Redis that accepts no writes, and followers must be able to read there.
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
        """Ask discovery whether another Redis is the primary than the one of this connection.

        An isolated or suspended primary does not know that it was replaced, and accepts writes until it does.
        """
        if self._discovery.primary_may_change and not connection.asking:
            with suppress(RedisFailure):  # no node knows: assume that nothing has changed
                return (await self._discovery.find()).address != connection.address
        return False

    @property
    def may_change(self) -> bool:
        """Whether another Redis may become the primary, which may lack commits."""
        return self._discovery.primary_may_change

    async def is_discoverable(self) -> bool:
        """Ask discovery whether there is a primary: without an answer no new connection can be made."""
        with suppress(RedisFailure):
            await self._discovery.find()
            return True
        return False

    async def verify(self) -> None:
        """Raise RedisFailure where the connected Redis is not the primary any more."""
        if self._connection is not None and await self.has_moved(self._connection):
            self.drop()
            raise RedisFailure("there is another master")

    @asynccontextmanager
    async def _abort_if_moved(self, connection: RedisConnection, wait_s: float) -> AsyncIterator[None]:
        """Close the connection during a slow call once the primary has changed: the old one may never answer."""

        async def watch() -> None:
            await asyncio.sleep(wait_s)
            while True:
                await asyncio.sleep(MOVE_CHECK_INTERVAL_S)
                if await self.has_moved(connection):
                    connection.close()
                    return

        if not self._discovery.primary_may_change:
            yield
            return
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()

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
        """Raise RedisFailure unless this is a primary with the replicas and the version that are required."""
        try:
            reply = await connection.call("ROLE")
        except ErrorReply as error:
            if self._discovery.primary_may_change or self._min_replicas or error.code not in UNSUPPORTED_CODES:
                raise
            return
        role = reply[0]
        if role != b"master":
            raise RedisFailure(f"{connection.address} is no master but a {role.decode()}")
        replicas = len(reply[2])
        if replicas < self._min_replicas:
            raise RedisFailure(f"{connection.address} has {replicas} replicas, and must have {self._min_replicas}")
        connection.version = await _version(connection)
        if self._fsync and (0, 0) < connection.version < (7, 2):
            raise RedisFailure(
                f"{connection.address} is older than Redis 7.2, and can't say when a write is on its disk"
            )


async def _version(connection: RedisConnection) -> tuple[int, int]:
    """Return the version of Redis; of a fork, the Redis version it claims compatibility with. (0, 0) if unknown."""
    try:
        found = VERSION.search(await connection.call("INFO", "server"))
    except ErrorReply as error:
        if error.code not in UNSUPPORTED_CODES:
            raise
        return 0, 0
    return (0, 0) if found is None else (int(found[1]), int(found[2] or 0))


def allowing_oom(script: bytes, connection: RedisConnection) -> bytes:
    """Return the script so that it also runs while this Redis is out of memory, if it supports that."""
    return ALLOW_OOM_SHEBANG + script if connection.version >= (7, 0) else script


async def warn_if_lossy(primary: Primary) -> None:
    """Log a warning for each setting of Redis under which it loses acknowledged commits."""
    found: dict[bytes, bytes] = {}
    try:
        for setting in ("appendonly", "maxmemory-policy"):  # Redis before version 7 takes one setting at a time
            reply = await primary.call("CONFIG", "GET", setting)
            found |= zip(reply[::2], reply[1::2], strict=True)
    except ErrorReply as error:
        log.warning("redis configuration unreadable, check that appendonly is yes", error=str(error))
        return
    if found.get(b"appendonly") == b"no":
        log.warning("redis persistence disabled, a restart loses all locks; set appendonly yes")
    policy = found.get(b"maxmemory-policy", b"noeviction").decode()
    if policy != "noeviction":
        log.warning("redis eviction enabled, it may drop locks; set maxmemory-policy noeviction", policy=policy)
