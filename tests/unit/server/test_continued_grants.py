"""Grants that a step leaves for later, while no lock is held and no request has a time limit.

Only the timer of the pipeline continues them. Without it, the clients would wait until another client sends a command that sets it.
"""

from __future__ import annotations

import asyncio

import pytest

from genie.core import grant
from genie.protocol.limits import MAX_TIMEOUT_MS
from genie.server.turns import IterationTurns
from support.core.sliced_pipeline import SECRET, Client, World

NAMES = [f"name/{number}" for number in range(9)]


class Scene:
    """A release that has not granted anything yet: one request is grantable, and its queue is the last one to be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grant, "MAX_CANDIDATES", 2)
        self.turns = IterationTurns()
        self.world = World(self.turns)
        self.waiting = Client(self.world)

    async def release(self) -> None:
        holder = Client(self.world)
        holder.lock(*NAMES, "last")
        await self.world.settle()
        for names in ((), *((name,) for name in NAMES)):
            self.waiting.lock(*names, "last", queueTimeout=MAX_TIMEOUT_MS)
        await self.world.settle()
        holder.send("release", id=next(iter(self.world.table.held)))
        pipeline = self.world.pipeline
        for _ in range(100):
            if pipeline._expiry.at == 0 and not pipeline._commits.in_flight:
                break
            await asyncio.sleep(0)
        assert self.world.manager.pending_grants

    async def check_the_grant(self) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        assert not self.world.failures
        assert self.waiting.commands().count("locked") == 1
        assert not self.world.manager.pending_grants


async def test_they_are_continued_in_further_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    await scene.release()
    await scene.check_the_grant()


async def test_they_are_continued_after_an_iteration_without_time_for_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    await scene.release()
    scene.turns.spend(1.0)
    await scene.check_the_grant()


async def test_they_are_continued_if_a_commit_is_in_flight_when_the_timer_fires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    other = Client(scene.world)
    other.send("hello", session=SECRET)
    await scene.world.settle()
    await scene.release()
    scene.world.store.held_back = []
    other.lock("last", queueTimeout=MAX_TIMEOUT_MS)
    for _ in range(5):
        await asyncio.sleep(0)
    assert scene.world.store.held_back, "a commit is in flight"
    scene.world.store.acknowledge()
    await scene.check_the_grant()
