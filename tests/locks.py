"""Stores locks in Redis one after another, as the pipeline does, and reads what is stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from genie.core import LockManager, Request
from genie.storage.redis.store import RedisStore
from genie.storage.store import Batch, Node, StateMachine
from servers import WAIT_S, Redis
from stored import last_position, stored_records
from stores import LEASE_MS

NAME = "genie"


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
