"""A Redis that dies, and one that is stopped."""

from __future__ import annotations

import asyncio
import signal
import time

from faults.cluster import to_its_end
from faults.figures import Figures
from faults.server_stops import closed
from faults.watch import Broken
from faults.world import World

LONG_STOP_S = 30.0
READ_S = 0.02
"""So long after a fault of Redis what was told before has been read, as a rule."""


async def kill_redis(w: World, found: Figures, times: int) -> None:
    """Redis is killed and started again: at once, after a part of the lease, or after more than the lease."""
    for _ in range(times):
        await w.calm()
        redis = await w.cluster.redis.home()
        w.watch.note("fault", "kill -9 Redis")
        fault = time.monotonic()
        redis.kill()
        grant = w.watch.grant_after(fault + READ_S, fresh=False)
        await asyncio.sleep(w.random.choice([0, w.random.uniform(0, 0.6), w.random.uniform(1.2, 2.5)]))
        await to_its_end(redis.start)
        w.watch.note("fault", "Redis is back")
        back = time.monotonic()
        granted = await w.waited(grant)
        found.away_s.append(granted - fault)
        found.back_s.append(max(0.0, granted - back))
        found.faults += 1


async def stop_redis(w: World, found: Figures, times: int, stop_s: float = LONG_STOP_S) -> None:
    """Redis is stopped for longer than the lease, and goes on."""
    for _ in range(times):
        await w.calm()
        redis = await w.cluster.redis.home()
        address = w.cluster.address(await w.cluster.leader())
        fault = w.cluster.send(redis, signal.SIGSTOP)
        await closed([link for link in w.links if link.address == address])  # which is behind all that was told on them
        await asyncio.sleep(READ_S)  # so what came with the end of a connection has got to those who asked
        grant = w.watch.grant_after(time.monotonic(), fresh=False)
        await asyncio.sleep(max(0.0, fault + stop_s - time.monotonic()))
        if grant.done():
            raise Broken(f"a lock was granted {grant.result() - fault:.3f} s after Redis was stopped")
        back = w.cluster.send(redis, signal.SIGCONT)
        granted = await w.waited(grant)
        found.away_s.append(granted - fault)
        found.back_s.append(granted - back)
        found.faults += 1
