"""Asks those who do not lead, again and again, until one of them does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from faults.cluster import LEAD_S, Cluster
from faults.link import Address, Link
from faults.watch import Watch
from servers import Genie

EVERY_S = 0.002


async def answers(addresses: Sequence[Address], watch: Watch) -> float:
    """When the first of these answers a ping by a pong, on a connection that was there before."""
    asking = [asyncio.create_task(_asked(address, watch)) for address in addresses]
    try:
        async with asyncio.timeout(LEAD_S):
            done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            return min(task.result() for task in done)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _asked(address: Address, watch: Watch) -> float:
    link = await Link.open(watch, address, set())
    try:
        while True:
            link.send("ping")
            command, _ = await link.next(LEAD_S)
            if command == "pong":
                return time.monotonic()
            await asyncio.sleep(EVERY_S)
    finally:
        link.abort()


async def asking(cluster: Cluster, watch: Watch) -> tuple[Genie, asyncio.Task[float]]:
    """Begin to ask the followers, until one of them leads: who leads now, and what returns when that was."""
    leader, followers = await cluster.followed()
    answer = asyncio.create_task(answers([cluster.address(server) for server in followers], watch))
    await asyncio.sleep(0.05)
    return leader, answer
