"""The master of the locks dies or is stopped where Redis has replicas: by sentinels, or in a cluster."""

from __future__ import annotations

import time
from typing import Protocol, cast

from faults.cluster import to_its_end
from faults.figures import Figures
from faults.redis_fails import READ_S
from faults.world import World
from redises.node import Node


class Several(Protocol):
    """Redis with replicas, however it is told who the master is."""

    async def settled(self) -> object: ...

    async def home(self) -> Node: ...

    async def successor(self, old: Node, /) -> Node: ...


async def kill_master(w: World, found: Figures, times: int) -> None:
    """The master is killed. It comes back when another one is there, and takes itself for the master at first."""
    for _ in range(times):
        old = await settled(w)
        w.watch.note("fault", f"kill -9 {old}")
        fault = time.monotonic()
        old.kill()
        await replaced(w, found, fault, old)
        await perhaps_calm(w)
        await back(w, old)


async def stop_master(w: World, found: Figures, times: int) -> None:
    """The master is stopped until another one is there, and goes on: what it was sent meanwhile it carries out then."""
    for _ in range(times):
        old = await settled(w)
        w.watch.note("fault", f"SIGSTOP {old}")
        fault = time.monotonic()
        old.stop()
        await replaced(w, found, fault, old)
        await perhaps_calm(w)
        w.watch.note("fault", f"SIGCONT {old}")
        old.resume()


async def settled(w: World) -> Node:
    """Clients anywhere, and Redis with all up that is up, and replicas that have what their master has: the master."""
    several = cast("Several", w.cluster.redis)
    await several.settled()
    await w.calm()
    return await several.home()


async def replaced(w: World, found: Figures, fault: float, old: Node) -> None:
    """Wait until there is another master, and a lock is granted."""
    grant = w.watch.grant_after(fault + READ_S, fresh=False)
    new = await cast("Several", w.cluster.redis).successor(old)
    known = time.monotonic()
    w.watch.note("fault", f"{new} is the master")
    granted = await w.waited(grant)
    found.away_s.append(granted - fault)
    found.back_s.append(max(0.0, granted - known))
    found.faults += 1


async def perhaps_calm(w: World) -> None:
    """The next thing happens while the clients are still on their way, or later."""
    if w.random.random() < 0.5:
        await w.calm()


async def back(w: World, old: Node) -> None:
    """Start it again."""
    await to_its_end(old.restart)
    w.watch.note("fault", f"{old} is back")
