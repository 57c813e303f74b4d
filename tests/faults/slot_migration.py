"""Faults: the slot of the locks is migrated in a Redis cluster."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from faults.environment import Environment
from faults.primary_failures import settled
from faults.results import Results
from redises.cluster import Cluster

PAUSES_S = ((0, 0), (0, 0.3), (0.5, 1.5))
"""Ranges of the pauses between the steps of a migration: none, a part of the lease, or about all of it."""


def redis_of(env: Environment) -> Cluster:
    """Return the Redis deployment, which must be a cluster."""
    return cast("Cluster", env.cluster.redis)


async def move_slot(env: Environment, results: Results, times: int) -> None:
    """Migrate the slot to another primary, with pauses between the steps, in which the keys are on two nodes."""

    async def pause() -> None:
        await asyncio.sleep(env.random.uniform(*env.random.choice(PAUSES_S)))

    for _ in range(times):
        old = await settled(env)
        to = env.random.choice([node for node in await redis_of(env).masters() if node is not old])
        env.checker.note("fault", f"slot migration from {old} to {to} started")
        fault = time.monotonic()
        await redis_of(env).move("genie", to, begun=pause, half=pause, moved=pause)
        env.checker.note("fault", f"slot migration to {to} completed")
        completed_at = time.monotonic()
        granted = await env.wait_for(env.checker.grant_after(completed_at, fresh=False))
        results.recovery_delays_s.append(granted - completed_at)
        results.grant_delays_s.append(env.checker.longest_gap(fault))
        results.faults += 1
