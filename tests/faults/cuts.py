"""Connections that are cut."""

from __future__ import annotations

import asyncio
import time

from faults.cluster import LEAD_S
from faults.figures import Figures
from faults.watch import Broken
from faults.world import World
from proxy import PLACES, Cut, Proxy

SAID = (
    ("hello", "request", "release", "extend", "ping"),
    ("welcome", "queued", "locked", "released", "extended", "pong"),
)
CLIENT_CUTS = [Cut(not side, kind, place) for side in (0, 1) for kind in SAID[side] for place in PLACES]
REDIS_CUTS = [
    *[Cut(to_server=True, kind=kind, place=place) for kind in ("EVALSHA", "XREAD") for place in PLACES],
    *[Cut(to_server=False, kind="reply", place=place) for place in PLACES],
]
COMMIT_CUTS = REDIS_CUTS[:3]


async def cut_clients(w: World, found: Figures, times: int) -> None:
    """A connection of a client is cut at each kind of message, in each direction."""
    await cut(w, found, times, w.front, CLIENT_CUTS)


async def cut_redis(w: World, found: Figures, times: int) -> None:
    """A connection of a server to Redis is cut: at a commit, at a look into the journal, at a reply."""
    await cut(w, found, times, w.back, REDIS_CUTS)


async def cut_and_kill(w: World, found: Figures, times: int) -> None:
    """A server's connection to Redis is cut at a commit, and just then it is killed: only Redis knows what became of it."""
    for _ in range(times):
        await w.calm()
        what = w.random.choice(COMMIT_CUTS)
        for proxy in w.back:  # the one behind the leader cuts, whichever that is by then
            proxy.arm(what)
        await fires(w.back, what)
        leader = next(server for server, proxy in zip(w.cluster.servers, w.back, strict=True) if proxy.fired.is_set())
        await asyncio.sleep(w.random.choice([0, w.random.uniform(0, 0.01)]))
        fault = w.cluster.kill(leader)
        grant = w.watch.grant_after(fault, fresh=True)
        for proxy in w.back:
            proxy.arm(None)
        await w.cluster.restart(leader)
        found.away_s.append(await w.waited(grant) - fault)
        found.faults += 1


async def cut(w: World, found: Figures, times: int, proxies: list[Proxy], kinds: list[Cut]) -> None:
    """Make the cuts in turns, in an order of their own each time; now and then one falls upon another."""
    order: list[Cut] = []
    while found.faults < times:
        if not order:
            order = w.random.sample(kinds, len(kinds))
        what = order.pop()
        for proxy in proxies:
            proxy.arm(what)
        await fires(proxies, what)
        fault = time.monotonic()
        w.watch.note("fault", f"cut {what}")
        found.faults += 1
        found.away_s.append(await w.waited(w.watch.grant_after(fault, fresh=False)) - fault)
        if w.random.random() < 0.7:  # else the next one comes upon those who are not yet back
            await w.everybody_served()


async def fires(proxies: list[Proxy], what: Cut) -> None:
    """Wait until one of them has cut."""
    fired = [asyncio.create_task(proxy.fired.wait()) for proxy in proxies]
    done, late = await asyncio.wait(fired, timeout=LEAD_S, return_when=asyncio.FIRST_COMPLETED)
    for task in late:
        task.cancel()
    if not done:
        raise Broken(f"there was nothing to cut {what} for {LEAD_S:g} s")
