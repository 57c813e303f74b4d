"""The admin port of a server with several namespaces: each response is about one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families
from prometheus_client.samples import Sample

from genie.admin import AdminServer, models
from genie.config import Settings
from genie.server.app import Server
from support.admin.client import fetch, release
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie, Redis, running_server

OF_THE_SERVER = {
    *("genie_connections", "genie_connections_limit", "genie_loop_lag_seconds", "genie_build"),
    *("genie_unread_bytes", "genie_slow_consumers"),
    *("process_start_time_seconds", "process_cpu_seconds", "process_resident_memory_bytes"),
}
LONG = {"queueTimeout": 600_000, "transactionTimeout": 600_000}
UNSERVED = "unknown namespace 'stock'; this server serves orders, billing"


@pytest.fixture
def genie() -> Iterator[Genie]:
    with running_server(admin_port=free_port(), namespaces="orders,billing", slow_wait=0.05) as server:
        yield server


@pytest.fixture
async def idle_port() -> AsyncIterator[int]:
    """The admin port of an idle server in this process."""
    server = Server(Settings.from_options(port=0, admin_port=0, namespaces=("orders", "billing")))
    admin = AdminServer(server)
    await server.start()
    await admin.start()
    assert admin.address is not None
    try:
        yield admin.address[1]
    finally:
        await admin.stop()
        await server.stop()


def port_of(genie: Genie) -> int:
    return int(str(genie.settings["admin_port"]))


async def connected(genie: Genie, namespace: str) -> Wire:
    wire = await Wire.connect(genie.address)
    wire.send("hello", namespace=namespace)
    assert (await wire.expect("welcome"))["namespace"] == namespace
    return wire


async def until_ready(genie: Genie) -> None:
    """Wait until the leaders of all namespaces are known: a server listens as soon as it knows one."""
    async with asyncio.timeout(WAIT_S):
        while (ready := await fetch(port_of(genie), "/readyz")).status != 200:
            assert b"waiting for a leader" in ready.body or b"has not caught up" in ready.body


async def fetch_samples(port: int, accept: str = "text/plain") -> list[Sample]:
    response = await fetch(port, "/metrics", headers={"Accept": accept})
    parse = open_families if "openmetrics" in response.headers["content-type"] else families
    return [sample for family in parse(response.body.decode()) for sample in family.samples]


async def test_each_namespace_has_its_own_responses(genie: Genie) -> None:
    port, orders, billing = port_of(genie), await connected(genie, "orders"), await connected(genie, "billing")
    await orders.lock("exclusive:a", "exclusive:b", **LONG)
    held = await billing.lock("exclusive:a", transactionName="t1", **LONG)
    waits = await billing.request("exclusive:a", transactionName="t2", **LONG)
    billing.raw(b"nonsense\n")
    await billing.expect("error")
    first, second = [
        (await fetch(port, f"/api/state{query}")).as_(models.State) for query in ("", "?namespace=billing")
    ]
    assert (first.namespace, first.locks, first.held, first.waiting, first.errors) == ("orders", 2, 1, 0, {})
    assert (second.namespace, second.locks, second.held, second.waiting) == ("billing", 1, 1, 1)
    assert second.errors == {"bad-json": 1}
    assert [line.resource for line in second.queues] == ["a"]
    assert first.connections == second.connections == 2, "connections are those of the server"
    assert (
        first.namespaces
        == second.namespaces
        == [
            models.Namespace(namespace="orders", role="leader", leader=None),
            models.Namespace(namespace="billing", role="leader", leader=None),
        ]
    )
    shown: dict[str, Any] = {}
    for namespace in (
        "orders",
        "billing",
    ):  # within the cache's TTL: a cached response of one is not used for the other
        query = f"?namespace={namespace}"
        nodes = (await fetch(port, f"/api/waits{query}&limit=5")).as_(models.Waits).nodes
        holders = (await fetch(port, f"/api/resources/a{query}")).as_(models.Resource).holders
        hot = (await fetch(port, f"/api/hot{query}")).as_(models.HotList).resources
        shown[namespace] = {node.id for node in nodes}, len(holders[0].resources), [row.resource for row in hot]
    assert shown == {"orders": (set(), 2, []), "billing": ({held, waits}, 1, ["a"])}


async def test_deadlocks_and_slow_waits_are_those_of_their_namespace(genie: Genie) -> None:
    port, client = port_of(genie), await connected(genie, "billing")
    for name in "ab":
        await client.lock(f"exclusive:{name}", transactionName=f"t{name}", **LONG)
    waits = await client.request("exclusive:b", transactionName="ta", **LONG)
    slow = genie.until("slow wait detected")
    assert (slow["namespace"], slow["id"]) == ("billing", waits)
    victim = await client.request("exclusive:a", transactionName="tb", **LONG)
    assert (await client.expect("released"))["reason"] == "deadlock"
    totals = [
        (await fetch(port, f"/api/deadlocks?namespace={namespace}")).as_(models.Deadlocks).total
        for namespace in ("orders", "billing")
    ]
    assert totals == [0, 1]
    line = genie.until("deadlock detected")
    assert (line["namespace"], line["id"]) == ("billing", victim)


async def test_a_release_is_executed_in_the_requested_namespace(genie: Genie) -> None:
    port, wire = port_of(genie), await connected(genie, "billing")
    held = await wire.lock("exclusive:a", **LONG)
    body = msgspec.json.encode({"id": held})
    assert (await release(port, body)).problem[:2] == (404, "unknown-id"), "the id is unknown in the first namespace"
    assert (await release(port, body, "?namespace=stock")).problem == (404, "not-found", UNSERVED)
    assert (await release(port, body, "?namespace=billing")).as_(models.Released).reason == "success"
    assert (await wire.expect("released"))["id"] == held
    line = genie.until("request released by operator")
    assert (line["namespace"], line["id"]) == ("billing", held)


async def test_an_unserved_namespace_is_not_found(idle_port: int) -> None:
    for path in ("/api/state", "/api/waits", "/api/hot", "/api/deadlocks", "/api/resources/a", "/leaderz"):
        rejected = await fetch(idle_port, f"{path}?namespace=stock")
        assert rejected.problem == (404, "not-found", UNSERVED), path


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text"])
async def test_metrics_of_namespaces_have_a_label_and_those_of_the_server_do_not(idle_port: int, accept: str) -> None:
    samples = await fetch_samples(idle_port, accept)
    assert len(samples) == len({(sample.name, *sorted(sample.labels.items())) for sample in samples}), "no duplicates"
    by_namespace: dict[str | None, set[tuple[str, ...]]] = {None: set(), "orders": set(), "billing": set()}
    for sample in samples:
        labels = dict(sample.labels)
        by_namespace[labels.pop("namespace", None)].add((sample.name, *labels.values()))
    assert by_namespace["orders"] == by_namespace["billing"]
    for suffix in ("_bucket", "_count", "_sum", "_total", "_info"):
        by_namespace[None] = {(name.removesuffix(suffix), *labels) for name, *labels in by_namespace[None]}
    assert {name for name, *_ in by_namespace[None]} == OF_THE_SERVER


async def test_metrics_of_several_namespaces_have_one_header(idle_port: int) -> None:
    body = (await fetch(idle_port, "/metrics")).body.decode()
    headers = [line for line in body.splitlines() if line.startswith("# TYPE")]
    assert len(headers) == len(set(headers))
    last = [line.partition(" ")[0] for line in body.splitlines() if line.startswith("genie_wait_seconds_count")]
    assert last == ['genie_wait_seconds_count{namespace="orders"}', 'genie_wait_seconds_count{namespace="billing"}']


async def test_metrics_are_counted_in_their_namespace(genie: Genie) -> None:
    wire = await connected(genie, "billing")
    await wire.lock("exclusive:a", **LONG)
    other = await Wire.connect(genie.address)
    other.send("hello", namespace="stock")
    await other.expect("error")
    values = {
        (sample.name, *(value for label, value in sorted(sample.labels.items()))): sample.value
        for sample in await fetch_samples(port_of(genie))
    }
    assert [values["genie_held_locks", namespace] for namespace in ("orders", "billing")] == [0, 1]
    assert [values["genie_requests_total", namespace, "granted"] for namespace in ("orders", "billing")] == [0, 1]
    rejected = [values["genie_errors_total", "unknown-namespace", namespace] for namespace in ("orders", "billing")]
    assert rejected == [1, 0], "an unknown namespace counts for the first"
    assert values["genie_connections",] == 2


async def test_a_server_may_lead_one_namespace_and_follow_another(redis: Redis) -> None:
    for namespace in ("orders", "billing"):
        redis.create_namespace(namespace)
    with (
        running_server(redis, namespaces="orders", lease=600) as other,
        running_server(redis, admin_port=free_port(), namespaces="orders,billing", lease=600) as genie,
    ):
        port, address = port_of(genie), f"127.0.0.1:{other.port}"
        await until_ready(genie)
        assert (await fetch(port, "/leaderz")).body == f"follower of {address}\n".encode()
        assert (await fetch(port, "/leaderz?namespace=billing")).status == 200
        state = (await fetch(port, "/api/state")).as_(models.State)
        assert state.namespaces == [
            models.Namespace(namespace="orders", role="follower", leader=address),
            models.Namespace(namespace="billing", role="leader", leader=None),
        ]
        assert (await fetch(port, "/api/waits")).leader == address
        assert (await fetch(port, "/api/waits?namespace=billing")).as_(models.Waits).nodes == []
        leads = {s.labels["namespace"]: s.value for s in await fetch_samples(port) if s.name == "genie_leader"}
        assert leads == {"orders": 0, "billing": 1}


async def test_it_is_not_ready_until_all_leaders_are_known(redis: Redis) -> None:
    """The second namespace has never had a leader: the server waits for a lease before it takes it over."""
    redis.create_namespace("orders")
    with running_server(redis, admin_port=free_port(), namespaces="orders,billing", lease=600) as genie:
        rejected = await fetch(port_of(genie), "/readyz")
        assert (rejected.status, rejected.body) == (503, b"orders: leader\nbilling: waiting for a leader\n")
        assert (await fetch(port_of(genie), "/leaderz")).status == 200
        assert (await fetch(port_of(genie), "/leaderz?namespace=billing")).status == 503
        assert [line.get("namespace") for line in genie.log_so_far() if "leadership acquired" in line["event"]] == []


async def test_store_failures_are_logged_with_the_namespace(redis: Redis) -> None:
    for namespace in ("orders", "billing"):
        redis.create_namespace(namespace)
    settings = {"namespaces": "orders,billing", "lease": 600, "store_timeout_ms": 600_000}
    with running_server(redis, admin_port=free_port(), **settings) as genie:
        await until_ready(genie)
        wire = await connected(genie, "billing")
        redis.kill()
        wire.send("request", resources=["exclusive:a"])
        while (line := genie.until("store unavailable"))["namespace"] != "billing":
            assert line["namespace"] == "orders", "its leader commits heartbeats"
        redis.start()
        while (line := genie.until("store available again"))["namespace"] != "billing":
            assert line["namespace"] == "orders"
        await wire.expect("queued")
