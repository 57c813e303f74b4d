"""Measures a takeover: pings the followers until one of them replies as the leader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from faults.checker import Checker
from faults.cluster import LEADER_TIMEOUT_S, Cluster
from faults.connection import Address, Connection
from support.processes.servers import Genie

PING_INTERVAL_S = 0.002


async def wait_for_pong(addresses: Sequence[Address], checker: Checker) -> float:
    """Return when the first of these servers replies to a ping by a pong, on a connection that was open before."""
    probes = [asyncio.create_task(_ping_until_pong(address, checker)) for address in addresses]
    try:
        async with asyncio.timeout(LEADER_TIMEOUT_S):
            done, _ = await asyncio.wait(probes, return_when=asyncio.FIRST_COMPLETED)
            return min(task.result() for task in done)
    finally:
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


async def _ping_until_pong(address: Address, checker: Checker) -> float:
    connection = await Connection.open(checker, address, set())
    try:
        while True:
            connection.send("ping")
            command, _ = await connection.next(LEADER_TIMEOUT_S)
            if command == "pong":
                return time.monotonic()
            await asyncio.sleep(PING_INTERVAL_S)
    finally:
        connection.abort()


async def start_probing(cluster: Cluster, checker: Checker) -> tuple[Genie, asyncio.Task[float]]:
    """Start pinging the followers; return the leader, and a task that returns when a follower replies as the leader."""
    leader, followers = await cluster.leader_and_followers()
    pong_at = asyncio.create_task(wait_for_pong([cluster.address(server) for server in followers], checker))
    await asyncio.sleep(0.05)
    return leader, pong_at
