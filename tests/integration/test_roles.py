"""What a server says about its role while it starts, follows, and while the store is unavailable."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from genie.admin import models
from support.admin.client import fetch
from support.network.certificates import Certificates
from support.network.wire import Wire
from support.processes.ports import free_port
from support.processes.programs import run_genie
from support.processes.servers import WAIT_S, Genie, Redis, running_redis, running_server

NOT_SERVING = "store unavailable, not serving until it is back"


@pytest.fixture
def redis() -> Iterator[Redis]:
    """A Redis that the tests may kill."""
    with running_redis() as own:
        own.create_namespace()
        yield own


def port_of(genie: Genie) -> int:
    return int(str(genie.settings["admin_port"]))


async def until(read: Callable[[], Awaitable[Any]], accept: Callable[[Any], bool]) -> Any:
    """Repeat a query until its result is accepted, and return the result."""
    async with asyncio.timeout(WAIT_S):
        while not accept(result := await read()):  # noqa: ASYNC110 - the admin port has no event
            await asyncio.sleep(0.02)
        return result


async def readyz(genie: Genie) -> tuple[int, str]:
    response = await fetch(port_of(genie), "/readyz")
    return response.status, response.body.decode()


async def state(genie: Genie) -> models.State:
    return (await fetch(port_of(genie), "/api/state")).as_(models.State)


async def metrics(genie: Genie) -> dict[str, float]:
    body = (await fetch(port_of(genie), "/metrics")).body.decode()
    return {sample.name: sample.value for family in families(body) for sample in family.samples}


def local_status(genie: Genie, **variables: str) -> tuple[int, str]:
    """Run `genie status --local` in the environment of the server."""
    environment = {f"GENIE_{name.upper()}": str(value) for name, value in genie.settings.items()} | variables
    done = run_genie("status", "--local", env=environment)
    return done.returncode, done.stdout + done.stderr


async def test_a_store_outage_says_so_on_each_node(redis: Redis) -> None:
    """Both the former leader and the follower: since when, how long, and which locks were held."""
    with (
        running_server(redis, admin_port=free_port(), lease=1) as leader,
        running_server(redis, admin_port=free_port(), lease=1) as follower,
    ):
        wire = await Wire.connect(leader.address)
        await wire.lock("exclusive:a", transactionTimeout=600_000)
        await until(lambda: readyz(follower), lambda ready: ready[0] == 200)
        redis.kill()
        began = time.time()
        leader.until("leadership lost")
        for genie in (leader, follower):
            status, text = await until(lambda genie=genie: readyz(genie), lambda ready: "store" in ready[1])  # type: ignore[misc]
            assert status == 503
            assert text.startswith("genie: store unavailable since ")
            found = await state(genie)
            assert found.role == "unavailable"
            assert found.store_unavailable_since is not None
            assert abs(found.store_unavailable_since / 1000 - began) < 1.5
            status, text = local_status(genie)
            assert (status, text.partition(" since ")[0]) == (1, "genie: store unavailable")
        samples = await until(lambda: metrics(leader), lambda samples: samples["genie_locks_age_seconds"] > 0)
        assert (samples["genie_held_locks"], samples["genie_store_available"]) == (1, 0)
        assert "genie_locks_age_seconds" not in await metrics(follower)
        lasted = await state(leader)
        assert (lasted.locks, lasted.locks_age is not None) == (1, True)
        await asyncio.sleep(max(0.0, began + 5 - time.time()))  # longer than the lease and the timeout of a commit
        redis.start()
        outage_s = time.time() - began
        for genie in (leader, follower):
            logged = genie.until("store available again")["outage_ms"] / 1000
            assert outage_s - 1.5 < logged < outage_s + 2.5, (logged, outage_s)
        await wire.close()


async def test_a_server_that_starts_without_its_store_says_so() -> None:
    server = Genie(admin_port=free_port(), redis_port=free_port())
    server.start(wait=False)
    try:
        assert "refused" in server.until(NOT_SERVING)["reason"].lower()
        status, text = local_status(server)
        assert (status, text.partition(" since ")[0]) == (1, "genie: store unavailable")
        done = run_genie("status", "--port", str(server.port), "--timeout", "1", env={})
        assert done.returncode == 1
        assert done.stderr.startswith(f"genie: no serving leader at 127.0.0.1:{server.port}: ")
        assert "; store unavailable since " in done.stderr
    finally:
        server.kill()


async def test_a_server_that_waits_for_a_leader_says_so() -> None:
    """A new namespace: the server waits for a lease, because another leader may exist."""
    with running_redis() as redis:
        server = Genie(redis, admin_port=free_port(), lease=3600)
        server.start(wait=False)
        try:
            assert server.until("leader unknown, waiting")["takeover_after_ms"] == 3_600_000
            assert local_status(server) == (1, "genie: waiting for a leader\n")
            done = run_genie("status", "--port", str(server.port), "--timeout", "1", env={})
            assert "no leader is known yet" in done.stderr
        finally:
            server.kill()


async def test_the_local_status_names_the_role_and_the_leader(redis: Redis) -> None:
    with (
        running_server(redis, admin_port=free_port()) as leader,
        running_server(redis, admin_port=free_port()) as follower,
    ):
        assert local_status(leader) == (0, "genie: leader\n")
        await until(lambda: readyz(follower), lambda ready: ready[0] == 200)
        assert local_status(follower) == (0, f"genie: follower of 127.0.0.1:{leader.port}\n")


async def test_the_local_status_works_with_the_settings_of_a_pod(tmp_path: Path) -> None:
    """All interfaces, a certificate that is not for this address, and a token file with several principals."""
    certificates = Certificates(tmp_path)
    certificate = certificates.issue("server", "genie-0.genie-peers.default.svc")
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[orders]\ntoken = "a-token-of-the-orders"\n[wallets]\ntoken = "a-token-of-the-wallets"\n')
    settings = {
        "admin_port": free_port(),
        "host": "0.0.0.0",  # noqa: S104
        "admin_host": "0.0.0.0",  # noqa: S104
        "tls_cert": certificate,
        "token_file": tokens,
    }
    with running_server(**settings) as server:
        assert local_status(server) == (0, "genie: leader\n")


async def test_the_status_says_that_the_store_is_full(redis: Redis) -> None:
    with running_server(redis, admin_port=free_port()) as server:
        redis.call("CONFIG", "SET", "maxmemory", "1")
        server.until("store out of memory")
        assert local_status(server) == (0, "genie: leader, the store is out of memory: only releases are accepted\n")


async def test_a_process_that_was_paused_says_so() -> None:
    with running_server() as server:
        server.send(signal.SIGSTOP)
        time.sleep(1.6)  # noqa: ASYNC251 - the length of the pause
        server.send(signal.SIGCONT)
        assert 1_000 <= server.until("process paused")["paused_ms"] < 60_000


async def test_a_changed_token_file_is_reloaded_without_a_signal(tmp_path: Path) -> None:
    """As the kubelet updates a Secret: the file is a link into a folder, and another folder takes its place."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "token").write_text(f"a-token-of-version-{version}")
    data, token = tmp_path / "data", tmp_path / "token"
    data.symlink_to(tmp_path / "one")
    token.symlink_to(data / "token")
    with running_server(token_file=token, reload_interval=0.1) as server:
        (tmp_path / "next").symlink_to(tmp_path / "two")
        (tmp_path / "next").rename(data)
        server.until("access tokens reloaded")
        wire = await Wire.connect(server.address)
        wire.send("hello", token="a-token-of-version-two")
        await wire.expect("welcome")
        await wire.close()
