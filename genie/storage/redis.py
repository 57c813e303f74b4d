"""Locks in Redis: one atomic script a batch, applied once however often it must be sent.

Every batch names the epoch, the nonce and its own number. So a lost answer is no question: the same batch is sent again.
What the keys are, and how the namespace is taken over, loaded and written anew: `namespace.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from hashlib import sha1
from importlib.resources import files
from random import uniform
from typing import Any, TypeVar

import structlog
from redis import RedisError
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from genie.core import ENDED, Request
from genie.storage.base import Batch, Replica, Superseded
from genie.storage.durability import warn_if_lossy
from genie.storage.follower import Follower
from genie.storage.journal import Journal, Kept
from genie.storage.link import Link, LinkError, bulk
from genie.storage.namespace import Namespace, Position, counters
from genie.storage.node import Node
from genie.storage.records import encode
from genie.tasks import end

log = structlog.get_logger()

CALL_TIMEOUT_S = 5.0
"""How long one call may take while loading or writing anew."""
COMMIT_TIMEOUT_S = 2.0
"""How long a commit may go neither forth nor back before it is sent again on a new connection. Doubled each time, for
Redis may only be slow with a large one."""
BACKOFF_S = (0.02, 1.0)
"""The first and the longest pause between two attempts to reach Redis."""

_COMMIT = files("genie.storage").joinpath("lua/commit.lua").read_bytes()
_COMMIT_SHA = sha1(_COMMIT).hexdigest()  # noqa: S324 - Redis names scripts so
_FAILURES = (RedisError, LinkError, OSError, TimeoutError)
T = TypeVar("T")


class RedisStore:
    """The store that lasts. `url` as redis-py takes it; `namespace` keeps several services' locks apart."""

    durable = True
    errors = 0

    def __init__(self, url: str, namespace: str = "genie") -> None:
        self._url = url
        self._client: Redis = Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),  # redis-py's own would send a script twice and not say so
            socket_timeout=CALL_TIMEOUT_S,
            socket_connect_timeout=CALL_TIMEOUT_S,
        )
        self._namespace = Namespace(self._client, namespace)
        self._node = Node()
        self._kept = Kept()
        self._whole: Callable[[], Batch] = Batch
        self._head, self._head_length = b"", 0
        self._sequence = 0
        self._link: Link | None = None
        self._packed = b""
        self._sent_at = self._answered_at = 0.0
        """When the last batch was sent first, and when the last one was that has been answered."""
        self._moved_at = 0.0
        self._unsent = 0
        self._timeout_s = COMMIT_TIMEOUT_S
        self._pauses: Iterator[float] | None = None
        """While Redis is away: the pauses between attempts, which go on until a commit is answered."""
        self._done: Callable[[BaseException | None], None] | None = None
        """Whom to tell of the batch in flight, if there is one."""
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None

    async def open(self, node: Node, whole: Callable[[], Batch], following: Callable[[str | None], None]) -> Replica:
        """Follow whoever leads the namespace until this node does, however long Redis can't be reached."""
        self._loop = asyncio.get_running_loop()
        known = self._known() if self._namespace.tenure.epoch else None
        await self._stand_down()
        self._node, self._whole = node, whole
        journal = Journal(self._client, self._namespace.journal)
        follower = Follower(self._namespace, journal, node, following, known)
        pauses = _pauses()
        replica, failed = None, False
        while True:
            try:
                replica = replica or await follower.lead()
                self._link = await self._connect()
                await warn_if_lossy(self._client)
            except _FAILURES as error:
                pause = next(pauses)
                self.errors += 1
                log.warning("Redis can't be reached; nothing is served before it is", error=str(error), retry_s=pause)
                self._drop_link()
                follower.interrupted()
                failed = True
                await asyncio.sleep(pause)
            else:
                if failed:
                    log.info("Redis is back")
                self._begin_numbers()
                self._answered_at = follower.since
                self._watch_commits()
                return replica

    def commit(self, batch: Batch, done: Callable[[BaseException | None], None]) -> None:
        """Write a batch, once, however often it must be sent."""
        self._sequence += 1
        self._sent_at = self._loop.time()
        self._packed = self._pack(batch)
        self._done = done
        self._send()

    async def resign(self) -> None:
        """Let another node lead at once. A Redis that can't be told leaves them to wait for the lease."""
        if not self._namespace.tenure.epoch:
            return
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                await self._namespace.resign()
        except _FAILURES as error:
            log.warning("Redis can't be reached; another server must wait for the lease to end", error=str(error))

    async def close(self) -> None:
        """Leave. The namespace stays as it is."""
        await self._stand_down()
        await self._client.aclose()

    def _known(self) -> tuple[Position, Batch]:
        """What this node has told, or might have, as the leader that it was: it must not be lost if Redis has lost it.

        A batch in flight was told to nobody; whether it is in there makes no difference.
        """
        answered = self._sequence - (self._done is not None)
        return (self._namespace.tenure.epoch, answered), self._whole()

    async def _stand_down(self) -> None:
        """Commit nothing more. What is in flight may or may not be stored."""
        self._done, self._pauses = None, None
        if self._watch is not None:
            self._watch.cancel()
        await end(self._task)
        self._drop_link()

    # -- a commit, sent and answered ----------------------------------------------------------------------

    def _begin_numbers(self) -> None:
        """What every batch of this tenure begins with; its first has number one."""
        tenure, self._sequence = self._namespace.tenure, 0
        keys = (self._namespace.meta, tenure.records, self._namespace.journal)
        head = ("EVALSHA", _COMMIT_SHA, len(keys), *keys, tenure.epoch, tenure.nonce)
        self._kept = Kept()
        self._head, self._head_length = b"".join(map(bulk, head)), len(head)

    def _pack(self, batch: Batch) -> bytes:
        deleted: list[bytes] = []
        written: list[bytes] = []
        for id_, change in batch.changes.items():
            key = b"%d" % id_
            if change is None or (isinstance(change, Request) and change.state is ENDED):
                deleted.append(b"$%d\r\n%b\r\n$0\r\n\r\n" % (len(key), key))
            else:
                record = encode(change)
                written.append(b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(record), record))
        changes = b"".join(deleted) + b"".join(written)
        numbers, gone = counters(self._sequence, batch.clock_ms, batch.next_id, batch.next_fence), b"%d" % len(deleted)
        kept = b"%d" % self._kept.add(len(changes) + len(numbers), len(batch.changes))
        return b"*%d\r\n%b$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n%b" % (
            self._head_length + 3 + 2 * len(batch.changes),
            self._head,
            len(numbers),
            numbers,
            len(kept),
            kept,
            len(gone),
            gone,
            changes,
        )

    def _send(self) -> None:
        if self._link is None:
            return  # it is being made, and then sends what is in flight
        self._moved_at = self._loop.time()
        self._link.send(self._packed, self._replied)

    def _replied(self, reply: object) -> None:
        if self._done is None:
            return
        if isinstance(reply, LinkError):
            self._drop_link()
            self._work(self._reconnect(reply))
            return
        self._timeout_s = COMMIT_TIMEOUT_S
        if self._pauses is not None:
            self._pauses = None
            log.info("Redis is back")
        if reply == b"ok":
            self._answered_at = self._sent_at
            self._settle(None)
        elif reply == b"lost" and self._sent_at - self._answered_at > self._node.lease_ms / 1000:
            self._settle(Superseded("Redis has lost commits, and another may have led since the last one was stored"))
        elif reply == b"lost":
            self._work(self._write_anew())
        else:
            self._settle(Superseded(f"{self._namespace.meta} is another server's"))

    def _settle(self, error: BaseException | None) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(error)

    # -- bad days -----------------------------------------------------------------------------------------

    def _watch_commits(self) -> None:
        """Give up a connection on which a commit is left without an answer. (A timer a commit would cost more.)"""
        self._watch = self._loop.call_later(COMMIT_TIMEOUT_S / 4, self._watch_commits)
        if self._link is None or self._done is None or self._task is not None:
            return
        unsent, self._unsent = self._unsent, self._link.unsent
        if self._unsent < unsent:
            self._moved_at = self._loop.time()
        elif self._loop.time() - self._moved_at > self._timeout_s:
            self._timeout_s *= 2
            self._drop_link()

    def _drop_link(self) -> None:
        """Close the connection. What it still carries fails with LinkError, and `_replied` goes on from there."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _work(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = None
        if not task.cancelled() and task.exception() is not None:
            self._settle(task.exception())

    async def _connect(self) -> Link:
        async with asyncio.timeout(COMMIT_TIMEOUT_S):
            link = await Link.open(self._url)
            try:
                await link.call(b"SCRIPT", b"LOAD", _COMMIT)
            except BaseException:
                link.close()
                raise
            return link

    async def _reconnect(self, error: BaseException) -> None:
        """Reach Redis again and send the batch in flight once more. One line for the loss, one for the return."""
        self.errors += 1
        if self._pauses is None:
            log.warning("Redis is away; commands wait", error=str(error))
            self._pauses = _pauses()
        else:  # reached, and refused again
            await asyncio.sleep(next(self._pauses))
        self._link = await _until_done(self._connect, self._pauses)
        self._send()

    async def _write_anew(self) -> None:
        """Redis lost what it had acknowledged. We have not, and nothing has changed since: that batch is in it."""
        log.warning("Redis has lost commits that it had acknowledged; writing the whole state anew")
        await _until_done(lambda: self._namespace.write_anew(self._node, self._whole()), _pauses())
        self._begin_numbers()
        self._answered_at = self._sent_at
        log.info("the state is written anew", epoch=self._namespace.tenure.epoch)
        self._settle(None)


async def _until_done(attempt: Callable[[], Awaitable[T]], pauses: Iterator[float]) -> T:
    """Repeat what fails for Redis's sake, with pauses, for as long as it takes."""
    told = ""
    while True:
        try:
            return await attempt()
        except _FAILURES as error:
            if str(error) != told:
                told = str(error)
                log.warning("Redis can't be reached yet", error=told)
            await asyncio.sleep(next(pauses))


def _pauses() -> Iterator[float]:
    """How long to wait before the next attempt: longer each time, and never in step with others."""
    pause, longest = BACKOFF_S
    while True:
        yield round(uniform(pause / 2, pause), 3)  # noqa: S311 - no secret
        pause = min(pause * 2, longest)
