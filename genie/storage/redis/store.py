"""The durable store: locks in Redis, one atomic script per batch.

`RedisStore` connects the parts: it follows the namespace until it leads (`follower.py`), commits batches (`commit.py`),
restores the snapshot after a rollback of Redis, and resigns. `genie/storage/README.md` is the theory of operation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import structlog

from genie.storage.redis.commit import (
    COMMIT_TIMEOUT_S,
    FAILURES,
    AckPolicy,
    BatchEncoder,
    CommitWriter,
    new_backoff,
    retry_until_done,
)
from genie.storage.redis.connection import RedisFailure
from genie.storage.redis.election import MIN_IMBALANCE, LeadershipBalancer
from genie.storage.redis.follower import Follower
from genie.storage.redis.keyspace import Keyspace, meta_key
from genie.storage.redis.log import MAX_EPOCHS, EpochHistory, LogReader, Position
from genie.storage.redis.primary import Primary, warn_if_lossy
from genie.storage.redis.replica import PriorLeadership, Snapshot
from genie.storage.redis.url import RedisUrl
from genie.storage.store import Batch, LeadershipLost, Node, StateMachine
from genie.tasks import cancel_and_wait

log = structlog.get_logger()

LOG_INTERVAL_S = 10.0
"""How often the same error is logged during an outage."""
CHECK_INTERVAL_S = 1.0
"""How often a leader polls for transfer requests, and at least queries the sentinels whether the primary has changed."""


class RedisStore:
    """Stores a namespace in Redis.

    `url` is parsed by `url.py`. A commit is stored once `min_replicas` replicas have it; with `fsync`, once it is on the disk
    of the primary and on theirs. `balancer` is shared by all namespaces of this node.
    """

    durable = True

    def __init__(
        self,
        url: str,
        namespace: str = "genie",
        *,
        min_replicas: int = 0,
        fsync: bool = False,
        balancer: LeadershipBalancer | None = None,
    ) -> None:
        self._log = log.bind(namespace=namespace)
        self._balancer = balancer or LeadershipBalancer()
        self._primary = Primary(RedisUrl.parse(url), meta_key(namespace), min_replicas, fsync=fsync)
        self._keyspace = Keyspace(self._primary, namespace)
        self._writer = CommitWriter(
            self._primary, AckPolicy(min_replicas, fsync=fsync), self._log, self._on_reply, self._finish
        )
        self._failure_count = 0
        self._node = Node()
        self._snapshot: Callable[[], Batch] = Batch
        self._encoder = BatchEncoder(self._keyspace)
        self._sent_at = self._lease_start = 0.0
        """When the last batch was first sent, and when the last acknowledged one was: the start of the lease."""
        self._done: Callable[[BaseException | None], None] | None = None
        """The callback of the batch in flight."""
        self._unacknowledged: deque[Position] = deque(maxlen=MAX_EPOCHS)
        """Positions of the batches that were in flight when this node stepped down."""
        self._primary_watch: asyncio.Task[None] | None = None

    @property
    def failure_count(self) -> int:
        """How many operations failed because Redis was unreachable or rejected them."""
        return self._failure_count + self._writer.failure_count

    @property
    def full(self) -> bool:
        """Whether Redis is out of memory, and stores only releases."""
        return self._writer.full

    async def open(
        self, node: Node, snapshot: Callable[[], Batch], on_leader_changed: Callable[[str | None], None]
    ) -> StateMachine:
        """Follow the namespace until this node leads it, retrying while Redis is unavailable."""
        self._loop = asyncio.get_running_loop()
        led = self._prior_leadership() if self._keyspace.epoch.number else None
        if self._done is not None:
            self._unacknowledged.append((self._keyspace.epoch.number, self._encoder.index))
        await self._step_down()
        self._node, self._snapshot = node, snapshot
        reader = LogReader(self._primary, self._keyspace.log)
        follower = Follower(self._keyspace, reader, node, self._balancer, on_leader_changed, led, self._unacknowledged)
        backoff = new_backoff()
        state_machine, logged_at, failed_at = None, 0.0, 0.0
        last_error: str | None = None
        while True:
            try:
                state_machine = state_machine or await follower.run()
                await self._writer.open()
                await warn_if_lossy(self._primary)
            except FAILURES as error:
                delay_s = round(backoff.next_delay(), 3)
                self._failure_count += 1
                failed_at = failed_at or self._loop.time()
                if str(error) != last_error or self._loop.time() - logged_at >= LOG_INTERVAL_S:
                    last_error, logged_at = str(error), self._loop.time()
                    self._log.warning("store unavailable, not serving", error=last_error)
                self._writer.drop()
                follower.on_store_failure()
                await asyncio.sleep(delay_s)
            else:
                if last_error is not None:
                    outage_ms = round((self._loop.time() - failed_at) * 1000)
                    address = str(self._primary.address)
                    self._log.info("store available again", address=address, outage_ms=outage_ms)
                self._encoder = BatchEncoder(self._keyspace)
                self._lease_start = follower.acquired_at
                if self._primary.has_sentinels:
                    self._primary_watch = self._loop.create_task(self._watch_primary())
                return state_machine

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        """Write a batch, then call `done`. The batch may be sent several times, but is applied only once."""
        self._sent_at = self._loop.time()
        self._done = done
        self._writer.write(self._encoder.encode(batch))

    async def wait_for_transfer_request(self) -> None:
        """Wait for a transfer request of a node that leads at least `MIN_IMBALANCE` namespaces fewer than this one."""
        own = self._node.address
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if self._balancer.count(own) < MIN_IMBALANCE:
                continue
            try:
                request = await self._keyspace.read_transfer_request()
            except RedisFailure:
                continue  # commits handle the failure
            if request is not None and self._balancer.start_transfer(self._keyspace.name, own, *request):
                with suppress(RedisFailure):
                    await self._keyspace.delete_transfer_request()  # another candidate repeats its own request
                return

    async def resign(self) -> None:
        """Resign, so that another node can take over at once. If Redis is unavailable, that node waits for a lease."""
        if not self._keyspace.epoch.number:
            return
        last_index = self._encoder.index
        await self._step_down()  # no batch may follow: the resignation takes the next index
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                try:
                    await self._keyspace.resign(last_index)
                except RedisFailure:  # the connection may have ended while it was idle: retry on a new one
                    await self._keyspace.resign(last_index)
        except FAILURES as error:
            self._log.warning("resignation failed, the next leader waits for the lease to expire", error=str(error))

    async def close(self) -> None:
        """Disconnect. The stored namespace remains unchanged."""
        await self._step_down()
        self._primary.drop()

    def _prior_leadership(self) -> PriorLeadership:
        """Return this node's state as the leader until now: what it has acknowledged must survive a rollback of Redis.

        The state includes a batch in flight, which was not acknowledged.
        """
        snapshot = Snapshot(self._history_at(self._encoder.index), self._snapshot())
        last_index = self._encoder.index
        acknowledged = last_index if self._done is None else last_index - 1
        return PriorLeadership(snapshot, (self._keyspace.epoch.number, acknowledged))

    def _history_at(self, index: int) -> EpochHistory:
        """Return the lineage up to the batch with an index, of this node's own epoch."""
        return self._keyspace.history.advanced_to((self._keyspace.epoch.number, index))

    async def _step_down(self) -> None:
        """Stop committing. Whether a batch in flight is stored remains unknown."""
        self._done = None
        self._balancer.set_leader(self._keyspace.name, None)
        await self._writer.stop()
        await cancel_and_wait(self._primary_watch)

    def _on_reply(self, reply: object) -> None:
        """Handle the reply of `commit.lua` to the batch in flight: stored, leadership lost, or rolled back."""
        if reply == b"ok":
            self._lease_start = self._sent_at
            self._finish(None)
        elif reply != b"lost":
            self._finish(LeadershipLost(f"{self._keyspace.meta} has another leader"))
        elif self._sent_at - self._lease_start > self._node.lease_ms / 1000:
            self._finish(
                LeadershipLost("Redis has lost commits, and the lease has expired since the last acknowledged one")
            )
        else:
            self._writer.recover(self._restore_snapshot())

    def _finish(self, error: BaseException | None) -> None:
        """Call the callback of the batch in flight, if there is one."""
        done, self._done = self._done, None
        if done is not None:
            done(error)

    async def _watch_primary(self) -> None:
        """Query the sentinels regularly, and reconnect if the primary has changed: an isolated one loses all later commits.

        The interval is a fraction of the lease: a follower at the new primary takes over when the lease has expired.
        """
        while True:
            await asyncio.sleep(min(CHECK_INTERVAL_S, self._node.lease_ms / 4000))
            connection = self._writer.connection
            if connection is None or not await self._primary.has_moved(connection):
                continue
            if self._writer.connection is connection:
                self._log.warning("primary changed, reconnecting", previous=str(connection.address))
                self._primary.drop()
                self._writer.drop()

    async def _restore_snapshot(self) -> None:
        """Write the whole state again after Redis has lost acknowledged commits. It includes the batch in flight.

        An empty batch is committed after it: once the replicas have acknowledged that, they have the snapshot, too.
        """
        self._log.warning("primary rolled back acknowledged commits, restoring snapshot")
        history, snapshot = self._history_at(self._encoder.index), self._snapshot()
        await retry_until_done(
            lambda: self._keyspace.restore_snapshot(self._node, snapshot, history), new_backoff(), self._log
        )
        self._encoder = BatchEncoder(self._keyspace)
        self._log.info("snapshot restored", epoch=self._keyspace.epoch.number)
        connection = self._writer.connection
        if connection is not None and connection.address != self._primary.address:
            self._writer.drop()
        await self._writer.resubmit(self._encoder.encode(replace(snapshot, changes={})))
