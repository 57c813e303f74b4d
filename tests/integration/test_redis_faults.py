"""Bad days: the server dies, Redis dies, stalls, forgets, or its answer is lost. No lock is lost, none is granted twice."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from genie.core import LockManager, Request
from genie.storage.redis.store import RedisStore
from genie.storage.store import Batch
from proxy import Cut, chunks, proxy
from relay import Command, relay
from servers import WAIT_S, Genie, Redis, resident, running_server
from stores import commit, opened
from wire import Wire


async def test_kill_and_restart_brings_every_lock_back(redis: Redis) -> None:
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
        found = await client.expect("inspected")
        after = found["holders"][0]
        assert after["expiresIn"] <= 600_000, "time goes on from the last commit, which may be before that look"
        assert {**after, "expiresIn": 0} == {**before, "expiresIn": 0}
        client.send("inspect")
        found = await client.expect("inspected")
        assert found["queueTotal"] == 0, "who waited is not connected any more"
        assert {row["id"] for row in found["holders"]} - {short} == {held}
        await client.request("exclusive:a", queueTimeout=0)
        assert (await client.expect("released"))["blockers"][0]["id"] == held
        newer = await client.lock("exclusive:bound")
        assert newer > bound
        client.send("inspect", id=newer)
        assert (await client.expect("inspected"))["holders"][0]["fence"] > before["fence"]
        after_short = await client.lock("exclusive:short")  # its timer went on
        assert await client.release(after_short) == "success"
        assert await client.release(held) == "success"
        await client.close()


async def test_kill_under_load(redis: Redis) -> None:
    """Whatever was said before the kill is true after it; what was not said may or may not be."""
    with running_server(redis, lease=60) as genie:
        seen: set[int] = set()
        fences: list[int] = []
        for _ in range(4):
            client = await Wire.connect(genie.address)
            told_held: dict[int, str] = {}
            told_released: set[int] = set()
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
                        told_held[payload["id"]] = names[payload["id"]]
                        if payload["id"] % 3 == 0:
                            client.send("release", id=payload["id"])
                    elif command == "released":
                        told_released.add(payload["id"])
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
            asked = {id_ for id_ in told_held if id_ % 3 == 0}
            assert told_held.keys() - asked <= held
            assert not told_released & held
            for id_ in held:
                await client.release(id_)
            await client.close()
        assert fences == sorted(set(fences))


async def test_redis_killed_and_started_again(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
        held = await client.lock("exclusive:a", transactionTimeout=600_000)
        redis.kill()
        client.send("release", id=held)  # taken up or not: it waits for its outcome
        genie.until("store unavailable")
        redis.start()
        genie.until("store available again")
        command, payload = await client.receive()
        assert (command, payload["id"]) == ("released", held) or payload["code"] == "unavailable"
        await other.lock("exclusive:b")
        for wire in (client, other):
            await wire.close()


@asynccontextmanager
async def struck(redis: Redis, resource: str, strike: Callable[[], object], **settings: object) -> AsyncIterator[Genie]:
    """A server whose Redis is struck when the commit of a lock comes by: it is under way then, and no heartbeat before it."""
    strikes = [strike]

    def see(command: Command) -> None:
        if strikes and any(resource.encode() in part for part in command):
            strikes.pop()()

    async with relay(redis.port, see) as between:
        redis.found()
        genie = Genie(None, lease=60, **settings)
        genie.redis_url = between.url
        try:
            await asyncio.to_thread(genie.start)
            yield genie
        finally:
            genie.kill()


async def test_unavailable_while_redis_is_stopped_and_nothing_said_twice(redis: Redis) -> None:
    async with struck(redis, "taken-up", lambda: redis.send(signal.SIGSTOP), store_timeout_ms=100) as genie:
        client, other = await Wire.connect(genie.address), await Wire.connect(genie.address)
        await client.lock("exclusive:warm")
        client.send("request", resources=["exclusive:taken-up"], ref="taken up")
        await asyncio.to_thread(genie.until, "store unavailable")
        other.send("request", resources=["exclusive:b"], ref="refused", queueTimeout=0)
        payload = await other.expect("error")
        assert (payload["code"], payload["ref"]) == ("unavailable", "refused")
        other.send("release", id=5)
        assert (await other.expect("error")) | {"message": ""} == {"code": "unavailable", "message": "", "id": 5}
        client.send("ping")  # must not overtake the answer that is due
        redis.send(signal.SIGCONT)
        assert (await client.expect("queued"))["ref"] == "taken up"
        id_ = (await client.expect("locked"))["id"]
        command, _ = await client.receive()
        assert command in ("pong", "error")
        assert await client.release(id_) == "success"
        client.send("ping")
        assert await client.expect("pong") == {}
        for wire in (client, other):
            await wire.close()


async def test_a_lost_answer_is_no_question(redis: Redis) -> None:
    lost = Cut(to_server=True, kind="EVALSHA", place="behind")
    async with proxy(redis.port, chunks) as between:
        redis.found()
        through = Genie(None, lease=60)
        through.redis_url = between.url
        await asyncio.to_thread(through.start)
        try:
            client = await Wire.connect(through.address)
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
            assert records(redis) == {}
            await client.close()
        finally:
            through.kill()


async def test_a_redis_that_comes_back_empty_is_written_anew(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client = await Wire.connect(genie.address)
        held = {await client.lock(f"exclusive:{number}", transactionTimeout=600_000) for number in range(50)}
        redis.call("FLUSHALL")
        held.add(await client.lock("exclusive:more", transactionTimeout=600_000))
        assert set(records(redis)) == held
        await client.release(min(held))
        assert set(records(redis)) == held - {min(held)}
        genie.kill()
        await client.close()
        genie.start()
        client = await Wire.connect(genie.address)
        client.send("inspect")
        assert {row["id"] for row in (await client.expect("inspected"))["holders"]} == held - {min(held)}
        await client.close()


async def test_what_is_lost_twice_is_written_anew_twice(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client = await Wire.connect(genie.address)
        one = await client.lock("exclusive:one", transactionTimeout=600_000)
        redis.call("FLUSHALL")
        other = await lock_again(client, "exclusive:other", transactionTimeout=600_000)
        two = await lock_again(client, "exclusive:two", transactionTimeout=600_000)
        key = redis.call("HGET", "{genie}:meta", "records")
        redis.call("HSET", "{genie}:meta", "counters", "0 0 1 1")  # back to where it was written anew
        redis.call("HDEL", key, str(two))
        three = await lock_again(client, "exclusive:three", transactionTimeout=600_000)
        assert set(records(redis)) == {one, other, two, three}


async def test_what_waits_is_not_written_anew(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client = await Wire.connect(genie.address)
        await client.lock("exclusive:A", transactionTimeout=600_000)
        client.send("request", resources=["exclusive:A"])
        waiting = (await client.expect("queued"))["id"]
        redis.call("FLUSHALL")
        held = await lock_again(client, "exclusive:B")
        assert held in records(redis)
        assert waiting not in records(redis)
        await client.close()


async def test_an_idle_server_finds_the_loss_by_itself(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a", transactionTimeout=600_000)
        redis.call("FLUSHALL")
        genie.until("snapshot restored")
        assert set(records(redis)) == {held}
        await client.close()


async def test_a_redis_that_comes_back_behind_is_written_anew(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client = await Wire.connect(genie.address)
        old = await client.lock("exclusive:old", transactionTimeout=600_000)
        log = redis.folder / "appendonlydir"
        shutil.copytree(log, redis.folder / "kept")
        new = await client.lock("exclusive:new", transactionTimeout=600_000)
        await client.release(old)
        redis.kill()
        shutil.rmtree(log)
        shutil.move(redis.folder / "kept", log)
        redis.start()
        last = await lock_again(client, "exclusive:last", transactionTimeout=600_000)
        assert set(records(redis)) == {new, last}
        keys = redis.call("KEYS", "*records*")
        assert len(keys) == 1, "the old copy is unlinked"
        await client.close()


async def test_a_redis_that_would_lose_data_is_named(redis: Redis) -> None:
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


async def test_a_script_cache_flushed_is_filled_again(redis: Redis) -> None:
    with running_server(redis, lease=60) as genie:
        client = await Wire.connect(genie.address)
        redis.call("SCRIPT", "FLUSH")
        await client.lock("exclusive:a")
        await client.close()


async def test_in_a_full_redis_locks_can_be_given_back_and_no_new_ones_be_had(redis: Redis) -> None:
    async with struck(redis, "the-last", lambda: redis.call("CONFIG", "SET", "maxmemory", "1")) as genie:
        client = await Wire.connect(genie.address)
        held = await client.lock("exclusive:a")
        waits = await client.request("exclusive:a")
        last = await client.lock("exclusive:the-last")  # it was granted before anybody knew, and so it is stored, too
        await asyncio.to_thread(genie.until, "store out of memory")
        client.send("request", resources=["exclusive:c"], ref="mine")
        refused = await client.expect("error")
        assert (refused["code"], refused["ref"]) == ("too-many", "mine")
        assert "out of memory" in refused["message"]
        assert await client.release(held) == "success"
        assert (await client.expect("locked"))["id"] == waits
        assert set(records(redis)) == {waits, last}
        genie.kill()
        await asyncio.to_thread(genie.start)
        client = await Wire.connect(genie.address)
        assert await client.release(waits) == "success"
        assert await client.release(last) == "success"
        assert records(redis) == {}
        redis.call("CONFIG", "SET", "maxmemory", "0")
        await asyncio.to_thread(genie.until, "store has memory again")
        await client.lock("exclusive:c")
        await client.close()


def connections(redis: Redis) -> int:
    return int(redis.call("INFO", "stats")["total_connections_received"])


async def test_two_servers_on_one_address_do_not_fight_over_redis(redis: Redis) -> None:
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


async def test_a_slow_redis_is_waited_for(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large commit takes longer than the first patience with it. It is done all the same, in a few attempts."""
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
        before = connections(redis)
        try:
            async with asyncio.timeout(WAIT_S):
                await commit(store, Batch(changes, 1, 1, 0))
            assert connections(redis) - before < 8
        finally:
            await store.close()


