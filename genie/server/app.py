"""The server process: starts, listens, drains, stops, and reloads tokens and certificates."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import structlog

from genie.access import AccessControl
from genie.config import RELOADABLE, SECRETS, Settings, file_key
from genie.core.lock_order.analysis import LockOrder
from genie.core.lock_order.classes import parse_rules
from genie.errors import Code, RequestRejected
from genie.history.recorder import History
from genie.history.retention import Retention
from genie.observability import logs
from genie.observability.roles import describe
from genie.observability.stats import Stats
from genie.server.auth import Authenticator, revoked
from genie.server.connection import Connection
from genie.server.file_watch import FileWatch
from genie.server.listener import AdmissionControl, TlsListener
from genie.server.machine import BACKLOG, Machine
from genie.server.namespace import Namespace
from genie.server.pauses import PauseDetector
from genie.server.peer import CommandHandler
from genie.server.systemd import SystemdNotifier
from genie.server.tls import make_tls_contexts
from genie.server.turns import IterationTurns
from genie.server.unread_output import UnreadOutput
from genie.storage.memory import MemoryStore
from genie.storage.store import Node, Store, UnknownFormat, UnsafeStore, this_node
from genie.tasks import cancel_and_wait
from genie.version import VERSION

log = structlog.get_logger()

TOKEN_SETTINGS = frozenset({"token", "token_file"})
TLS_FILES = frozenset({"tls_cert", "tls_key", "tls_ca"})
MAX_CHECKED_CONNECTIONS = 100
"""Number of connections whose watches are compared with new permissions in one iteration of the event loop."""


class Server:
    """One lock server in one event loop. The server leads or follows in each of its namespaces independently.

    `machine` provides the machine and the process; a simulation replaces it. `store`, for a server with one namespace,
    replaces the store that the settings configure. `lock_orders` contains earlier analyses of the lock order by namespace,
    which this server continues.

    `read_settings` reads the settings again for `reload`, and raises ValueError if they are invalid. `describe_error`
    returns the text that is logged for an error of a reload. The commands pass a function whose text names the option
    or the file of a setting, not its environment variable.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store | None = None,
        *,
        machine: Machine | None = None,
        lock_orders: Mapping[str, LockOrder] = MappingProxyType({}),
        read_settings: Callable[[], Settings] | None = None,
        describe_error: Callable[[ValueError], str] = str,
    ) -> None:
        # More than 16 fields: the arguments, and the parts of a server, which this class starts and stops.
        self.settings = settings
        self._read_settings = read_settings
        self._describe_error = describe_error
        self.tls = make_tls_contexts(settings.tls)
        self._machine = machine or Machine()
        self.connections: AdmissionControl[Connection] = AdmissionControl(settings.limits)
        """The open connections of all namespaces, and their limits."""
        self._ready = asyncio.Event()
        """Set when a namespace knows its leader, or has failed."""
        stores = make_stores(settings) if store is None else [store]
        turns = IterationTurns()
        self.namespaces = {
            name: Namespace(
                name,
                store,
                settings,
                self._machine,
                admission=self.connections,
                ready=self._ready,
                turns=turns,
                lock_order=make_lock_order(settings, lock_orders.get(name)),
                history=make_history(settings, name),
            )
            for name, store in zip(settings.namespaces, stores, strict=True)
        }
        self.default_namespace = self.namespaces[settings.namespaces[0]]
        """The namespace of clients whose `hello` does not name a namespace."""
        self.authenticator = Authenticator(
            settings.token, settings.token_file, certificates_required=settings.tls.ca is not None, stats=self.stats
        )
        self._sock: socket.socket | None = None
        """The bound socket, until the server stops."""
        self._address_lock: socket.socket | None = None
        """Keeps other servers that are starting from binding the same address."""
        self._listener: list[asyncio.Server] | TlsListener[Connection] = []
        """Accepts connections: a listener with TLS, or without TLS one server for each duplicate of the socket. Empty
        before the start."""
        self._stopped = asyncio.Event()
        """Set by SIGTERM, SIGINT or the failure of a namespace, so that the server stops."""
        self._failure: BaseException | None = None
        """The error of the first namespace that failed."""
        self._reloading: asyncio.Task[None] | None = None
        """The task of the current or the last reload. None before the first."""
        self._is_reload_wanted = False
        """True if a reload was requested that has not begun."""
        self._service_manager: SystemdNotifier | None = None
        """Reports the state to systemd. None if systemd does not run this server, or expects no messages."""

    # -- for the admin port and the metrics ---------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Statistics of the default namespace, which include rejected connections and the event-loop lag."""
        return self.default_namespace.stats

    @property
    def access(self) -> AccessControl:
        """The current access-control list."""
        return self.authenticator.access

    @property
    def admin_tls(self) -> ssl.SSLContext | None:
        """TLS context of the admin port, or None for plain HTTP."""
        return None if self.tls is None else self.tls.admin

    @property
    def unread_output(self) -> UnreadOutput:
        """The output that clients have not read, and its limits."""
        return self.connections.unread_output

    @property
    def certificate_expiry(self) -> float | None:
        """Unix time at which the server's certificate expires. None without TLS, or if the certificate cannot be read."""
        return None if self.tls is None else self.tls.expiry

    def _describe_roles(self) -> str:
        """Return the roles in one line, for systemd: `leader`, or `orders: leader, wallets: follower of HOST:PORT`.

        With one namespace, its name is omitted.
        """
        texts = {name: describe(namespace) for name, namespace in self.namespaces.items()}
        if len(texts) == 1:
            return texts[self.default_namespace.name]
        return ", ".join(f"{name}: {text}" for name, text in texts.items())

    # -- start --------------------------------------------------------------------------------------------

    def bind_address(self) -> tuple[str, int]:
        """Bind the configured address, and return its host and port. Connections wait until `start` accepts them.

        Raises OSError if another process uses the address.
        """
        self._sock = self._machine.bind(self.settings.host, self.settings.port)
        try:
            self._address_lock = self._machine.lock_address(self._sock.getsockname()[:2])
        except BaseException:
            self.release_address()
            raise
        host, port = self._sock.getsockname()[:2]
        return host, port

    def release_address(self) -> None:
        """Close the bound socket and the lock on its address, because the server does not start."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._address_lock is not None:
            self._address_lock.close()
            self._address_lock = None

    async def start(self) -> tuple[str, int]:
        """Start the server, and return its host and port once one namespace knows its leader.

        Before that, commands are rejected with the reason. The address is bound before the store is used, so a second
        server on the same address fails with OSError and changes nothing. If the start fails, everything that was
        started is stopped.
        """
        if self._sock is None:
            self.bind_address()
        assert self._sock is not None  # noqa: S101 - `bind_address` set it
        host, port = self._sock.getsockname()[:2]
        try:
            self._machine.prepare_memory()
            lease_ms = round(self.settings.lease * 1000)
            node = this_node((host, port), self.settings.advertise, lease_ms, self._machine.boot_id())
            await self._listen(self._sock)
            await self._start_namespaces(node)
        except BaseException:
            await self._close_listener()
            await self._stop_namespaces()
            self._sock.close()
            for connection in list(self.connections):
                connection.abort()
            raise
        self._log_start(host, port)
        return host, port

    async def _listen(self, sock: socket.socket) -> None:
        """Accept connections at a bound socket."""
        if self.tls is not None:
            self._listener = listener = TlsListener(self.tls, self.connections, self._make_connection)
            listener.listen(sock, BACKLOG)
        else:
            loop, self._listener = asyncio.get_running_loop(), []
            for each in self._machine.listening_sockets(sock):
                self._listener.append(await loop.create_server(self._make_connection, sock=each, backlog=BACKLOG))

    async def _close_listener(self) -> None:
        """Stop accepting connections. Open connections stay open."""
        if isinstance(self._listener, TlsListener):
            await self._listener.close()
        else:
            for server in self._listener:
                server.close()  # no wait_closed(): since Python 3.12 it waits until all clients have disconnected

    async def _start_namespaces(self, node: Node) -> None:
        """Start all namespaces, and wait until one namespace knows its leader.

        If one fails before that, raise its error.
        """
        for namespace in self.namespaces.values():
            namespace.start(node).add_done_callback(partial(self._on_namespace_ended, namespace.name))
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def _on_namespace_ended(self, name: str, role_loop: asyncio.Task[None]) -> None:
        """Stop the server if the role loop of a namespace has failed, not if it was cancelled."""
        if role_loop.cancelled():
            return
        error = role_loop.exception()
        if self._ready.is_set():  # before `_ready` is set, `start` raises the error, and the caller logs it
            is_defect = not isinstance(error, UnknownFormat | UnsafeStore)
            traceback_of = error if is_defect else None
            log.error("namespace failed, stopping server", namespace=name, reason=str(error), exc_info=traceback_of)
        self._failure = self._failure or error
        self._ready.set()
        self._stopped.set()

    def _log_start(self, host: str, port: int) -> None:
        """Log the address, the role and the store. Log a warning if locks are kept only in memory."""
        default = self.default_namespace
        manager = default.manager  # None on a follower
        roles = {name: namespace.role for name, namespace in self.namespaces.items()}
        log.info(
            "listening",
            host=host,
            port=port,
            role=default.role,
            held_locks=0 if manager is None else manager.table.locks,
            store="redis" if default.store.durable else "memory",
            tls=self.tls is not None,
            version=VERSION,
            **({} if len(roles) == 1 else {"namespaces": roles}),
        )
        if not default.store.durable:
            log.warning(
                "locks are kept in memory only, and are lost when this process exits",
                hint="set GENIE_REDIS_URL or GENIE_REDIS_HOST",
            )

    def _make_connection(self) -> Connection:
        """Return the protocol for a new client connection."""
        return Connection(
            handler=self.default_namespace.handler,
            limits=self.settings.limits,
            admission=self.connections,
            authenticator=self.authenticator,
            find_handler=self._find_handler,
        )

    def _find_handler(self, name: str | None) -> CommandHandler | RequestRejected:
        """Return the command handler of the namespace `name`, or an error if this server does not serve it.

        None stands for the default namespace.
        """
        namespace = self.default_namespace if name is None else self.namespaces.get(name)
        if namespace is not None:
            return namespace.handler
        reason = f"this server does not serve the namespace {name!r}; it serves {', '.join(self.namespaces)}"
        return RequestRejected(Code.UNKNOWN_NAMESPACE, reason)

    # -- reload -------------------------------------------------------------------------------------------

    async def reload(self) -> None:
        """Read the configuration file, the certificates and the token file again.

        Must not be called while another reload runs. If a file is invalid, log the error. An invalid configuration file
        changes nothing. In place of another invalid file, its previous content stays in use.
        """
        if self._read_settings is not None:
            try:
                changed = await self._reload_settings(self._read_settings())
            except ValueError as error:
                # No traceback: the operator needs the text only.
                reason = self._describe_error(error)
                log.error("configuration reload failed, all previous settings stay in use", reason=reason)  # noqa: TRY400
                return
        elif self.tls is None and self.settings.token_file is None:
            hint = "set GENIE_CONFIG, GENIE_TOKEN_FILE or GENIE_TLS_CERT"
            log.info("reload skipped, no file to reload is configured", hint=hint)
            return
        else:
            changed = frozenset()
        self._reload_certificates()
        if self.settings.token_file is not None or changed & TOKEN_SETTINGS:
            await self._reload_tokens()

    async def _reload_settings(self, new_settings: Settings) -> frozenset[str]:
        """Apply the changed settings that a running server can change, and return their flat names. Log all changes.

        Raises ValueError, and changes nothing, if the certificates or the tokens of the new settings are invalid.
        """
        used, wanted = self.settings.options(), new_settings.options()
        changed = frozenset(name for name in used if used[name] != wanted[name])
        applied = changed & (RELOADABLE - self._fixed_settings(used, wanted))
        settings = Settings.from_options(**used | {name: wanted[name] for name in applied})
        if applied & TLS_FILES:
            make_tls_contexts(settings.tls)  # raises ValueError for invalid files
        if applied & TOKEN_SETTINGS:
            await self.authenticator.load(settings.token, settings.token_file)
        self._use_settings(settings)
        for name in sorted(changed):
            values = {} if name in SECRETS else {"previous": used[name], "value": wanted[name]}
            if name in applied:
                log.info("setting changed", setting=file_key(name), **values)
            else:
                log.warning("setting change postponed until restart", setting=file_key(name), **values)
        if not changed:
            log.info("configuration reloaded without changes")
        return applied

    @staticmethod
    def _fixed_settings(used: dict[str, Any], wanted: dict[str, Any]) -> frozenset[str]:
        """Return the settings that cannot change now, because the change would turn TLS or authentication on or off.

        `used` and `wanted` contain the current and the new values by flat name.
        """

        def turns_on_or_off(*names: str) -> bool:
            is_on = any(used[name] is not None for name in names)
            will_be_on = any(wanted[name] is not None for name in names)
            return is_on != will_be_on

        fixed: frozenset[str] = frozenset()
        if turns_on_or_off("tls_cert") or turns_on_or_off("tls_ca"):
            fixed |= TLS_FILES
        if turns_on_or_off(*TOKEN_SETTINGS):
            fixed |= TOKEN_SETTINGS
        return fixed

    def _use_settings(self, settings: Settings) -> None:
        """Replace the settings, and apply the changes.

        They must differ only in settings that a running server can change.
        """
        previous, self.settings = self.settings, settings
        if settings.log_level != previous.log_level:
            logs.set_level(settings.log_level)
        self.connections.set_limits(settings.limits)
        if settings.slow_wait != previous.slow_wait:
            for namespace in self.namespaces.values():
                namespace.set_slow_wait(settings.slow_wait * 1000)

    def _reload_certificates(self) -> None:
        """Read the certificates again, for new connections."""
        if self.tls is None:
            return
        try:
            self.tls.reload(self.settings.tls)
        except ValueError as error:
            reason = self._describe_error(error)
            log.warning("certificate reload failed, previous certificates stay in use", reason=reason)
        else:
            log.info("certificates reloaded", file=self.settings.tls.cert)

    async def _reload_tokens(self) -> None:
        """Read the token file again, and apply the new permissions to open connections.

        A connection is closed if its principal was removed, or if its principal may no longer see a prefix that it
        watches.
        """
        try:
            await self.authenticator.reload(self.settings.token, self.settings.token_file)
        except ValueError as error:
            log.error("access token reload failed, previous tokens stay valid", reason=self._describe_error(error))  # noqa: TRY400
            return
        # All at once, so that no command is executed with earlier permissions.
        connections = list(self.connections)
        for connection in connections:
            if connection.principal is not None:
                connection.reauthorize(self.authenticator.reauthorize(connection.principal, connection.certificate))
        closed = 0
        for number, connection in enumerate(connections, 1):
            if self._close_unless_permitted(connection):
                closed += 1
            if number % MAX_CHECKED_CONNECTIONS == 0:
                await asyncio.sleep(0)
        log.info("access tokens reloaded", file=self.settings.token_file, connections_closed=closed)

    def _close_unless_permitted(self, connection: Connection) -> bool:
        """Close a connection if its principal was removed, or lacks the permission for a watched prefix.

        Return whether it was closed. Commands that were read but not executed are rejected, because the connection gets
        a principal without permissions.
        """
        principal = connection.principal
        if principal is None or connection.closed:
            return False
        if any(namespace.revoke_watches(connection) for namespace in self.namespaces.values()):
            principal = revoked(principal)
            connection.reauthorize(principal)
        if principal.permissions or connection.closing:
            return False
        connection.close_revoked()
        return True

    def _on_sighup(self) -> None:
        """Request a reload. If one is running, another one follows: a file may have changed since it was read."""
        self._is_reload_wanted = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.create_task(self._run_reloads())
            self._reloading.add_done_callback(_raise_defect)

    async def _run_reloads(self) -> None:
        """Reload until no further reload is wanted. Report the start and the end of each reload to systemd."""
        while self._is_reload_wanted:
            self._is_reload_wanted = False
            # Each `reloading` requires a `ready`. Before a leader is known, `ready` would report the end of the start
            # too early. While the server stops, it would be wrong.
            service_manager = self._service_manager if self._ready.is_set() else None
            if service_manager is not None and not self._stopped.is_set():
                service_manager.reloading()
            try:
                await self.reload()
            finally:
                if service_manager is not None and not self._stopped.is_set():
                    service_manager.ready()

    # -- run and stop -------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Start, serve until SIGTERM or SIGINT, then drain and stop. SIGHUP calls `reload`.

        The state is reported to systemd if the environment contains NOTIFY_SOCKET. Returns the exit status: 1 if a
        namespace failed, else 0.
        """
        self._service_manager = SystemdNotifier.from_environment(os.environ, self._describe_roles)
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._stopped.set)
        loop.add_signal_handler(signal.SIGHUP, self._on_sighup)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # `genie serve` blocks it until now
        if self._service_manager is not None:
            self._service_manager.start()
        for namespace in self.namespaces.values():
            namespace.observe(self.settings.slow_wait * 1000)
        pauses = PauseDetector(self._machine)
        watch = FileWatch(self._reloadable_files, self._on_sighup)
        interval_s = self.settings.reload_interval
        watching = asyncio.create_task(watch.run(interval_s)) if interval_s else None
        try:
            return await self._serve_until_stopped()
        finally:
            pauses.stop()
            await cancel_and_wait(watching)
            await cancel_and_wait(self._reloading)
            if self._service_manager is not None:
                self._service_manager.close()

    def _reloadable_files(self) -> list[str]:
        """Return the paths of the token file and of the certificates."""
        tls = self.settings.tls
        return [path for path in (self.settings.token_file, tls.cert, tls.key, tls.ca) if path is not None]

    async def _serve_until_stopped(self) -> int:
        """Start, wait until `_stopped` is set, and stop. Return the exit status of `run`."""
        starting = asyncio.create_task(self.start())
        stopping = asyncio.create_task(self._stopped.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() or self._failure is not None:
            await starting  # raises the error if the start failed, perhaps after it has stopped what was started
            if self._service_manager is not None:
                self._service_manager.ready()
            await stopping
        else:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
        await self.stop()
        return 0 if self._failure is None else 1

    async def stop(self) -> None:
        """Shut down gracefully: stop accepting commands, drain, resign, then close all connections."""
        await self._close_listener()
        namespaces = self.namespaces.values()
        for namespace in namespaces:
            namespace.begin_shutdown()
        if self._service_manager is not None:
            self._service_manager.stopping()
        # Followers stop first, so that none of them acquires leadership while the leaders drain.
        await asyncio.gather(*(namespace.stop() for namespace in namespaces if not namespace.is_leader))
        leaders = [namespace for namespace in namespaces if namespace.is_leader]
        drained = await asyncio.gather(*(namespace.drain() for namespace in leaders))
        # A namespace that did not drain does not resign: its last commits may not be acknowledged.
        undrained = [namespace for namespace, success in zip(leaders, drained, strict=True) if not success]
        await self._stop_namespaces()
        await asyncio.gather(*(namespace.store.resign() for namespace in namespaces if namespace not in undrained))
        await self._close_connections()
        await asyncio.gather(*(namespace.store.close() for namespace in namespaces))
        # At the end, because the next leaders and the clients need not wait for the disk.
        await asyncio.gather(*(namespace.close_history() for namespace in namespaces))
        log.info("server stopped")

    async def _stop_namespaces(self) -> None:
        for namespace in self.namespaces.values():
            await namespace.stop()
        if self._address_lock is not None:
            self._address_lock.close()

    async def _close_connections(self) -> None:
        """Close each connection after its messages are sent. Abort the connections that are open after the drain timeout."""
        for connection in list(self.connections):
            connection.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_timeout_ms / 1000):
                while self.connections:  # noqa: ASYNC110 - polled only at shutdown; an event would cost every connection
                    await asyncio.sleep(0.005)
        for connection in list(self.connections):
            connection.abort()


