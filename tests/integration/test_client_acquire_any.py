"""`acquire_any` of both clients with a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import wraps

import pytest

from genie import Insufficient, LockLost, RequestRejected, TransactionTimeout, connect, sync
from support.network.clocks import LONG_TIMEOUTS
from support.network.fake_server import fake_server
from support.processes.servers import WAIT_S, Genie, Redis, running_server

MAX_WEIGHT = 2**63 - 1


def with_timeout(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A test that fails where it would wait for ever."""

    @wraps(test)
    async def run(*args: object, **fixtures: object) -> None:
        async with asyncio.timeout(3 * WAIT_S):
            await test(*args, **fixtures)

    return run


@pytest.fixture
async def client(genie: Genie):
    async with connect(*genie.address) as client:
        yield client


@pytest.fixture
async def other(genie: Genie):
    async with connect(*genie.address) as client:
        yield client


@with_timeout
async def test_free_resources_are_locked_until_they_reach_the_target(client, other):
    async with other.lock("any/1", "shared:any/2"):
        names = ["any/1", "shared:any/2", "any/3", "any/4"]
        lock = await client.acquire_any(names, 30, weights=[50, 10, 20, 20], transaction="t-any")
        assert lock.resources == ("shared:any/2", "exclusive:any/3")
        [row] = (await other.inspect(id=lock.id)).holders
        assert (row.transaction, row.fence, row.resources_total) == ("t-any", lock.fence, 2)
        assert await other.try_acquire("any/3") is None
        async with other.lock("any/4", queue_timeout=0) as free:
            assert free.fence > lock.fence
    await lock.extend(60)
    await lock.release()
    async with other.lock("any/2", "any/3", queue_timeout=0):
        pass
    assert not lock.lost.is_set()


@with_timeout
async def test_the_default_weight_is_one(client):
    lock = await client.acquire_any([f"one/{number}" for number in range(5)], 3)
    assert lock.resources == ("exclusive:one/0", "exclusive:one/1", "exclusive:one/2")
    await lock.release()


@with_timeout
async def test_insufficient_resources_are_not_locked_and_their_sums_are_reported(client, other):
    async with other.lock("few/1"):
        with pytest.raises(Insufficient) as caught:
            await client.acquire_any(["few/1", "few/2"], 10**30, weights=[2, 10**20])
        assert (caught.value.free, caught.value.locked) == (10**20, 2)
        async with other.lock("few/2", queue_timeout=0):
            pass


@with_timeout
async def test_sums_are_exact_beyond_the_precision_of_floats(client, other):
    names = [f"large/{number}" for number in range(10_000)]
    async with other.lock(*names[:1000]):
        with pytest.raises(Insufficient) as caught:
            await client.acquire_any(names[:1001], MAX_WEIGHT, weights=[MAX_WEIGHT] * 1000 + [MAX_WEIGHT - 1])
        assert (caught.value.free, caught.value.locked) == (MAX_WEIGHT - 1, 1000 * MAX_WEIGHT)
        lock = await client.acquire_any(names[:1002], MAX_WEIGHT, weights=[MAX_WEIGHT] * 1000 + [MAX_WEIGHT - 1, 1])
        assert len(lock.resources) == 2
        await lock.release()
    lock = await client.acquire_any(names, 10_000)
    assert len(lock.resources) == 10_000
    await lock.release()


@with_timeout
async def test_concurrent_calls_never_lock_the_same_resource(client, other):
    names = [f"meet/{number}" for number in range(100)]
    locks = await asyncio.gather(*(who.acquire_any(names, 5) for who in [client, other] * 10))
    taken = [name for lock in locks for name in lock.resources]
    assert len(taken) == len(set(taken)) == 100
    with pytest.raises(Insufficient):
        await client.acquire_any(names, 1)
    await asyncio.gather(*(lock.release() for lock in locks))


@with_timeout
async def test_resources_of_the_own_transaction_count_as_free(client):
    async with client.lock("own/1", transaction="t-own"):
        lock = await client.acquire_any(["own/1", "own/2"], 2, transaction="t-own")
        assert len(lock.resources) == 2
        await lock.release()


@with_timeout
async def test_the_lock_is_lost_after_its_transaction_timeout(client):
    lock = await client.acquire_any(["short/1"], 1)
    with suppress(LockLost):
        await lock.extend(0.001)
    await lock.lost.wait()
    with pytest.raises(TransactionTimeout):
        await lock.extend(1)


@with_timeout
async def test_a_cancelled_call_locks_nothing(client, other):
    call = asyncio.create_task(client.acquire_any(["cancel/1"], 1))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with other.lock("cancel/1"):
        pass


@with_timeout
async def test_a_too_long_line_is_rejected_locally(client):
    with pytest.raises(RequestRejected, match="line-too-long"):
        await client.acquire_any([f"{number:05}" + "x" * 100 for number in range(10_000)], 1)
    await client.ping()


def test_threads_lock_free_resources(genie):
    with sync.connect(*genie.address) as client:
        with client.lock("threads/1"):
            lock = client.acquire_any(["threads/1", "shared:threads/2"], 2, weights=[3, 2])
            assert lock.resources == ("shared:threads/2",)
            with pytest.raises(Insufficient) as caught:
                client.acquire_any(["threads/1", "threads/2"], 2)
            assert (caught.value.free, caught.value.locked) == (0, 2)
            lock.extend(60)
            lock.release()
        assert not lock.lost.is_set()


@with_timeout
async def test_the_lock_survives_a_server_restart_and_is_granted_once(redis: Redis):
    with running_server(redis) as durable:
        async with connect(*durable.address, **LONG_TIMEOUTS) as client:
            lock = await client.acquire_any(["durable/1", "durable/2"], 1, transaction_timeout=3600)
            durable.kill()
            calls = [asyncio.create_task(client.acquire_any(["durable/1", "durable/2"], 1)) for _ in range(2)]
            await asyncio.to_thread(durable.start)
            taken, refused = sorted(
                await asyncio.gather(*calls, return_exceptions=True), key=lambda it: isinstance(it, Exception)
            )
            assert taken.resources == ("exclusive:durable/2",)
            assert isinstance(refused, Insufficient)
            await lock.extend(3600)
            assert lock.resources == ("exclusive:durable/1",)
            await lock.release()


@with_timeout
async def test_a_grant_while_disconnected_is_reported_with_its_resources():
    async with fake_server() as fake, connect("127.0.0.1", fake.port) as client:
        line = await fake.accept()
        call = asyncio.create_task(client.acquire_any(["a", "shared:b"], 1))
        asked = await line.expect("request")
        assert (asked["anyOf"], asked["target"]) == (["exclusive:a", "shared:b"], 1)
        line.writer.close()
        line = await fake.accept()
        assert await line.expect("request") == asked, "it is asked by the same line"
        fake.last_words = [
            '{"command":"locked","payload":{"id":101,"fence":7,"ref":"1","expiresIn":29900,"resources":["b"]}}'
        ]
        line.writer.close()
        line = await fake.accept()
        lock = await call
        assert (lock.id, lock.resources) == (101, ("shared:b",))
        line.say('{"command":"released","payload":{"id":101,"reason":"disconnected","ref":"1"}}')
        await lock.lost.wait()
        with pytest.raises(LockLost):
            await lock.extend(1)
