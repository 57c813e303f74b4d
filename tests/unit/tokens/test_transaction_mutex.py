"""Asks of one transaction take turns."""

from __future__ import annotations

import asyncio

from genie.tokens.sherdlock.search import TransactionMutex
from sherdlock_world import settle, virtual


@virtual
async def test_a_turn_that_came_to_somebody_who_is_cancelled_goes_to_the_next():
    mutex, order = TransactionMutex(), []

    async def take(name: str) -> None:
        async with mutex.hold("tx"):
            order.append(name)

    async with mutex.hold("tx"):
        tasks = [asyncio.create_task(take(name)) for name in ("second", "third", "fourth")]
        await settle()
        async with mutex.hold("another"):
            order.append("another")
        tasks[1].cancel()
    tasks[0].cancel()  # its turn has come, and it does not know yet
    await settle()
    assert order == ["another", "fourth"]
    assert mutex._locks == {}
