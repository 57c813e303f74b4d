"""The connection to the current primary: discovers the primary, checks its role, and calls commands and scripts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import structlog

from genie.storage.redis.connection import UNKNOWN_RUN, ErrorReply, RedisConnection, RedisFailure, RedisRun
from genie.storage.redis.discovery import PrimaryLocation, discovery_for
from genie.storage.redis.url import Address, RedisUrl
from genie.storage.store import StoreMemory, UnsafeStore

log = structlog.get_logger()

CALL_TIMEOUT_S = 5.0
"""Time limit of one call. If the command may block, such as XREAD, the blocking time is added."""
MOVE_CHECK_INTERVAL_S = 0.5
"""While a call waits for its reply, discovery checks once per interval whether the primary has changed."""
CONNECT_TIMEOUT_S = 2.0
"""Time limit for discovery, connecting and logging in together."""
UNSUPPORTED_CODES = ("ERR", "NOPERM")
"""Error codes of commands that do not exist, or that the Redis user may not run."""
DENIED_CODES = ("WRONGPASS", "NOAUTH", "NOPERM")
"""Error codes of a wrong password, and of a command that the Redis user may not run."""
ALLOW_OOM_SHEBANG = b"#!lua flags=allow-oom\n"
"""The first line of a script that Redis also runs while it is out of memory. Requires Redis 7."""
VERSION = re.compile(rb"^redis_version:(\d+)(?:\.(\d+))?", re.MULTILINE)
RUN_ID = re.compile(rb"^run_id:(\S+)", re.MULTILINE)
UPTIME = re.compile(rb"^uptime_in_seconds:(\d+)", re.MULTILINE)
MEMORY = re.compile(rb"^(used_memory|maxmemory):(\d+)\r?$", re.MULTILINE)
SCRIPTS = files("genie.storage.redis").joinpath("lua")
CALL_SCRIPT = SCRIPTS.joinpath("call.lua").read_bytes()


class NoReply(RedisFailure):
    """A call was given up, because Redis had not answered for `CALL_TIMEOUT_S`."""


class AccessDenied(RedisFailure):
    """Redis rejects the password, or the user may not run a command. This lasts until an operator changes it."""


def is_denied(error: BaseException) -> bool:
    """Return whether an error means that the password is wrong, or that the user may not run a command."""
    return isinstance(error, AccessDenied) or (isinstance(error, ErrorReply) and error.code in DENIED_CODES)


class Primary:
    """Calls commands on the Redis that is currently the primary.

    In a cluster, this is the primary of the hash slot of `key`.

    A primary with fewer than `min_replicas` connected replicas is rejected. With `fsync`, a Redis without WAITAOF is
    rejected as well.
    """

    def __init__(self, url: RedisUrl, key: str, min_replicas: int = 0, *, fsync: bool = False) -> None:
        self._login = url.login
        self.has_sentinels = url.kind == "sentinel"
        """True if sentinels report the primary. If so, a leader must query the sentinels regularly."""
        self._discovery = discovery_for(url, key)
        self.may_change = self._discovery.primary_may_change
        """True if another Redis, which may lack commits, can become the primary."""
        self._min_replicas = min_replicas
        """Number of replicas that a primary must have."""
        self._fsync = fsync
        self._connection: RedisConnection | None = None
        """The shared connection for `call`. None while disconnected."""
        self._call_lock = asyncio.Lock()
        """Held during a call: the connection has one command in flight."""

    async def connect(self) -> RedisConnection:
        """Discover the current primary, connect to it, and check its role.

        Returns a new connection, which belongs to the caller. If the primary has changed, the shared connection is
        closed. Raises RedisFailure if any step fails, or if the discovered Redis is not a suitable primary.
        """
        location: PrimaryLocation | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                location = await self._discovery.find()
                connection = await self._open(location.address)
        except TimeoutError:
            step = "discovery of the primary" if location is None else f"connecting to {location.address}"
            raise RedisFailure(f"{step} took longer than {CONNECT_TIMEOUT_S} s") from None
        except ErrorReply as error:
            if location is None:
                raise
            self.on_error(error, location.address)
            kind = AccessDenied if is_denied(error) else RedisFailure
            raise kind(f"{location.address} rejected the connection: {error}") from None
        except OSError as error:
            prefix = "" if location is None else f"{location.address}: "
            raise RedisFailure(f"{prefix}{error}") from error
        connection.asking = location.asking
        if self._connection is not None and self._connection.address != connection.address:
            self.drop()  # the former primary may still accept writes until it notices its demotion
        return connection

    async def _open(self, address: Address) -> RedisConnection:
        """Connect to the Redis at `address`, and check its role. Disconnects if the check fails."""
        connection = await RedisConnection.open(address, self._login)
        try:
            await self._check_role(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def call(self, *parts: object, wait_s: float = 0.0) -> Any:
        """Run one command, which may block for `wait_s` seconds, and return its reply. Connects first if necessary.

        Raises RedisFailure if the command fails. Redis may have executed the command nevertheless. After any error the
        connection is closed, and the next call discovers the primary again.
        """
        async with self._call_lock:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S + wait_s):
                    if self._connection is None:
                        self._connection = await self.connect()
                    async with self._abort_if_moved(self._connection, wait_s):
                        return await self._connection.call(*parts)
            except TimeoutError:
                self.drop()
                raise NoReply(f"no reply of Redis within {CALL_TIMEOUT_S} s") from None
            except ErrorReply as error:
                if self._connection is not None:
                    self.on_error(error, self._connection.address)
                self.drop()
                if error.code == "MOVED" and not self.may_change:
                    raise RedisFailure(f"a cluster node needs a URL with redis+cluster:// ({error})") from None
                raise
            except BaseException:
                self.drop()
                raise

    async def eval(self, script: bytes, keys: list[str], *arguments: object) -> Any:
        """Run a script, and return its result. Redis 7 or newer runs the script also while it is out of memory."""
        async with self._call_lock:
            if self._connection is None:  # connect first, because the script depends on the version of Redis
                self._connection = await self.connect()
            if self._connection.version >= (7, 0):
                script = ALLOW_OOM_SHEBANG + script
        return await self.call("EVAL", script, len(keys), *keys, *arguments)

    async def read(self, keys: list[str], command: str, *arguments: object) -> Any:
        """Run one command that reads the first of `keys`, and return its reply.

        Raises RedisFailure if only some keys exist.

        The command is run by a script: during the migration of a hash slot, the importing node replies to a plain
        command as if a key that has not arrived yet did not exist, but rejects a script.

        The script has no allow-oom flag, because Redis would treat it as a write. Followers must be able to read while
        Redis accepts no writes.
        """
        return await self.call("EVAL", CALL_SCRIPT, len(keys), *keys, command, *arguments)

    async def write(self, command: str, key: str, *arguments: object) -> Any:
        """Run one command that writes `key`, and return its reply.

        Redis 7 or newer runs it also while it is out of memory.
        """
        return await self.eval(CALL_SCRIPT, [key], command, *arguments)

    def on_error(self, error: object, address: Address) -> None:
        """Pass an error reply of the Redis at `address` to discovery, because it may be a redirection to the new primary."""
        if isinstance(error, ErrorReply):
            self._discovery.on_error_reply(error, address)

    async def find_replacement(self, connection: RedisConnection) -> Address | None:
        """Return the address of the Redis that has replaced the Redis of `connection` as the primary, or None.

        A primary that was isolated or suspended does not notice immediately that it was replaced, and still accepts
        writes.
        """
        # A node that is importing the slot (`asking`) is not yet the primary that discovery reports.
        if not self.may_change or connection.asking:
            return None
        try:
            location = await self._discovery.find()
        except RedisFailure:  # without a reply, assume that the primary has not changed
            return None
        return None if location.address == connection.address else location.address

    async def is_discoverable(self) -> bool:
        """Return whether discovery finds a primary, so that a new connection could be opened."""
        try:
            await self._discovery.find()
        except RedisFailure:
            return False
        return True

    async def verify(self) -> None:
        """Disconnect and raise RedisFailure if the connected Redis is no longer the primary."""
        if self._connection is not None and await self.find_replacement(self._connection) is not None:
            former = self._connection.address
            self.drop()
            raise RedisFailure(f"{former} is no longer the primary")

    @asynccontextmanager
    async def _abort_if_moved(self, connection: RedisConnection, wait_s: float) -> AsyncIterator[None]:
        """Close the connection if the primary changes during a slow call, because the old primary may never reply.

        The command itself may block for `wait_s` seconds, after which the checks begin.
        """

        async def watch_primary() -> None:
            await asyncio.sleep(wait_s)
            while True:
                await asyncio.sleep(MOVE_CHECK_INTERVAL_S)
                if await self.find_replacement(connection) is not None:
                    connection.close()
                    return

        if not self.may_change:
            yield
            return
        watch = asyncio.create_task(watch_primary())
        try:
            yield
        finally:
            watch.cancel()

    @property
    def asking(self) -> bool:
        """True if the connected node is importing the hash slot, and may still lack some of the keys."""
        return self._connection is not None and self._connection.asking

    @property
    def run(self) -> RedisRun:
        """The run of the connected Redis, or `UNKNOWN_RUN` while disconnected."""
        return UNKNOWN_RUN if self._connection is None else self._connection.run

    @property
    def address(self) -> Address | None:
        """The address of the connected Redis, or None while disconnected."""
        return None if self._connection is None else self._connection.address

    def drop(self) -> None:
        """Close the shared connection. The next call discovers the primary again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _check_role(self, connection: RedisConnection) -> None:
        """Raise RedisFailure unless this Redis is a primary with enough replicas and a sufficient version.

        A standalone server without the command ROLE, for example a proxy, is accepted without these checks.
        """
        try:
            reply = await connection.call("ROLE")
        except ErrorReply as error:
            if self.may_change or self._min_replicas or error.code not in UNSUPPORTED_CODES:
                raise
            return
        role = reply[0]
        if role != b"master":
            raise RedisFailure(f"{connection.address} is not a master, its role is {role.decode()}")
        replicas = len(reply[2])
        if replicas < self._min_replicas:
            raise RedisFailure(
                f"{connection.address} has {replicas} replicas, and GENIE_REDIS_MIN_REPLICAS requires {self._min_replicas}"
            )
        await _read_server_info(connection)
        if self._fsync and (0, 0) < connection.version < (7, 2):  # (0, 0) if the server does not report its version
            raise RedisFailure(
                f"{connection.address} is Redis {connection.version[0]}.{connection.version[1]}; GENIE_REDIS_FSYNC needs 7.2"
            )


