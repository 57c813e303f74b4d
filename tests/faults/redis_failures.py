"""Faults: Redis is killed or stopped, or loses the last second of its file."""

from __future__ import annotations

import asyncio
import signal
import time

from faults.append_only_file import AppendOnlyFile
from faults.checker import Violation
from faults.cluster import start_in_thread
from faults.environment import Environment
from faults.many_locks import hold_many, release_many
from faults.results import Results
from faults.stopped_leader import wait_until_closed
from support.processes.servers import Redis

LONG_STOP_S = 30.0
READ_S = 0.02
"""After this time the clients have usually read the messages from before a fault of Redis."""
LOST_S = 1.0
"""How much `appendfsync everysec` may lose."""
RESTORE_S = 0.05
"""Restoring the commits takes about this long."""


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


async def lose_last_second(env: Environment, results: Results, times: int, many: int = 5_000) -> None:
    """Kill Redis, remove the last second from its file, and restart it. The servers must restore the lost commits.

    In one of four cases Redis is killed again while the commits are restored. `many` other locks are held all the time.
    """
    redis = await env.cluster.redis.node_of()
    ids = await hold_many(env, many)
    file = AppendOnlyFile(redis)
    watching = asyncio.create_task(file.watch())
    try:
        for _ in range(times):
            await env.settle()
            await asyncio.sleep(env.random.uniform(0, 1.5 * LOST_S))  # else the last restore is always lost
            before = state_key(redis)
            fault, grant = await kill_and_cut(env, redis, file, LOST_S)
            if env.random.random() < 0.25:
                await file.wait_until_written()
                await asyncio.sleep(env.random.uniform(0, RESTORE_S))
                env.checker.counts["kills while commits are restored"] += 1
                lost_s = env.random.choice([LOST_S, env.random.uniform(0, RESTORE_S)])
                _, grant = await kill_and_cut(env, redis, file, lost_s)
            recovered_at = time.monotonic()
            granted = await env.wait_for(grant)
            if state_key(redis) == before:
                raise Violation("a lock was granted, but the lost commits were not restored")
            results.grant_delays_s.append(granted - fault)
            results.recovery_delays_s.append(max(0.0, granted - recovered_at))
            results.faults += 1
    finally:
        watching.cancel()
    await env.settle()
    await release_many(env, ids)


async def kill_and_cut(
    env: Environment, redis: Redis, file: AppendOnlyFile, lost_s: float
) -> tuple[float, asyncio.Future[float]]:
    """Kill Redis, cut its file, and restart it: at once, after a part of the lease, or after more than the lease.

    Returns when it was killed, and the time of the next grant.
    """
    env.checker.note("fault", "kill -9 Redis")
    redis.kill()
    fault = time.monotonic()
    env.checker.note("fault", f"the last {file.cut(fault - lost_s)} bytes of Redis are lost")
    await asyncio.sleep(env.random.choice([0, env.random.uniform(0, 0.6), env.random.uniform(1.2, 2.5)]))
    await start_in_thread(redis.start)
    env.checker.note("fault", "Redis restarted")
    # An earlier grant may be an old message that a busy client has read late.
    return fault, env.checker.grant_after(time.monotonic() + READ_S, fresh=False)


def state_key(redis: Redis) -> bytes:
    """Return the key of the stored state, which is another after each restore."""
    return bytes(redis.call("HGET", "{genie}:meta", "state"))


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
