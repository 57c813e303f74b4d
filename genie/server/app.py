"""The server as a whole: what it is made of, how it starts, changes its role, drains and stops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
from collections.abc import Callable
from importlib.metadata import version

import structlog

from genie.access import Access
from genie.config import Settings
from genie.errors import Code, RequestRejected
from genie.observability.stats import Stats
from genie.server.auth import Authenticator
from genie.server.connection import Connection
from genie.server.follower import CommandHandler
from genie.server.listener import AdmissionControl, TlsListener, bind, guard
from genie.server.monitor import Monitor
from genie.server.namespace import Namespace
from genie.server.pipeline import Pipeline
from genie.server.tls import make_tls_contexts
from genie.storage.memory import MemoryStore
from genie.storage.store import Node, Store, this_node

log = structlog.get_logger()

GC_THRESHOLD = (50_000, 20, 1_000)
"""A request leaves no garbage in rings behind, so the collector has next to nothing to find, and rarely looks.

(Else a million locks would load in twice the time: it would look through them over and over.)
"""
BACKLOG = 4096
"""Connections that may wait to be accepted: thousands arrive at once when a server comes back."""


class Server:
    """One lock server in one event loop. It leads its namespaces, or follows the servers that do, each by itself.

    `bind_to` makes the socket on which it listens: not a real one where the network is simulated. `store` is for the one
    namespace that there is then.
    """

    def __init__(
        self, settings: Settings, store: Store | None = None, *, bind_to: Callable[[str, int], socket.socket] = bind
    ) -> None:
        self.settings = settings
        self.tls = make_tls_contexts(settings.tls)
        self._bind_to = bind_to
        self.connections = AdmissionControl(settings)
        self._ready = asyncio.Event()
        stores = make_stores(settings) if store is None else [store]
        self.namespaces = {
            namespace: Namespace(namespace, store, settings, self.connections, self._ready)
            for namespace, store in zip(settings.namespaces, stores, strict=True)
        }
        self.default_namespace = self.namespaces[settings.namespaces[0]]
        """Of those who say no namespace."""
        self.authenticator = Authenticator(settings, self.stats)
        self._draining = False
        self._sock: socket.socket | None = None
        self._guard: socket.socket | None = None
        self._listener: asyncio.Server | None = None
        self._tls_listener: TlsListener | None = None
        self._stopped = asyncio.Event()
        self._failure: BaseException | None = None

    def bind_address(self) -> None:
        """Bind the address without listening on it yet. OSError where another process has it."""
        self._sock = self._bind_to(self.settings.host, self.settings.port)
        try:
            if self._bind_to is bind:
                self._guard = guard(self._sock.getsockname()[:2])
        except BaseException:
            self.release_address()
            raise

    def release_address(self) -> None:
        """Undo `bind_address`, where the server does not start after all."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    async def start(self) -> tuple[str, int]:
        """Listen, when it is known whether this server leads or whom it follows; returns the address.

        OSError where the address can't be had. It is taken first, unless `bind_address` has done so, so that a second
        server by mistake fails before it has touched the store.
        """
        if self._sock is None:
            self.bind_address()
        assert self._sock is not None  # noqa: S101 - it was taken
        host, port = self._sock.getsockname()[:2]
        try:
            gc.collect()
            gc.set_threshold(*GC_THRESHOLD)
            node = this_node((host, port), self.settings.advertise, round(self.settings.lease * 1000))
            await self._start_namespaces(node)
            if self.tls is not None:
                self._tls_listener = TlsListener(self.tls, self.connections, self._connect)
                self._tls_listener.listen(self._sock, BACKLOG)
            else:
                self._listener = await asyncio.get_running_loop().create_server(
                    self._connect, sock=self._sock, backlog=BACKLOG
                )
        except BaseException:
            await self._stop_namespaces()
            self._sock.close()
            raise
        manager = self.default_namespace.manager
        several = (
            {}
            if len(self.namespaces) == 1
            else {"namespaces": {name: seat.role for name, seat in self.namespaces.items()}}
        )
        log.info(
            "listening",
            host=host,
            port=port,
            role=self.default_namespace.role,
            held=0 if manager is None else len(manager.table.held),
            store="redis" if self.default_namespace.store.durable else "memory",
            tls=self.tls is not None,
            version=version("genie-lock"),
            **several,
        )
        if not self.default_namespace.store.durable:
            log.warning(
                "locks are kept in memory and end with this process; set GENIE_REDIS_URL or GENIE_REDIS_HOST to keep them"
            )
        return host, port

    def _connect(self) -> Connection:
        return Connection(
            self.default_namespace.handler, self.settings, self.connections, self.authenticator, self._find_handler
        )

    def _find_handler(self, namespace: str | None) -> CommandHandler | RequestRejected:
        seat = self.default_namespace if namespace is None else self.namespaces.get(namespace)
        if seat is not None:
            return seat.handler
        why = f"this server does not serve the namespace {namespace!r}; it serves {', '.join(self.namespaces)}"
        return RequestRejected(Code.UNKNOWN_NAMESPACE, why)

    @property
    def admin_tls(self) -> ssl.SSLContext | None:
        """What the admin port speaks, if not plain HTTP."""
        return None if self.tls is None else self.tls.admin

    # -- for those who look ---------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Those of the first namespace, with what is counted of strangers and of the event loop."""
        return self.default_namespace.stats

    @property
    def access(self) -> Access:
        """Who may come in at present."""
        return self.authenticator.access

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
        if self.settings.token_file is None or not self.authenticator.reread():
            return
        gone = 0
        for connection in list(self.connections):
            if connection.principal is None or connection.closing:
                continue
            connection.revise(self.authenticator.reauthenticate(connection.principal, connection.certificate))
            if isinstance(connection.handler, Pipeline) and not connection.handler.may_watch_on(connection):
                connection.revise(None)
            gone += connection.closing
        log.info("the token file was read again", file=self.settings.token_file, closed=gone)

    # -- its life ---------------------------------------------------------------------------------------------

    async def _start_namespaces(self, node: Node) -> None:
        """Begin to follow, or lead, and wait until it is known of one namespace which of the two."""
        for seat in self.namespaces.values():
            seat.start(node).add_done_callback(self._ended)
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def _ended(self, roles: asyncio.Task[None]) -> None:
        """One seat can't go on: neither can the server."""
        if roles.cancelled():
            return
        error = roles.exception()
        if self._ready.is_set():  # else `start` says why
            log.error("a namespace can't be served; the server stops", why=str(error), exc_info=error)
        self._failure = self._failure or error
        self._ready.set()
        self._stopped.set()

    async def run(self) -> int:
        """Start, serve until SIGTERM or SIGINT, drain and stop. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        for seat in self.namespaces.values():
            seat.monitor = Monitor(seat.namespace, seat.stats, self.settings.slow_wait * 1000)
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
        namespaces = self.namespaces.values()
        for seat in namespaces:
            seat.draining = True
        await asyncio.gather(
            *(seat.stop() for seat in namespaces if not seat.leads)
        )  # or it might begin to lead meanwhile
        leading = [seat for seat in namespaces if seat.leads]
        drained = await asyncio.gather(*(seat.drain() for seat in leading))
        stuck = [seat for seat, done in zip(leading, drained, strict=True) if not done]
        await self._stop_namespaces()
        await asyncio.gather(*(seat.store.resign() for seat in namespaces if seat not in stuck))
        await self._close_after()
        await asyncio.gather(*(seat.store.close() for seat in namespaces))
        log.info("stopped")

    async def _stop_namespaces(self) -> None:
        for seat in self.namespaces.values():
            await seat.stop()
        if self._guard is not None:
            self._guard.close()

    async def _close_after(self) -> None:
        """Close every connection when it has been sent what it was told, and those that do not read without."""
        for connection in list(self.connections):
            connection.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_timeout_ms / 1000):
                while self.connections:  # noqa: ASYNC110 - once in a life; no event needs to be kept for it
                    await asyncio.sleep(0.005)
        for connection in list(self.connections):
            connection.abort()


def make_stores(settings: Settings) -> list[Store]:
    """The stores that the settings choose, one for each namespace."""
    if settings.redis.url is None:
        return [MemoryStore() for _ in settings.namespaces]
    from genie.storage.redis.election import LeadershipBalancer  # noqa: PLC0415
    from genie.storage.redis.store import RedisStore  # noqa: PLC0415 - a server without Redis need not load its client

    balancer = LeadershipBalancer()
    return [
        RedisStore(
            settings.redis.url,
            namespace,
            min_replicas=settings.redis.min_replicas,
            fsync=settings.redis.fsync,
            balancer=balancer,
        )
        for namespace in settings.namespaces
    ]