async def lock_again(client: Wire, resource: str, **payload: Any) -> int:
    """Ask until the store is back."""
    while True:
        client.send("request", resources=[resource], **payload)
        command, answer = await client.receive()
        if command == "queued":
            await client.expect("locked")
            return int(answer["id"])
        assert answer["code"] == "unavailable"


def records(redis: Redis) -> dict[int, bytes]:
    key = redis.call("HGET", "{genie}:meta", "records")
    return {int(id_): record for id_, record in redis.call("HGETALL", key).items() if id_ != b"0"}


async def test_sigterm_under_load_tells_what_it_stored(redis: Redis) -> None:
    with running_server(redis, lease=60, drain_timeout_ms=60_000) as genie:
        client = await Wire.connect(genie.address)
        told: set[int] = set()
        for number in range(3_000):
            client.send("request", resources=[f"exclusive:{number}"], transactionTimeout=600_000)
        genie.send(signal.SIGTERM)
        while (message := await client.receive())[0] != "closed":
            if message[0] == "locked":
                told.add(message[1]["id"])
        assert genie.wait() == 0
        assert set(records(redis)) == told
        await client.close()


async def test_sigterm_without_redis_ends_in_time(redis: Redis) -> None:
    async with struck(redis, "taken-up", lambda: redis.send(signal.SIGSTOP), drain_timeout_ms=50) as genie:
        client = await Wire.connect(genie.address)
        client.send("request", resources=["exclusive:taken-up"])
        await asyncio.to_thread(genie.until, "store unavailable")
        genie.send(signal.SIGTERM)
        assert await client.receive() == ("closed", {})
        assert await asyncio.to_thread(genie.wait) == 0
        redis.send(signal.SIGCONT)
        await client.close()


async def test_what_waits_for_redis_is_bounded(redis: Redis) -> None:
    """While a commit is under way the server reads up to its bound, then leaves the rest to the client."""
    requests = 28_000
    with running_server(redis, max_pending=1024, store_timeout_ms=600_000, lease=600) as genie:
        client = await Wire.connect(genie.address)
        client.send("request", resources=["exclusive:warm"], transactionTimeout=1e9)
        await client.expect("queued")
        await client.expect("locked")
        redis.send(signal.SIGSTOP)
        client.send("request", resources=["exclusive:first"], transactionTimeout=1e9)
        genie.until("store unavailable")  # the first is under way
        for number in range(requests):  # 16 MB, more than the sockets of both ends hold
            client.raw(
                b'{"command":"request","payload":{"resources":["exclusive:%0500d"],"transactionTimeout":1e9}}\n'
                % number
            )
        memory = resident(genie)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):  # it must not be read: nothing else tells that nothing happens
                await client.writer.drain()
        assert resident(genie) - memory < 8 << 20
        redis.send(signal.SIGCONT)
        for _ in range(requests + 1):
            await client.expect("queued")
            await client.expect("locked")
        await client.close()
