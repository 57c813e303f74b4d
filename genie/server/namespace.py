"""One namespace on this server: its role, leader or follower, and the pipeline of a leader."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING

import structlog

from genie.core import LockManager
from genie.observability.stats import Stats
from genie.server.connection import Connection
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.peer import CommandHandler, ConnectionState, Peer
from genie.server.pipeline import Pipeline
from genie.storage.store import Batch, LeadershipLost, Node, StateMachine, Store
from genie.tasks import cancel_and_wait

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.server.monitor import Monitor

log = structlog.get_logger()


class _InternalClient(Peer):
    """Executes one command from inside the server like a client's: stored first, answered after that."""

    __slots__ = ("_handler", "_reply")

    def __init__(self, handler: CommandHandler) -> None:
        super().__init__()
        self.enter_state(ConnectionState.READY)
        self._handler = handler
        self._reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def execute(self, line: bytes) -> bytes:
        """Submit a line and return the reply. Bound the time: an unavailable store delays it without limit."""
        self._handler.submit(self, [line], len(line))
        try:
            return await self._reply
        finally:
            self.closed = True
            self._handler.on_disconnect(self)

    def abort(self) -> None:
        """Cancel the command: the server does not lead any more."""
        self._reply.cancel()

    def _write(self, data: bytes) -> None:
        if data and not self._reply.done():
            self._reply.set_result(data)


