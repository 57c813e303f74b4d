"""The server as a whole: what it is made of, how it starts, changes its role, drains and stops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
import time
from collections.abc import Callable
from importlib.metadata import version

import structlog

from genie.access import Access
from genie.config import Settings
from genie.core import LockManager
from genie.observability.stats import Stats
from genie.server.address import bind, guard
from genie.server.connection import Connection
from genie.server.desk import Desk, Refusing
from genie.server.door import Door
from genie.server.errand import Errand
from genie.server.handshake import TlsListener
from genie.server.pulse import Pulse
from genie.server.pump import Pump
from genie.server.registry import Registry
from genie.server.tls import tls_of
from genie.storage.base import Batch, Replica, Store, Superseded
from genie.storage.memory import MemoryStore
from genie.storage.node import Node, this_node
from genie.tasks import end

log = structlog.get_logger()

GC_THRESHOLD = (50_000, 20, 1_000)
"""A request leaves no garbage in rings behind, so the collector has next to nothing to find, and rarely looks.

(Else a million locks would load in twice the time: it would look through them over and over.)
"""
BACKLOG = 4096
"""Connections that may wait to be accepted: thousands arrive at once when a server comes back."""


class Server:
    """One lock server in one event loop. It leads its namespace, or follows the server that does.

    `bind_to` makes the socket on which it listens: not a real one where the network is simulated.
    """

    def __init__(
        self, settings: Settings, store: Store | None = None, *, bind_to: Callable[[str, int], socket.socket] = bind
    ) -> None:
        self.settings = settings
        self.tls = tls_of(settings)
        self._store: Store = store or make_store(settings)
        self._bind_to = bind_to
        self.stats = Stats()
        self.door = Door(settings, self.stats)
        self.connections = Registry(settings)
        self._errands: set[Errand] = set()
        self._pulse: Pulse | None = None
        """Beats in a server that runs on its own; not in one that is part of somebody's test, whose time it would fill."""
        self._refusing = Refusing(self.stats)
        self._draining = False
        self._pump: Pump | None = None
        """That of the present time as leader, or of the last."""
        self._leads = False
        self._sock: socket.socket | None = None
        self._guard: socket.socket | None = None
        self._listener: asyncio.Server | None = None
        self._tls_listener: TlsListener | None = None
        self._roles: asyncio.Task[None] | None = None
        self._deposed = asyncio.Event()
        self._ready = asyncio.Event()
        self._stopped = asyncio.Event()
        self._failure: BaseException | None = None

    async def start(self) -> tuple[str, int]:
        """Listen, when it is known whether this server leads or whom it follows; returns the address.

        OSError where the address can't be had. It is taken first, so that a second server by mistake fails before it
        has touched the store.
        """
        self._sock = self._bind_to(self.settings.host, self.settings.port)
        host, port = self._sock.getsockname()[:2]
        try:
            if self._bind_to is bind:
                self._guard = guard((host, port))
            gc.collect()
            gc.set_threshold(*GC_THRESHOLD)
            node = this_node((host, port), self.settings.advertise, round(self.settings.lease * 1000))
            self._roles = asyncio.create_task(self._take_roles(node))
            self._roles.add_done_callback(self._ended)
            await self._ready.wait()
            self._check()
            if self.tls is not None:
                self._tls_listener = TlsListener(self.tls, self.connections, self._connect)
                self._tls_listener.listen(self._sock, BACKLOG)
            else:
                self._listener = await asyncio.get_running_loop().create_server(
                    self._connect, sock=self._sock, backlog=BACKLOG
                )
        except BaseException:
            await self._leave_roles()
            self._sock.close()
            raise
        log.info(
            "listening",
            host=host,
            port=port,
            role="leader" if self._leads else "follower",
            held=0 if self.manager is None else len(self.manager.table.held),
            store="redis" if self._store.durable else "memory",
            tls=self.tls is not None,
            version=version("genie-lock"),
        )
        if not self._store.durable:
            log.warning(
                "locks are kept in memory and end with this process; set GENIE_REDIS_URL or GENIE_REDIS_HOST to keep them"
            )
        return host, port

    def _connect(self) -> Connection:
        return Connection(self._desk, self.settings, self.connections, self.door)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    @property
    def _desk(self) -> Desk:
        return self._pump if self._pump is not None and self._leads else self._refusing

    @property
    def admin_tls(self) -> ssl.SSLContext | None:
        """What the admin port speaks, if not plain HTTP."""
        return None if self.tls is None else self.tls.admin

    # -- for those who look ---------------------------------------------------------------------------------

    @property
    def role(self) -> str:
        """`starting` (nobody is known to lead), `leader`, `follower` or `stopping`."""
        if self._draining:
            return "stopping"
        if self._leads:
            return "leader"
        return "starting" if self._refusing.leader is None else "follower"

    @property
    def leader(self) -> str | None:
        """The address of the server that leads, where this one follows it."""
        return None if self._leads else self._refusing.leader

    @property
    def reaches_store(self) -> bool:
        """Whether the store answers, as far as this server needs it now."""
        return self._pump.reaches_store if self._leads and self._pump is not None else self._refusing.leader is not None

    @property
    def store_errors(self) -> int:
        """How often the store could not be reached, or took longer than it may."""
        return self.stats.store_errors + self._store.errors

    @property
    def manager(self) -> LockManager | None:
        """All locks and lines, while this server leads."""
        return self._pump.manager if self._leads and self._pump is not None else None

    @property
    def now(self) -> float:
        """The time of the lock manager (ms). Only while this server leads."""
        return self._leading.now

    @property
    def sessions(self) -> int:
        """Sessions, with and without a connection."""
        return self._pump.sessions if self._leads and self._pump is not None else 0

    async def carry_out(self, line: bytes) -> bytes:
        """Do what a line of the wire asks for, as for a client; returns what it is told, when it is stored."""
        errand = Errand(self.settings, self._desk)
        self._errands.add(errand)
        try:
            return await errand.carry_out(line)
        finally:
            self._errands.discard(errand)

    @property
    def access(self) -> Access:
        """Who may come in at present."""
        return self.door.access

    def reload(self) -> None:
        """Read certificates and tokens again. A wrong file changes nothing."""
        if self.tls is None and self.settings.token_file is None:
            log.info("there is no file to be read again")
        self._reread_certificates()
        self._reread_tokens()

    def _reread_certificates(self) -> None:
        """Who connects from now on sees the new ones."""
        if self.tls is None:
            return
        try:
            self.tls.reload()
        except ValueError as error:
            log.warning("the certificates stay as they were", why=str(error))
        else:
            log.info("certificates read again")

    def _reread_tokens(self) -> None:
        """Let those who are connected go on as the file says, or go."""
        if self.settings.token_file is None or not self.door.reread():
            return
        pump, gone = self._pump if self._leads else None, 0
        for connection in list(self.connections):
            if connection.principal is None or connection.ending:
                continue
            connection.revise(self.door.again(connection.principal, connection.certificate))
            if pump is not None and not pump.may_watch_on(connection):
                connection.revise(None)
            gone += connection.ending
        log.info("the token file was read again", file=self.settings.token_file, closed=gone)

    # -- its life ---------------------------------------------------------------------------------------------

    async def _take_roles(self, node: Node) -> None:
        """Follow, lead, and follow again, until somebody puts an end to it."""
        while True:
            replica = await self._store.open(node, self._whole, self._follow)
            await self._lead(replica)
            await self._deposed.wait()

    def _ended(self, roles: asyncio.Task[None]) -> None:
        if roles.cancelled():
            return
        error = roles.exception()
        if self._listener is not None or self._tls_listener is not None:
            log.error("a defect in the server; stopped", exc_info=error)
        self._failure = self._failure or error
        self._ready.set()
        self._stopped.set()

    @property
    def _leading(self) -> Pump:
        assert self._pump is not None, "only who leads, or has just led, is asked"  # noqa: S101
        return self._pump

    def _whole(self) -> Batch:
        return self._leading.whole()

    def _follow(self, leader: str | None) -> None:
        """Another server leads, as far as is known."""
        if leader is not None and leader != self._refusing.leader:
            log.info("following", leader=leader)
        self._refusing.leader = leader
        if leader is not None:
            self._ready.set()

    async def _lead(self, replica: Replica) -> None:
        """Go on from where the namespace stands."""
        loop = asyncio.get_running_loop()
        manager, began = replica.manager, loop.time() * 1000 - replica.clock_ms
        floor = time.time_ns() // 1000  # whatever the store remembers, no id or fence is ever given twice
        manager.next_id = max(manager.next_id, floor)
        manager.next_fence = max(manager.next_fence, floor)

        def clock() -> float:
            return loop.time() * 1000 - began

        manager.unix_offset_ms = time.time() * 1000 - clock()
        self._deposed.clear()
        manager.max_places = self.settings.max_queue
        self.stats.begin()
        self._pump = pump = Pump(manager, self._store, self.settings, self.stats, clock, self._fail)
        pump.recover(replica.endings.values())
        await pump.settled()
        if self._deposed.is_set():
            return
        self._leads = True
        gc.freeze()  # what is there now stays: the collector need not look at it again
        if self._pulse is not None:
            self._pulse.pump = pump
        for connection in self.connections:
            connection.desk = pump
        if self._ready.is_set():
            log.info("leading", namespace=self.settings.namespace, held=len(manager.table.held))
        self._ready.set()

    def _fail(self, error: BaseException) -> None:
        """Not a word more to anyone: what was not told may not be true."""
        self._leads, self._refusing.leader = False, None
        self.stats.reorderings += self._leading.manager.reorderings
        if self._pulse is not None:
            self._pulse.pump = None
        for connection in [*self.connections, *self._errands]:
            connection.abort()
        self._deposed.set()
        if isinstance(error, Superseded):
            log.error("does not lead any more", namespace=self.settings.namespace, why=str(error))
            return
        log.error("a defect in the server; stopped", exc_info=error)
        self._failure = error
        self._ready.set()
        self._stopped.set()

    async def run(self) -> int:
        """Start, serve until SIGTERM or SIGINT, drain and stop. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        self._pulse = Pulse(self.stats, self.settings.slow_wait * 1000)
        starting = asyncio.create_task(self.start())
        stopping = asyncio.create_task(self._stopped.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await stopping
        else:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
        await self.stop()
        return 0 if self._failure is None else 1

    async def stop(self) -> None:
        """Read no more commands, wait for those that were read, let another server lead, close every connection."""
        self._draining = True
        if self._listener is not None:
            self._listener.close()  # not wait_closed(): from 3.12 on it waits for every client to leave
        if self._tls_listener is not None:
            await self._tls_listener.close()
        pump, drained = self._pump, True
        if pump is not None and self._leads:
            for connection in self.connections:
                connection.stop_reading()
            try:
                async with asyncio.timeout(self.settings.drain_timeout_ms / 1000):
                    await pump.settled()
            except TimeoutError:
                log.warning("the store does not answer; stopped without it", unstored="the last commands")
                drained = False
            pump.stop()
        await self._leave_roles()
        if drained:
            await self._store.resign()
        await self._hang_up()
        await self._store.close()
        log.info("stopped")

    async def _leave_roles(self) -> None:
        await end(self._roles)
        if self._pulse is not None:
            self._pulse.stop()
        if self._guard is not None:
            self._guard.close()

    async def _hang_up(self) -> None:
        """Close every connection when it has been sent what it was told, and those that do not read without."""
        for connection in list(self.connections):
            connection.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_timeout_ms / 1000):
                while self.connections:  # noqa: ASYNC110 - once in a life; no event needs to be kept for it
                    await asyncio.sleep(0.005)
        for connection in list(self.connections):
            connection.abort()


def make_store(settings: Settings) -> Store:
    """The store that the settings choose."""
    if settings.redis_url is None:
        return MemoryStore()
    from genie.storage.redis import RedisStore  # noqa: PLC0415 - a server without Redis need not load its client

    try:
        return RedisStore(settings.redis_url, settings.namespace)
    except TypeError as error:  # what redis-py makes of options in the URL that it doesn't know
        raise ValueError(f"the Redis URL: {error}") from None
