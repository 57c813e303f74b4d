"""A command from inside the server, carried out like a client's: stored first, told then."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING

import structlog

from genie.core import LockManager
from genie.observability.stats import Stats
from genie.server.connection import Connection
from genie.server.follower import CommandHandler, FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.monitor import Monitor
from genie.server.pipeline import Pipeline
from genie.storage.store import Batch, LeadershipLost, Node, StateMachine, Store
from genie.tasks import cancel_and_wait

if TYPE_CHECKING:
    from genie.config import Settings


class _InternalClient(Connection):
    """A connection without a socket, for one command."""

    __slots__ = ("_told",)

    def __init__(self, settings: Settings, handler: CommandHandler) -> None:
        super().__init__(handler, settings, AdmissionControl(settings))
        self._told: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def carry_out(self, line: bytes) -> bytes:
        """Hand the line in, and wait for the answer. It never comes where the server stops leading meanwhile: bound it."""
        self.handler.submit(self, [line], len(line))
        try:
            return await self._told
        finally:
            self.closed = True
            self.handler.gone(self)

    def abort(self) -> None:
        """The server has stopped leading."""
        self._told.cancel()

    def _write(self, data: bytes) -> None:
        if data and not self._told.done():
            self._told.set_result(data)


# -- One namespace in this server: its place among the servers that lead it one after the other --------

log = structlog.get_logger()


class Namespace:
    """Leads a namespace, or follows the server that does.

    `connections` are those of the whole server; those are its own whose handler is. `ready` is set as soon as it is known who
    leads. `task` ends only by a defect, or with an error that cannot be waited out.
    """

    def __init__(
        self, namespace: str, store: Store, settings: Settings, connections: AdmissionControl, ready: asyncio.Event
    ) -> None:
        self.namespace = namespace
        self.store = store
        self.settings = settings
        self.stats = Stats()
        self.draining = False
        self.task: asyncio.Task[None] | None = None
        self.monitor: Monitor | None = None
        """Beats in a server that runs on its own; not in one that is part of somebody's test, whose time it would fill."""
        self._connections = connections
        self._ready = ready
        self._internal_clients: set[_InternalClient] = set()
        self._follower = FollowerHandler(self.stats, namespace, settings.limits.max_pending)
        self.pipeline: Pipeline | None = None
        """That of the present time as leader, or of the last until it is known who leads now."""
        self.leads = False
        self._deposed = asyncio.Event()
        self._failure: BaseException | None = None

    def start(self, node: Node) -> asyncio.Task[None]:
        """Begin to follow, or lead."""
        self.task = asyncio.create_task(self._run_role_loop(node))
        return self.task

    @property
    def handler(self) -> CommandHandler:
        """Who takes what connections for this namespace bring."""
        return self.pipeline if self.pipeline is not None and self.leads else self._follower

    # -- for those who look ---------------------------------------------------------------------------------

    @property
    def role(self) -> str:
        """`starting` (nobody is known to lead), `leader`, `follower` or `stopping`."""
        if self.draining:
            return "stopping"
        if self.leads:
            return "leader"
        return "starting" if self._follower.leader is None else "follower"

    @property
    def leader(self) -> str | None:
        """The address of the server that leads, where this one follows it."""
        return None if self.leads else self._follower.leader

    @property
    def store_available(self) -> bool:
        """Whether the store answers, as far as this server needs it now."""
        return (
            self.pipeline.store_available
            if self.leads and self.pipeline is not None
            else self._follower.leader is not None
        )

    @property
    def store_errors(self) -> int:
        """How often the store could not be reached, or took longer than it may."""
        return self.stats.store_errors + self.store.failure_count

    @property
    def manager(self) -> LockManager | None:
        """All locks and lines, while this server leads."""
        return self.pipeline.manager if self.leads and self.pipeline is not None else None

    @property
    def now(self) -> float:
        """The time of the lock manager (ms). Only while this server leads."""
        return self._leading.now

    @property
    def sessions(self) -> int:
        """SessionTable, with and without a connection."""
        return self.pipeline.sessions if self.leads and self.pipeline is not None else 0

    async def carry_out(self, line: bytes) -> bytes:
        """Do what a line of the wire asks for, as for a client; returns what it is told, when it is stored."""
        client = _InternalClient(self.settings, self.handler)
        self._internal_clients.add(client)
        try:
            return await client.carry_out(line)
        finally:
            self._internal_clients.discard(client)

    # -- its life -------------------------------------------------------------------------------------------

    async def _run_role_loop(self, node: Node) -> None:
        """Follow, lead, and follow again, until somebody puts an end to it."""
        while True:
            await self._lead(await self.store.open(node, self._snapshot, self._follow))
            await self._until_another_leads()
            if self._failure is not None:
                raise self._failure

    @property
    def _leading(self) -> Pipeline:
        assert self.pipeline is not None, "only who leads, or has just led, is asked"  # noqa: S101
        return self.pipeline

    def _snapshot(self) -> Batch:
        return self._leading.snapshot()

    def _follow(self, leader: str | None) -> None:
        """Another server leads, as far as is known."""
        if leader is not None and leader != self._follower.leader:
            log.info("following", namespace=self.namespace, leader=leader)
        self._follower.leader = leader
        if leader is not None:
            self._forget_last()
            self._ready.set()

    def _forget_last(self) -> None:
        """Free what this server knew as the leader that it was: the store has what it needs of it by now."""
        pipeline, self.pipeline = self.pipeline, None
        if pipeline is not None:
            pipeline.forget()

    async def _lead(self, replica: StateMachine) -> None:
        """Go on from where the namespace stands."""
        self._forget_last()
        loop = asyncio.get_running_loop()
        manager, began = replica.manager, loop.time() * 1000 - replica.clock_ms
        floor = time.time_ns() // 1000  # whatever the store remembers, no id or fence is ever given twice
        manager.next_id = max(manager.next_id, floor)
        manager.next_fence = max(manager.next_fence, floor)

        def clock() -> float:
            return loop.time() * 1000 - began

        manager.unix_offset_ms = time.time() * 1000 - clock()
        self._deposed.clear()
        manager.max_queue_entries = self.settings.limits.max_queue
        self.stats.begin()
        self.pipeline = pipeline = Pipeline(
            manager, self.store, self.settings, self.stats, clock, self._fail, self.namespace
        )
        pipeline.recover(replica.retained_replies.values())
        await pipeline.drained()
        if self._deposed.is_set():
            return
        self.leads = True
        gc.freeze()  # what is there now stays: the collector need not look at it again
        if self.monitor is not None:
            self.monitor.pipeline = pipeline
        self._follower.complete()
        for connection in self._own(self._follower):
            connection.handler = pipeline
        if self._ready.is_set():
            log.info("leading", namespace=self.namespace, held=len(manager.table.held))
        self._ready.set()

    async def _until_another_leads(self) -> None:
        """Lead until that is over, or another server should: one that leads fewer namespaces than this."""
        deposed, wanted = (
            asyncio.create_task(self._deposed.wait()),
            asyncio.create_task(self.store.wait_for_transfer_request()),
        )
        try:
            await asyncio.wait({deposed, wanted}, return_when=asyncio.FIRST_COMPLETED)
            if not self._deposed.is_set():
                wanted.result()
                await self._hand_over()
        finally:
            await cancel_and_wait(deposed)
            await cancel_and_wait(wanted)

    async def _hand_over(self) -> None:
        """Let another server lead at once. Clients are told everything that was stored, and look for it."""
        log.info("handing over to a server that leads fewer namespaces", namespace=self.namespace)
        drained = await self.drain()
        if self._deposed.is_set():
            return
        self._step_down()
        if drained:
            await self.store.resign()
        for connection in self._own(self._leading):
            connection.finish()

    async def drain(self) -> bool:
        """Take up no more commands, and wait for those that were; whether all are stored."""
        pipeline = self._leading
        for connection in self._own(pipeline):
            connection.stop_reading()
        drained = True
        try:
            async with asyncio.timeout(self.settings.drain_timeout_ms / 1000):
                await pipeline.drained()
        except TimeoutError:
            log.warning(
                "the store does not answer; stopped without it", namespace=self.namespace, unstored="the last commands"
            )
            drained = False
        pipeline.stop()
        return drained

    async def stop(self) -> None:
        """Neither lead nor follow any more. Nothing is told to anybody."""
        await cancel_and_wait(self.task)
        if self.pipeline is not None:
            self.pipeline.stop()
        if self.monitor is not None:
            self.monitor.stop()

    def _own(self, handler: CommandHandler) -> list[Connection]:
        return [connection for connection in self._connections if connection.handler is handler]

    def _step_down(self) -> None:
        self.leads, self._follower.leader = False, None
        self.stats.reorderings += self._leading.manager.rearrangements
        if self.monitor is not None:
            self.monitor.pipeline = None
        for client in self._internal_clients:
            client.abort()

    def _fail(self, error: BaseException) -> None:
        """Not a word more to anyone: what was not told may not be true."""
        self._step_down()
        for connection in self._own(self._leading):
            connection.abort()
        if isinstance(error, LeadershipLost):
            log.error("does not lead any more", namespace=self.namespace, why=str(error))
        else:
            self._failure = error
        self._deposed.set()
