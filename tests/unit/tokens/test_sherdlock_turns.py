"""Asks of one transaction take turns."""

from __future__ import annotations

import asyncio

from genie.tokens.sherdlock.search import Turns
from sherdlock_world import settle, virtual


@virtual
async def test_a_turn_that_came_to_somebody_who_is_cancelled_goes_to_the_next():
    turns, order = Turns(), []

    async def take(name: str) -> None:
        async with turns.turn("tx"):
            order.append(name)

    async with turns.turn("tx"):
        tasks = [asyncio.create_task(take(name)) for name in ("second", "third", "fourth")]
        await settle()
        async with turns.turn("another"):
            order.append("another")
        tasks[1].cancel()
    tasks[0].cancel()  # its turn has come, and it does not know yet
    await settle()
    assert order == ["another", "fourth"]
    assert turns._next == {}
