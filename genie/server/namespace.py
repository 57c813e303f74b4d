"""One namespace on this server: its role, leader or follower, and the pipeline of a leader."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from genie.core import LockManager
from genie.core.lock_order.analysis import LockOrder
from genie.observability.roles import unix_begin
from genie.observability.stats import Stats
from genie.roles import (
    FollowerRole,
    Following,
    Leading,
    Role,
    Starting,
    Stopping,
    StoreOutage,
    StoreUnavailable,
    Waiting,
)
from genie.server.connection import Connection
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.machine import Machine
from genie.server.monitor import Monitor
from genie.server.peer import CommandHandler, InternalClient
from genie.server.pipeline import Pipeline
from genie.server.turns import IterationTurns
from genie.storage.store import Batch, LeadershipLost, Node, StateMachine, Store, StoreMemory
from genie.tasks import cancel_and_wait

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.history.recorder import History

log = structlog.get_logger()

MEMORY_INTERVAL_S = 10.0
"""Seconds between two reads of the memory that the store of a leader uses."""
MAX_QUEUE_DRAIN_S = 0.5
"""Seconds for which a leader that stops executes queued commands. One client may have queued slow commands for many seconds."""
HISTORY_CLOSE_TIMEOUT_S = 5.0
"""Maximum seconds for which a server that stops waits until the last events of the history are written."""


class Namespace:
    """One namespace on this server, which leads the namespace or follows the server that leads it.

    `admission` contains all connections of the server. A connection belongs to this namespace if its handler is the
    pipeline or the follower's handler of this namespace. `ready` is set as soon as the leader is known.
    `turns` are those of the server.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        settings: Settings,
        machine: Machine,
        admission: AdmissionControl[Connection],
        ready: asyncio.Event,
        turns: IterationTurns,
        lock_order: LockOrder | None = None,
        history: History | None = None,
    ) -> None:
        # More than 16 fields: the arguments, and the state of the role, which changes in this class only.
        self.name = name
        self.store = store
        self.stats = Stats()
        self.lock_order = lock_order
        """The lock order that this server has observed as leader since its start. None if the analysis is off."""
        self.history = history
        """The recording of this namespace. None if the history is off."""
        self._is_shutting_down = False
        """True if the server is shutting down."""
        self._is_draining = False
        """True if this server leads and gives up its leadership, so that new clients are rejected."""
        self._role_loop: asyncio.Task[None] | None = None
        """The task of the role loop, which runs until the server stops. It fails after a defect, or after an error that
        a retry cannot resolve. None before `start`."""
        self._history_cleanup: asyncio.Task[None] | None = None
        """Archives and deletes files of the history while the server runs."""
        self._monitor: Monitor | None = None
        """Samples the namespace. None before `observe`."""
        self.pipeline: Pipeline | None = None
        """The pipeline of this server as leader. After leadership is lost, the pipeline is kept until the next leader is
        known, because the store may need a snapshot of its state."""
        self._role: Role = Starting()
        """The role of this server in the namespace. A shutdown does not change it: see `_is_shutting_down`."""
        self._led_until = 0.0
        """Event-loop time at which this server last stopped leading."""
        self.store_memory: StoreMemory | None = None
        """The memory of the store, as the leader last read it. None on a follower, or if the store does not report it."""
        self._settings = settings
        self._machine = machine
        self._admission = admission
        self._turns = turns
        self._ready = ready
        self._internal_clients: set[InternalClient] = set()
        """The internal clients that wait for a reply."""
        self._follower = FollowerHandler(self.stats, name, settings.limits.max_pending, lambda: self._role, self._turns)
        self._leadership_lost = asyncio.Event()
        """Set when this server has lost leadership, and cleared when it leads again."""
        self._failure: BaseException | None = None
        """The defect that ended the pipeline, which the role loop raises."""

    def start(self, node: Node) -> asyncio.Task[None]:
        """Start the role loop: follow the leader, and compete for leadership if there is none."""
        self._role_loop = asyncio.create_task(self._run_role_loop(node))
        if self.history is not None:
            self._history_cleanup = asyncio.create_task(self.history.keep_clean())
        return self._role_loop

    def observe(self, slow_wait_ms: float) -> None:
        """Sample the namespace, read the memory of its store and log slow waits, from now on until `stop`.

        Not in a simulation: with these timers, a virtual clock would advance only 0.1 s at a time.
        """
        self._monitor = Monitor(
            self.name, self.stats, self.lock_order, slow_wait_ms, lambda: self.pipeline if self.is_leader else None
        )

    def set_slow_wait(self, slow_wait_ms: float) -> None:
        """Set the wait (ms) after which a request is logged. 0 disables the log of slow waits."""
        if self._monitor is not None:
            self._monitor.set_slow_wait(slow_wait_ms)

    def begin_shutdown(self) -> None:
        """Report the role as `stopping` from now on."""
        self._is_shutting_down = True

    @property
    def handler(self) -> CommandHandler:
        """The handler of new clients: the pipeline of a leader that does not drain, or the follower's handler."""
        is_serving = self.is_leader and not self._is_draining
        return self.pipeline if self.pipeline is not None and is_serving else self._follower

    # -- for the admin port and the metrics ---------------------------------------------------------------

    @property
    def state(self) -> Role:
        """The role of this server in the namespace."""
        return Stopping() if self._is_shutting_down else self._role

    @property
    def role(self) -> str:
        """The name of `state`: `starting`, `waiting`, `follower`, `unavailable`, `leader` or `stopping`."""
        return self.state.name

    @property
    def is_leader(self) -> bool:
        """True if this server leads the namespace, also while it shuts down."""
        return isinstance(self._role, Leading)

    @property
    def leader(self) -> str | None:
        """The leader's address for clients. None if this server leads, or if the leader is unknown."""
        return self._role.leader if isinstance(self._role, Following) else None

    @property
    def outage(self) -> StoreOutage | None:
        """The interruption of the store that keeps this server from leading and from following, or None."""
        if isinstance(self._role, StoreUnavailable):
            return self._role.outage
        if self.is_leader and not self._current_pipeline.store_available:
            return self.store.outage
        return None

    @property
    def store_unavailable_since(self) -> float | None:
        """Unix time at which the interruption of the store began, or None if the store is available."""
        outage = self.outage
        return None if outage is None else unix_begin(outage)

    @property
    def store_available(self) -> bool:
        """True if a leader executes commands, or a follower reads from the store."""
        if isinstance(self._role, Leading):
            return self._current_pipeline.store_available
        return isinstance(self._role, Waiting | Following)

    @property
    def store_full(self) -> bool:
        """True if this server leads and its store is out of memory, so that requests are rejected."""
        return self.is_leader and self.store.full

    @property
    def store_errors(self) -> int:
        """Number of failures of the store, and of commits that exceeded the store timeout."""
        return self.stats.store_errors + self.store.failure_count

    @property
    def manager(self) -> LockManager | None:
        """The lock manager of a leader. None on a follower."""
        return self.pipeline.manager if self.is_leader and self.pipeline is not None else None

    @property
    def now(self) -> float:
        """The lock manager's time (ms). Only on the leader."""
        return self._current_pipeline.now

    @property
    def last_manager(self) -> LockManager | None:
        """The lock manager of this server as leader.

        After leadership is lost, it is kept until the next leader is known. None without such a lock manager.
        """
        return None if self.pipeline is None else self.pipeline.manager

    @property
    def locks_age_s(self) -> float | None:
        """Age in seconds of the state of `last_manager`: 0 on the leader, None without such a state."""
        if self.pipeline is None:
            return None
        return 0.0 if self.is_leader else asyncio.get_running_loop().time() - self._led_until

    @property
    def sessions(self) -> int:
        """Number of sessions, with and without a connection, in the state of `last_manager`. 0 without such a state."""
        return 0 if self.pipeline is None else self.pipeline.session_count

    @property
    def state_bytes(self) -> int:
        """The size in bytes of the state of `last_manager`, which `max_state` bounds. 0 without such a state."""
        return 0 if self.pipeline is None else self.pipeline.state_bytes

    async def execute(self, line: bytes) -> bytes:
        """Execute one line of the wire protocol as an internal client. Return the reply once the command is stored."""
        client = InternalClient(self.handler)
        self._internal_clients.add(client)
        try:
            return await client.execute(line)
        finally:
            self._internal_clients.discard(client)

    def revoke_watches(self, connection: Connection) -> bool:
        """End all watches of a connection in this namespace if it lacks the permission for one of them.

        Return whether watches have ended.
        """
        return (
            self.pipeline is not None
            and connection.handler is self.pipeline
            and self.pipeline.revoke_watches(connection)
        )

    # -- roles --------------------------------------------------------------------------------------------

    async def _run_role_loop(self, node: Node) -> None:
        """Follow until this server acquires leadership, lead until it is lost, and repeat."""
        while True:
            # Without a variable for the state, which would keep it in memory after the next leader is known.
            await self._lead(await self.store.open(node, self._snapshot, self._on_role_changed))
            await self._wait_until_leadership_ends()
            if self._failure is not None:
                raise self._failure

    def _snapshot(self) -> Batch:
        """Return the state of this server as leader, from which the store can restore a Redis that has lost commits."""
        return self._current_pipeline.snapshot()

    @property
    def _current_pipeline(self) -> Pipeline:
        assert self.pipeline is not None, "the pipeline is kept until the next leader is known"  # noqa: S101
        return self.pipeline

    def _on_role_changed(self, role: FollowerRole) -> None:
        """Use the role that the store reports. Once a leader is known, free the state of this server's last leadership."""
        previous_leader, was_waiting = self.leader, isinstance(self._role, Waiting)
        self._role = role
        begins_to_wait = isinstance(role, Waiting) and not was_waiting
        if begins_to_wait and not self._ready.is_set():
            takeover_after_ms = round(self._settings.lease * 1000)
            log.info(
                "leader unknown, waiting before a takeover", namespace=self.name, takeover_after_ms=takeover_after_ms
            )
        if isinstance(role, Following):
            if role.leader != previous_leader:
                log.info("leader changed", namespace=self.name, leader=role.leader)
            self._dispose_pipeline()
            self._ready.set()

    def _dispose_pipeline(self) -> None:
        """Free the state of this server's last leadership, because the store no longer needs a snapshot of it."""
        pipeline, self.pipeline = self.pipeline, None
        if pipeline is not None:
            pipeline.dispose()

    async def _lead(self, state: StateMachine) -> None:
        """Become the leader: recover the replicated state, wait until the recovery is stored, then serve connections.

        Return without serving if leadership is lost during the recovery.
        """
        self._dispose_pipeline()
        self._leadership_lost.clear()
        self._led_until = asyncio.get_running_loop().time()
        self.stats.start_epoch()
        self.pipeline = pipeline = self._make_pipeline(state)
        await pipeline.recover(state.retained_replies.values())
        await pipeline.drained()
        if self._leadership_lost.is_set():  # the store failed while the recovery was stored
            return
        self._role, self._is_draining = Leading(), False
        self._machine.freeze_memory()
        self._follower.hand_over(self._connections_of(self._follower), pipeline)
        if self._ready.is_set():
            log.info("leadership acquired", namespace=self.name, held_locks=pipeline.manager.table.locks)
        self._ready.set()

    def _make_pipeline(self, state: StateMachine) -> Pipeline:
        """Return a pipeline for the replicated state. The clock of the pipeline continues the previous leader's clock.

        The event loop's clock is not used, because uvloop reads it once per iteration and truncates it to ms. A lock would end
        up to 1 ms early for a client that counts its timeout from the moment at which it sent the request.
        """
        settings = self._settings
        manager = state.manager
        offset_ms = state.clock_ms - time.monotonic() * 1000
        # Ids that are at least the Unix time keep ids and fencing tokens unique even if the store lost the last
        # batches.
        unix_us = time.time_ns() // 1000

        def clock() -> float:
            return time.monotonic() * 1000 + offset_ms

        manager.lead(min_id=unix_us, unix_offset_ms=time.time() * 1000 - clock(), lock_order=self.lock_order)
        return Pipeline(
            manager,
            self.store,
            settings.limits,
            self.stats,
            clock,
            self._on_leadership_lost,
            namespace=self.name,
            lease_s=settings.lease,
            store_timeout_s=settings.store_timeout_ms / 1000,
            recorder=None if self.history is None else self.history.start_recorder(manager),
            turns=self._turns,
        )

    async def _wait_until_leadership_ends(self) -> None:
        """Wait until leadership is lost. If a server that leads fewer namespaces requests leadership, transfer it."""
        lost = asyncio.create_task(self._leadership_lost.wait())
        requested = asyncio.create_task(self.store.wait_for_transfer_request())
        polling = None if self._monitor is None else asyncio.create_task(self._poll_store_memory())
        try:
            await asyncio.wait({lost, requested}, return_when=asyncio.FIRST_COMPLETED)
            if not self._leadership_lost.is_set():
                requested.result()  # raises the error if the wait failed
                await self._transfer_leadership()
        finally:
            await cancel_and_wait(lost)
            await cancel_and_wait(requested)
            await cancel_and_wait(polling)
            self.store_memory = None

    async def _poll_store_memory(self) -> None:
        """Read the memory of the store at intervals, until this task is cancelled.

        If the store does not answer, keep the value.
        """
        while True:
            self.store_memory = await self.store.read_memory() or self.store_memory
            await asyncio.sleep(MEMORY_INTERVAL_S)

    async def _transfer_leadership(self) -> None:
        """Drain, resign, and close the connections of the namespace after the replies to stored commands are sent.

        If draining times out, do not resign: the next leader waits until the lease expires.
        """
        log.info("leadership transfer started", namespace=self.name, reason="another node leads fewer namespaces")
        drained = await self.drain()
        if self._leadership_lost.is_set():
            return
        self._step_down()
        if drained:
            await self.store.resign()
        for connection in self._connections_of(self._current_pipeline):
            connection.finish()

    async def drain(self) -> bool:
        """Stop reading commands, wait until the commands that were read are stored, and stop the pipeline.

        New clients are rejected, because their commands would prolong the wait. After `MAX_QUEUE_DRAIN_S`, drop the commands
        that were not executed. Return False if the others were not stored within the drain timeout.
        """
        pipeline, self._is_draining = self._current_pipeline, True
        self._follower.cancel_handover()
        for connection in self._connections_of(pipeline):
            connection.stop_reading()
        drained = True
        dropping = asyncio.get_running_loop().call_later(MAX_QUEUE_DRAIN_S, pipeline.drop_queued)
        try:
            async with asyncio.timeout(self._settings.drain_timeout_ms / 1000):
                await pipeline.drained()
        except TimeoutError:
            log.warning(
                "namespace drain timed out, the next leader waits for the lease to expire",
                namespace=self.name,
                drain_timeout_ms=self._settings.drain_timeout_ms,
                reason="the store did not acknowledge the last commands",
            )
            drained = False
        finally:
            dropping.cancel()
        pipeline.stop()
        return drained

    async def stop(self) -> None:
        """Stop all tasks and the pipeline of the namespace. Sends nothing to clients."""
        await cancel_and_wait(self._role_loop)
        await cancel_and_wait(self._history_cleanup)
        if self.pipeline is not None:
            self.pipeline.stop()
        if self._monitor is not None:
            self._monitor.stop()

    async def close_history(self) -> None:
        """Wait until the history of a stopped namespace is written. A slow disk may take seconds."""
        if self.history is not None:
            await asyncio.to_thread(self.history.join, HISTORY_CLOSE_TIMEOUT_S)

    def _connections_of(self, handler: CommandHandler) -> list[Connection]:
        return [connection for connection in self._admission if connection.handler is handler]

    def _step_down(self) -> None:
        """End leadership on this server, so that commands are rejected, and abort the internal clients."""
        outage = self.store.outage
        self._role = Waiting() if outage is None else StoreUnavailable(outage)
        self._led_until = asyncio.get_running_loop().time()
        self._follower.cancel_handover()
        # The lock manager, which counts rearrangements, is freed with the pipeline: add its count to the statistics.
        self.stats.rearrangements += self._current_pipeline.manager.rearrangements
        for client in self._internal_clients:
            client.abort()

    def _on_leadership_lost(self, error: BaseException) -> None:
        """Step down, and abort all connections of the namespace without sending replies.

        A reply could confirm a command that is not stored. Any `error` except `LeadershipLost` is a defect, which ends
        the role loop.
        """
        self._step_down()
        for connection in self._connections_of(self._current_pipeline):
            connection.abort()
        if isinstance(error, LeadershipLost):
            log.error("leadership lost", namespace=self.name, reason=str(error))
        else:
            self._failure = error
        self._leadership_lost.set()
