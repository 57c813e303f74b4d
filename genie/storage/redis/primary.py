"""Would this Redis lose locks? Said at the start, with the setting that would keep them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

import structlog

from genie.storage.redis.connection import ErrorReply, RedisConnection, RedisFailure
from genie.storage.redis.discovery import PrimaryLocation, finder
from genie.storage.redis.url import Address, RedisUrl

log = structlog.get_logger()


async def warn_if_lossy(master: Primary) -> None:
    """Log a warning for each setting of Redis under which it forgets what it acknowledged."""
    found: dict[bytes, bytes] = {}
    try:
        for setting in ("appendonly", "maxmemory-policy"):  # before Redis 7 only one can be asked for at a time
            reply = await master.call("CONFIG", "GET", setting)
            found |= zip(reply[::2], reply[1::2], strict=True)
    except ErrorReply as error:
        log.warning("can't see whether Redis keeps what it is given; it should have appendonly yes", error=str(error))
        return
    if found.get(b"appendonly") == b"no":
        log.warning("Redis forgets the locks when it restarts; set appendonly yes in its configuration")
    policy = found.get(b"maxmemory-policy", b"noeviction").decode()
    if policy != "noeviction":
        log.warning("Redis may drop locks when its memory is full; set maxmemory-policy noeviction", policy=policy)


# -- The Redis that keeps a namespace at present: found, checked after each connect, and called --------

CALL_TIMEOUT_S = 5.0
"""How long one call may take, beyond what it waits for by itself."""
DOUBT_S = 0.5
"""From when on, and how often, it is asked whether there is another master, while one does not answer."""
CONNECT_TIMEOUT_S = 2.0
"""How long finding the master and logging in may take."""
NO_RIGHTS = ("ERR", "NOPERM")
"""What Redis answers where a command does not exist, or is not for us."""
SHEBANG = b"#!lua flags=allow-oom\n"
"""Makes a script run also where Redis has no memory left for new keys. From Redis 7 on."""
VERSION = re.compile(rb"^redis_version:(\d+)(?:\.(\d+))?", re.MULTILINE)
ANY = files("genie.storage").joinpath("lua/any.lua").read_bytes()


class Primary:
    """What is asked of a Redis that may be another one tomorrow. `key` is any key of the namespace.

    `min_replicas` replicas must follow a master that is to be taken, and with `fsync` it must be able to say when something
    is on its disk.
    """

    def __init__(self, url: RedisUrl, key: str, min_replicas: int = 0, *, fsync: bool = False) -> None:
        self._login = url.login
        self.watched = url.kind == "sentinel"
        """Whether there are sentinels to be asked whether it is still the master."""
        self._finder = finder(url, key)
        self._min_replicas = min_replicas
        self._fsync = fsync
        self._link: RedisConnection | None = None
        self._calling = asyncio.Lock()

    async def connect(self) -> RedisConnection:
        """A new connection to the present master. RedisFailure where there is none."""
        found: PrimaryLocation | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                found = await self._finder.find()
                link = await RedisConnection.open(found.address, self._login)
                try:
                    await self._check(link)
                except BaseException:
                    link.close()
                    raise
        except TimeoutError:
            where = "whoever knows the master" if found is None else str(found.address)
            raise RedisFailure(f"{where} does not answer") from None
        except ErrorReply as error:
            if found is None:
                raise
            self.failed(error, found.address)
            raise RedisFailure(f"{found.address} refuses: {error}") from None
        except OSError as error:
            raise RedisFailure(str(error) if found is None else f"{found.address}: {error}") from error
        link.asking = found.asking
        if self._link is not None and self._link.address != link.address:
            self.drop()  # an old master may not know yet that it is none, and would take what is written to it
        return link

    async def call(self, *parts: object, wait_s: float = 0.0) -> Any:
        """Carry out one command, on a connection of its own. RedisFailure where it failed, or may have."""
        async with self._calling:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S + wait_s):
                    if self._link is None:
                        self._link = await self.connect()
                    async with self._doubting(self._link, wait_s):
                        return await self._link.call(*parts)
            except TimeoutError:
                self.drop()
                raise RedisFailure("Redis does not answer") from None
            except ErrorReply as error:
                if self._link is not None:
                    self.failed(error, self._link.address)
                self.drop()
                if error.code == "MOVED" and not self._finder.strict:
                    raise RedisFailure(f"it is a node of a cluster, and needs redis+cluster:// ({error})") from None
                raise
            except BaseException:
                self.drop()
                raise

    async def eval(self, script: bytes, keys: list[str], *arguments: object) -> Any:
        """Run a script, also where Redis is full."""
        async with self._calling:
            if self._link is None:
                self._link = await self.connect()
            script = runnable(script, self._link)
        return await self.call("EVAL", script, len(keys), *keys, *arguments)

    async def look(self, keys: list[str], command: str, *arguments: object) -> Any:
        """Carry out one command that reads the first of some keys. RedisFailure where one that exists is not there.

        While a slot of a cluster moves, the Redis that takes it over shows nothing for a key that it does not have yet;
        but asked for several of which it has not all it says so. No script that may write: it would be refused where
        nothing can be written, and a follower has to see all the same.
        """
        return await self.call("EVAL", ANY, len(keys), *keys, command, *arguments)

    async def write(self, command: str, key: str, *arguments: object) -> Any:
        """Carry out one command that writes, also where Redis is full."""
        return await self.eval(ANY, [key], command, *arguments)

    def failed(self, error: object, said_by: Address) -> None:
        """A command was answered so: it may say where the master is by now."""
        if isinstance(error, ErrorReply):
            self._finder.hint(error, said_by)

    async def elsewhere(self, link: RedisConnection) -> bool:
        """Whether another master is named by now than the one at the other end of this.

        One that was cut off, or held up, does not know that it is none any more, and takes every write until it does.
        """
        if self._finder.strict and not link.asking:
            with suppress(RedisFailure):  # nobody knows better
                return (await self._finder.find()).address != link.address
        return False

    @property
    def replaceable(self) -> bool:
        """Whether somebody may name another master."""
        return self._finder.strict

    async def findable(self) -> bool:
        """Whether somebody says who the master is: without that no connection to it can be made."""
        with suppress(RedisFailure):
            await self._finder.find()
            return True
        return False

    async def verify(self) -> None:
        """RedisFailure where the one that is called is not the master any more."""
        if self._link is not None and await self.elsewhere(self._link):
            self.drop()
            raise RedisFailure("there is another master")

    @asynccontextmanager
    async def _doubting(self, link: RedisConnection, wait_s: float) -> AsyncIterator[None]:
        """Give a call up that takes long, where there is another master by now: the old one may never answer."""

        async def doubt() -> None:
            await asyncio.sleep(wait_s)
            while True:
                await asyncio.sleep(DOUBT_S)
                if await self.elsewhere(link):
                    link.close()
                    return

        if not self._finder.strict:
            yield
            return
        doubting = asyncio.create_task(doubt())
        try:
            yield
        finally:
            doubting.cancel()

    @property
    def asking(self) -> bool:
        """Whether the one that is called is about to take the slot over, and may not have all of its keys yet."""
        return self._link is not None and self._link.asking

    @property
    def address(self) -> Address | None:
        """Which Redis is called, where one is connected."""
        return None if self._link is None else self._link.address

    def drop(self) -> None:
        """Close the connection; the next call finds the master anew."""
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _check(self, link: RedisConnection) -> None:
        """Is this a master, with the replicas that it must have?"""
        try:
            said = await link.call("ROLE")
        except ErrorReply as error:
            if self._finder.strict or self._min_replicas or error.code not in NO_RIGHTS:
                raise
            return
        role = said[0]
        if role != b"master":
            raise RedisFailure(f"{link.address} is no master but a {role.decode()}")
        replicas = len(said[2])
        if replicas < self._min_replicas:
            raise RedisFailure(f"{link.address} has {replicas} replicas, and must have {self._min_replicas}")
        link.version = await _version(link)
        if self._fsync and (0, 0) < link.version < (7, 2):
            raise RedisFailure(f"{link.address} is older than Redis 7.2, and can't say when a write is on its disk")


async def _version(link: RedisConnection) -> tuple[int, int]:
    """That of Redis; of a fork the one that it says to be like. (0, 0) where it does not say."""
    try:
        found = VERSION.search(await link.call("INFO", "server"))
    except ErrorReply as error:
        if error.code not in NO_RIGHTS:
            raise
        return 0, 0
    return (0, 0) if found is None else (int(found[1]), int(found[2] or 0))


def runnable(script: bytes, link: RedisConnection) -> bytes:
    """A script that runs there also when memory is full, where that can be had."""
    return SHEBANG + script if link.version >= (7, 0) else script
