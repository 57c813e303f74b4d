"""Stores under test, and what is stored in Redis, read without the code under test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from genie.core import LockManager, Request
from genie.storage.redis.store import RedisStore
from genie.storage.store import Batch, Node, StateMachine, Store
from redises.group import until
from support.processes.servers import WAIT_S, Redis

NAME = "genie"
LEASE_MS = 50


async def commit(store: Store, batch: Batch) -> None:
    """Commit a batch and wait until it is stored; raise the error of the store."""
    stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: BaseException | None) -> None:
        if error is None:
            stored.set_result(None)
        else:
            stored.set_exception(error)

    store.commit(batch, done)
    async with asyncio.timeout(WAIT_S):
        await stored


async def opened(store: Store) -> StateMachine:
    """Open a store: take over after the (short) lease of a former leader."""
    async with asyncio.timeout(WAIT_S):
        return await store.open(Node("here:1", "here:1", LEASE_MS), Batch, lambda _: None)


class Locks:
    """Commits locks to a store, as the pipeline does: one batch at a time."""

    def __init__(self, url: str, **options: Any) -> None:
        self.store = RedisStore(url, NAME, **options)
        self.manager = LockManager()

    async def open(self) -> StateMachine:
        """Take over after the short lease of a former leader; then lead with a long lease."""
        async with asyncio.timeout(WAIT_S):
            replica = await self.store.open(Node("here:1", "here:1", LEASE_MS), self.snapshot, lambda _: None)
        self.store._node = Node("here:1", "here:1", 60_000)
        return replica

    def snapshot(self) -> Batch:
        """Return all held locks."""
        return Batch(dict(self.manager.table.held), self.manager.next_id, self.manager.next_fence, 0)

    def lock(self, resource: str) -> asyncio.Future[None]:
        """Start to store a lock; the future is done when the commit is acknowledged."""
        request = Request(exclusive=(resource,))
        self.manager.step(request, 0)
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(failure: BaseException | None) -> None:
            acknowledged.set_result(None) if failure is None else acknowledged.set_exception(failure)

        self.store.commit(Batch({request.id: request}, self.manager.next_id, self.manager.next_fence, 0), done)
        return acknowledged


@asynccontextmanager
async def locks(url: str, **options: Any) -> AsyncIterator[Locks]:
    """Run a store that leads."""
    client = Locks(url, **options)
    await client.open()
    try:
        yield client
    finally:
        await client.store.close()


def stored(redis: Redis) -> set[int]:
    """Return the ids of the stored records."""
    return set(stored_records(redis, NAME))


def batches(redis: Redis) -> int:
    """Return how many batches were stored in the last epoch."""
    return last_position(redis, NAME)[1]


async def soon(acknowledged: asyncio.Future[None]) -> None:
    """Wait until a commit is acknowledged."""
    async with asyncio.timeout(WAIT_S):
        await acknowledged


def stored_records(redis: Redis, namespace: str = "genie") -> dict[int, bytes]:
    """Return the records that a new leader would read: those of the last checkpoint, changed by the log after it.

    The leader may write a checkpoint meanwhile: `meta` is read first and the log last, and its entries are absolute.
    """
    meta = redis.call("HGETALL", f"{{{namespace}}}:meta")
    records = redis.call("HGETALL", meta[b"state"].decode())
    checkpoint = meta[b"checkpoint"].split()[0].decode()
    last = checkpoint
    for position, entry in redis.call("XRANGE", f"{{{namespace}}}:log", f"({checkpoint}", "+"):
        epoch, index = last.split("-")
        if b"base" in entry:
            assert entry[b"base"].decode() == last, f"{position} does not continue {last}"
        else:
            assert position.decode() == f"{epoch}-{int(index) + 1}", f"{position} does not follow {last}"
            for change in entry[b"batch"].split(b"\n")[1:]:
                id_, _, record = change.partition(b" ")
                if record:
                    records[id_] = record
                else:
                    records.pop(id_, None)
        last = position.decode()
    return {int(id_): record for id_, record in records.items() if id_ != b"0"}


def last_position(redis: Redis, namespace: str = "genie") -> tuple[int, int]:
    """Return the epoch and the index of the last log entry."""
    ((position, _),) = redis.call("XREVRANGE", f"{{{namespace}}}:log", "+", "-", "COUNT", "1")
    epoch, index = position.decode().split("-")
    return int(epoch), int(index)


def checkpoint_position(redis: Redis, namespace: str = "genie") -> tuple[int, int]:
    """Return the epoch and the index of the last log entry that the checkpoint contains."""
    epoch, index = redis.call("HGET", f"{{{namespace}}}:meta", "checkpoint").split()[0].decode().split("-")
    return int(epoch), int(index)


async def checkpoint_written(redis: Redis, namespace: str = "genie") -> tuple[int, int]:
    """Wait until a checkpoint contains the log up to its present end; return its position."""
    end = last_position(redis, namespace)

    async def is_written() -> bool:
        return checkpoint_position(redis, namespace) >= end

    await until("a checkpoint is written", is_written)
    return checkpoint_position(redis, namespace)
