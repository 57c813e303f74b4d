"""`TransactionMutex` serializes the requests of one transaction."""

from __future__ import annotations

import asyncio

from genie_tokens.sherdlock.search import TransactionMutex
from sherdlock_world import settle, virtual_time


@virtual_time
async def test_a_mutex_granted_to_a_cancelled_task_passes_to_the_next():
    mutex, order = TransactionMutex(), []

    async def record(name: str) -> None:
        async with mutex.hold("tx"):
            order.append(name)

    async with mutex.hold("tx"):
        tasks = [asyncio.create_task(record(name)) for name in ("second", "third", "fourth")]
        await settle()
        async with mutex.hold("another"):
            order.append("another")
        tasks[1].cancel()
    tasks[0].cancel()  # it has been granted the mutex, but has not run yet
    await settle()
    assert order == ["another", "fourth"]
    assert mutex._lock_by_transaction == {}
