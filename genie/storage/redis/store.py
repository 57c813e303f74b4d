"""The durable store: a write-ahead log in Redis, with checkpoints in the background.

`RedisStore` connects the parts: it follows the namespace until it leads (`follower.py`), commits batches (`commit.py`),
writes checkpoints (`checkpoint.py`), restores the snapshot after a rollback of Redis, and resigns.
`genie/storage/README.md` is the theory of operation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import structlog
from msgspec.structs import replace

from genie.roles import FollowerRole, StoreOutage
from genie.storage.redis.checkpoint import Checkpointer
from genie.storage.redis.commit import (
    COMMIT_TIMEOUT_S,
    FAILURES,
    FINISHED,
    AckPolicy,
    BatchInFlight,
    CommitEncoder,
    CommitWriter,
    new_backoff,
    retry_until_done,
)
from genie.storage.redis.connection import RedisFailure, describe_failure
from genie.storage.redis.election import MIN_IMBALANCE, LeadershipBalancer
from genie.storage.redis.follower import Follower
from genie.storage.redis.keyspace import Keyspace, meta_key
from genie.storage.redis.log import MAX_EPOCHS, EpochHistory, LogReader, Position
from genie.storage.redis.outage import OutageLog, failed_since
from genie.storage.redis.primary import Primary, is_denied, read_memory, reject_if_unsafe, warn_if_lossy
from genie.storage.redis.records import encode_batch
from genie.storage.redis.replica import PriorLeadership, Snapshot
from genie.storage.redis.url import RedisUrl
from genie.storage.store import Batch, LeadershipLost, Node, StateMachine, StoreMemory
from genie.tasks import cancel_and_wait

log = structlog.get_logger()

DENIED_RETRY_S = 5.0
"""The pause after Redis has rejected the password or the user. It is long, because Redis logs each attempt."""
CHECK_INTERVAL_S = 1.0
"""How often a leader checks for transfer requests. The sentinels are queried at least this often."""


class RedisStore:
    """Stores a namespace in Redis.

    `url.py` describes the forms of `url`. A commit is acknowledged when `min_replicas` replicas have it. With `fsync`,
    it is acknowledged when the primary and these replicas have written it to disk. With `allow_data_loss`, an unsafe
    configuration of Redis is logged instead of rejected. All namespaces of a node must share one `balancer`.
    """

    durable = True

    def __init__(
        self,
        url: str,
        namespace: str = "genie",
        *,
        min_replicas: int = 0,
        fsync: bool = False,
        allow_data_loss: bool = False,
        balancer: LeadershipBalancer | None = None,
    ) -> None:
        # More than 16 fields: the parts of the store, and what it keeps when the role of this node changes.
        self._log = log.bind(namespace=namespace)
        self._balancer = balancer or LeadershipBalancer()
        self._primary = Primary(RedisUrl.parse(url), meta_key(namespace), min_replicas, fsync=fsync)
        self._keyspace = Keyspace(self._primary, namespace)
        self._outage_log = OutageLog(self._log)
        self._writer = CommitWriter(
            self._primary,
            self._keyspace,
            AckPolicy(min_replicas, fsync=fsync),
            self._log,
            self._outage_log,
            self._on_stored,
            self._on_rolled_back,
        )
        self._keeps_commits = min_replicas > 0 or fsync
        """True if the settings promise that commits survive a failure of Redis."""
        self._must_check_safety = not allow_data_loss
        """True if an unsafe configuration of Redis must be rejected. False after the first check, because ending a
        server that runs would do more harm than logging an error."""
        self._is_leader = False
        """True if `open` has returned the state with which this node leads."""
        self._follower: Follower | None = None
        """The follower of the current call of `open`, or of the last one if it was cancelled. None otherwise."""
        self._node = Node()
        """This server process. Set by `open`."""
        self._snapshot: Callable[[], Batch] = Batch
        """Returns the current state of the namespace. Set by `open`."""
        self._lease_start = 0.0
        """When the last acknowledged batch was first sent (event-loop time)."""
        self._unacknowledged: deque[Position] = deque(maxlen=MAX_EPOCHS)
        """Positions of the batches that were in flight when this node stepped down. Redis may or may not have them."""
        self._primary_watch: asyncio.Task[None] | None = None
        """Queries the sentinels while this node leads."""
        self._checkpointer: Checkpointer
        """Collects the stored changes for the next checkpoint. Set when this node begins to lead."""
        self._checkpointing: asyncio.Task[None] | None = None
        """Writes checkpoints while this node leads."""

    @property
    def failure_count(self) -> int:
        """How many operations failed because Redis was unreachable or rejected them."""
        return self._outage_log.failure_count

    @property
    def full(self) -> bool:
        """True if Redis is out of memory, and stores only releases."""
        return self._writer.full

    @property
    def outage(self) -> StoreOutage | None:
        """The current interruption of Redis, or None. A commit that is not acknowledged counts as an interruption."""
        batch = self._writer.batch
        if self._outage_log.current is None and batch.state is not FINISHED:
            return StoreOutage(batch.sent_at, batch.ack_error or "a commit is not acknowledged")
        return self._outage_log.current

    async def open(
        self, node: Node, snapshot: Callable[[], Batch], on_role_changed: Callable[[FollowerRole], None]
    ) -> StateMachine:
        """Follow the namespace until this node leads it, and return its state. Retries while Redis is unavailable.

        If this node has led before, its former state is kept until it is clear that Redis has lost none of it.
        """
        self._loop = asyncio.get_running_loop()
        prior_leadership = self._prior_leadership() if self._keyspace.epoch.number else None
        self._note_unacknowledged_batch()
        await self._step_down()
        self._is_leader = False
        self._node, self._snapshot = node, snapshot
        self._follower = Follower(
            self._keyspace,
            LogReader(self._primary, self._keyspace.log),
            node,
            self._balancer,
            self._outage_log,
            on_role_changed=on_role_changed,
            prior_leadership=prior_leadership,
            unacknowledged=self._unacknowledged,
        )
        state_machine = await self._follow_and_connect(self._follower)
        self._outage_log.end(self._primary.address, self._loop.time())
        self._begin_to_lead(_counters_of(state_machine), self._follower.acquired_at)
        self._follower.drop_state()
        self._follower = None
        return state_machine

    def _note_unacknowledged_batch(self) -> None:
        """Record the position of the batch that is in flight while leadership ends, if there is one."""
        batch = self._writer.batch
        if batch.state is not FINISHED:
            self._unacknowledged.append((self._keyspace.epoch.number, batch.index))
            if batch.ack_error:  # the waits of one commit may last for a lease, and log nothing before
                self._log.warning("commit not acknowledged by Redis before leadership ended", reason=batch.ack_error)

    async def _follow_and_connect(self, follower: Follower) -> StateMachine:
        """Follow until this node has acquired leadership, connect for commits, and return the state.

        Retries any failure.
        """
        backoff = new_backoff()
        state_machine = None
        while True:
            try:
                if self._must_check_safety:
                    await reject_if_unsafe(self._primary, keeps_commits=self._keeps_commits)
                    self._must_check_safety = False
                if state_machine is None:  # otherwise only a later step has failed
                    state_machine = await follower.run()
                await self._writer.open()
                await warn_if_lossy(self._primary, keeps_commits=self._keeps_commits)
            except FAILURES as error:
                self._writer.drop()
                now = self._loop.time()
                outage = self._outage_log.on_failure(error, now, failed_since(error, now), leads=False)
                follower.on_store_failure(outage)
                delay_s = DENIED_RETRY_S if is_denied(error) else round(backoff.next_delay(), 3)
            else:
                return state_machine
            # Not in the handler: compiled by mypyc, a coroutine that is closed there can overwrite memory beyond `None`.
            await asyncio.sleep(delay_s)

    def _begin_to_lead(self, counters: Batch, acquired_at: float) -> None:
        """Prepare for commits, and start the background tasks of a leader.

        `counters` are those of the state from which this node leads. `acquired_at` is when this node acquired
        leadership (event-loop time), and starts the first lease.
        """
        self._writer.start_epoch(CommitEncoder(self._keyspace), counters)
        self._start_checkpoints(counters)
        self._is_leader, self._lease_start = True, acquired_at
        if self._primary.has_sentinels:
            self._primary_watch = self._loop.create_task(self._watch_primary())

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        """Write a batch, then call `done` with None or an error.

        Redis applies the batch once, however often it is sent.
        """
        self._writer.write(batch, done)

    async def wait_for_transfer_request(self) -> None:
        """Wait until another node requests this namespace and leads at least `MIN_IMBALANCE` namespaces fewer than this node.

        The transfer is then recorded in the balancer, and the caller must resign.
        """
        own_address = self._node.address
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if self._balancer.count(own_address) < MIN_IMBALANCE:
                continue
            try:
                request = await self._keyspace.read_transfer_request()
            except RedisFailure:
                continue  # the next commit detects the outage and handles it
            if request is None:
                continue
            receiver, receiver_count = request
            if self._balancer.start_transfer(self._keyspace.name, own_address, receiver, receiver_count):
                with suppress(RedisFailure):
                    await self._keyspace.delete_transfer_request()  # other nodes repeat their own requests
                return

    async def read_memory(self) -> StoreMemory | None:
        """Return the memory of the primary, or None if Redis does not answer or does not report it."""
        try:
            return await read_memory(self._primary)
        except RedisFailure:
            return None

    async def resign(self) -> None:
        """Step down, and store in Redis that there is no leader, so that another node can take over at once.

        Does nothing if this node does not lead, or has not loaded the state yet, whose counters it would have to store.
        If storing the resignation fails, a warning is logged, and the next leader waits for the lease to expire.
        """
        last_index, last_batch = self._writer.batch.index, self._writer.batch.batch
        if not self._is_leader:  # `open` was cancelled, perhaps after it has acquired leadership
            state = None if self._follower is None else self._follower.acquired_state
            if state is None:
                return
            last_index, last_batch = 0, _counters_of(state)
        await self._step_down()  # no commit may follow: the resignation uses the next index
        counters = encode_batch(last_batch, {})
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                with suppress(RedisFailure):  # Redis may have closed the idle connection: retry on a new one
                    await self._keyspace.resign(last_index, counters)
                    return
                await self._keyspace.resign(last_index, counters)
        except FAILURES as error:
            self._log.warning(
                "resignation failed, the next leader waits for the lease to expire", reason=describe_failure(error)
            )

    async def close(self) -> None:
        """Stop committing and disconnect.

        The leader stored in Redis is unchanged: other nodes wait for the lease to expire.
        """
        await self._step_down()
        self._primary.drop()

    def _prior_leadership(self) -> PriorLeadership:
        """Return the state of this node, which was the leader until now.

        The state includes a batch in flight, which was not acknowledged to any client.
        """
        batch = self._writer.batch
        acknowledged_index = batch.index if batch.state is FINISHED else batch.index - 1
        acknowledged = self._keyspace.epoch.number, acknowledged_index
        return PriorLeadership(Snapshot(self._history(), self._snapshot()), acknowledged)

    def _history(self) -> EpochHistory:
        """Return the epoch history up to the last batch of this node's epoch, which may be in flight."""
        return self._keyspace.history.advanced_to((self._keyspace.epoch.number, self._writer.batch.index))

    async def _step_down(self) -> None:
        """Stop committing, without calling `done`. A batch in flight may or may not be stored."""
        self._balancer.set_leader(self._keyspace.name, None)
        await self._writer.stop()
        await cancel_and_wait(self._primary_watch)
        await cancel_and_wait(self._checkpointing)

    def _start_checkpoints(self, counters: Batch) -> None:
        """Begin to write checkpoints in the epoch that this node has just acquired.

        `counters` are those of its first state.
        """
        self._checkpointer = Checkpointer(self._keyspace, counters, self._writer.on_loss, self._log)
        self._checkpointing = self._loop.create_task(self._checkpointer.run())

    def _on_stored(self, batch: BatchInFlight) -> None:
        """Extend the lease, add the batch to the next checkpoint, and acknowledge it."""
        self._checkpointer.add(batch.batch, batch.lines, len(batch.encoded))
        self._lease_start = batch.sent_at
        batch.finish(None)

    def _on_rolled_back(self, batch: BatchInFlight) -> None:
        """Restore the snapshot, unless the lease has expired: then another node may have led, and the batch fails."""
        if batch.sent_at - self._lease_start > self._node.lease_ms / 1000:
            reason = "Redis has lost commits, and the lease has expired since the last acknowledged one"
            batch.finish(LeadershipLost(reason))
        else:
            self._writer.recover(self._restore_snapshot())

    async def _watch_primary(self) -> None:
        """Query the sentinels regularly, and disconnect if they have replaced the primary, which would lose all later commits."""
        # At least four times in a lease, because a follower that uses the new primary takes over when the lease has
        # expired.
        interval_s = min(CHECK_INTERVAL_S, self._node.lease_ms / 1000 / 4)
        while True:
            await asyncio.sleep(interval_s)
            connection = self._writer.connection
            if connection is None or (new_address := await self._primary.find_replacement(connection)) is None:
                continue
            if self._writer.connection is connection:  # the writer has not reconnected during the query
                self._log.warning(
                    "primary replaced, reconnecting", address=str(new_address), previous_address=str(connection.address)
                )
                self._primary.drop()
                self._writer.drop()

    async def _restore_snapshot(self) -> None:
        """Write the whole state, including the batch in flight, to a Redis that has lost acknowledged commits.

        Then commit an empty batch: replicas that have acknowledged the empty batch also have the snapshot.
        """
        address = self._primary.address
        self._log.warning(
            "Redis lost acknowledged commits, writing the state of this server to it", address=address and str(address)
        )
        await cancel_and_wait(self._checkpointing)
        history, snapshot = self._history(), self._snapshot()
        await retry_until_done(
            "restore snapshot",
            lambda: self._keyspace.restore_snapshot(self._node, snapshot, history),
            new_backoff(),
            self._log,
        )
        counters = replace(snapshot, changes={})
        self._start_checkpoints(counters)
        self._log.info("snapshot restored", address=str(self._primary.address), epoch=self._keyspace.epoch.number)
        connection = self._writer.connection
        if connection is not None and connection.address != self._primary.address:  # restored at a new primary
            self._writer.drop()
        await self._writer.resubmit(CommitEncoder(self._keyspace), counters)


def _counters_of(state: StateMachine) -> Batch:
    """Return a batch without changes, with the clock and the counters of a state."""
    return Batch({}, state.manager.next_id, state.manager.next_fence, state.clock_ms)
