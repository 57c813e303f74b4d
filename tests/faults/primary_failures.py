"""Faults: the Redis primary is killed or stopped, with sentinels or in a cluster."""

from __future__ import annotations

import time
from typing import Protocol, cast

from faults.cluster import start_in_thread
from faults.environment import Environment
from faults.redis_failures import READ_S
from faults.results import Results
from redises.node import Node


class Deployment(Protocol):
    """Redis with replicas: sentinels or a cluster."""

    async def settled(self) -> object: ...

    async def node_of(self) -> Node: ...

    async def successor(self, old: Node, /) -> Node: ...


async def kill_primary(env: Environment, results: Results, times: int) -> None:
    """Kill the primary, and restart it after the failover: at first it still considers itself the primary."""
    for _ in range(times):
        old = await settled(env)
        env.checker.note("fault", f"kill -9 {old}")
        fault = time.monotonic()
        old.kill()
        await wait_for_failover(env, results, fault, old)
        await sometimes_settle(env)
        await restart(env, old)


async def stop_primary(env: Environment, results: Results, times: int) -> None:
    """Stop the primary until after the failover: when it continues, it executes the commands that were sent meanwhile."""
    for _ in range(times):
        old = await settled(env)
        env.checker.note("fault", f"SIGSTOP {old}")
        fault = time.monotonic()
        old.stop()
        await wait_for_failover(env, results, fault, old)
        await sometimes_settle(env)
        env.checker.note("fault", f"SIGCONT {old}")
        old.resume()


async def settled(env: Environment) -> Node:
    """Wait until Redis is settled and all clients are served; return the primary."""
    deployment = cast("Deployment", env.cluster.redis)
    await deployment.settled()
    await env.settle()
    return await deployment.node_of()


async def wait_for_failover(env: Environment, results: Results, fault: float, old: Node) -> None:
    """Wait until there is another primary, and a lock is granted; record the delays."""
    grant = env.checker.grant_after(fault + READ_S, fresh=False)
    new = await cast("Deployment", env.cluster.redis).successor(old)
    failed_over_at = time.monotonic()
    env.checker.note("fault", f"{new} is the primary")
    granted = await env.wait_for(grant)
    results.grant_delays_s.append(granted - fault)
    results.recovery_delays_s.append(max(0.0, granted - failed_over_at))
    results.faults += 1


async def sometimes_settle(env: Environment) -> None:
    """Wait until all clients are served, with probability one half."""
    if env.random.random() < 0.5:
        await env.settle()


async def restart(env: Environment, old: Node) -> None:
    """Restart a Redis process."""
    await start_in_thread(old.restart)
    env.checker.note("fault", f"{old} restarted")
