"""Faults: the leader is stopped for longer than its lease."""

from __future__ import annotations

import asyncio
import signal
import time

from faults.checker import Violation
from faults.cluster import LEADER_TIMEOUT_S
from faults.connection import Address, Connection
from faults.environment import Environment, wait_for_takeover
from faults.prober import start_probing
from faults.results import Results


async def stop_leader(env: Environment, results: Results, times: int) -> None:
    """Stop the leader until after a takeover: when it continues, it must send nothing new, disconnect all, and follow."""
    for _ in range(times):
        await env.settle()
        leader, pong_at = await start_probing(env.cluster, env.checker)
        fault = env.cluster.send(leader, signal.SIGSTOP)
        await wait_for_takeover(env, results, fault, pong_at)
        await env.wait_until_all_served()
        address = env.cluster.address(leader)
        before = [
            connection
            for connection in env.connections
            if connection.address == address and (connection.first_message_at or fault) < fault
        ]
        env.checker.counts["connections left to the stopped leader"] += len(before)
        for number, connection in enumerate(before):
            connection.send("ping")
            connection.send("request", resources=[f"exclusive:late/{number}"])
        env.checker.stopped_leaders[address] = fault
        env.cluster.send(leader, signal.SIGCONT)
        await wait_until_closed(before)
        next_, _ = await env.cluster.leader_and_followers()
        if next_ is leader:
            raise Violation(f"{leader.port}, which was stopped, is the leader again")
        await env.settle()
        abort_all(env, address)
        del env.checker.stopped_leaders[address]


def abort_all(env: Environment, address: Address) -> None:
    """Abort the connections to a follower: clients have made them while it was stopped, and have given them up.

    Otherwise their `hello` stays rejected when the follower leads again, and it replies so without a commit.
    """
    for connection in env.connections.copy():
        if connection.address == address:
            connection.abort()


async def wait_until_closed(connections: list[Connection]) -> None:
    """Wait until the server has ended all these connections."""
    end = time.monotonic() + LEADER_TIMEOUT_S
    while any(not connection.closed for connection in connections):
        if time.monotonic() > end:
            raise Violation(
                f"{sum(not connection.closed for connection in connections)} connections to the former leader are still open"
            )
        await asyncio.sleep(0.005)
