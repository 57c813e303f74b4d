"""Measures a takeover: pings the followers until one of them replies as the leader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from faults.checker import Checker
from faults.cluster import LEADER_TIMEOUT_S, Cluster
from faults.connection import Connection
from support.processes.servers import Genie

PING_INTERVAL_S = 0.002


async def wait_for_pong(connections: Sequence[Connection]) -> float:
    """Return when the first of these servers replies to a ping by a pong."""
    probes = [asyncio.create_task(_ping_until_pong(connection)) for connection in connections]
    try:
        async with asyncio.timeout(LEADER_TIMEOUT_S):
            done, _ = await asyncio.wait(probes, return_when=asyncio.FIRST_COMPLETED)
            return min(task.result() for task in done)
    finally:
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


async def _ping_until_pong(connection: Connection) -> float:
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
    connections = [await Connection.open(checker, cluster.address(server), set()) for server in followers]
    return leader, asyncio.create_task(wait_for_pong(connections))
