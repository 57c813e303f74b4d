"""The processes: a Redis, and several servers of one namespace, started and ended without holding up the clients."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from faults.link import Address, Lost, ask
from faults.watch import Broken, Watch
from servers import WAIT_S, Genie, Ground, Redis

CAUGHT_UP = "replica caught up"
LEAD_S = WAIT_S
"""A bound: so long may it take until somebody leads."""


async def to_its_end(start: Callable[[], None]) -> None:
    """Start a process in a thread, and not leave before that is done: nobody else would know of it to end it."""
    starting = asyncio.create_task(asyncio.to_thread(start))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.gather(starting, return_exceptions=True)
        raise


class Cluster:
    """`addresses` are those by which clients reach the servers, in their order."""

    def __init__(self, redis: Ground, servers: Sequence[Genie], addresses: Sequence[Address], watch: Watch) -> None:
        self.redis = redis
        self.servers = list(servers)
        self.addresses = list(addresses)
        self._watch = watch

    async def start(self) -> None:
        """Start all; the first one leads."""
        self.redis.found()
        for server in self.servers:
            await self.restart(server)

    def address(self, server: Genie) -> Address:
        """Where clients reach it."""
        return self.addresses[self.servers.index(server)]

    async def restart(self, server: Genie, *, caught_up: bool = False) -> None:
        """Start one that is down, and wait until it listens; `caught_up`: and, as a follower, has read all there is."""
        before = len(server.log)
        await to_its_end(server.start)
        self._watch.note("fault", f"{server.port} listens as {server.log[-1]['role']}")
        if caught_up and not any(line["event"].startswith(CAUGHT_UP) for line in server.log[before:]):
            await asyncio.to_thread(server.until, CAUGHT_UP)

    def kill(self, server: Genie) -> float:
        """SIGKILL; returns when."""
        self._watch.note("fault", f"kill -9 {server.port}")
        moment = time.monotonic()
        server.kill()
        return moment

    def send(self, process: Genie | Redis, number: signal.Signals) -> float:
        """Another signal; returns when."""
        self._watch.note("fault", f"{number.name} {process.port}")
        moment = time.monotonic()
        process.send(number)
        return moment

    async def says(self, server: Genie) -> str | None:
        """What it says of its role: `leads`, whom it names as the leader (or nobody), or nothing."""
        try:
            command, payload = await ask(self._watch, self.address(server), "ping")
        except (OSError, TimeoutError, Lost):
            return None
        return "leads" if command == "pong" else str(payload.get("leader", "nobody"))

    async def leader(self) -> Genie:
        """The server that leads, as soon as one does."""
        end = time.monotonic() + LEAD_S
        while time.monotonic() < end:
            for server in self.servers:
                if server.process is not None and await self.says(server) == "leads":
                    return server
            await asyncio.sleep(0.02)
        raise Broken(f"nobody leads within {LEAD_S:g} s")

    async def followed(self) -> tuple[Genie, list[Genie]]:
        """The server that leads, and the others, when each of them knows it."""
        end = time.monotonic() + LEAD_S
        while time.monotonic() < end:
            leader = await self.leader()  # each time: it may be another one by now
            others = [server for server in self.servers if server is not leader]
            name = "{}:{}".format(*self.address(leader))
            if [await self.says(server) for server in others] == [name] * len(others):
                return leader, others
            await asyncio.sleep(0.02)
        raise Broken(f"not all follow one within {LEAD_S:g} s")

    async def ask(self, command: str, **payload: Any) -> dict[str, Any]:
        """What the leader answers, whichever that is when it does."""
        end = time.monotonic() + LEAD_S
        while time.monotonic() < end:
            leader = await self.leader()
            with suppress(OSError, TimeoutError, Lost):
                _, answer = await ask(self._watch, self.address(leader), command, **payload)
                if answer.get("code") != "unavailable":
                    return answer
            await asyncio.sleep(0.02)
        raise Broken(f"nobody answers {command} within {LEAD_S:g} s")

    def stop(self) -> None:
        """End all processes."""
        for server in self.servers:
            server.kill()
