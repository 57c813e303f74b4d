"""One batch as the one command that commits it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeVar

from structlog.typing import FilteringBoundLogger

from genie.backoff import Backoff
from genie.core import ENDED, Request
from genie.storage.redis.connection import ErrorReply, RedisConnection, RedisFailure, bulk, pack
from genie.storage.redis.keyspace import Keyspace, counters
from genie.storage.redis.log import LogRetention
from genie.storage.redis.primary import Primary, runnable
from genie.storage.redis.records import encode
from genie.storage.store import Batch
from genie.tasks import cancel_and_wait

WAIT_MS = (1_000,) * 3
"""How long Redis waits for its replicas before it says how many have confirmed a commit, as often as it is asked."""
WAITAOF_MS = (10, 20, 40, 80, 160, 320, 640, 1_000, 1_000)
"""The same for disks. A replica says what is on its disk when it is asked, and then once a second: when it is asked for
the first time that commit is not there yet."""

_COMMIT = files("genie.storage").joinpath("lua/commit.lua").read_bytes()


def _sha(script: bytes) -> bytes:
    return sha1(script).hexdigest().encode()  # noqa: S324 - Redis names scripts so


async def load_scripts(link: RedisConnection) -> bytes:
    """Load the script of a commit, and the one that is also run where Redis is full; returns that one's name.

    Empty where this Redis has no such thing: it is older than 7.
    """
    await link.call("SCRIPT", "LOAD", _COMMIT)
    roomy = runnable(_COMMIT, link)
    if roomy is _COMMIT:
        return b""
    await link.call("SCRIPT", "LOAD", roomy)
    return _sha(roomy)


class BatchEncoder:
    """Numbers the batches of one tenure, from one on, and packs them."""

    def __init__(self, namespace: Keyspace) -> None:
        tenure = namespace.tenure
        keys = (namespace.meta, tenure.records, namespace.journal)
        head = ("EVALSHA", _SHA, len(keys), *keys, tenure.epoch, tenure.nonce)
        self._head, self._head_length = b"".join(map(bulk, head)), len(head)
        self._kept = LogRetention()
        self.number = 0

    def pack(self, batch: Batch) -> bytes:
        """The next batch."""
        self.number += 1
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
        numbers, gone = counters(self.number, batch.clock_ms, batch.next_id, batch.next_fence), b"%d" % len(deleted)
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


_SHA = _sha(_COMMIT)


def with_script(packed: bytes, name: bytes) -> bytes:
    """A packed batch, for another script that does the same."""
    return packed.replace(_SHA, name, 1)


class AckPolicy:
    """What a commit must be followed by before it counts as stored: nothing, WAIT or WAITAOF, on the same connection.

    `replicas` must have it; with `fsync` on their disks, and on that of the master.
    """

    def __init__(self, replicas: int, *, fsync: bool) -> None:
        self._wanted = [1, replicas] if fsync else [replicas]
        name, timeouts_ms = ("WAITAOF", WAITAOF_MS) if fsync else ("WAIT", WAIT_MS)
        self.again = [pack([name, *self._wanted, timeout_ms]) for timeout_ms in timeouts_ms]
        """What is sent behind a commit, and then instead of it for as long as something is missing."""
        wanted = any(self._wanted)
        self.command = self.again[0] if wanted else b""
        self.replies = 2 if wanted else 1

    def missing(self, reply: object) -> str:
        """What is still missing by Redis's answer; nothing where it is all there."""
        if isinstance(reply, ErrorReply):
            return str(reply)
        confirmed = reply if isinstance(reply, list) else [reply]
        if all(count >= wanted for count, wanted in zip(confirmed, self._wanted, strict=True)):
            return ""
        disk = [] if len(confirmed) == 1 or confirmed[0] else ["not on the disk of the master"]
        replicas = [f"confirmed by {confirmed[-1]} of {self._wanted[-1]} replicas"] if self._wanted[-1] else []
        return ", and ".join(disk + replicas)


# -- One batch at a time on its way to Redis: sent, perhaps refused, sent again, until it is known what became of it --------

COMMIT_TIMEOUT_S = 2.0
"""How long a commit may go neither forth nor back before it is sent again on a new connection. Doubled each time, for
Redis may only be slow with a large one."""
MOST_HEAD = 128
"""Bytes within which a packed batch names its script."""
BACKOFF_S = (0.02, 1.0)
"""The first and the longest pause between two attempts to reach Redis."""

FAILURES = (RedisFailure, OSError, TimeoutError)
"""What goes wrong for Redis's sake, and is tried again."""
T = TypeVar("T")


