"""Sentinels who make another Redis the master: the old one is behind with its replicas, is cut off, or hands over."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from faults.figures import Figures
from faults.masters_die import back, perhaps_calm, replaced, settled
from faults.world import World
from redises.node import Node
from redises.sentinels import Sentinels

LAG_S = 0.3
"""The replicas lack up to so much when the master dies."""


def ground(w: World) -> Sentinels:
    """The Redis of this world."""
    return cast("Sentinels", w.cluster.redis)


async def kill_lagging(w: World, found: Figures, times: int) -> None:
    """Nothing gets to the replicas for a while, in which locks are granted and released. Then the master is killed."""
    for _ in range(times):
        old = await settled(w)
        w.watch.note("fault", f"the replicas of {old} hear nothing")
        old.hush()
        await asyncio.sleep(w.random.uniform(0, LAG_S))
        w.watch.note("fault", f"kill -9 {old}")
        fault = time.monotonic()
        old.kill()
        old.forget()
        await replaced(w, found, fault, old)
        await perhaps_calm(w)
        await back(w, old)


async def isolate_master(w: World, found: Figures, times: int) -> None:
    """Neither sentinels nor replicas hear of the master any more, and the servers do. Then there are two for a while.

    A follower that is started meanwhile, or loses its connection, finds the new one. It must not lead there while somebody
    leads at the old one.
    """
    for _ in range(times):
        old = await settled(w)
        _, (follower,) = await w.cluster.followed()
        w.watch.note("fault", f"{old} is cut off")
        fault = time.monotonic()
        old.isolate()
        await ground(w).successor(old)
        if w.random.random() < 0.5:
            w.cluster.kill(follower)
            await w.cluster.restart(follower)
        else:
            w.watch.note("fault", "the follower loses its connection")
            await cut_readers(old)
        await w.everybody_served()
        await perhaps_calm(w)
        w.watch.note("fault", f"{old} is there again")
        old.rejoin()
        await w.everybody_served()
        found.away_s.append(w.watch.silence(fault))
        found.faults += 1


async def hand_over(w: World, found: Figures, times: int) -> None:
    """SENTINEL FAILOVER, which stops nobody before the next one is there."""
    for _ in range(times):
        old = await settled(w)
        w.watch.note("fault", f"SENTINEL FAILOVER of {old}")
        fault = time.monotonic()
        await ground(w).begin_failover()
        new = await ground(w).successor(old)
        w.watch.note("fault", f"{new} is the master")
        await w.everybody_served()
        await ground(w).settled()
        found.away_s.append(w.watch.silence(fault))
        found.faults += 1


async def cut_readers(redis: Node) -> None:
    """Cut the connections on which a journal is read."""
    for line in (await redis.ask("CLIENT", "LIST", "TYPE", "normal")).splitlines():
        client = dict(part.partition("=")[::2] for part in line.split())
        if client["cmd"] == "xread":
            await redis.ask("CLIENT", "KILL", "ID", client["id"])
