"""Servers of several versions share a namespace: who refuses to lead, and what a rolling restart loses."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

import genie
from support.network.wire import Wire
from support.processes.builds import FIELD, LaterGenie, make_later_build
from support.processes.commands import genie_cli
from support.processes.programs import start_genie
from support.processes.servers import WAIT_S, Genie, Redis

LEASE_S = 0.5
UNKNOWN = '{"since":1,"since_unix_ms":1,"deadline":600000,"exclusive":["b"],"fence":2,"build":"later"}'
OTHER_VERSION = "has the format version 2, and this version of Genie knows 1"
OTHER_FIELD = "the record of 2 was written by another version of Genie: Object contains unknown field `build`"


class Namespace:
    """A namespace without a server, whose leader has resigned or may be alive."""

    def __init__(self, redis: Redis, node: str = "", name: str = "genie") -> None:
        self.client = redis_py.Redis(port=redis.port)
        prefix = f"{{{name}}}:"
        self.log, self.meta, self.state = f"{prefix}log", f"{prefix}meta", f"{prefix}state:7-n"
        self.client.xadd(self.log, {"base": "0-0", "node": node}, "7-0")
        self.client.hset(self.state, "0", "")
        self.client.sadd(f"{prefix}snapshots", self.state)
        fields = {"version": 1, "epoch": 7, "nonce": "n", "node": node, "history": "0-0", "attempt": 0}
        self.client.hset(self.meta, mapping=fields | {"state": self.state, "checkpoint": "7-0 1.000 1 1"})

    def dump(self) -> list[Any]:
        """Return everything that a leader would change."""
        return [self.client.hgetall(self.meta), self.client.xrange(self.log), self.client.hgetall(self.state)]


LEADER = '{"address":"127.0.0.1:1","lease_ms":600000}'
"""A leader whose lease does not end during a test."""


def started_in_vain(redis: Redis) -> tuple[int, str]:
    """Start a server that must refuse to start; return its exit status and what it printed."""
    environment = {"GENIE_REDIS_URL": redis.url, "GENIE_PORT": "0", "GENIE_ADMIN_PORT": "", "GENIE_LEASE": str(LEASE_S)}
    with start_genie("serve", env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        printed, _ = process.communicate(timeout=WAIT_S)
    return process.returncode or 0, printed


def set_other_version(namespace: Namespace) -> None:
    namespace.client.hset(namespace.meta, "version", 2)


def add_unknown_field_to_state(namespace: Namespace) -> None:
    namespace.client.hset(namespace.state, "2", UNKNOWN)


def add_unknown_field_to_log(namespace: Namespace) -> None:
    namespace.client.xadd(namespace.log, {"batch": f"1.000 10 10\n2 {UNKNOWN}"}, "7-1")


def resign(namespace: Namespace) -> None:
    """Resign as the last leader does: afterwards any follower may take over."""
    with namespace.client.pipeline(transaction=True) as transaction:
        transaction.xadd(namespace.log, {"resigned": "", "batch": "1.000 10 10"}, "7-2")
        transaction.hset(namespace.meta, "node", "")
        transaction.execute()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_other_version, OTHER_VERSION),
        (add_unknown_field_to_state, OTHER_FIELD),
        (add_unknown_field_to_log, OTHER_FIELD),
    ],
)
def test_a_server_does_not_start_on_a_later_format(
    redis: Redis, change: Callable[[Namespace], None], reason: str
) -> None:
    namespace = Namespace(redis)
    change(namespace)
    before = namespace.dump()
    status, printed = started_in_vain(redis)
    assert (status, printed.splitlines()[-1].startswith("genie: "), reason in printed) == (1, True, True), printed
    assert namespace.dump() == before, "it has neither led nor changed anything"
    check = genie_cli("store", "check", redis_url=redis.url)
    assert (check.returncode, reason in check.stdout) == (1, True)
    export = genie_cli("store", "export", redis_url=redis.url)
    assert (export.returncode, reason in export.stderr) == (1, True)


@pytest.mark.parametrize(
    ("change", "reason"), [(set_other_version, OTHER_VERSION), (add_unknown_field_to_log, OTHER_FIELD)]
)
def test_a_follower_of_a_later_leader_refuses_to_lead_and_stops(
    redis: Redis, change: Callable[[Namespace], None], reason: str
) -> None:
    namespace = Namespace(redis, LEADER)
    follower = Genie(redis, lease=LEASE_S)
    follower.start(wait=False)
    events: set[str] = set()
    while not events >= {"listening", "replica loaded"}:  # in any order
        events.add(follower.until("")["event"])
    change(namespace)
    resign(namespace)
    failure = follower.until("namespace failed, stopping server")
    assert reason in failure["reason"]
    assert "exception" not in failure
    assert follower.wait() == 1
    assert namespace.client.hget(namespace.meta, "epoch") == b"7"
    assert namespace.client.xrevrange(namespace.log, count=1)[0][0] == b"7-2"


async def test_a_server_that_stops_hands_over_its_other_namespaces(redis: Redis) -> None:
    namespace = Namespace(redis, LEADER, "later")
    server = Genie(redis, lease=LEASE_S, namespaces="own,later")
    server.start()
    async with genie.connect(port=server.port, namespace="own") as client:
        await client.acquire("a", transaction_timeout=600)
        set_other_version(namespace)
        namespace.client.xadd(namespace.log, {"batch": "1.000 10 10"}, "7-1")
        await asyncio.to_thread(server.until, "namespace failed, stopping server")
        assert await asyncio.to_thread(server.wait) == 1
    report = json.loads(genie_cli("store", "check", "--json", redis_url=redis.url, namespace="own").stdout)
    assert (report["sound"], report["leader"], report["sizes"]["held"]) == (True, None, 1)


async def test_a_server_rejects_another_protocol_version_and_names_its_own(redis: Redis) -> None:
    server = Genie(redis, lease=LEASE_S)
    server.start()
    wire = await Wire.connect(server.address)
    wire.send("hello", protocol=2)
    rejection = await wire.expect("error")
    assert (rejection["code"], rejection["supported"]) == ("unsupported-protocol", [1])
    wire.send("hello", protocol=1)
    assert (await wire.expect("welcome"))["protocol"] == 1
    server.kill()


# -- a rolling restart under load ---------------------------------------------------------------------


class Load:
    """Clients that lock a few names and check that no two of them hold one at the same time, and that fences grow."""

    NAMES = tuple(f"name/{number}" for number in range(5))
    CLIENTS = 12

    def __init__(self, servers: list[str]) -> None:
        self._servers = servers
        self._holders: dict[str, int] = {}
        self._fences: dict[str, int] = defaultdict(int)
        self.grants = 0
        self.violations: list[str] = []

    async def run(self, number: int) -> None:
        """Lock and release until cancelled. Any error of the client library ends the test."""
        async with genie.connect(self._servers, response_timeout=WAIT_S) as client:
            while True:
                name = self.NAMES[(number + self.grants) % len(self.NAMES)]
                async with client.lock(name, queue_timeout=60, transaction_timeout=60) as lock:
                    if name in self._holders:
                        self.violations.append(f"{name} is granted to {self._holders[name]} and {number}")
                    if lock.fence <= self._fences[name]:
                        self.violations.append(f"{name}: the fence {lock.fence} follows {self._fences[name]}")
                    self._holders[name], self._fences[name] = number, lock.fence
                    await asyncio.sleep(0.002)
                    del self._holders[name]
                    self.grants += 1

    async def more_grants(self, clients: list[asyncio.Task[None]], count: int = 200) -> None:
        """Wait until this many more locks were granted. Fails with the error of a client."""
        goal = self.grants + count
        async with asyncio.timeout(WAIT_S):
            while self.grants < goal:
                await asyncio.wait(clients, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
                for client in clients:
                    if client.done():
                        client.result()
        assert not self.violations


async def test_a_rolling_restart_to_a_later_build_under_load_loses_nothing(redis: Redis, tmp_path: Path) -> None:
    folder = make_later_build(tmp_path / "later")
    first, second = Genie(redis, lease=LEASE_S), Genie(redis, lease=LEASE_S)
    later_first = LaterGenie(folder, redis, **(first.settings | {"lease": LEASE_S}))
    later_second = LaterGenie(folder, redis, **(second.settings | {"lease": LEASE_S}))
    everything = [first, second, later_first, later_second]
    servers = [f"127.0.0.1:{server.port}" for server in (first, second)]
    redis.create_namespace()
    load = Load(servers)
    clients: list[asyncio.Task[None]] = []
    try:
        first.start()
        second.start()
        async with (
            genie.connect(servers, response_timeout=WAIT_S) as client,
            genie.connect(servers, response_timeout=WAIT_S) as other,
        ):
            held = await client.acquire("kept", transaction_timeout=600)
            waiting = asyncio.create_task(other.acquire("kept", queue_timeout=600))
            clients += [asyncio.create_task(load.run(number)) for number in range(load.CLIENTS)]
            await load.more_grants(clients)
            for former, later in ((second, later_second), (first, later_first), (later_second, later_second)):
                # The follower first, then the leader; at last the second server again: a later build takes over from a later one.
                former.send(signal.SIGTERM)
                assert await asyncio.to_thread(former.wait) == 0
                await asyncio.to_thread(later.start)
                await load.more_grants(clients)
                assert held.held
                assert not waiting.done()
            await held.release()
            assert (await waiting).fence > held.fence
    finally:
        for task in clients:
            task.cancel()
        for task in clients:
            with suppress(asyncio.CancelledError):
                await task
        for server in everything:
            server.kill()
    stored = redis_py.Redis(port=redis.port)
    batches = [fields.get(b"batch", b"") for _, fields in stored.xrange("{genie}:log")]
    assert any(f'"{FIELD}":"later"'.encode() in batch for batch in batches), "the later build has led"
    assert any(b"resigned" in fields for _, fields in stored.xrange("{genie}:log"))
