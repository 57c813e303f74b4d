"""Locks that are stored one after another, as the pump would store them, and what is in Redis then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from genie.core import LockManager, Request
from genie.storage.redis.store import RedisStore
from genie.storage.store import Batch, Node, StateMachine
from servers import WAIT_S, Redis
from stores import LEASE_MS

NAME = "genie"


class Locks:
    """Commits one lock after another to a store, as the pump would: one batch at a time."""

    def __init__(self, url: str, **options: Any) -> None:
        self.store = RedisStore(url, NAME, **options)
        self.manager = LockManager()

    async def open(self) -> StateMachine:
        """Lead, as soon as whoever led before has not been heard of for a short lease; then for a long one."""
        async with asyncio.timeout(WAIT_S):
            replica = await self.store.open(Node("here:1", "here:1", LEASE_MS), self.snapshot, lambda _: None)
        self.store._node = Node("here:1", "here:1", 60_000)
        return replica

    def snapshot(self) -> Batch:
        """All that is held."""
        return Batch(dict(self.manager.table.held), self.manager.next_id, self.manager.next_fence, 0)

    def lock(self, resource: str) -> asyncio.Future[None]:
        """Begin to store a lock; the future is done when that is told."""
        request = Request(exclusive=(resource,))
        self.manager.step(request, 0)
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(failure: BaseException | None) -> None:
            told.set_result(None) if failure is None else told.set_exception(failure)

        self.store.commit(Batch({request.id: request}, self.manager.next_id, self.manager.next_fence, 0), done)
        return told


@asynccontextmanager
async def locks(url: str, **options: Any) -> AsyncIterator[Locks]:
    """A store that leads."""
    made = Locks(url, **options)
    await made.open()
    try:
        yield made
    finally:
        await made.store.close()


def stored(redis: Redis) -> set[int]:
    """The ids that are there."""
    key = redis.call("HGET", f"{{{NAME}}}:meta", "records")
    return {int(id_) for id_ in redis.call("HKEYS", key) if id_ != b"0"}


def batches(redis: Redis) -> int:
    """How many were applied, by the journal."""
    return int(redis.call("XLEN", f"{{{NAME}}}:log")) - 1


async def soon(told: asyncio.Future[None]) -> None:
    """It is told, some time."""
    async with asyncio.timeout(WAIT_S):
        await told
