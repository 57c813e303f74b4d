"""The admin port of a server process: its responses agree with what clients did."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from msgspec import UNSET
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as families

from genie.admin import AdminServer, connections, models
from genie.admin import views as state
from genie.admin.throttle import MAX_SLICE_WORK, WorkBudget
from genie.admin.views import MAX_SCANNED_WAITERS, ongoing_waits
from genie.config import Settings
from genie.core import LockManager, Request
from genie.observability.stats import Stats
from genie.server.app import Server
from support.admin.client import fetch, release
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie, Redis, running_server
from support.processes.waiting import until

HOUR_MS = 3_600_000


@pytest.fixture
def genie() -> Iterator[Genie]:
    """A new server, so that its counters are those of one test."""
    with running_server(admin_port=free_port()) as server:
        yield server


def port_of(genie: Genie) -> int:
    return int(str(genie.settings["admin_port"]))


def thread_count(genie: Genie) -> int:
    assert genie.process is not None
    return len([*Path(f"/proc/{genie.process.pid}/task").iterdir()])


async def metrics(port: int, **headers: str) -> dict[str, float]:
    """Return the samples by name and labels without the namespace, as `name{label}`."""
    response = await fetch(port, "/metrics", headers=headers)
    assert response.status == 200
    parse = open_families if "openmetrics" in response.headers["content-type"] else families
    return {
        sample.name
        + "".join(f"{{{value}}}" for label, value in sample.labels.items() if label != "namespace"): sample.value
        for family in parse(response.body.decode())
        for sample in family.samples
    }


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
async def test_a_server_with_an_admin_port_has_one_thread(genie: Genie) -> None:
    assert (await fetch(port_of(genie), "/livez")).status == 200
    assert thread_count(genie) == 1


async def test_requests_are_found_by_a_text_and_limited(genie: Genie) -> None:
    wire = await Wire.connect(genie.address)
    ids = [await wire.lock(f"exclusive:accounts/{n}", transactionName=f"t-{n}") for n in range(3)]
    waits = await wire.request("exclusive:accounts/1", note="Nightly job")

    async def found(query: str) -> tuple[list[int], list[int], bool]:
        response = (await fetch(port_of(genie), f"/api/requests?{query}")).as_(models.Requests)
        return [row.id for row in response.held], [row.id for row in response.waiting], response.complete

    assert await found("") == (ids, [], True)
    assert await found("limit=2") == (ids[:2], [], False)
    assert await found("search=ACCOUNTS/1") == ([ids[1]], [waits], True)
    assert await found("search=t-2") == ([ids[2]], [], True)
    assert await found("search=nightly") == ([], [waits], True)
    assert await found("search=accounts&limit=2") == ([ids[0], ids[1]], [], False)


async def test_health_checks(genie: Genie) -> None:
    for path in ("/livez", "/readyz", "/leaderz"):
        assert (await fetch(port_of(genie), path)).status == 200


async def test_a_server_without_its_store_is_live_but_not_ready() -> None:
    """The admin port is opened before the server has connected to Redis."""
    server = Genie(admin_port=free_port(), redis_port=free_port())
    server.start(wait=False)
    try:
        port = port_of(server)
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    live = await fetch(port, "/livez")
                    break
                except OSError:
                    await asyncio.sleep(0.01)
        assert live.status == 200
        server.until("store unavailable, not serving until it is back")
        for path, start in (("/readyz", b"genie: store unavailable since "), ("/leaderz", b"store unavailable since ")):
            response = await fetch(port, path)
            assert response.status == 503
            assert response.body.startswith(start), path
        state = (await fetch(port, "/api/state")).as_(models.State)
        assert (state.role, state.leader, state.store, state.held) == ("unavailable", None, "redis", 0)
        waits = await fetch(port, "/api/waits")
        assert waits.problem == (503, "unavailable", "this server is not the leader; no leader is known")
    finally:
        server.kill()


async def test_a_follower_names_the_leader(redis: Redis) -> None:
    with (
        running_server(redis, admin_port=free_port()) as leader,
        running_server(redis, admin_port=free_port()) as follower,
    ):
        port, address = port_of(follower), f"127.0.0.1:{leader.port}"
        while (await fetch(port, "/readyz")).status != 200:  # noqa: ASYNC110 - its replica has not caught up
            await asyncio.sleep(0.01)
        assert (await fetch(port, "/leaderz")).body == f"follower of {address}\n".encode()
        state = (await fetch(port, "/api/state")).as_(models.State)
        assert (state.role, state.leader, state.held, state.queues) == ("follower", address, 0, [])
        for path in ("/api/waits", "/api/hot", "/api/deadlocks", "/api/resources/a"):
            rejected = await fetch(port, path)
            assert rejected.problem[:2] == (503, "unavailable")
            assert rejected.leader == address
            assert rejected.headers["retry-after"] == "1"
        rejected = await release(port, b'{"id":7}')
        assert (rejected.problem[0], rejected.leader) == (503, address)
        assert (await metrics(port))["genie_leader"] == 0
        assert (await metrics(port_of(leader)))["genie_leader"] == 1
        state = (await fetch(port_of(leader), "/api/state")).as_(models.State)
        assert (state.role, state.leader, state.store, state.store_available) == ("leader", None, "redis", True)
        leader.kill()
        follower.until("leadership acquired")
        assert (await fetch(port, "/leaderz")).status == 200
        assert (await fetch(port, "/api/waits")).as_(models.Waits).nodes == []


async def test_the_state_agrees_with_the_clients(genie: Genie) -> None:
    one, two = await Wire.connect(genie.address), await Wire.connect(genie.address)
    held = await one.lock("exclusive:a", "shared:b", transactionName="t1", transactionTimeout=HOUR_MS)
    await one.lock("shared:b")
    first = await two.request("exclusive:a", transactionName="t2", queueTimeout=HOUR_MS)
    await two.request("shared:a", "exclusive:b", queueTimeout=HOUR_MS)
    two.send("request", resources=["exclusive:a"], queueTimeout=0)
    await two.expect("queued")
    assert (await two.expect("released"))["reason"] == "queue-timeout"
    two.raw(b"nonsense\n")
    await two.expect("error")
    state = (await fetch(port_of(genie), "/api/state")).as_(models.State)
    assert (state.role, state.namespace, state.store, state.store_available) == ("leader", "genie", "memory", True)
    assert (state.held, state.waiting, state.locks, state.resources) == (2, 2, 3, 2)
    assert (state.connections, state.sessions) == (2, 0)
    assert state.outcomes["granted"] == 2
    assert state.outcomes["queue-timeout"] == 1
    assert state.errors == {"bad-json": 1}
    (a, b) = state.queues
    assert (a.resource, a.waiting, a.holders, a.holder, a.transaction_name) == ("a", 2, 1, held, "t1")
    assert (b.resource, b.waiting, b.holders) == ("b", 1, 2)
    assert state.queues_complete
    assert state.longest_wait >= 0
    assert await one.release(held) == "success"
    assert (await two.expect("locked"))["id"] == first
    samples = await metrics(port_of(genie))
    assert samples["genie_requests_total{granted}"] == 2
    assert samples["genie_requests_total{waited}"] == 1
    assert samples["genie_requests_total{queue-timeout}"] == 1
    assert samples["genie_wait_seconds_count"] == 1
    assert samples["genie_hold_seconds_count"] == 1
    assert samples["genie_queue_length"] == 1
    assert samples["genie_held_requests"] == 2
    assert samples["genie_held_locks"] == 2
    assert 0 < samples["genie_state_bytes"] < samples["genie_state_limit_bytes"] == 1 << 32
    assert samples["genie_connections"] == 2
    assert samples["genie_errors_total{bad-json}"] == 1


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


async def test_notes_traces_and_waits_without_a_timeout(genie: Genie) -> None:
    wire, client = await Wire.connect(genie.address), await Wire.connect(genie.address)
    held = await wire.lock("exclusive:noted", transactionName="t1", note="cron@host-1", traceparent=TRACE)
    other = await client.lock("exclusive:other", transactionName="t2")
    waits = await client.request(
        "exclusive:noted", transactionName="t2", note="page 3", traceparent=OTHER_TRACE, queueTimeout=2147483647
    )
    shown = (await fetch(port_of(genie), "/api/resources/noted")).as_(models.Resource)
    (holder,), (row,) = shown.holders, shown.queue
    assert (holder.id, holder.note, holder.expires_in is UNSET) == (held, "cron@host-1", False)
    assert row.blockers is not UNSET
    assert (row.id, row.note, row.expires_in, row.blockers[0].note) == (waits, "page 3", UNSET, "cron@host-1")
    assert (holder.traceparent, row.traceparent, row.blockers[0].traceparent) == (TRACE, OTHER_TRACE, TRACE)
    graph = (await fetch(port_of(genie), "/api/waits")).as_(models.Waits)
    assert {node.id: node.traceparent for node in graph.nodes} == {held: TRACE, waits: OTHER_TRACE}
    assert {node.id: node.note for node in graph.nodes} == {held: "cron@host-1", waits: "page 3"}
    client.send("inspect", resource="noted")
    found = await client.expect("inspected")
    assert (found["holders"][0]["note"], found["queue"][0]["note"]) == ("cron@host-1", "page 3")
    assert (found["holders"][0]["traceparent"], found["queue"][0]["traceparent"]) == (TRACE, OTHER_TRACE)
    assert "expiresIn" not in found["queue"][0]
    await wire.request("exclusive:other", transactionName="t1")
    released = await wire.expect("released")
    assert released["reason"] == "deadlock"
    assert [step.get("note") for step in released["waits"]] == [None, "page 3"]
    assert [step.get("traceparent") for step in released["waits"]] == [None, OTHER_TRACE]
    deadlock = (await fetch(port_of(genie), "/api/deadlocks")).as_(models.Deadlocks).deadlocks[0]
    assert [step.note for step in deadlock.waits] == [UNSET, "page 3"]
    assert [step.traceparent for step in deadlock.waits] == [UNSET, OTHER_TRACE]
    assert await wire.release(held) == "success"
    assert (await client.expect("locked"))["id"] == waits
    assert [await client.release(id_) for id_ in (waits, other)] == ["success"] * 2


async def test_rates_and_quantiles_are_updated(genie: Genie) -> None:
    one, two = await Wire.connect(genie.address), await Wire.connect(genie.address)
    held = await one.lock("exclusive:a")
    await two.request("exclusive:a")
    await one.release(held)
    await two.expect("locked")
    async with asyncio.timeout(WAIT_S):
        state = (await fetch(port_of(genie), "/api/state")).as_(models.State)
        while not state.rates.grants:
            state = (await fetch(port_of(genie), "/api/state")).as_(models.State)
    assert state.rates.deadlocks == 0
    assert state.wait_p50 is not None
    assert state.wait_p99 is not None
    assert 0 < state.wait_p50 <= state.wait_p99


async def test_an_idle_connection_of_the_address_with_the_most_is_closed_for_a_new_one() -> None:
    server = Server(Settings.from_options(port=0, admin_port=0, admin_host="0.0.0.0", insecure=True))  # noqa: S104
    admin = AdminServer(server)
    await admin.start()
    assert admin.address is not None
    port = admin.address[1]
    try:
        single = await asyncio.open_connection("127.0.0.2", port, local_addr=("127.0.0.2", 0))
        many = [await asyncio.open_connection("127.0.0.1", port) for _ in range(connections.MAX_PENDING)]
        async with asyncio.timeout(WAIT_S):
            assert await many[0][0].read() == b"", "the oldest one of the address with the most"
        single[1].write(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.2\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert (await single[0].readline()).startswith(b"HTTP/1.1 ")
        for _, writer in (single, *many):
            writer.close()
    finally:
        await admin.stop()


async def test_requests_beyond_the_limit_are_rejected_except_health_checks() -> None:
    admin = AdminServer(Server(Settings.from_options(port=0, admin_port=0)))
    await admin.start()
    assert admin.address is not None

    async def request(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*admin.address)  # type: ignore[misc]
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        return reader, writer

    try:
        async with asyncio.timeout(WAIT_S):
            busy = [await request("/livez") for _ in range(connections.MAX_CONNECTIONS)]
            for reader, _ in busy:
                await reader.readuntil(b"ok\n")
            established = [each for group in admin.connections._established._by_address.values() for each in group]
            for connection in established:
                connection.is_busy = True  # as during a request
            rejected = await request("/page.css")
            assert (await rejected[0].readline()).startswith(b"HTTP/1.1 503 ")
            assert b"64 connections have a request in progress; try again later" in await rejected[0].read()
            checked = await request("/livez")
            assert b"200 OK" in (response := await checked[0].read())
            assert response.endswith(b"ok\n"), "and it is closed"
            established[0].is_busy = False
            served = await request("/page.css")
            assert (await served[0].readline()).startswith(b"HTTP/1.1 200 ")
            assert len(admin.connections._established) == connections.MAX_CONNECTIONS
        for _, writer in (*busy, rejected, checked, served):
            writer.close()
    finally:
        await admin.stop()


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(connections, "FIRST_REQUEST_TIMEOUT_S", 0.05)
    server = Server(Settings.from_options(port=0, admin_port=0))
    admin = AdminServer(server)
    await admin.start()
    assert admin.address is not None
    now = asyncio.get_running_loop().time
    last_request_at = now()
    try:
        silent, busy = [await asyncio.open_connection(*admin.address) for _ in range(2)]
        silent[1].write(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n")  # an incomplete request
        async with asyncio.timeout(WAIT_S):
            while not silent[0].at_eof():
                request_at = now()
                try:
                    busy[1].write(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                    assert b"200 OK" in await busy[0].readuntil(b"ok\n")
                except (
                    ConnectionError,
                    asyncio.IncompleteReadError,
                ):  # this process was suspended for longer than the timeout
                    assert now() - last_request_at >= connections.IDLE_TIMEOUT_S
                    busy[1].close()
                    busy = await asyncio.open_connection(*admin.address)
                last_request_at = request_at
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        assert await silent[0].read() == b""
        for _, writer in (silent, busy):
            writer.close()
    finally:
        await admin.stop()


async def test_connections_that_do_not_read_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(connections, "RESPONSE_TIMEOUT_S", 0.05)
    admin = AdminServer(Server(Settings.from_options(port=0, admin_port=0)))
    await admin.start()
    assert admin.address is not None
    loop = asyncio.get_running_loop()
    with socket.socket() as not_reading:
        not_reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        not_reading.setblocking(False)
        await loop.sock_connect(not_reading, admin.address)
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(WAIT_S):
                while True:
                    await loop.sock_sendall(not_reading, b"GET /page.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 100)
    await until(lambda: not len(admin.connections))
    await admin.stop()


async def test_input_that_is_not_http_is_not_echoed(shared: Genie) -> None:
    secret = b"a token that must not be echoed"
    for lines in (b"GET /api/state HTTP/1.1\r\nAuthorization : " + secret, b"GET \x00" + secret + b" HTTP/1.1"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(shared))
        writer.write(lines + b"\r\nHost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            response = await reader.read()
        assert b" 400 " in response.partition(b"\r\n")[0]
        assert b"Server: genie\r\n" in response
        assert b"Content-Security-Policy: default-src 'none'" in response
        assert b'"code":"bad-request"' in response
        assert secret not in response
        writer.close()


async def test_the_wait_for_graph(genie: Genie) -> None:
    client = await Wire.connect(genie.address)
    held = await client.lock("exclusive:a", transactionName="t1")
    first = await client.request("exclusive:a", transactionName="t2")
    second = await client.request("shared:a")
    waits = (await fetch(port_of(genie), "/api/waits")).as_(models.Waits)
    assert [(node.id, node.state) for node in waits.nodes] == [(first, "queued"), (held, "held"), (second, "queued")]
    assert [node.transaction_name for node in waits.nodes[:2]] == ["t2", "t1"]
    assert waits.nodes[2].transaction_name is msgspec.UNSET
    assert waits.nodes[2].resources == ["shared:a"]
    assert [node.blockers_total for node in waits.nodes] == [1, msgspec.UNSET, 2]
    assert [(edge.waiter, edge.blocker, edge.mode, edge.state) for edge in waits.edges] == [
        (first, held, "exclusive", "held"),
        (second, held, "exclusive", "held"),
        (second, first, "exclusive", "queued"),
    ]
    assert (waits.queue_total, waits.queue_shown) == (2, 2)
    few = (await fetch(port_of(genie), "/api/waits?limit=2")).as_(models.Waits)
    assert [node.id for node in few.nodes] == [first, held]
    assert (few.queue_total, few.queue_shown, len(few.edges)) == (2, 1, 1)


@pytest.mark.parametrize(
    "name", ["a", "a/b//c/", "../..", "%", "a%2Fb", "é ☃ 𝄞", "?limit=1", "#x", "a:b", "x" * 512, "/" * 512, "+ &"]
)
async def test_a_resource_by_its_encoded_name(shared: Genie, name: str) -> None:
    client = await Wire.connect(shared.address)
    held = await client.lock(f"shared:{name}", transactionTimeout=HOUR_MS)
    waiting = await client.request(f"exclusive:{name}", transactionName="t", priority=3, queueTimeout=HOUR_MS)
    client.send("inspect", resource=name)
    inspected = await client.expect("inspected")
    resource = (await fetch(port_of(shared), f"/api/resources/{quote(name, safe='')}")).as_(models.Resource)
    assert resource.resource == name
    assert (resource.holders_total, resource.queue_total) == (1, 1)
    assert (resource.holders[0].id, resource.queue[0].id) == (held, waiting)
    for rows, wire_rows in ((resource.holders, inspected["holders"]), (resource.queue, inspected["queue"])):
        assert [without_timeout(msgspec.to_builtins(row)) for row in rows] == [
            without_timeout(row) for row in wire_rows
        ]
    other = (await fetch(port_of(shared), f"/api/resources/{quote(name[:500])}%21")).as_(models.Resource)
    assert (other.holders_total, other.queue_total) == (0, 0)


def without_timeout(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the field that changes with time."""
    return {key: value for key, value in row.items() if key != "expiresIn"}


