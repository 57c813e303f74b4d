"""Commits and the lease: another server may lead when the lease has expired, so a later acknowledgement counts as none."""

from __future__ import annotations

import asyncio

from genie.storage.store import LeadershipLost
from support.core.sliced_pipeline import Client, World, tick

LEASE_S = 3.0


async def iterations() -> None:
    """Let the event loop run what is ready."""
    for _ in range(5):
        await asyncio.sleep(0)


def begin_commit(world: World) -> Client:
    """Return a client whose request is in a commit that the store has not acknowledged."""
    client = Client(world)
    world.store.held_back = []
    client.lock("a")
    return client


async def test_a_commit_within_the_lease_is_acknowledged_to_the_client() -> None:
    world = World()
    client = begin_commit(world)
    await iterations()
    world.pipeline._commits._sent_at -= LEASE_S - 0.5
    world.store.acknowledge()
    await world.settle()
    assert client.commands().count("locked") == 1
    world.pipeline.stop()


async def test_a_commit_that_took_longer_than_the_lease_has_failed() -> None:
    world = World()
    client = begin_commit(world)
    await iterations()
    world.pipeline._commits._sent_at -= LEASE_S + 0.5
    world.store.acknowledge()
    await iterations()
    (failure,) = world.failures
    assert isinstance(failure, LeadershipLost)
    assert "longer than the lease of 3 s" in str(failure)
    assert client.commands().count("locked") == 0


async def test_a_leader_without_an_acknowledgement_steps_down_when_its_lease_expires() -> None:
    world = World()
    begin_commit(world)
    await iterations()
    world.pipeline._commits._sent_at -= LEASE_S + 0.5
    tick(world.pipeline)
    (failure,) = world.failures
    assert isinstance(failure, LeadershipLost)
    assert "within the lease of 3 s" in str(failure)