class Namespace:
    """Leads a namespace, or follows the server that does.

    `connections` are those of the whole server; those of the namespace have its handler. `ready` is set as soon as the
    leader is known. `task` ends only by a defect, or with an error that retrying cannot resolve.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        settings: Settings,
        connections: AdmissionControl[Connection],
        ready: asyncio.Event,
    ) -> None:
        self.name = name
        self.store = store
        self.stats = Stats()
        self.draining = False
        self.task: asyncio.Task[None] | None = None
        self.monitor: Monitor | None = None
        """Only in a server that runs on its own: in one that is embedded in a test it would fill virtual time."""
        self.pipeline: Pipeline | None = None
        """The leader's. After leadership is lost it is kept until the next leader is known: the store may need it."""
        self.is_leader = False
        self._settings = settings
        self._connections = connections
        self._ready = ready
        self._internal_clients: set[_InternalClient] = set()
        self._follower = FollowerHandler(self.stats, name, settings.limits.max_pending)
        self._leadership_lost = asyncio.Event()
        self._failure: BaseException | None = None

    def start(self, node: Node) -> asyncio.Task[None]:
        """Start to follow, and to lead where no other server does."""
        self.task = asyncio.create_task(self._run_role_loop(node))
        return self.task

    @property
    def handler(self) -> CommandHandler:
        """What connections of the namespace submit commands to, in its present role."""
        return self.pipeline if self.pipeline is not None and self.is_leader else self._follower

    # -- for the admin port and the metrics ---------------------------------------------------------------

    @property
    def role(self) -> str:
        """`starting` (the leader is unknown), `leader`, `follower` or `stopping`."""
        if self.draining:
            return "stopping"
        if self.is_leader:
            return "leader"
        return "starting" if self._follower.leader is None else "follower"

    @property
    def leader(self) -> str | None:
        """The leader's address for clients, where this server follows it."""
        return None if self.is_leader else self._follower.leader

    @property
    def store_available(self) -> bool:
        """Whether a leader executes commands, or a follower knows the leader."""
        if self.is_leader and self.pipeline is not None:
            return self.pipeline.store_available
        return self._follower.leader is not None

    @property
    def store_errors(self) -> int:
        """How often the store failed, or exceeded the store timeout."""
        return self.stats.store_errors + self.store.failure_count

    @property
    def manager(self) -> LockManager | None:
        """The lock manager, on the leader."""
        return self.pipeline.manager if self.is_leader and self.pipeline is not None else None

    @property
    def now(self) -> float:
        """The lock manager's time (ms). Only on the leader."""
        return self._leading.now

    @property
    def sessions(self) -> int:
        """Sessions, with and without a connection."""
        return self.pipeline.session_count if self.is_leader and self.pipeline is not None else 0

    async def execute(self, line: bytes) -> bytes:
        """Execute a line of the wire like a client's, and return the reply, once it is stored."""
        client = _InternalClient(self.handler)
        self._internal_clients.add(client)
        try:
            return await client.execute(line)
        finally:
            self._internal_clients.discard(client)

    def may_keep_watches(self, connection: Connection) -> bool:
        """Return whether a connection may see everything that it watches here, with its present permissions."""
        return (
            self.pipeline is None
            or connection.handler is not self.pipeline
            or self.pipeline.may_keep_watches(connection)
        )

    # -- roles --------------------------------------------------------------------------------------------

    async def _run_role_loop(self, node: Node) -> None:
        """Follow until this node leads, lead until leadership is lost, and again."""
        while True:
            await self._lead(await self.store.open(node, self._snapshot, self._on_leader_changed))
            await self._until_leadership_ends()
            if self._failure is not None:
                raise self._failure

    @property
    def _leading(self) -> Pipeline:
        assert self.pipeline is not None, "only a leader, or one that has just lost leadership, has a pipeline"  # noqa: S101
        return self.pipeline

    def _snapshot(self) -> Batch:
        return self._leading.snapshot()

    def _on_leader_changed(self, leader: str | None) -> None:
        """Send clients to another leader; None: it is unknown."""
        if leader is not None and leader != self._follower.leader:
            log.info("leader changed", namespace=self.name, leader=leader)
        self._follower.leader = leader
        if leader is not None:
            self._dispose_pipeline()
            self._ready.set()

    def _dispose_pipeline(self) -> None:
        """Free the state of the last leadership: the store has what is needed of it."""
        pipeline, self.pipeline = self.pipeline, None
        if pipeline is not None:
            pipeline.dispose()

    async def _lead(self, state: StateMachine) -> None:
        """Begin to lead from the namespace's replicated state."""
        self._dispose_pipeline()
        settings, loop = self._settings, asyncio.get_running_loop()
        manager, began = state.manager, loop.time() * 1000 - state.clock_ms
        floor = time.time_ns() // 1000  # no id or fencing token is given out twice, whatever the store has lost
        manager.next_id = max(manager.next_id, floor)
        manager.next_fence = max(manager.next_fence, floor)

        def clock() -> float:
            return loop.time() * 1000 - began

        manager.unix_offset_ms = time.time() * 1000 - clock()
        self._leadership_lost.clear()
        manager.max_queue_entries = settings.limits.max_queue
        self.stats.start_epoch()
        self.pipeline = pipeline = Pipeline(
            manager,
            self.store,
            settings.limits,
            self.stats,
            clock,
            self._on_leadership_lost,
            namespace=self.name,
            lease_s=settings.lease,
            store_timeout_s=settings.store_timeout_ms / 1000,
        )
        pipeline.recover(state.retained_replies.values())
        await pipeline.drained()
        if self._leadership_lost.is_set():
            return
        self.is_leader = True
        gc.freeze()  # the loaded state is long-lived: the garbage collector need not traverse it again
        if self.monitor is not None:
            self.monitor.pipeline = pipeline
        self._follower.hand_over(self._connections_of(self._follower), pipeline)
        if self._ready.is_set():
            log.info("leadership acquired", namespace=self.name, held=len(manager.table.held))
        self._ready.set()

    async def _until_leadership_ends(self) -> None:
        """Lead until leadership is lost, or should be transferred to a node that leads fewer namespaces."""
        lost, requested = (
            asyncio.create_task(self._leadership_lost.wait()),
            asyncio.create_task(self.store.wait_for_transfer_request()),
        )
        try:
            await asyncio.wait({lost, requested}, return_when=asyncio.FIRST_COMPLETED)
            if not self._leadership_lost.is_set():
                requested.result()
                await self._transfer_leadership()
        finally:
            await cancel_and_wait(lost)
            await cancel_and_wait(requested)

    async def _transfer_leadership(self) -> None:
        """Resign after a drain: clients are sent everything that was stored, then their connections are closed."""
        log.info("leadership transfer started", namespace=self.name, reason="another node leads fewer namespaces")
        drained = await self.drain()
        if self._leadership_lost.is_set():
            return
        self._step_down()
        if drained:
            await self.store.resign()
        for connection in self._connections_of(self._leading):
            connection.finish()

    async def drain(self) -> bool:
        """Accept no more commands, wait for those that were accepted; return whether all are stored."""
        pipeline = self._leading
        self._follower.cancel_handover()
        for connection in self._connections_of(pipeline):
            connection.stop_reading()
        drained = True
        try:
            async with asyncio.timeout(self._settings.drain_timeout_ms / 1000):
                await pipeline.drained()
        except TimeoutError:
            log.warning(
                "drain timed out", namespace=self.name, reason="the store did not acknowledge the last commands"
            )
            drained = False
        pipeline.stop()
        return drained

    async def stop(self) -> None:
        """Neither lead nor follow any more. Clients are not sent anything."""
        await cancel_and_wait(self.task)
        if self.pipeline is not None:
            self.pipeline.stop()
        if self.monitor is not None:
            self.monitor.stop()

    def _connections_of(self, handler: CommandHandler) -> list[Connection]:
        return [connection for connection in self._connections if connection.handler is handler]

    def _step_down(self) -> None:
        self.is_leader, self._follower.leader = False, None
        self._follower.cancel_handover()
        self.stats.rearrangements += self._leading.manager.rearrangements
        if self.monitor is not None:
            self.monitor.pipeline = None
        for client in self._internal_clients:
            client.abort()

    def _on_leadership_lost(self, error: BaseException) -> None:
        """Close every connection without sending anything more: replies that were not sent may not be true."""
        self._step_down()
        for connection in self._connections_of(self._leading):
            connection.abort()
        if isinstance(error, LeadershipLost):
            log.error("leadership lost", namespace=self.name, reason=str(error))
        else:
            self._failure = error
        self._leadership_lost.set()
