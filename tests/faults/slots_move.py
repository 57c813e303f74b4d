"""A cluster of Redis, in which the slot of the locks moves, and whose members die or are stopped."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from faults.cluster import to_its_end
from faults.figures import Figures
from faults.masters_change import perhaps_calm, replaced
from faults.world import World
from redises.cluster import Cluster, Member

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


async def kill_member(w: World, found: Figures, times: int) -> None:
    """The master that has the slot is killed; its replica takes over. It comes back as a replica."""
    for _ in range(times):
        old = await settled(w)
        w.watch.note("fault", f"kill -9 {old}")
        fault = time.monotonic()
        old.kill()
        await replaced(w, found, fault, ground(w).failed_over(old))
        await perhaps_calm(w)
        await to_its_end(old.restart)
        w.watch.note("fault", f"{old} is back")


async def stop_member(w: World, found: Figures, times: int) -> None:
    """The master that has the slot is stopped until its replica has taken over, and goes on."""
    for _ in range(times):
        old = await settled(w)
        w.watch.note("fault", f"SIGSTOP {old}")
        fault = time.monotonic()
        old.stop()
        await replaced(w, found, fault, ground(w).failed_over(old))
        await perhaps_calm(w)
        w.watch.note("fault", f"SIGCONT {old}")
        old.resume()


async def settled(w: World) -> Member:
    """Clients anywhere, and a cluster in which all agree, and replicas have what their masters have."""
    await ground(w).settled()
    await w.calm()
    return await ground(w).owner()
