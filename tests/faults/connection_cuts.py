"""Faults: connections of clients or to Redis are cut at a certain message."""

from __future__ import annotations

import asyncio
import time

from faults.checker import Violation
from faults.cluster import LEADER_TIMEOUT_S
from faults.environment import Environment
from faults.results import Results
from support.network.proxy import CUT_POSITIONS, Cut, Proxy

MESSAGES = (
    ("hello", "request", "release", "extend", "ping"),
    ("welcome", "queued", "locked", "released", "extended", "pong"),
)
CLIENT_CUTS = [
    Cut(not side, kind, position) for side in (0, 1) for kind in MESSAGES[side] for position in CUT_POSITIONS
]
REDIS_CUTS = [
    *[Cut(to_server=True, kind=kind, position=position) for kind in ("MULTI", "XREAD") for position in CUT_POSITIONS],
    *[Cut(to_server=False, kind="reply", position=position) for position in CUT_POSITIONS],
]
COMMIT_CUTS = REDIS_CUTS[:3]


async def cut_clients(env: Environment, results: Results, times: int) -> None:
    """Cut client connections at each kind of message, in each direction."""
    await make_cuts(env, results, times, env.client_proxies, CLIENT_CUTS)


async def cut_redis(env: Environment, results: Results, times: int) -> None:
    """Cut connections of servers to Redis: at a commit, at a read of the log, at a reply."""
    await make_cuts(env, results, times, env.redis_proxies, REDIS_CUTS)


async def cut_and_kill(env: Environment, results: Results, times: int) -> None:
    """Cut the leader's connection to Redis at a commit and kill the leader, so that the outcome of the commit is unknown."""
    for _ in range(times):
        await env.settle()
        cut = env.random.choice(COMMIT_CUTS)
        for proxy in env.redis_proxies:  # only the leader commits, so its proxy cuts
            proxy.arm(cut)
        await wait_for_cut(env.redis_proxies, cut)
        leader = next(
            server for server, proxy in zip(env.cluster.servers, env.redis_proxies, strict=True) if proxy.fired.is_set()
        )
        await asyncio.sleep(env.random.choice([0, env.random.uniform(0, 0.01)]))
        fault = env.cluster.kill(leader)
        grant = env.checker.grant_after(fault, fresh=True)
        for proxy in env.redis_proxies:
            proxy.arm(None)
        await env.cluster.restart(leader)
        results.grant_delays_s.append(await env.wait_for(grant) - fault)
        results.faults += 1


async def make_cuts(env: Environment, results: Results, times: int, proxies: list[Proxy], kinds: list[Cut]) -> None:
    """Make all kinds of cuts, in random order; some of them before the clients have recovered from the last one."""
    order: list[Cut] = []
    while results.faults < times:
        if not order:
            order = env.random.sample(kinds, len(kinds))
        cut = order.pop()
        for proxy in proxies:
            proxy.arm(cut)
        await wait_for_cut(proxies, cut)
        fault = time.monotonic()
        env.checker.note("fault", f"cut {cut}")
        results.faults += 1
        results.grant_delays_s.append(await env.wait_for(env.checker.grant_after(fault, fresh=False)) - fault)
        if env.random.random() < 0.7:  # else the next cut comes before all clients have reconnected
            await env.wait_until_all_served()


async def wait_for_cut(proxies: list[Proxy], cut: Cut) -> None:
    """Wait until one of the proxies has cut a connection."""
    fired = [asyncio.create_task(proxy.fired.wait()) for proxy in proxies]
    done, pending = await asyncio.wait(fired, timeout=LEADER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    if not done:
        raise Violation(f"no message to cut {cut} for {LEADER_TIMEOUT_S:g} s")
