"""Faults: Redis is killed or stopped."""

from __future__ import annotations

import asyncio
import signal
import time

from faults.checker import Violation
from faults.cluster import start_in_thread
from faults.environment import Environment
from faults.results import Results
from faults.stopped_leader import wait_until_closed

LONG_STOP_S = 30.0
READ_S = 0.02
"""After this time the clients have usually read the messages from before a fault of Redis."""


async def kill_redis(env: Environment, results: Results, times: int) -> None:
    """Kill Redis and restart it: at once, after a part of the lease, or after more than the lease."""
    for _ in range(times):
        await env.settle()
        redis = await env.cluster.redis.node_of()
        env.checker.note("fault", "kill -9 Redis")
        fault = time.monotonic()
        redis.kill()
        grant = env.checker.grant_after(fault + READ_S, fresh=False)
        await asyncio.sleep(env.random.choice([0, env.random.uniform(0, 0.6), env.random.uniform(1.2, 2.5)]))
        await start_in_thread(redis.start)
        env.checker.note("fault", "Redis restarted")
        recovered_at = time.monotonic()
        granted = await env.wait_for(grant)
        results.grant_delays_s.append(granted - fault)
        results.recovery_delays_s.append(max(0.0, granted - recovered_at))
        results.faults += 1


async def stop_redis(env: Environment, results: Results, times: int, stop_s: float = LONG_STOP_S) -> None:
    """Stop Redis for longer than the lease."""
    for _ in range(times):
        await env.settle()
        redis = await env.cluster.redis.node_of()
        address = env.cluster.address(await env.cluster.leader())
        fault = env.cluster.send(redis, signal.SIGSTOP)
        await wait_until_closed(
            [connection for connection in env.connections if connection.address == address]
        )  # it follows all messages on them
        await asyncio.sleep(READ_S)  # so that the clients have processed the last messages
        grant = env.checker.grant_after(time.monotonic(), fresh=False)
        await asyncio.sleep(max(0.0, fault + stop_s - time.monotonic()))
        if grant.done():
            raise Violation(f"a lock was granted {grant.result() - fault:.3f} s after Redis was stopped")
        recovered_at = env.cluster.send(redis, signal.SIGCONT)
        granted = await env.wait_for(grant)
        results.grant_delays_s.append(granted - fault)
        results.recovery_delays_s.append(granted - recovered_at)
        results.faults += 1
