"""The server as a whole: what it is made of, how it starts, drains and stops."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import sys
import time
from importlib.metadata import version

import structlog

from genie.config import Settings
from genie.core import LockManager
from genie.server.connection import Connection
from genie.server.pump import Pump
from genie.storage.base import Store, Superseded
from genie.storage.memory import MemoryStore

log = structlog.get_logger()

GC_THRESHOLD = (50_000, 20, 1_000)
"""A request leaves no garbage in rings behind, so the collector has next to nothing to find, and rarely looks.

(Else a million locks would load in twice the time: it would look through them over and over.)
"""
BACKLOG = 4096
"""Connections that may wait to be accepted: thousands arrive at once when a server comes back."""


class Server:
    """One lock server in one event loop."""

    def __init__(self, settings: Settings, store: Store | None = None) -> None:
        self.settings = settings
        self._store: Store = store or make_store(settings)
        self._connections: set[Connection] = set()
        self._pump: Pump | None = None
        self._listener: asyncio.Server | None = None
        self._stopped = asyncio.Event()
        self._failure: BaseException | None = None
        self._guard: socket.socket | None = None

    async def start(self) -> tuple[str, int]:
        """Load what the store holds and listen; returns the address. OSError where that can't be had.

        The address is taken first, so that a second server by mistake fails before it has touched the store; it
        answers when everything is loaded.
        """
        sock = _bind(self.settings.host, self.settings.port)
        gc.collect()
        gc.set_threshold(*GC_THRESHOLD)
        try:
            manager = await self._load(sock)
        except BaseException:
            sock.close()
            raise
        gc.freeze()  # what is there now stays: the collector need not look at it again
        host, port = sock.getsockname()[:2]
        log.info(
            "listening",
            host=host,
            port=port,
            store="redis" if self._store.durable else "memory",
            held=len(manager.table.held),
            version=version("genie-lock"),
        )
        if not self._store.durable:
            log.warning(
                "locks are kept in memory and end with this process; set GENIE_REDIS_URL or GENIE_REDIS_HOST to keep them"
            )
        return host, port

    async def _load(self, sock: socket.socket) -> LockManager:
        """Take up what the store holds, and listen."""
        loop = asyncio.get_running_loop()
        self._guard = _guard(sock.getsockname())
        replica = await self._store.open(lambda: pump.whole())  # noqa: PLW0108 - it is made below
        manager, began = replica.manager, loop.time() * 1000 - replica.clock_ms
        floor = time.time_ns() // 1000  # whatever the store remembers, no id or fence is ever given twice
        manager.next_id = max(manager.next_id, floor)
        manager.next_fence = max(manager.next_fence, floor)

        def clock() -> float:
            return loop.time() * 1000 - began

        manager.unix_offset_ms = time.time() * 1000 - clock()
        self._pump = pump = Pump(manager, self._store, self.settings, clock, self._fail)
        pump.recover(replica.endings.values())
        await pump.settled()
        if self._failure is not None:
            raise self._failure
        self._listener = await loop.create_server(
            lambda: Connection(pump, self.settings, self._connections), sock=sock, backlog=BACKLOG
        )
        return manager

    async def stop(self) -> None:
        """Read no more commands, wait for those that were read, close every connection."""
        if self._listener is not None:
            self._listener.close()  # not wait_closed(): from 3.12 on it waits for every client to leave
        if self._pump is not None:
            for connection in self._connections:
                connection.stop_reading()
            try:
                async with asyncio.timeout(self.settings.drain_timeout_ms / 1000):
                    await self._pump.settled()
            except TimeoutError:
                log.warning("the store does not answer; stopped without it", unstored="the last commands")
            self._pump.stop()
        await self._hang_up()
        await self._store.close()
        log.info("stopped")

    async def _hang_up(self) -> None:
        """Close every connection when it has been sent what it was told, and those that do not read without."""
        for connection in list(self._connections):
            connection.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_timeout_ms / 1000):
                while self._connections:  # noqa: ASYNC110 - once in a life; no event needs to be kept for it
                    await asyncio.sleep(0.005)
        for connection in list(self._connections):
            connection.abort()

    async def run(self) -> int:
        """Start, serve until SIGTERM or SIGINT, drain and stop. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        starting = asyncio.create_task(self.start())
        stopping = asyncio.create_task(self._stopped.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            error = starting.exception()
            if error is not None and self._failure is None:
                raise error
            await stopping
        else:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
        if self._failure is None:
            await self.stop()
        return 0 if self._failure is None else 1

    def _fail(self, error: BaseException) -> None:
        """Not a word more to anyone: what was not told may not be true."""
        self._failure = error
        for connection in list(self._connections):
            connection.abort()
        if self._listener is not None:
            self._listener.close()
        if isinstance(error, Superseded):
            log.error("another server has taken over this namespace; stopped", namespace=self.settings.namespace)
        else:
            log.error("a defect in the server; stopped", exc_info=error)
        self._stopped.set()


def make_store(settings: Settings) -> Store:
    """The store that the settings choose."""
    if settings.redis_url is None:
        return MemoryStore()
    from genie.storage.redis import RedisStore  # noqa: PLC0415 - a server without Redis need not load its client

    try:
        return RedisStore(settings.redis_url, settings.namespace)
    except TypeError as error:  # what redis-py makes of options in the URL that it doesn't know
        raise ValueError(f"the Redis URL: {error}") from None


def _guard(address: tuple[str, int]) -> socket.socket | None:
    """Make sure that no other server has bound the same address and is loading, too.

    Until one of them listens, which is only after loading, Linux lets both bind (the option that a restart needs,
    SO_REUSEADDR, allows it), and the second would take the store from the first. A name in the abstract namespace
    of Unix sockets is free again whenever its process ends, in whatever way.
    """
    if sys.platform != "linux":
        return None
    guard = socket.socket(socket.AF_UNIX)
    try:
        guard.bind(f"\0genie {address[0]} {address[1]}")
    except OSError:
        guard.close()
        raise OSError(errno.EADDRINUSE, "another server is starting on this address") from None
    return guard


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