def _raise_defect(task: asyncio.Task[None]) -> None:
    """Raise the exception of a task that has failed, so that the event loop logs it."""
    if not task.cancelled():
        task.result()


def make_stores(settings: Settings) -> list[Store]:
    """Return one store per namespace: Redis if a Redis URL is configured, else memory."""
    if settings.redis.url is None:
        return [MemoryStore() for _ in settings.namespaces]
    from genie.storage.redis.election import LeadershipBalancer  # noqa: PLC0415
    from genie.storage.redis.store import RedisStore  # noqa: PLC0415 - not needed without Redis

    balancer = LeadershipBalancer()
    return [
        RedisStore(
            settings.redis.url,
            namespace,
            min_replicas=settings.redis.min_replicas,
            fsync=settings.redis.fsync,
            allow_data_loss=settings.redis.allow_data_loss,
            balancer=balancer,
        )
        for namespace in settings.namespaces
    ]


def make_lock_order(settings: Settings, earlier: LockOrder | None) -> LockOrder | None:
    """Return `earlier`, or without it a new analysis of the lock order.

    Return None if the settings turn the analysis off.
    """
    if settings.lock_order != "on":
        return None
    return earlier or LockOrder(parse_rules(settings.lock_order_rules or ""))


def make_history(settings: Settings, namespace: str) -> History | None:
    """Return the recording of the history of a namespace, or None if the settings have no directory for it.

    Raises ValueError if the directory cannot be created or written.
    """
    history = settings.history
    if history.dir is None:
        return None
    retention = Retention(max_bytes=history.max_mb << 20, max_age_s=history.max_days * 86_400)
    prefixes = [prefix.strip() for prefix in (history.redact or "").split(",") if prefix.strip()]
    server = settings.advertise or f"{settings.host}:{settings.port}"
    return History(history.dir, namespace, server, retention, prefixes)