async def test_hot_resources_and_deadlocks(genie: Genie) -> None:
    client = await Wire.connect(genie.address)
    for name in "ab":
        await client.lock(f"exclusive:{name}", transactionName=f"t{name}", transactionTimeout=HOUR_MS)
    waiting = await client.request("exclusive:b", transactionName="ta", queueTimeout=HOUR_MS)
    victim = await client.request("exclusive:a", transactionName="tb", queueTimeout=HOUR_MS)
    assert (await client.expect("released"))["reason"] == "deadlock"
    deadlocks = (await fetch(port_of(genie), "/api/deadlocks")).as_(models.Deadlocks)
    assert deadlocks.total == 1
    (row,) = deadlocks.deadlocks
    assert (row.id, row.transaction_name, row.cycle, row.steps_total) == (victim, "tb", ["tb", "ta"], 2)
    assert [(step.waiter, step.resource) for step in row.waits] == [(victim, "a"), (waiting, "b")]
    hot_list = (await fetch(port_of(genie), "/api/hot")).as_(models.HotList)
    assert {(hot.resource, hot.conflicts, hot.waiting, hot.holders) for hot in hot_list.resources} == {
        ("a", 1, 0, 1),
        ("b", 1, 1, 1),
    }
    assert len((await fetch(port_of(genie), "/api/hot?limit=1")).as_(models.HotList).resources) == 1
    assert hot_list.resources[0].resource == "b", "a request waits for it now"
    state = (await fetch(port_of(genie), "/api/state")).as_(models.State)
    assert (state.deadlocks, state.outcomes["deadlock"]) == (1, 1)
    assert (await metrics(port_of(genie)))["genie_deadlocks_total"] == 1


