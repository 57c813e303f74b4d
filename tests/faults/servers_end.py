"""Servers that die, and servers that are told to end."""

from __future__ import annotations

import asyncio
import signal
import time

from faults.figures import Figures
from faults.many import hold_many, release_many
from faults.prober import asking
from faults.watch import Broken
from faults.world import World, taken_over

READ_ON_S = 2.0
"""A follower may take so long to read of the many locks what was locked last."""


async def kill_alone(w: World, found: Figures, times: int) -> None:
    """The only server is killed and started again at once."""
    for _ in range(times):
        await w.calm()
        (server,) = w.cluster.servers
        fault = w.cluster.kill(server)
        grant = w.watch.grant_after(fault, fresh=True)
        await w.cluster.restart(server)
        found.answer_s.append(time.monotonic() - fault)
        found.away_s.append(await w.waited(grant) - fault)
        found.faults += 1


async def kill_leader(w: World, found: Figures, times: int) -> None:
    """The leader is killed. A follower takes over when the lease is over; then the killed one comes back to follow."""
    for _ in range(times):
        await w.calm()
        leader, answer = await asking(w.cluster, w.watch)
        fault = w.cluster.kill(leader)
        await taken_over(w, found, fault, answer)
        if w.random.random() < 0.5:  # else it comes back while the clients are still on their way
            await w.calm()
        await w.cluster.restart(leader)


async def kill_and_restart(w: World, found: Figures, times: int) -> None:
    """The leader is killed and started again at once, or a while later: it and its followers reach for the lead."""
    for _ in range(times):
        await w.calm()
        leader = await w.cluster.leader()
        fault = w.cluster.kill(leader)
        grant = w.watch.grant_after(fault, fresh=True)
        await asyncio.sleep(w.random.choice([0, w.random.uniform(0, 1.2)]))
        await w.cluster.restart(leader)
        found.away_s.append(await w.waited(grant) - fault)
        found.faults += 1


async def resign(w: World, found: Figures, times: int) -> None:
    """SIGTERM for the leader: it says goodbye, and a follower answers at once."""
    for _ in range(times):
        await w.calm()
        leader, answer = await asking(w.cluster, w.watch)
        fault = w.cluster.send(leader, signal.SIGTERM)
        await taken_over(w, found, fault, answer)
        if (status := await asyncio.to_thread(leader.wait)) != 0:
            raise Broken(f"{leader.port} ended with status {status}")
        await w.cluster.restart(leader)


async def kill_with_many(w: World, found: Figures, times: int, many: int = 100_000) -> None:
    """The leader is killed while many more locks are held, half of them by sessions."""
    ids = await hold_many(w, many)
    await asyncio.sleep(READ_ON_S)
    for _ in range(times):
        await w.calm()
        leader, answer = await asking(w.cluster, w.watch)
        fault = w.cluster.kill(leader)
        await taken_over(w, found, fault, answer)
        await w.cluster.restart(leader, caught_up=True)
    await release_many(w, ids)
