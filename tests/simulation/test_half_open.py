"""A client holds a lock, and its connection becomes half-open or loses the bytes of one direction.

At the same time the server may restart, another server may take over, or the client may come back, before or after the end of
its session. In each combination the client must consider the lock lost before the waiting client is granted it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

import genie
from genie.client.keepalive import SessionLease
from genie.testing.simulation.host import Host
from genie.testing.simulation.loop import SimLoop, deterministic
from genie.testing.simulation.network import Connection, Network, RandomDelays
from simulator.beliefs import Beliefs
from simulator.checkers import check
from simulator.history import ClusterHistory
from simulator.stores import OneRedis

WORK_S = 25.0
"""How long the holder works in its block, unless the block is cancelled: longer than the faults last."""
HOLDER, WAITER, SERVERS = "holder", "waiter", ("s1", "s2")


class World:
    """Two servers with one Redis, a client that holds a lock and a client that waits for it."""

    def __init__(self, on_disconnect: Any, session_timeout: float) -> None:
        self.loop = SimLoop(step_s=1e-6)
        self.history = ClusterHistory(self.loop.time)
        self.network = Network(self.loop, RandomDelays(Random(1), slow_ratio=0.0), self.history)
        self.on_disconnect = on_disconnect
        self.session_timeout = session_timeout
        self.hosts: list[Host] = []
        self._beliefs = Beliefs(self.loop, self.history)
        self._holds = asyncio.Event()
        self.outcome = ""
        """How the block of the holder has ended."""
        self.granted_at = 0.0
        """When the waiter was granted the lock."""

    def run(self, fault: Callable[[World], Awaitable[None]]) -> list[str]:
        """Inject a fault while the lock is held, wait until both clients have finished, and return the violations."""
        with deterministic(self.loop, 1, lambda _level, _line: True):
            try:
                self.loop.run_until_complete(self._run(fault))
            finally:
                self.loop.finish()
        return check(self.history)

    async def _run(self, fault: Callable[[World], Awaitable[None]]) -> None:
        store = OneRedis(self.loop, self.history)
        await store.start()
        for name in SERVERS:
            self.hosts.append(Host(name, self.loop, self.history, Random(name), redis_url=store.url, min_replicas=0))
        await asyncio.sleep(5)  # until one of them leads
        holder = self.loop.spawn(self.loop.create_node(HOLDER), self._hold())
        await asyncio.wait_for(self._holds.wait(), 30.0)
        waiter = self.loop.spawn(self.loop.create_node(WAITER), self._wait())
        await asyncio.sleep(0.5)
        self.began_at = self.loop.time()
        await fault(self)
        await asyncio.wait_for(asyncio.gather(holder, waiter), 120.0)

    async def _hold(self) -> None:
        timeout_s = 60.0 if self.on_disconnect == "release" else 6.0
        async with genie.connect(",".join(SERVERS), session_timeout=self.session_timeout) as client:
            try:
                async with client.lock("a", transaction_timeout=timeout_s, on_disconnect=self.on_disconnect) as lock:
                    with self._beliefs.in_block(lock):
                        self._holds.set()
                        await asyncio.sleep(WORK_S)
                self.outcome = "released"
            except genie.LockLost as error:
                self.outcome = type(error).__name__

    async def _wait(self) -> None:
        async with genie.connect(",".join(SERVERS), session_timeout=60.0) as client:
            lock = await client.acquire("a", queue_timeout=None)
            self.granted_at = self.loop.time()
            self._beliefs.observe(lock)
            await lock.release()

    # -- what faults need ---------------------------------------------------------------------------------

    def connection(self) -> Connection:
        """Return the connection of the holder."""
        [connection] = [each for each in self.network.connections if each.client.node.name == HOLDER]
        return connection

    def leader(self) -> Host:
        """Return the host of the leading server, to which the clients are connected."""
        [leader] = [host for host in self.hosts if host.node is self.connection().server.node]
        return leader


async def nothing_else(_world: World) -> None:
    """Leave the half-open connection alone."""


async def restart(world: World) -> None:
    world.leader().terminate()


async def fail_over(world: World) -> None:
    """Crash the leader for longer than its lease, so that the other server takes over."""
    world.leader().kill(10.0, silently=False)


async def resume(world: World) -> None:
    """Let the client notice the end of its connection before its session ends, so that it resumes the session."""
    world.network.reset_later(world.connection().client, 0.3)


async def come_back_late(world: World) -> None:
    """Let the client notice the end of its connection, and keep it from the servers until its session has ended."""
    for name in SERVERS:
        world.network.partition(HOLDER, name)
    world.network.reset_later(world.connection().client, 0.3)
    world.loop.call_later(world.session_timeout + 4.0, world.network.heal)


DIRECTIONS = {"both": (True, True), "to the server": (True, False), "to the client": (False, True)}
TCP_KEEPALIVE_S = 20.0
"""When the server detects a half-open connection without any other sign."""

Fault = Callable[[World], Awaitable[None]]


def half_open(direction: str, detected_after_s: float, then: Fault) -> Fault:
    """Return a fault: the holder's connection loses its bytes, `then` follows, and the server detects the loss later."""

    async def inject(world: World) -> None:
        connection = world.connection()
        to_server, to_client = DIRECTIONS[direction]
        world.network.silence(connection, to_server=to_server, to_client=to_client)
        await asyncio.sleep(0.2)
        await then(world)
        world.network.reset_later(connection.server, detected_after_s)

    return inject


@pytest.mark.parametrize("session_timeout", [1.0, 10.0], ids=["short", "long"])
@pytest.mark.parametrize("on_disconnect", ["keep", "release"])
@pytest.mark.parametrize("detected_after_s", [0.0, TCP_KEEPALIVE_S], ids=["detected", "undetected"])
@pytest.mark.parametrize("then", [nothing_else, restart, fail_over, resume, come_back_late])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_holder_loses_the_lock_before_the_waiter_is_granted_it(
    direction: str, then: Fault, detected_after_s: float, on_disconnect: str, session_timeout: float
) -> None:
    world = World(on_disconnect, session_timeout)
    assert world.run(half_open(direction, detected_after_s, then)) == []
    if on_disconnect == "keep":
        assert world.outcome in ("TransactionTimeout", "LockLost"), "it may also be lost with the session"
    elif then is resume or (session_timeout == 10.0 and then is not come_back_late):
        assert world.outcome == "released", "the client came back in time"
    elif then is come_back_late:
        assert world.outcome == "Disconnected"
    assert world.granted_at - world.began_at < max(WORK_S, TCP_KEEPALIVE_S + session_timeout) + 1


def test_a_client_that_counts_from_when_it_notices_the_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def renew(lease: SessionLease, _sent_at: float) -> None:
        lease.ends_at = float("inf")

    def stop(lease: SessionLease) -> None:
        lease.next_timer = float("inf")
        lease.ends_at = time.monotonic() + lease.timeout_s

    monkeypatch.setattr(SessionLease, "renew", renew)
    monkeypatch.setattr(SessionLease, "stop", stop)
    world = World("release", 1.0)
    [violation] = world.run(half_open("both", 0.0, nothing_else))
    assert f"{HOLDER} considers" in violation
    assert "which the server has ended, and" in violation, "and another client holds it"
