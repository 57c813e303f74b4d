"""Faults: failovers by sentinels, with lagging replicas, with a partitioned primary, or on request."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from faults.environment import Environment
from faults.primary_failures import restart, settled, sometimes_settle, wait_for_failover
from faults.results import Results
from redises.node import Node
from redises.sentinels import Sentinels

LAG_S = 0.3
"""The maximum lag of the replicas when the primary is killed."""


def redis_of(env: Environment) -> Sentinels:
    """Return the Redis deployment, which must have sentinels."""
    return cast("Sentinels", env.cluster.redis)


async def kill_lagging(env: Environment, results: Results, times: int) -> None:
    """Stop the replication for a while, in which locks are granted and released; then kill the primary."""
    for _ in range(times):
        old = await settled(env)
        env.checker.note("fault", f"replication of {old} stopped")
        old.stop_replication()
        await asyncio.sleep(env.random.uniform(0, LAG_S))
        env.checker.note("fault", f"kill -9 {old}")
        fault = time.monotonic()
        old.kill()
        old.discard_in_flight()
        await wait_for_failover(env, results, fault, old)
        await sometimes_settle(env)
        await restart(env, old)


async def isolate_primary(env: Environment, results: Results, times: int) -> None:
    """Partition the primary from sentinels and replicas, but not from the servers, so that there are two primaries.

    A follower that is started meanwhile, or loses its connection, finds the new one. It must not lead there while another
    server leads at the old one.
    """
    for _ in range(times):
        old = await settled(env)
        _, (follower,) = await env.cluster.leader_and_followers()
        env.checker.note("fault", f"{old} partitioned")
        fault = time.monotonic()
        old.isolate()
        await redis_of(env).successor(old)
        if env.random.random() < 0.5:
            env.cluster.kill(follower)
            await env.cluster.restart(follower)
        else:
            env.checker.note("fault", "connection of the follower cut")
            await cut_readers(old)
        await env.wait_until_all_served()
        await sometimes_settle(env)
        env.checker.note("fault", f"{old} reachable again")
        old.rejoin()
        await env.wait_until_all_served()
        results.grant_delays_s.append(env.checker.longest_gap(fault))
        results.faults += 1


async def fail_over(env: Environment, results: Results, times: int) -> None:
    """SENTINEL FAILOVER: the old primary serves until the new one takes over."""
    for _ in range(times):
        old = await settled(env)
        env.checker.note("fault", f"SENTINEL FAILOVER of {old}")
        fault = time.monotonic()
        await redis_of(env).begin_failover()
        new = await redis_of(env).successor(old)
        env.checker.note("fault", f"{new} is the primary")
        await env.wait_until_all_served()
        await redis_of(env).settled()
        results.grant_delays_s.append(env.checker.longest_gap(fault))
        results.faults += 1


async def cut_readers(redis: Node) -> None:
    """Cut the connections on which the log is read."""
    for line in (await redis.ask("CLIENT", "LIST", "TYPE", "normal")).splitlines():
        client = dict(part.partition("=")[::2] for part in line.split())
        if client["cmd"] == "xread":
            await redis.ask("CLIENT", "KILL", "ID", client["id"])
