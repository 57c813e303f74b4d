"""The server or Redis is killed or stopped, Redis loses data or a reply is lost: no lock is lost or granted twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from genie.core import LockManager, Request
from genie.storage.redis.store import RedisStore
from genie.storage.store import Batch
from support.admin.client import fetch
from support.network.proxy import Cut, chunks, proxy
from support.network.wire import Wire
from support.processes.commands import genie_cli
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie, Redis, redis_version, resident_bytes, running_redis, running_server
from support.storage.relay import Command, relay
from support.storage.stores import commit, opened, stored_records


async def test_after_a_kill_and_restart_every_lock_is_held(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a", "shared:s", transactionTimeout=600_000, transactionName="T1")
        bound = await client.lock("exclusive:bound", onDisconnect="release", transactionTimeout=600_000)
        short = await client.lock("exclusive:short", transactionTimeout=300)
        client.send("inspect", id=held)
        before = (await client.expect("inspected"))["holders"][0]
        await client.request("exclusive:a", transactionName="T2")
        genie.send(signal.SIGKILL)
        genie.wait()
        await client.close()

        genie.start()

        client = await Wire.connect(genie.address)
        client.send("inspect", transactionName="T1")
        inspected = await client.expect("inspected")
        after = inspected["holders"][0]
        assert after["expiresIn"] <= 600_000, (
            "time continues from the last commit, which may be earlier than the first inspect"
        )
        assert {**after, "expiresIn": 0} == {**before, "expiresIn": 0}
        client.send("inspect")
        inspected = await client.expect("inspected")
        assert inspected["queueTotal"] == 0, "the waiting client is not connected any more"
        assert {row["id"] for row in inspected["holders"]} - {short} == {held}
        await client.request("exclusive:a", queueTimeout=0)
        assert (await client.expect("released"))["blockers"][0]["id"] == held
        newer = await client.lock("exclusive:bound")
        assert newer > bound
        client.send("inspect", id=newer)
        assert (await client.expect("inspected"))["holders"][0]["fence"] > before["fence"]
        after_short = await client.lock("exclusive:short")  # it timed out in the meantime
        assert await client.release(after_short) == "success"
        assert await client.release(held) == "success"
        await client.close()


async def test_after_a_kill_under_load_all_notifications_hold(redis: Redis) -> None:
    """What clients were notified of before the kill is stored; the rest may or may not be."""
    with running_server(redis, lease=60) as genie:
        seen: set[int] = set()
        fences: list[int] = []
        for _ in range(4):
            client = await Wire.connect(genie.address)
            notified_grants: dict[int, str] = {}
            notified_releases: set[int] = set()
            for number in range(400):
                client.send(
                    "request", resources=[f"exclusive:load/{number}"], transactionTimeout=600_000, ref=f"{number}"
                )
            names = {}
            count = 0
            try:
                while True:
                    command, payload = await client.receive()
                    if command == "closed":
                        break
                    if command == "queued":
                        assert payload["id"] not in seen
                        seen.add(payload["id"])
                        names[payload["id"]] = f"load/{payload['ref']}"
                    elif command == "locked":
                        fences.append(payload["fence"])
                        notified_grants[payload["id"]] = names[payload["id"]]
                        if payload["id"] % 3 == 0:
                            client.send("release", id=payload["id"])
                    elif command == "released":
                        notified_releases.add(payload["id"])
                    count += 1
                    if count == 700:
                        genie.send(signal.SIGKILL)
            except OSError:
                pass
            genie.wait()
            await client.close()
            genie.start()
            client = await Wire.connect(genie.address)
            client.send("inspect", limit=1_000)
            held = {row["id"] for row in (await client.expect("inspected"))["holders"]}
            release_sent = {id_ for id_ in notified_grants if id_ % 3 == 0}
            assert notified_grants.keys() - release_sent <= held
            assert not notified_releases & held
            for id_ in held:
                await client.release(id_)
            await client.close()
        assert fences == sorted(set(fences))


async def test_a_follower_logs_the_end_of_an_outage(redis: Redis) -> None:
    with running_server(redis, lease=60):
        follower = Genie(redis, lease=60)
        try:
            follower.start()
            redis.kill()
            follower.until("store unavailable")
            redis.start()
            assert follower.until("store available again")["outage_ms"] > 0
            assert not any(line["event"] == "leadership acquired" for line in follower.log)
        finally:
            follower.kill()


async def test_a_release_gets_its_reply_after_a_restart_of_redis(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
        held = await client.lock("exclusive:a", transactionTimeout=600_000)
        redis.kill()
        client.send("release", id=held)  # executed or queued
        genie.until("store unavailable")
        redis.start()
        genie.until("store available again")
        command, payload = await client.receive()
        assert (command, payload["id"]) == ("released", held) or payload["code"] == "unavailable"
        await other.lock("exclusive:b")
        for wire in (client, other):
            await wire.close()


@asynccontextmanager
async def server_with_fault(
    redis: Redis, resource: str, fault: Callable[[], object], **settings: object
) -> AsyncIterator[Genie]:
    """Run a server; call `fault` when the commit of a lock of `resource` arrives at Redis, and is in flight."""
    faults = [fault]

    def inject(command: Command) -> None:
        if faults and any(resource.encode() in part for part in command):
            faults.pop()()

    async with relay(redis.port, inject) as between:
        redis.create_namespace()
        genie = Genie(None, lease=60, **settings)
        genie.redis_url = between.url
        try:
            await asyncio.to_thread(genie.start)
            yield genie
        finally:
            genie.kill()


async def test_while_redis_is_stopped_commands_are_unavailable_and_no_reply_is_repeated(redis: Redis) -> None:
    async with server_with_fault(redis, "in-flight", lambda: redis.send(signal.SIGSTOP), store_timeout_ms=100) as genie:
        client, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
        await client.lock("exclusive:warm")
        client.send("request", resources=["exclusive:in-flight"], ref="in flight")
        await asyncio.to_thread(genie.until, "store unavailable")
        other.send("request", resources=["exclusive:b"], ref="rejected", queueTimeout=0)
        payload = await other.expect("error")
        assert (payload["code"], payload["ref"]) == ("unavailable", "rejected")
        other.send("release", id=5)
        assert (await other.expect("error")) | {"message": ""} == {"code": "unavailable", "message": "", "id": 5}
        client.send("ping")  # must not overtake the pending reply
        redis.send(signal.SIGCONT)
        assert (await client.expect("queued"))["ref"] == "in flight"
        id_ = (await client.expect("locked"))["id"]
        command, _ = await client.receive()
        assert command in ("pong", "error")
        assert await client.release(id_) == "success"
        client.send("ping")
        assert await client.expect("pong") == {}
        for wire in (client, other):
            await wire.close()


async def test_a_commit_whose_reply_is_lost_is_applied_once(redis: Redis) -> None:
    lost = Cut(to_server=True, kind="MULTI", position="after")
    async with proxy(redis.port, chunks) as between:
        redis.create_namespace()
        genie = Genie(None, lease=60)
        genie.redis_url = between.url
        await asyncio.to_thread(genie.start)
        try:
            client = await Wire.connect(genie.address)
            for number in range(20):
                between.arm(lost)
                client.send("request", resources=[f"exclusive:{number}"])
                queued = await client.expect("queued")
                locked = await client.expect("locked")
                assert queued["id"] == locked["id"]
                assert between.fired.is_set()
                between.arm(lost)
                assert await client.release(locked["id"]) == "success"
                assert between.fired.is_set()
            client.send("inspect")
            assert (await client.expect("inspected"))["holdersTotal"] == 0
            assert stored_records(redis) == {}
            await client.close()
        finally:
            genie.kill()


async def test_the_snapshot_is_restored_to_an_empty_redis(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client = await Wire.connect(genie.address)
        held = {await client.lock(f"exclusive:{number}", transactionTimeout=600_000) for number in range(50)}
        redis.call("FLUSHALL")
        held.add(await client.lock("exclusive:more", transactionTimeout=600_000))
        assert set(stored_records(redis)) == held
        await client.release(min(held))
        assert set(stored_records(redis)) == held - {min(held)}
        genie.kill()
        await client.close()
        genie.start()
        client = await Wire.connect(genie.address)
        client.send("inspect")
        assert {row["id"] for row in (await client.expect("inspected"))["holders"]} == held - {min(held)}
        await client.close()


async def test_a_snapshot_that_is_lost_again_is_restored_again(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client = await Wire.connect(genie.address)
        one = await client.lock("exclusive:one", transactionTimeout=600_000)
        redis.call("FLUSHALL")
        other = await lock_again(client, "exclusive:other", transactionTimeout=600_000)
        redis.call("COPY", "{genie}:log", "restored")
        two = await lock_again(client, "exclusive:two", transactionTimeout=600_000)
        redis.call("RENAME", "restored", "{genie}:log")  # rolled back to the restored snapshot
        three = await lock_again(client, "exclusive:three", transactionTimeout=600_000)
        assert set(stored_records(redis)) == {one, other, two, three}


async def test_waiting_requests_without_a_session_are_not_restored(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client = await Wire.connect(genie.address)
        await client.lock("exclusive:A", transactionTimeout=600_000)
        client.send("request", resources=["exclusive:A"])
        waiting = (await client.expect("queued"))["id"]
        redis.call("FLUSHALL")
        held = await lock_again(client, "exclusive:B")
        assert held in stored_records(redis)
        assert waiting not in stored_records(redis)
        await client.close()


async def test_an_idle_server_detects_the_loss(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a", transactionTimeout=600_000)
        redis.call("FLUSHALL")
        genie.until("snapshot restored")
        assert set(stored_records(redis)) == {held}
        await client.close()


async def test_the_snapshot_is_restored_to_a_redis_that_rolled_back(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client = await Wire.connect(genie.address)
        old = await client.lock("exclusive:old", transactionTimeout=600_000)
        redis.back_up()
        new = await client.lock("exclusive:new", transactionTimeout=600_000)
        await client.release(old)
        redis.kill()
        redis.roll_back()
        redis.start()
        last = await lock_again(client, "exclusive:last", transactionTimeout=600_000)
        assert set(stored_records(redis)) == {new, last}
        keys = redis.call("KEYS", "*:state:*")
        assert len(keys) == 1, "the old snapshot is deleted"
        await client.close()


async def test_settings_with_which_redis_loses_data_are_logged(redis: Redis) -> None:
    redis.call("CONFIG", "SET", "appendonly", "no")
    redis.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    genie = Genie(redis)
    try:
        genie.start()
        warnings = " ".join(line["event"] for line in genie.log if line["level"] == "warning")
        assert "appendonly yes" in warnings
        assert "maxmemory-policy noeviction" in warnings
    finally:
        genie.kill()


def rejection(redis: Redis, **settings: object) -> str:
    """Start a server, which must not start; return its error."""
    done = genie_cli("serve", port=free_port(), admin_port="", redis_url=redis.url, **settings)
    assert done.returncode == 1
    assert "GENIE_REDIS_ALLOW_DATA_LOSS=1" in done.stderr
    assert redis.call("KEYS", "*") == [], "it has neither led nor registered"
    return done.stderr


def test_a_server_does_not_start_if_redis_evicts_keys(redis: Redis) -> None:
    redis.call("CONFIG", "SET", "maxmemory", "100mb")
    redis.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    assert "set maxmemory-policy noeviction" in rejection(redis)


def test_a_server_that_must_replicate_does_not_start_if_the_primary_persists_nothing(redis: Redis) -> None:
    redis.call("CONFIG", "SET", "appendonly", "no")
    with running_redis("--replicaof", "127.0.0.1", str(redis.port)):
        assert "set appendonly yes" in rejection(redis, redis_min_replicas=1)


@pytest.mark.parametrize("configuration", [{"maxmemory": "100mb"}, {"maxmemory-policy": "allkeys-lru"}])
def test_a_limit_without_eviction_and_a_policy_without_limit_are_accepted(
    configuration: dict[str, str], redis: Redis
) -> None:
    for name, value in configuration.items():
        redis.call("CONFIG", "SET", name, value)
    with running_server(redis) as genie:
        assert not [line for line in genie.log if line["level"] == "error"]


async def test_an_unsafe_redis_can_be_allowed_and_does_not_end_a_running_server(redis: Redis) -> None:
    redis.create_namespace()
    redis.call("CONFIG", "SET", "maxmemory", "100mb")
    redis.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with running_server(redis, redis_allow_data_loss=1) as genie:
        (line,) = [line for line in genie.log if line["event"].startswith("redis configuration unsafe")]
        assert (line["level"], "noeviction" in line["explanation"]) == ("error", True)
        client = await Wire.connect(genie.address)
        await client.lock("exclusive:a")


async def test_a_wrong_password_is_logged_once_and_retried_slowly(redis: Redis) -> None:
    redis.call("ACL", "SETUSER", "genie", "on", ">right", "allkeys", "allcommands")
    redis.call("ACL", "LOG", "RESET")
    genie = Genie(redis)
    genie.redis_url = redis.url.replace("redis://", "redis://genie:wrong@")
    try:
        genie.start(wait=False)
        line = genie.until("store access denied, retrying slowly")
        assert "WRONGPASS" in line["reason"]
        assert "wrong" not in line["reason"].partition("WRONGPASS")[0]
        await asyncio.to_thread(genie.send, signal.SIGHUP)  # an event that shows that the server runs on
        genie.until("reload skipped")
        (entry,) = redis.call("ACL", "LOG")
        assert entry[b"count"] == 1, "it is retried after 5 seconds, and not at once"
        redis.call("ACL", "SETUSER", "genie", ">wrong")
        genie.until("listening")
        assert [line["event"] for line in genie.log].count("store access denied, retrying slowly") == 1
    finally:
        genie.kill()


async def test_a_missing_permission_is_logged_once_and_retried_slowly(redis: Redis) -> None:
    redis.call("ACL", "SETUSER", "genie", "on", ">right", "allkeys", "allcommands", "-eval")
    genie = Genie(redis)
    genie.redis_url = redis.url.replace("redis://", "redis://genie:right@")
    try:
        genie.start(wait=False)
        assert "eval" in genie.until("store access denied, retrying slowly")["reason"]
        redis.call("ACL", "SETUSER", "genie", "+eval")
        genie.until("listening")
        assert [line["event"] for line in genie.log].count("store access denied, retrying slowly") == 1
    finally:
        genie.kill()


@pytest.mark.skipif(redis_version() < (7,), reason="Redis 6.2 has no scripts that it runs while it is out of memory")
async def test_a_full_redis_accepts_releases_and_rejects_requests(redis: Redis) -> None:
    port = free_port()

    async def has_metric(value: int) -> bool:
        metrics = await fetch(port, "/metrics")
        return f'genie_store_full{{namespace="genie"}} {value}.0' in metrics.body.decode().splitlines()

    fill = partial(redis.call, "CONFIG", "SET", "maxmemory", "1")
    async with server_with_fault(redis, "the-last", fill, admin_port=port) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a")
        waiting = await client.request("exclusive:a")
        last = await client.lock("exclusive:the-last")  # granted before the server knew, so it must be stored
        await asyncio.to_thread(genie.until, "store out of memory")
        client.send("request", resources=["exclusive:c"], ref="mine")
        rejected = await client.expect("error")
        assert (rejected["code"], rejected["ref"]) == ("too-many", "mine")
        assert "out of memory" in rejected["message"]
        assert await has_metric(1)
        assert await client.release(held) == "success"
        assert (await client.expect("locked"))["id"] == waiting
        assert set(stored_records(redis)) == {waiting, last}
        genie.kill()
        await asyncio.to_thread(genie.start)
        client = await Wire.connect(genie.address)
        assert await client.release(waiting) == "success"
        assert await client.release(last) == "success"
        assert stored_records(redis) == {}
        redis.call("CONFIG", "SET", "maxmemory", "0")
        await asyncio.to_thread(genie.until, "store memory available again")
        await client.lock("exclusive:c")
        assert await has_metric(0)
        await client.close()


async def test_a_server_whose_address_is_in_use_exits_before_it_takes_over(redis: Redis) -> None:
    redis.kill()
    first = Genie(redis)
    second = Genie(redis, port=first.port)
    try:
        first.start(wait=False)
        first.until("store unavailable")
        second.start(wait=False)
        assert second.wait() != 0
        redis.start()
        first.until("listening")
        client = await Wire.connect(first.address)
        await client.lock("exclusive:a")
        await client.close()
    finally:
        first.kill()
        second.kill()


async def test_a_commit_to_a_slow_redis_succeeds(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large commit takes longer than the first timeout, and succeeds with a longer one."""
    monkeypatch.setattr("genie.storage.redis.commit.COMMIT_TIMEOUT_S", 0.2)
    async with proxy(redis.port, chunks) as slow:
        store = RedisStore(slow.url)
        await opened(store)
        slow.bytes_a_second = 8 << 20
        manager = LockManager()
        changes = {}
        for number in range(8_000):
            request = Request(exclusive=tuple(f"{number}/{part}/{'x' * 100}" for part in range(10)))
            manager.step(request, 0)
            changes[request.id] = request
        try:
            async with asyncio.timeout(WAIT_S):
                await commit(store, Batch(changes, 1, 1, 0))
            assert store.failure_count > 0
        finally:
            await store.close()


