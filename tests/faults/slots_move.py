"""A cluster of Redis, in which the slot of the locks moves."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from faults.figures import Figures
from faults.masters_die import settled
from faults.world import World
from redises.cluster import Cluster

PAUSES_S = ((0, 0), (0, 0.3), (0.5, 1.5))
"""So long may it take until the next step of a move: nothing, a part of the lease, or about all of it."""


def ground(w: World) -> Cluster:
    """The Redis of this world."""
    return cast("Cluster", w.cluster.redis)


async def move_slot(w: World, found: Figures, times: int) -> None:
    """The slot goes to another master, with pauses between the steps: some of the keys are here, and some there."""

    async def pause() -> None:
        await asyncio.sleep(w.random.uniform(*w.random.choice(PAUSES_S)))

    for _ in range(times):
        old = await settled(w)
        to = w.random.choice([node for node in await ground(w).masters() if node is not old])
        w.watch.note("fault", f"the slot moves from {old} to {to}")
        fault = time.monotonic()
        await ground(w).move("genie", to, begun=pause, half=pause, moved=pause)
        w.watch.note("fault", f"{to} has the slot")
        known = time.monotonic()
        granted = await w.waited(w.watch.grant_after(known, fresh=False))
        found.back_s.append(granted - known)
        found.away_s.append(w.watch.silence(fault))
        found.faults += 1
