"""Faults: servers are killed or terminated."""

from __future__ import annotations

import asyncio
import signal
import time

from faults.checker import Violation
from faults.environment import Environment, wait_for_takeover
from faults.many_locks import hold_many, release_many
from faults.prober import start_probing
from faults.results import Results

REPLICATION_S = 2.0
"""Time for a follower to replicate the many locks."""


async def kill_only_server(env: Environment, results: Results, times: int) -> None:
    """Kill the only server, and restart it at once."""
    for _ in range(times):
        await env.settle()
        (server,) = env.cluster.servers
        fault = env.cluster.kill(server)
        grant = env.checker.grant_after(fault, fresh=True)
        await env.cluster.restart(server)
        results.reply_delays_s.append(time.monotonic() - fault)
        results.grant_delays_s.append(await env.wait_for(grant) - fault)
        results.faults += 1


async def kill_leader(env: Environment, results: Results, times: int) -> None:
    """Kill the leader. A follower takes over when the lease has expired; then the killed server is restarted."""
    for _ in range(times):
        await env.settle()
        leader, pong_at = await start_probing(env.cluster, env.checker)
        fault = env.cluster.kill(leader)
        await wait_for_takeover(env, results, fault, pong_at)
        if env.random.random() < 0.5:  # else it is restarted before all clients have reconnected
            await env.settle()
        await env.cluster.restart(leader)


async def kill_and_restart(env: Environment, results: Results, times: int) -> None:
    """Kill the leader, and restart it at once or shortly after, so that it competes with the follower."""
    for _ in range(times):
        await env.settle()
        leader = await env.cluster.leader()
        fault = env.cluster.kill(leader)
        grant = env.checker.grant_after(fault, fresh=True)
        await asyncio.sleep(env.random.choice([0, env.random.uniform(0, 1.2)]))
        await env.cluster.restart(leader)
        results.grant_delays_s.append(await env.wait_for(grant) - fault)
        results.faults += 1


async def resign(env: Environment, results: Results, times: int) -> None:
    """Send SIGTERM to the leader: it resigns, and a follower takes over at once."""
    for _ in range(times):
        await env.settle()
        leader, pong_at = await start_probing(env.cluster, env.checker)
        fault = env.cluster.send(leader, signal.SIGTERM)
        await wait_for_takeover(env, results, fault, pong_at)
        if (status := await asyncio.to_thread(leader.wait)) != 0:
            raise Violation(f"{leader.port} ended with status {status}")
        await env.cluster.restart(leader)


async def kill_with_many(env: Environment, results: Results, times: int, many: int = 100_000) -> None:
    """Kill the leader while many more locks are held, half of them by sessions."""
    ids = await hold_many(env, many)
    await asyncio.sleep(REPLICATION_S)
    for _ in range(times):
        await env.settle()
        leader, pong_at = await start_probing(env.cluster, env.checker)
        fault = env.cluster.kill(leader)
        await wait_for_takeover(env, results, fault, pong_at)
        await env.cluster.restart(leader, caught_up=True)
    await release_many(env, ids)