async def _read_server_info(connection: RedisConnection) -> None:
    """Set the version and the run of a connection's Redis, if the server reports them.

    Sets nothing if the command INFO does not exist or is not allowed.
    """
    try:
        info = await connection.call("INFO", "server")
    except ErrorReply as error:
        if error.code not in UNSUPPORTED_CODES:
            raise
        return
    if version := VERSION.search(info):
        connection.version = int(version[1]), int(version[2] or 0)
    if (run_id := RUN_ID.search(info)) and (uptime := UPTIME.search(info)):
        min_uptime_s = max(0, int(uptime[1]) - 1)  # Redis computes with whole seconds: up to a second too much
        started_at = asyncio.get_running_loop().time() - min_uptime_s
        connection.run = RedisRun(run_id[1].decode(), started_at)


async def read_memory(primary: Primary) -> StoreMemory | None:
    """Return the memory that the primary uses, and its `maxmemory`, or None if the primary does not report both."""
    fields = {name: int(value) for name, value in MEMORY.findall(await primary.call("INFO", "memory"))}
    if fields.keys() != {b"used_memory", b"maxmemory"}:
        return None
    return StoreMemory(fields[b"used_memory"], fields[b"maxmemory"])


async def _read_configuration(primary: Primary) -> dict[str, str]:
    """Return the settings of the primary that concern durability. Raises ErrorReply if the user may not read them."""
    settings: dict[str, str] = {}
    for setting in ("appendonly", "maxmemory", "maxmemory-policy"):  # Redis before version 7 takes one at a time
        reply = await primary.call("CONFIG", "GET", setting)
        settings |= {name.decode(): value.decode() for name, value in zip(reply[::2], reply[1::2], strict=True)}
    return settings


