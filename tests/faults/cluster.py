"""The processes: a Redis, and several servers of one namespace. Starting them does not block the event loop."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from faults.checker import Checker, Violation
from faults.connection import Address, ConnectionEnded, query
from support.processes.servers import WAIT_S, Genie, Redis, RedisDeployment

CAUGHT_UP = "replica loaded"
LEADER_TIMEOUT_S = WAIT_S
"""Time limit for the election of a leader."""


async def start_in_thread(start: Callable[[], None]) -> None:
    """Start a process in a thread, and wait for it even if cancelled: otherwise the process would not be stopped later."""
    starting = asyncio.create_task(asyncio.to_thread(start))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.gather(starting, return_exceptions=True)
        raise


class Cluster:
    """The processes of a test. `addresses` are those to which clients connect, in the order of the servers."""

    def __init__(
        self, redis: RedisDeployment, servers: Sequence[Genie], addresses: Sequence[Address], checker: Checker
    ) -> None:
        self.redis = redis
        self.servers = list(servers)
        self.addresses = list(addresses)
        self._checker = checker

    async def start(self) -> None:
        """Start all processes; the first server becomes the leader."""
        self.redis.create_namespace()
        for server in self.servers:
            await self.restart(server)

    def address(self, server: Genie) -> Address:
        """Return the address to which clients of a server connect."""
        return self.addresses[self.servers.index(server)]

    async def restart(self, server: Genie, *, caught_up: bool = False) -> None:
        """Start a server that is down, and wait until it listens or, with `caught_up`, has replicated as a follower."""
        before = len(server.log)
        await start_in_thread(server.start)
        self._checker.note("fault", f"{server.port} listens as {server.log[-1]['role']}")
        if caught_up and not any(line["event"].startswith(CAUGHT_UP) for line in server.log[before:]):
            await asyncio.to_thread(server.until, CAUGHT_UP)

    def kill(self, server: Genie) -> float:
        """Send SIGKILL; return the time."""
        self._checker.note("fault", f"kill -9 {server.port}")
        moment = time.monotonic()
        server.kill()
        return moment

    def send(self, process: Genie | Redis, number: signal.Signals) -> float:
        """Send another signal; return the time."""
        self._checker.note("fault", f"{number.name} {process.port}")
        moment = time.monotonic()
        process.send(number)
        return moment

    async def role_of(self, server: Genie) -> str | None:
        """Return the role of a server by its reply to `ping`: "leader", the leader that it names or "", None without a reply."""
        try:
            command, payload = await query(self._checker, self.address(server), "ping")
        except (OSError, TimeoutError, ConnectionEnded):
            return None
        return "leader" if command == "pong" else str(payload.get("leader", ""))

    async def leader(self) -> Genie:
        """Wait until a server leads, and return it."""
        end = time.monotonic() + LEADER_TIMEOUT_S
        while time.monotonic() < end:
            for server in self.servers:
                if server.process is not None and await self.role_of(server) == "leader":
                    return server
            await asyncio.sleep(0.02)
        raise Violation(f"no server leads within {LEADER_TIMEOUT_S:g} s")

    async def leader_and_followers(self) -> tuple[Genie, list[Genie]]:
        """Wait until all other servers know the leader; return it and them."""
        end = time.monotonic() + LEADER_TIMEOUT_S
        while time.monotonic() < end:
            leader = await self.leader()  # each time: the leader may have changed
            others = [server for server in self.servers if server is not leader]
            name = "{}:{}".format(*self.address(leader))
            if [await self.role_of(server) for server in others] == [name] * len(others):
                return leader, others
            await asyncio.sleep(0.02)
        raise Violation(f"the servers do not follow one leader within {LEADER_TIMEOUT_S:g} s")

    async def query_leader(self, command: str, **payload: Any) -> dict[str, Any]:
        """Send a command to the leader, and return its reply; retry while there is no leader."""
        end = time.monotonic() + LEADER_TIMEOUT_S
        while time.monotonic() < end:
            leader = await self.leader()
            with suppress(OSError, TimeoutError, ConnectionEnded):
                _, reply = await query(self._checker, self.address(leader), command, **payload)
                if reply.get("code") != "unavailable":
                    return reply
            await asyncio.sleep(0.02)
        raise Violation(f"no leader replies to {command} within {LEADER_TIMEOUT_S:g} s")

    def stop(self) -> None:
        """End all processes."""
        for server in self.servers:
            server.kill()