async def test_ongoing_waits_count_as_contention() -> None:
    """A resource with hour-long ongoing waits ranks before one with more, but shorter, ended waits."""
    manager, stats, budget = LockManager(unix_offset_ms=time.time() * 1000 - HOUR_MS), Stats(), WorkBudget()
    for names in (("stuck",), ("stuck",), ("free", "stuck")):
        manager.step(Request(exclusive=names, queue_timeout_ms=2 * HOUR_MS, transaction_timeout_ms=2 * HOUR_MS), 0.0)
    stats.contention.record_wait(["busy", "stuck"], HOUR_MS / 2)
    stats.contention.record_conflict(["busy"])
    rows = (await state.hot(stats, manager.table, 10, budget)).resources
    assert [(row.resource, row.conflicts, row.waiting) for row in rows] == [("stuck", 0, 2), ("busy", 1, 0)]
    assert rows[0].waited >= 2.5 * HOUR_MS
    assert rows[1].waited == HOUR_MS / 2, "only ended waits"


async def test_the_number_of_scanned_waits_is_limited() -> None:
    manager, budget = LockManager(), WorkBudget()
    for number in range(MAX_SCANNED_WAITERS + 2):
        manager.step(Request(exclusive=(f"r{number // 2}",), queue_timeout_ms=HOUR_MS), 0.0)
    distinct = len(manager.table.waiting)
    for _ in range(MAX_SCANNED_WAITERS):
        manager.step(Request(exclusive=("r0",), queue_timeout_ms=HOUR_MS), 0.0)
    waited = await ongoing_waits(manager.table, 1.0, budget)
    assert sum(waited.values()) == MAX_SCANNED_WAITERS, "each has waited for one millisecond"
    assert waited["r0"] == MAX_SCANNED_WAITERS - distinct + 1
    assert budget.max_spent <= MAX_SLICE_WORK


