"""A store under test."""

from __future__ import annotations

import asyncio

from genie.storage.base import Batch, Store


async def commit(store: Store, batch: Batch) -> None:
    """Commit a batch and wait until it is stored. Raises what the store says instead."""
    stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: BaseException | None) -> None:
        if error is None:
            stored.set_result(None)
        else:
            stored.set_exception(error)

    store.commit(batch, done)
    async with asyncio.timeout(30):
        await stored
