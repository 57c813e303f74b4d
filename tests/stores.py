"""Opens a store, and commits to it."""

from __future__ import annotations

import asyncio

from genie.storage.store import Batch, Node, StateMachine, Store
from servers import WAIT_S


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


LEASE_MS = 50


async def opened(store: Store) -> StateMachine:
    """Open a store: take over after the (short) lease of a former leader."""
    async with asyncio.timeout(WAIT_S):
        return await store.open(Node("here:1", "here:1", LEASE_MS), Batch, lambda _: None)