async def test_a_release_notifies_the_holder_and_grants_the_next_request(genie: Genie) -> None:
    one, two = await Wire.connect(genie.address), await Wire.connect(genie.address)
    held = await one.lock("exclusive:a")
    waiting = await two.request("exclusive:a")
    cancelled = await two.request("exclusive:a")
    for id_ in (held, cancelled):
        response = (await release(port_of(genie), msgspec.json.encode({"id": id_}))).as_(models.Released)
        assert (response.id, response.reason) == (id_, "success")
    assert await one.expect("released") == {"id": held, "reason": "success"}
    assert (await two.expect("locked"))["id"] == waiting
    assert (await two.expect("released"))["id"] == cancelled
    again = (await release(port_of(genie), msgspec.json.encode({"id": held}))).as_(models.Released)
    assert again.reason == "success"
    assert genie.until("request released by operator")["id"] == held
    unknown = await release(port_of(genie), b'{"id":7}')
    assert unknown.problem == (404, "unknown-id", "there is no request 7, or it ended long ago")


async def test_a_release_times_out_without_the_store(redis: Redis) -> None:
    import signal

    with running_server(redis, admin_port=free_port(), store_timeout_ms=1000, lease=600) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a", transactionTimeout=HOUR_MS)
        redis.send(signal.SIGSTOP)
        try:
            rejected = await release(port_of(genie), msgspec.json.encode({"id": held}))
        finally:
            redis.send(signal.SIGCONT)
        assert rejected.problem[:2] == (503, "unavailable")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/waits?limit=0", ["limit", "nodes", "1 to 1000", "'0'"]),
        ("/api/waits?limit=1001", ["limit", "1 to 1000", "'1001'"]),
        ("/api/waits?limit=", ["limit", "''"]),
        ("/api/waits?limit=1e2", ["limit", "'1e2'"]),
        ("/api/waits?limit=-1", ["limit", "'-1'"]),
        ("/api/waits?limit=%D9%A3", ["limit", "1 to 1000"]),
        ("/api/waits?limit=1&limit=2", ["limit", "'1, 2'"]),
        ("/api/waits?most=3", ["most", "known: limit, namespace"]),
        ("/api/hot?limit=101", ["limit", "resources", "1 to 100"]),
        ("/api/hot?search=a", ["unknown parameter 'search'"]),
        (f"/api/requests?search={'a' * 513}", ["search", "512", "513"]),
        ("/api/deadlocks?limit=101", ["limit", "deadlocks", "1 to 100"]),
        ("/api/state?limit=1", ["limit", "/api/state", "known: namespace"]),
        ("/api/schema?namespace=genie", ["namespace", "/api/schema", "known: none"]),
        ("/api/state?namespace=", ["namespace must be a string of 1 to 128 letters", "''"]),
        ("/api/state?namespace=a%20b", ["namespace must be a string of 1 to 128 letters", "'a b'"]),
        ("/api/hot?namespace=genie&namespace=genie", ["namespace must be given once", "'genie, genie'"]),
        ("/leaderz?namespace=%C3%A9", ["namespace must be a string", "'é'"]),
        ("/api/schema?x", ["x", "/api/schema", "known: none"]),
        ("/api/resources/a?limit=1", ["limit", "known: namespace"]),
        ("/api/resources/", ["the name of a resource", "1 to 512"]),
        ("/api/resources/" + "x" * 513, ["the name of a resource", "1 to 512", "513"]),
        ("/api/resources/a%00", ["the name of a resource", "control"]),
        ("/api/resources/%FF", ["the name of a resource", "UTF-8"]),
    ],
)
async def test_invalid_parameters_are_explained(shared: Genie, path: str, words: list[str]) -> None:
    rejected = await fetch(port_of(shared), path)
    status, code, message = rejected.problem
    assert (status, code) == (400, "bad-request")
    for word in words:
        assert word in message
    assert rejected.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "id"),
        (b"nonsense", "id"),
        (b"[]", "object"),
        (b"{}", "`id`"),
        (b'{"id":"7"}', "`$.id`"),
        (b'{"id":1.5}', "`$.id`"),
        (b'{"id":0}', "positive"),
        (b'{"id":-1}', "positive"),
        (b'{"id":9223372036854775808}', "63 bits"),
        (b'{"id":1' + b"0" * 4000 + b"}", "id"),
        (b'{"id":7,"\xff":1}', "id"),
    ],
)
async def test_an_invalid_release_body_is_explained(shared: Genie, body: bytes, word: str) -> None:
    status, code, message = (await release(port_of(shared), body)).problem
    assert (status, code) == (400, "bad-request")
    assert word in message