async def lock_again(client: Wire, resource: str, **payload: Any) -> int:
    """Request a lock until the store is available."""
    while True:
        client.send("request", resources=[resource], **payload)
        command, payload = await client.receive()
        if command == "queued":
            await client.expect("locked")
            return int(payload["id"])
        assert payload["code"] == "unavailable"


async def test_at_sigterm_under_load_clients_are_notified_of_all_that_is_stored(redis: Redis) -> None:
    with running_server(redis, lease=60, drain_timeout_ms=60_000) as genie:
        client = await Wire.connect(genie.address)
        notified: set[int] = set()
        for number in range(3_000):
            client.send("request", resources=[f"exclusive:{number}"], transactionTimeout=600_000)
        genie.send(signal.SIGTERM)
        while (message := await client.receive())[0] != "closed":
            if message[0] == "locked":
                notified.add(message[1]["id"])
        assert genie.wait() == 0
        assert set(stored_records(redis)) == notified
        await client.close()


async def test_at_sigterm_without_redis_the_server_exits_in_time(redis: Redis) -> None:
    async with server_with_fault(redis, "in-flight", lambda: redis.send(signal.SIGSTOP), drain_timeout_ms=50) as genie:
        client = await Wire.connect(genie.address)
        client.send("request", resources=["exclusive:in-flight"])
        await asyncio.to_thread(genie.until, "store unavailable")
        genie.send(signal.SIGTERM)
        assert await client.receive() == ("closed", {})
        assert await asyncio.to_thread(genie.wait) == 0
        redis.send(signal.SIGCONT)
        await client.close()


async def test_input_is_bounded_while_redis_is_stopped(redis: Redis) -> None:
    """During a commit the server reads input up to its limit; the rest stays in the socket buffers."""
    requests = 28_000
    with running_server(redis, max_pending=1024, store_timeout_ms=600_000, lease=600) as genie:
        client = await Wire.connect(genie.address)
        client.send("request", resources=["exclusive:warm"], transactionTimeout=1e9)
        await client.expect("queued")
        await client.expect("locked")
        redis.send(signal.SIGSTOP)
        client.send("request", resources=["exclusive:first"], transactionTimeout=1e9)
        genie.until("store unavailable")  # the first commit is in flight
        for number in range(requests):  # 16 MB, more than the sockets of both ends hold
            client.raw(
                b'{"command":"request","payload":{"resources":["exclusive:%0500d"],"transactionTimeout":1e9}}\n'
                % number
            )
        memory = resident_bytes(genie)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):  # the server must not read it: only the timeout shows that
                await client.writer.drain()
        assert resident_bytes(genie) - memory < 8 << 20
        redis.send(signal.SIGCONT)
        for _ in range(requests + 1):
            await client.expect("queued")
            await client.expect("locked")
        await client.close()
