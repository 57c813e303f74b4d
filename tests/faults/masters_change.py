"""Sentinels who make another Redis the master: the old one dies, is stopped, is cut off, or hands over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import cast

from faults.cluster import to_its_end
from faults.figures import Figures
from faults.redis_fails import READ_S
from faults.world import World
from redises.node import Node
from redises.sentinels import Sentinels

LAG_S = 0.3
"""The replicas lack up to so much when the master dies."""


def ground(w: World) -> Sentinels:
    """The Redis of this world."""
    return cast("Sentinels", w.cluster.redis)


async def kill_master(w: World, found: Figures, times: int) -> None:
    """The master is killed. It comes back when another one is there, and takes itself for the master at first."""
    for _ in range(times):
        old = await settled(w)
        w.watch.note("fault", f"kill -9 {old}")
        fault = time.monotonic()
        old.kill()
        await replaced(w, found, fault, ground(w).master_changed(old))
        await perhaps_calm(w)
        await back(w, old)


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
        await replaced(w, found, fault, ground(w).master_changed(old))
        await perhaps_calm(w)
        await back(w, old)


async def stop_master(w: World, found: Figures, times: int) -> None:
    """The master is stopped until another one is there, and goes on: what it was sent meanwhile it carries out then."""
    for _ in range(times):
        old = await settled(w)
        w.watch.note("fault", f"SIGSTOP {old}")
        fault = time.monotonic()
        old.stop()
        await replaced(w, found, fault, ground(w).master_changed(old))
        await perhaps_calm(w)
        w.watch.note("fault", f"SIGCONT {old}")
        old.resume()


async def isolate_master(w: World, found: Figures, times: int) -> None:
    """Neither sentinels nor replicas hear of the master any more, and the servers do. Then there are two for a while.

    A follower that is started meanwhile, or loses its connection, finds the new one. It must not lead there while somebody
    leads at the old one.
    """
    for _ in range(times):
        old = await settled(w)
        leader = await w.cluster.leader()
        (follower,) = await w.cluster.followers(leader)
        w.watch.note("fault", f"{old} is cut off")
        fault = time.monotonic()
        old.isolate()
        await ground(w).master_changed(old)
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
        new = await ground(w).master_changed(old)
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


async def settled(w: World) -> Node:
    """Clients anywhere, and a master whose replicas have all it has."""
    await ground(w).settled()
    await w.calm()
    return await ground(w).master()


async def replaced(w: World, found: Figures, fault: float, another: Awaitable[Node]) -> None:
    """Wait until there is another master, and a lock is granted."""
    grant = w.watch.grant_after(fault + READ_S, fresh=False)
    new = await another
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