async def test_unknown_paths_and_methods(shared: Genie) -> None:
    port = port_of(shared)
    assert (await fetch(port, "/api/nothing")).problem == (
        *(404, "not-found"),
        "/api/nothing does not exist; /api/schema lists the paths",
    )
    wrong = await fetch(port, "/api/release")
    assert wrong.problem == (405, "not-allowed", "/api/release allows POST, not GET")
    assert wrong.headers["allow"] == "POST"
    assert (await fetch(port, "/api/state", method="DELETE")).problem[0] == 405
    large = await release(port, b'{"id":7}' + b" " * 5000)
    assert large.problem == (413, "bad-request", "the body exceeds 4096 bytes")


async def test_the_schema_describes_the_responses(shared: Genie) -> None:
    schema = msgspec.json.decode((await fetch(port_of(shared), "/api/schema")).body)
    operations = {path: next(iter(methods.items())) for path, methods in schema["paths"].items()}
    assert {path for path, (method, _) in operations.items() if method == "get"} == {
        *(
            "/api/state",
            "/api/waits",
            "/api/hot",
            "/api/deadlocks",
            "/api/order",
            "/api/requests",
            "/api/resources/{name}",
            "/api/history/{name}",
        )
    }
    limit, namespace = operations["/api/waits"][1]["parameters"]
    assert (namespace["name"], namespace["in"], "required" in namespace) == ("namespace", "query", False)
    assert all(operation["parameters"][-1] == namespace for _, operation in operations.values())
    assert limit["schema"] == {"type": "integer", "minimum": 1, "maximum": 1000, "default": 500}
    state = (await fetch(port_of(shared), "/api/state")).body
    properties = schema["components"]["schemas"]["State"]["properties"]
    assert set(properties) == set(msgspec.json.decode(state))


async def test_metrics_in_both_formats(shared: Genie) -> None:
    port = port_of(shared)
    plain = await fetch(port, "/metrics", headers={"Accept": "text/plain"})
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    as_open = await fetch(
        port, "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    )
    assert as_open.headers["content-type"].startswith("application/openmetrics-text; version=")
    assert as_open.body.endswith(b"\n# EOF\n")
    assert as_open.body.count(b"# EOF") == 1
    assert b"# EOF" not in plain.body
    both = [await metrics(port), await metrics(port, Accept="application/openmetrics-text")]
    assert set(both[0]) == set(both[1])
    for response in (plain, as_open):
        assert b"resource=" not in response.body
        assert response.headers["cache-control"] == "no-store"


async def test_concurrent_polls_share_responses(shared: Genie) -> None:
    responses = await asyncio.gather(*(fetch(port_of(shared), "/api/state") for _ in range(20)))
    assert {response.status for response in responses} == {200}
    assert len({response.body for response in responses}) < 20


@pytest.fixture(scope="module")
def shared() -> Iterator[Genie]:
    with running_server(admin_port=free_port()) as server:
        yield server
