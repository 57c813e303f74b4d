"""Locks in Redis: one atomic script a batch, applied once however often it must be sent.

Every batch names the epoch, the nonce and its own number. So a lost answer is no question: the same batch is sent again,
to whichever Redis is the master by then. What the keys are, and how the namespace is taken over, loaded and written anew:
`namespace.py`. Who the master is: `master.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import structlog

from genie.backoff import Backoff
from genie.storage.redis.commit import (
    BACKOFF_S,
    COMMIT_TIMEOUT_S,
    FAILURES,
    AckPolicy,
    BatchEncoder,
    CommitWriter,
    until_done,
)
from genie.storage.redis.connection import RedisFailure
from genie.storage.redis.election import TOO_MANY, LeadershipBalancer
from genie.storage.redis.follower import Follower
from genie.storage.redis.keyspace import Keyspace, meta_key
from genie.storage.redis.log import LONGEST, EpochHistory, LogReader, Position
from genie.storage.redis.primary import Primary, warn_if_lossy
from genie.storage.redis.replica import PriorLeadership, Snapshot
from genie.storage.redis.url import RedisUrl
from genie.storage.store import Batch, LeadershipLost, Node, StateMachine
from genie.tasks import cancel_and_wait

log = structlog.get_logger()

TOLD_AGAIN_S = 10.0
"""How often the same trouble with Redis is logged, while it lasts."""
LOOK_S = 1.0
"""How long it is at most until the sentinels are asked again whether the master is still the same."""


class RedisStore:
    """The store that lasts.

    `url` is read by `url.py`; `namespace` keeps several services' locks apart. A commit counts as stored when
    `min_replicas` replicas have it, and with `fsync` when it is on the disk of the master, and on theirs. `balancer` is
    what all namespaces of this node have in common.
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
        self._master = Primary(RedisUrl.read(url), meta_key(namespace), min_replicas, fsync=fsync)
        self._namespace = Keyspace(self._master, namespace)
        self._delivery = CommitWriter(
            self._master, AckPolicy(min_replicas, fsync=fsync), self._log, self._answered, self._settle
        )
        self._errors = 0
        self._node = Node()
        self._snapshot: Callable[[], Batch] = Batch
        self._packer = BatchEncoder(self._namespace)
        self._sent_at = self._answered_at = 0.0
        """When the last batch was sent first, and when the last one was that has been answered."""
        self._done: Callable[[BaseException | None], None] | None = None
        """Whom to tell of the batch in flight, if there is one."""
        self._untold: deque[Position] = deque(maxlen=LONGEST)
        """Batches of this node that were in flight when it stood down."""
        self._looking: asyncio.Task[None] | None = None

    @property
    def failure_count(self) -> int:
        """How often Redis could not be reached, or refused something."""
        return self._errors + self._delivery.errors

    @property
    def full(self) -> bool:
        """Whether Redis has no memory left but for what ends."""
        return self._delivery.full

    async def open(
        self, node: Node, whole: Callable[[], Batch], following: Callable[[str | None], None]
    ) -> StateMachine:
        """Follow whoever leads the namespace until this node does, however long Redis can't be reached."""
        self._loop = asyncio.get_running_loop()
        led = self._led() if self._namespace.tenure.epoch else None
        if self._done is not None:
            self._untold.append((self._namespace.tenure.epoch, self._packer.number))
        await self._stand_down()
        self._node, self._snapshot = node, whole
        journal = LogReader(self._master, self._namespace.journal)
        follower = Follower(self._namespace, journal, node, self._balancer, following, led, self._untold)
        backoff = Backoff(*BACKOFF_S)
        replica, told_at = None, 0.0
        told: str | None = None
        while True:
            try:
                replica = replica or await follower.lead()
                await self._delivery.open()
                await warn_if_lossy(self._master)
            except FAILURES as error:
                pause = round(backoff.next_delay(), 3)
                self._errors += 1
                if str(error) != told or self._loop.time() - told_at >= TOLD_AGAIN_S:
                    told, told_at = str(error), self._loop.time()
                    self._log.warning("Redis can't be reached; nothing is served before it is", error=told)
                self._delivery.drop()
                follower.interrupted()
                await asyncio.sleep(pause)
            else:
                if told is not None:
                    self._log.info("Redis is back", address=str(self._master.address))
                self._packer = BatchEncoder(self._namespace)
                self._answered_at = follower.since
                if self._master.watched:
                    self._looking = self._loop.create_task(self._look_for_another())
                return replica

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        """Write a batch, once, however often it must be sent."""
        self._sent_at = self._loop.time()
        self._done = done
        self._delivery.send(self._packer.pack(batch))

    async def wait_for_transfer_request(self) -> None:
        """Wait until a node asks for the namespace that leads fewer than this one."""
        own = self._node.address
        while True:
            await asyncio.sleep(LOOK_S)
            if self._balancer.count(own) < TOO_MANY:
                continue
            try:
                wish = await self._namespace.wished()
            except RedisFailure:
                continue  # a commit will see to it
            if wish is not None and self._balancer.give(self._namespace.name, own, *wish):
                with suppress(RedisFailure):
                    await self._namespace.unwish()  # who is still there repeats it
                return

    async def resign(self) -> None:
        """Let another node lead at once. A Redis that can't be told leaves them to wait for the lease."""
        if not self._namespace.tenure.epoch:
            return
        sent = self._packer.number
        await self._stand_down()  # a batch that comes later would be taken for the last one, which this is
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                try:
                    await self._namespace.resign(sent)
                except RedisFailure:  # this connection was idle for long, and may have ended: the next one is new
                    await self._namespace.resign(sent)
        except FAILURES as error:
            self._log.warning("Redis can't be reached; another server must wait for the lease to end", error=str(error))

    async def close(self) -> None:
        """Leave. The namespace stays as it is."""
        await self._stand_down()
        self._master.drop()

    def _led(self) -> PriorLeadership:
        """What this node has told, or might have, as the leader that it was: it must not be lost if Redis has lost it.

        A batch in flight is in it, and was told to nobody: the last is how far Redis must have come.
        """
        number = self._packer.number
        return PriorLeadership(
            Snapshot(self._history(number), self._snapshot()), (self._namespace.tenure.epoch, self._told)
        )

    @property
    def _told(self) -> int:
        """The number of the last batch that may have been told: not that of one in flight."""
        return self._packer.number - (self._done is not None)

    def _history(self, number: int) -> EpochHistory:
        """That of a batch of this tenure."""
        return self._namespace.history.at((self._namespace.tenure.epoch, number))

    async def _stand_down(self) -> None:
        """Commit nothing more. What is in flight may or may not be stored."""
        self._done = None
        self._balancer.leads(self._namespace.name, None)
        await self._delivery.stop()
        await cancel_and_wait(self._looking)

    def _answered(self, answer: object) -> None:
        """What the script has said of the batch in flight."""
        if answer == b"ok":
            self._answered_at = self._sent_at
            self._settle(None)
        elif answer != b"lost":
            self._settle(LeadershipLost(f"{self._namespace.meta} is another server's"))
        elif self._sent_at - self._answered_at > self._node.lease_ms / 1000:
            self._settle(
                LeadershipLost("Redis has lost commits, and another may have led since the last one was stored")
            )
        else:
            self._delivery.work(self._write_anew())

    def _settle(self, error: BaseException | None) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(error)

    async def _look_for_another(self) -> None:
        """Ask the sentinels now and then: one that was cut off goes on as a master, and loses all that it is given.

        Several times within a lease: a follower that already reads at the new master takes over there when that is over.
        """
        while True:
            await asyncio.sleep(min(LOOK_S, self._node.lease_ms / 4000))
            link = self._delivery.link
            if link is not None and await self._master.elsewhere(link) and self._delivery.link is link:
                self._log.warning("the sentinels name another master", before=str(link.address))
                self._master.drop()
                self._delivery.drop()

    async def _write_anew(self) -> None:
        """Redis lost what it had acknowledged. We have not, and nothing has changed since: the batch in flight is in it.

        A batch without changes comes behind: when that is stored and confirmed, everything is.
        """
        self._log.warning("Redis has lost commits that it had acknowledged; writing the whole state anew")
        history, whole = self._history(self._packer.number), self._snapshot()
        await until_done(lambda: self._namespace.write_anew(self._node, whole, history), Backoff(*BACKOFF_S), self._log)
        self._packer = BatchEncoder(self._namespace)
        self._log.info("the state is written anew", epoch=self._namespace.tenure.epoch)
        link = self._delivery.link
        if link is not None and link.address != self._master.address:
            self._delivery.drop()
        await self._delivery.go_on(self._packer.pack(replace(whole, changes={})))