def _find_dangers(settings: dict[str, str], *, keeps_commits: bool) -> list[str]:
    """Return a sentence for each setting with which Redis can lose locks that the server has promised to keep.

    `keeps_commits` says whether the server promises, by `GENIE_REDIS_MIN_REPLICAS` or `GENIE_REDIS_FSYNC`, that commits
    survive a failure of Redis.
    """
    dangers = []
    policy, limit = settings.get("maxmemory-policy", ""), settings.get("maxmemory", "0")
    if policy.startswith("allkeys-") and limit != "0":
        dangers.append(
            f"redis evicts keys beyond {limit} bytes of memory (maxmemory-policy {policy}), so held locks could be granted "
            "again; set maxmemory-policy noeviction"
        )
    if keeps_commits and settings.get("appendonly") == "no":
        dangers.append(
            "redis persistence disabled (appendonly no), so a restart of the primary deletes the locks from its replicas as "
            "well, which GENIE_REDIS_MIN_REPLICAS and GENIE_REDIS_FSYNC promise to keep; set appendonly yes"
        )
    return dangers


async def reject_if_unsafe(primary: Primary, *, keeps_commits: bool) -> None:
    """Raise UnsafeStore if the configuration of the primary can lose locks that the server promises to keep.

    The configuration is not checked if the user of Redis may not read it. `_find_dangers` explains `keeps_commits`.
    """
    try:
        dangers = _find_dangers(await _read_configuration(primary), keeps_commits=keeps_commits)
    except ErrorReply as error:
        if error.code not in UNSUPPORTED_CODES:
            raise
        return
    if dangers:
        raise UnsafeStore(
            f"{primary.address}: {'; '.join(dangers)}, or GENIE_REDIS_ALLOW_DATA_LOSS=1 to start nevertheless"
        )


async def warn_if_lossy(primary: Primary, *, keeps_commits: bool) -> None:
    """Log each Redis setting that can lose locks: as an error if the server promises to keep them, else as a warning.

    `_find_dangers` explains `keeps_commits`.
    """
    try:
        settings = await _read_configuration(primary)
    except ErrorReply as error:
        hint = "make sure that Redis has appendonly yes and maxmemory-policy noeviction"
        log.warning("redis configuration check skipped", address=str(primary.address), reason=str(error), hint=hint)
        return
    dangers = _find_dangers(settings, keeps_commits=keeps_commits)
    for danger in dangers:
        log.error("redis configuration unsafe, locks may be lost", address=str(primary.address), explanation=danger)
    logged = "; ".join(dangers)
    if settings.get("appendonly") == "no" and "appendonly" not in logged:
        log.warning(
            "redis persistence disabled, a restart loses all locks; set appendonly yes", address=str(primary.address)
        )
    policy = settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction" and "maxmemory-policy" not in logged:
        log.warning(
            "redis eviction enabled, redis may drop locks; set maxmemory-policy noeviction",
            address=str(primary.address),
            maxmemory_policy=policy,
        )