class CommitWriter:
    """Sends batches over a connection of its own to whoever is the master.

    `answered` is told what the script said: `ok` when it is stored as far as `confirmation` wants, `lost`, `stale` or
    `other`. `failed` is told of what no further attempt would change.
    """

    def __init__(
        self,
        master: Primary,
        confirmation: AckPolicy,
        log: FilteringBoundLogger,
        answered: Callable[[object], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._master = master
        self._confirmation = confirmation
        self._log = log
        self._answered = answered
        self._failed = failed
        self.errors = 0
        """How often Redis could not be reached, or refused something."""
        self.full = False
        """Whether Redis has no memory left but for what ends."""
        self._link: RedisConnection | None = None
        self._packed = b""
        self._busy = False
        """A batch is in flight."""
        self._roomy = b""
        """The name of the script that is run also where Redis is full."""
        self._moved_at = 0.0
        self._unsent = 0
        self._unconfirmed = 0
        """How often the batch in flight was waited for in vain on this connection."""
        self._timeout_s = COMMIT_TIMEOUT_S
        self._backoff: Backoff | None = None
        """While Redis is unavailable: the delays between attempts, until a commit is answered."""
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Connect. RedisFailure, OSError or TimeoutError where that fails."""
        self._loop = asyncio.get_running_loop()
        self._timeout_s = COMMIT_TIMEOUT_S
        self._link = await self._connect()
        if self._watch is None:
            self._watch_commits()

    def send(self, packed: bytes) -> None:
        """Bring this batch to Redis, however often it must be sent."""
        self._packed, self._busy = packed, True
        self._send()

    def work(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Do something else before the next batch is sent."""
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._worked)

    async def go_on(self, packed: bytes) -> None:
        """Bring this batch to Redis, from within such work."""
        self._packed, self._busy = packed, True
        if self._link is None:
            self._link = await until_done(self._connect, self._backoff or Backoff(*BACKOFF_S), self._log)
        self._send()

    async def stop(self) -> None:
        """Send nothing more. What is in flight may or may not be stored."""
        self._busy, self._backoff = False, None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        await cancel_and_wait(self._task)
        self.drop()

    @property
    def link(self) -> RedisConnection | None:
        """The connection, where there is one."""
        return self._link

    def drop(self) -> None:
        """Close the connection. What it still carries fails with RedisFailure, and is sent again on the next."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _send(self) -> None:
        if self._link is None:  # it is being made, and then sends what is in flight; or it was given up
            if self._task is None:
                self.work(self._send_again(RedisFailure("there is no connection")))
            return
        self._moved_at, self._unconfirmed = self._loop.time(), 0
        self._link.send(self._packed + self._confirmation.command, self._replied, self._confirmation.replies)

    def _replied(self, reply: object) -> None:
        if not self._busy:
            return
        confirmed: object = None
        if type(reply) is list:
            reply, confirmed = reply
        if isinstance(reply, RedisFailure):
            self._refused(reply)
            return
        if reply == b"ok" and confirmed is not None and (missing := self._confirmation.missing(confirmed)):
            self._wait_on(confirmed, missing)
            return
        self._timeout_s = COMMIT_TIMEOUT_S
        if self._backoff is not None:
            self._backoff = None
            self._log.info("Redis is back", address=None if self._link is None else str(self._link.address))
        if reply == b"ok" and self.full and not self._urged:
            self.full = False
            self._log.info("Redis has room again")
        self._busy = False
        self._answered(reply)

    def _wait_on(self, confirmed: object, missing: str) -> None:
        """The batch in flight is written, and not yet confirmed by all who must.

        It is waited for again on the same connection, and not sent again: that would be one more write to wait for.
        """
        self._unconfirmed += 1
        again = self._confirmation.again
        if self._link is None or isinstance(confirmed, RedisFailure) or self._unconfirmed >= len(again):
            self._refused(RedisFailure(f"a commit is not stored yet: {missing}"))
            return
        self._moved_at = self._loop.time()
        self._link.send(again[self._unconfirmed], self._waited)

    def _waited(self, confirmed: object) -> None:
        """An answer to that; where there is none, the connection is gone."""
        lost = isinstance(confirmed, RedisFailure) and not isinstance(confirmed, ErrorReply)
        self._replied(confirmed if lost else [b"ok", confirmed])

    @property
    def _urged(self) -> bool:
        """Whether the batch in flight was sent as one that is written also where Redis is full."""
        return bool(self._roomy) and self._roomy in self._packed[:MOST_HEAD]

    def _refused(self, error: RedisFailure) -> None:
        """The batch in flight came to nothing, or nobody knows to what."""
        if isinstance(error, ErrorReply) and error.code == "OOM" and self._roomy and not self._urged:
            if not self.full:
                self.full = True
                self._log.error("Redis is full: what is held can be released, and nothing new be had", error=str(error))
            self._packed = with_script(self._packed, self._roomy)
            self._send()
            return
        if self._link is not None:
            self._master.failed(error, self._link.address)
        self.drop()
        self.work(self._send_again(error))

    # -- bad days -----------------------------------------------------------------------------------------

    def _watch_commits(self) -> None:
        """Give up a connection on which a commit is left without an answer. (A timer a commit would cost more.)"""
        self._watch = self._loop.call_later(COMMIT_TIMEOUT_S / 4, self._watch_commits)
        if self._link is None or not self._busy or self._task is not None:
            return
        unsent, self._unsent = self._unsent, self._link.unsent
        if self._unsent < unsent:
            self._moved_at = self._loop.time()
        elif self._loop.time() - self._moved_at > self._timeout_s:
            self._timeout_s *= 2
            self.drop()

    def _worked(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    async def _connect(self) -> RedisConnection:
        link = await self._master.connect()
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                self._roomy = await load_scripts(link)
        except BaseException:
            link.close()
            raise
        return link

    async def _send_again(self, error: RedisFailure) -> None:
        """Send the batch in flight once more, to whoever is the master. One line for the loss, one for the return."""
        self.errors += 1
        if self._backoff is None:
            self._log.warning("Redis is away; commands wait", error=str(error))
            self._backoff = Backoff(*BACKOFF_S)
        else:  # reached, and refused again
            await asyncio.sleep(round(self._backoff.next_delay(), 3))
        await self.go_on(self._packed)


async def until_done(attempt: Callable[[], Awaitable[T]], backoff: Backoff, log: FilteringBoundLogger) -> T:
    """Repeat what fails for Redis's sake, with pauses, for as long as it takes."""
    told = ""
    while True:
        try:
            return await attempt()
        except FAILURES as error:
            if str(error) != told:
                told = str(error)
                log.warning("Redis can't be reached yet", error=told)
            await asyncio.sleep(round(backoff.next_delay(), 3))
