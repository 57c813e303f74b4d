"""Locks in Redis: one atomic script a batch, and a way back from everything that Redis may forget.

Keys, all in one hash slot by the tag `{namespace}`:

- `{namespace}:meta`, a hash: `epoch` and `nonce` of the server that owns the namespace, the `sequence` of its last
  batch, its `clock`, `next_id`, `next_fence`, and `records`, the key of
- `{namespace}:records:…`, a hash from id to record (`records.py`);
- `{namespace}:copies`, a set of every records key that was ever begun, so that one left over is found and unlinked.

Every batch names the epoch, the nonce and its number, and is applied once however often it is sent. So a lost answer is
no question: the same batch is sent again.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files
from random import uniform
from typing import Any, TypeVar

import structlog
from redis import RedisError
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from genie.core import Request, Snapshot, State
from genie.storage.base import Batch, Superseded
from genie.storage.durability import warn_if_lossy
from genie.storage.link import Link, LinkError, pack
from genie.storage.records import decode, encode

log = structlog.get_logger()

CALL_TIMEOUT_S = 5.0
"""How long one call may take while loading or writing anew."""
COMMIT_TIMEOUT_S = 2.0
"""How long a commit may be without an answer before it is sent again on a new connection."""
BACKOFF_S = (0.02, 1.0)
"""The first and the longest pause between two attempts to reach Redis."""
CHUNK = 1000
"""Records read or written in one call: Redis serves nobody else meanwhile."""

_COMMIT = files("genie.storage").joinpath("lua/commit.lua").read_bytes()
_BEGIN = files("genie.storage").joinpath("lua/begin.lua").read_bytes()
_COMMIT_SHA = sha1(_COMMIT).hexdigest().encode()  # noqa: S324 - Redis names scripts so
T = TypeVar("T")
_FAILURES = (RedisError, LinkError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Tenure:
    """Who owns the namespace: an epoch that only grows, a nonce in case two reach for the same, and its records."""

    epoch: int
    nonce: str
    records: str


class RedisStore:
    """The store that lasts. `url` as redis-py takes it; `namespace` keeps several services' locks apart."""

    durable = True

    def __init__(self, url: str, namespace: str = "genie") -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", namespace):
            raise ValueError(f"namespace must be 1 to 128 letters, digits or any of _.:- , not {namespace!r}")
        self._url = url
        self._prefix = f"{{{namespace}}}:"
        self._meta = f"{self._prefix}meta"
        self._client: Redis = Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),  # redis-py's own would send a script twice and not say so
            socket_timeout=CALL_TIMEOUT_S,
            socket_connect_timeout=CALL_TIMEOUT_S,
        )
        self._tenure = Tenure(0, "", "")
        self._attempted: Tenure | None = None
        self._head: tuple[bytes, ...] = ()
        self._sequence = 0
        self._snapshot: Callable[[], Snapshot] = Snapshot
        self._link: Link | None = None
        self._packed = b""
        self._sent_at = 0.0
        self._done: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None

    # -- the protocol of a store --------------------------------------------------------------------------

    async def open(self, snapshot: Callable[[], Snapshot]) -> Snapshot:
        """Take the namespace over and load it, however long Redis can't be reached."""
        self._snapshot = snapshot
        pauses = _pauses()
        while True:
            try:
                loaded = await self._load(await self._take_over())
                self._link = await self._connect()
                await warn_if_lossy(self._client)
            except _FAILURES as error:
                pause = next(pauses)
                log.warning("Redis can't be reached; nothing is served before it is", error=str(error), retry_s=pause)
                await asyncio.sleep(pause)
            else:
                self._watch_commits()
                return loaded

    def commit(self, batch: Batch) -> asyncio.Future[None]:
        """Write a batch, once, however often it must be sent."""
        self._sequence += 1
        self._packed = self._pack(batch)
        self._done = asyncio.get_running_loop().create_future()
        self._send()
        return self._done

    async def close(self) -> None:
        """Leave. The namespace stays as it is."""
        if self._watch is not None:
            self._watch.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._link is not None:
            self._link.close()
        await self._client.aclose()

    # -- commits ------------------------------------------------------------------------------------------

    def _pack(self, batch: Batch) -> bytes:
        deleted: list[bytes] = []
        written: list[bytes] = []
        for id_, request in batch.changes.items():
            if request.state is State.ENDED:
                deleted.append(b"%d" % id_)
            else:
                written += (b"%d" % id_, encode(request))
        return pack(
            (
                *self._head,
                b"%d" % self._sequence,
                b"%.3f" % batch.clock_ms,
                b"%d" % batch.next_id,
                b"%d" % batch.next_fence,
                b"%d" % len(deleted),
                *deleted,
                *written,
            )
        )

    def _send(self) -> None:
        if self._link is None:
            return  # it is being made, and then sends what is in flight
        self._sent_at = asyncio.get_running_loop().time()
        self._link.send(self._packed).add_done_callback(self._replied)

    def _replied(self, reply: asyncio.Future[Any]) -> None:
        done = self._done
        if reply.cancelled() or done is None or done.done():
            return
        error = reply.exception()
        if error is not None:
            self._drop_link()
            self._work(self._reconnect(error))
        elif reply.result() == b"ok":
            done.set_result(None)
        elif reply.result() == b"lost":
            self._work(self._write_anew())
        else:
            done.set_exception(Superseded(f"{self._meta} is not ours any more"))

    def _watch_commits(self) -> None:
        """Give up a connection on which a commit is left without an answer. (A timer a commit would cost more.)"""
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(COMMIT_TIMEOUT_S / 4, self._watch_commits)
        waiting = self._done is not None and not self._done.done() and self._link is not None
        if waiting and self._task is None and loop.time() - self._sent_at > COMMIT_TIMEOUT_S:
            self._drop_link()

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            # what it still carries fails with LinkError in `connection_lost`, and `_replied` goes on from there
            self._link = None

    def _work(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(coroutine)

    async def _reconnect(self, error: BaseException) -> None:
        """Reach Redis again and send the batch in flight once more. One line for the loss, one for the return."""
        log.warning("Redis is away; commands wait", error=str(error))
        self._link = await self._until_done(self._connect)
        log.info("Redis is back")
        self._task = None
        self._send()

    async def _write_anew(self) -> None:
        """Redis lost what it had acknowledged. We have not: write all of it, into new keys, and switch to them."""
        log.warning("Redis has lost commits that it had acknowledged; writing the whole state anew")
        done = self._done
        assert done is not None  # noqa: S101 - only a commit finds it out
        try:
            requests = await self._until_done(self._replace)
        except Superseded as error:
            done.set_exception(error)
            return
        log.info("the state is written anew", requests=requests, epoch=self._tenure.epoch)
        self._task = None
        done.set_result(None)

    async def _until_done(self, attempt: Callable[[], Awaitable[T]]) -> T:
        pauses = _pauses()
        while True:
            try:
                return await attempt()
            except _FAILURES:
                await asyncio.sleep(next(pauses))

    # -- owning, loading, writing anew --------------------------------------------------------------------

    async def _connect(self) -> Link:
        async with asyncio.timeout(COMMIT_TIMEOUT_S):
            link = await Link.open(self._url)
            try:
                await link.call(b"SCRIPT", b"LOAD", _COMMIT)
            except BaseException:
                link.close()
                raise
            return link

    async def _read_meta(self) -> tuple[Tenure | None, Snapshot]:
        stored: dict[bytes, bytes] = await self._client.hgetall(self._meta)  # type: ignore[assignment]
        meta = {field.decode(): value.decode() for field, value in stored.items()}
        if "epoch" not in meta:
            return None, Snapshot()
        counters = Snapshot(
            (), int(meta.get("next_id", 1)), int(meta.get("next_fence", 1)), float(meta.get("clock", 0))
        )
        return Tenure(int(meta["epoch"]), meta["nonce"], meta["records"]), counters

    async def _take_over(self) -> Snapshot:
        """Own the namespace from here on: whoever owned it before can't commit any more."""
        while True:
            before, counters = await self._read_meta()
            tenure = self._next(before)
            if before is not None:
                tenure = Tenure(tenure.epoch, tenure.nonce, before.records)
            if await self._begin(tenure, before, None):
                return counters

    async def _load(self, counters: Snapshot) -> Snapshot:
        requests: list[Request] = []
        cursor, first = 0, True
        while cursor or first:
            found: dict[bytes, bytes]
            cursor, found = await self._client.hscan(self._tenure.records, cursor, count=CHUNK)  # type: ignore[assignment]
            requests += map(decode, found.values())
            first = False
        unique = {request.id: request for request in requests}  # a scan may show a record twice
        counters.requests = [unique[id_] for id_ in sorted(unique)]
        await self._unlink_copies()
        return counters

    async def _replace(self) -> int:
        before, _ = await self._read_meta()
        if before is not None and before == self._attempted:  # it was done, and only the answer was lost
            self._own(before)
            return 0
        if before is not None and before.epoch >= self._tenure.epoch and before != self._tenure:
            raise Superseded(f"{self._meta} is not ours any more")
        self._attempted = tenure = self._next(self._tenure)
        snapshot = self._snapshot()
        requests = list(snapshot.requests)
        await self._client.sadd(f"{self._prefix}copies", tenure.records)
        for start in range(0, len(requests), CHUNK):
            chunk = {str(request.id): encode(request) for request in requests[start : start + CHUNK]}
            await self._client.hset(tenure.records, mapping=chunk)  # type: ignore[arg-type]
        if not await self._begin(tenure, before, snapshot):
            raise LinkError("the namespace changed while it was written")
        await self._unlink_copies()
        return len(requests)

    async def _begin(self, tenure: Tenure, before: Tenure | None, counters: Snapshot | None) -> bool:
        expected = ("", "") if before is None else (before.epoch, before.nonce)
        written = ("", "", "") if counters is None else (counters.clock_ms, counters.next_id, counters.next_fence)
        if counters is None:
            await self._client.sadd(f"{self._prefix}copies", tenure.records)
        answer = await self._client.eval(
            _BEGIN.decode(), 2, self._meta, tenure.records, tenure.epoch, tenure.nonce, *expected, *written
        )
        if answer != b"ok":
            return False
        self._own(tenure)
        return True

    def _own(self, tenure: Tenure) -> None:
        self._tenure, self._sequence = tenure, 0
        self._head = (
            b"EVALSHA",
            _COMMIT_SHA,
            b"2",
            self._meta.encode(),
            tenure.records.encode(),
            b"%d" % tenure.epoch,
            tenure.nonce.encode(),
        )

    def _next(self, before: Tenure | None) -> Tenure:
        """The next owner. Its epoch is new even where Redis lost the last one."""
        epoch = max((before.epoch if before is not None else 0) + 1, int(time.time()))
        nonce = secrets.token_hex(8)
        return Tenure(epoch, nonce, f"{self._prefix}records:{epoch}-{nonce}")

    async def _unlink_copies(self) -> None:
        """Remove the records that nothing points to: from before they were written anew, or of an attempt that died."""
        copies = f"{self._prefix}copies"
        for key in await self._client.smembers(copies):
            if key != self._tenure.records.encode():
                await self._client.unlink(key)
                await self._client.srem(copies, key)


def _pauses() -> Iterator[float]:
    """How long to wait before the next attempt: longer each time, and never in step with others."""
    pause, longest = BACKOFF_S
    while True:
        yield round(uniform(pause / 2, pause), 3)  # noqa: S311 - no secret
        pause = min(pause * 2, longest)
