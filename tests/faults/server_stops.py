"""A leader that is stopped for longer than its lease, and goes on."""

from __future__ import annotations

import asyncio
import signal
import time

from faults.cluster import LEAD_S
from faults.figures import Figures
from faults.link import Link
from faults.prober import asking
from faults.watch import Broken
from faults.world import World, taken_over


async def stop_leader(w: World, found: Figures, times: int) -> None:
    """The leader is stopped until a follower leads, and goes on: nothing new is said, every connection closed, it follows."""
    for _ in range(times):
        await w.calm()
        leader, answer = await asking(w.cluster, w.watch)
        fault = w.cluster.send(leader, signal.SIGSTOP)
        await taken_over(w, found, fault, answer)
        await w.everybody_served()
        address = w.cluster.address(leader)
        before = [link for link in w.links if link.address == address and (link.heard_at or fault) < fault]
        w.watch.counts["connections left to the stopped leader"] += len(before)
        for number, link in enumerate(before):
            link.send("ping")
            link.send("request", resources=[f"exclusive:late/{number}"])
        w.watch.silenced[address] = fault
        w.cluster.send(leader, signal.SIGCONT)
        await closed(before)
        next_, _ = await w.cluster.followed()
        if next_ is leader:
            raise Broken(f"{leader.port} leads again")
        await w.calm()
        del w.watch.silenced[address]


async def closed(links: list[Link]) -> None:
    """Until the server has ended all of these."""
    end = time.monotonic() + LEAD_S
    while any(not link.closed for link in links):
        if time.monotonic() > end:
            raise Broken(f"{sum(not link.closed for link in links)} connections to the old leader are left open")
        await asyncio.sleep(0.005)
