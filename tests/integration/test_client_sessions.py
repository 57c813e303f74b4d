"""Restarts and failovers of real servers are invisible to waiting callers."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

import genie as genie_module
from genie import Client, ConnectionLost, LockLost, QueueTimeout, RequestRejected, Unavailable, connect, sync
from support.network.clocks import LONG_TIMEOUTS
from support.network.fake_server import error, fake_server
from support.network.proxy import CutPosition, Decide, lines, proxy
from support.network.wire import Wire
from support.processes.servers import WAIT_S, Genie, Redis, running_server

pytestmark = pytest.mark.usefixtures("_bounded")


@pytest.fixture
async def _bounded() -> AsyncIterator[None]:
    async with asyncio.timeout(3 * WAIT_S):
        yield


async def until_waiting(client: Client, name: str, count: int = 1) -> list[int]:
    while True:
        with suppress(ConnectionLost):
            found = await client.inspect(resource=name)
            if found.queue_total == count:
                return [row.id for row in found.queue]


def addresses(*servers: Genie) -> list[str]:
    return [f"127.0.0.1:{server.port}" for server in servers]


async def restart(genie: Genie) -> None:
    genie.kill()
    await asyncio.to_thread(genie.start)


@pytest.fixture
def with_store(redis: Redis):
    with running_server(redis) as genie:
        yield genie


@pytest.fixture
def without_store():
    with running_server() as genie:
        yield genie


async def test_a_server_with_a_store_is_killed_and_restarted(with_store):
    async with (
        connect(*with_store.address, **LONG_TIMEOUTS) as client,
        connect(*with_store.address, **LONG_TIMEOUTS) as other,
    ):
        async with client.lock("kill", transaction_timeout=3600) as lock:
            waiting = asyncio.create_task(other.acquire("kill", queue_timeout=3600))
            gone = asyncio.create_task(other.acquire("kill", queue_timeout=3600))
            ids = await until_waiting(client, "kill", 2)
            gone.cancel()
            await restart(with_store)
            assert await until_waiting(client, "kill") == ids[:1]
            assert await client.try_acquire("kill") is None
            await lock.extend(3600)
        next_lock = await waiting
        assert (next_lock.id, lock.lost.is_set()) == (ids[0], False)
        assert next_lock.fence > lock.fence
        await restart(with_store)
        await next_lock.release()
        assert not next_lock.lost.is_set()
        async with client.lock("kill", queue_timeout=0):
            pass


async def test_timeouts_after_a_restart_are_reported(with_store):
    async with (
        connect(*with_store.address, **LONG_TIMEOUTS) as client,
        client.lock("short", transaction_timeout=3600) as lock,
    ):
        waiting = asyncio.create_task(client.acquire("short", queue_timeout=0.5))
        await client.ping()
        await restart(with_store)
        with pytest.raises(QueueTimeout) as caught:
            await waiting
        assert caught.value.blockers[0].id == lock.id


async def test_a_server_without_a_store_is_restarted(without_store):
    async with (
        connect(*without_store.address, **LONG_TIMEOUTS) as client,
        connect(*without_store.address, **LONG_TIMEOUTS) as other,
    ):

        async def hold() -> None:
            async with client.lock("forget", transaction_timeout=3600, watchdog=True):
                await asyncio.Event().wait()

        holding = asyncio.create_task(hold())
        while not (await other.inspect(resource="forget")).holders_total:
            pass
        waiting = asyncio.create_task(other.acquire("forget", queue_timeout=3600))
        await until_waiting(client, "forget")
        await restart(without_store)
        with pytest.raises(LockLost, match="the session ended"):
            await holding
        await (await waiting).release()
        async with client.lock("forget", queue_timeout=0):
            pass


async def test_an_expired_session_loses_its_locks_but_keeps_its_waiting_requests(without_store):
    async with (
        proxy(without_store.port, lines) as between,
        connect(*without_store.address) as other,
        connect("127.0.0.1", between.port, session_timeout=0.001) as client,
    ):
        holder = await other.acquire("away", transaction_timeout=3600)
        lock = await client.acquire("away/held", transaction_timeout=3600)
        waiting = asyncio.create_task(client.acquire("away", queue_timeout=3600))
        [first] = await until_waiting(other, "away")
        between.closed = True
        between.cut()
        await until_waiting(other, "away", 0)
        between.closed = False
        await lock.lost.wait()
        [second] = await until_waiting(other, "away")
        assert second > first
        async with other.lock("away/held", queue_timeout=3600):
            await holder.release()
        assert (await waiting).id == second


async def test_an_expired_session_loses_its_units_but_keeps_its_waiting_requests(without_store):
    async with (
        proxy(without_store.port, lines) as between,
        connect(*without_store.address) as other,
        connect("127.0.0.1", between.port, session_timeout=0.001) as client,
    ):
        holder = await other.acquire("shared:away/x", transaction_timeout=3600)
        lock = await client.acquire("2/3:pool", transaction_timeout=3600)
        waiting = asyncio.create_task(client.acquire("1/3:pool", "exclusive:away/**", queue_timeout=3600))
        [first] = await until_waiting(other, "away/x")
        between.closed = True
        between.cut()
        await until_waiting(other, "away/x", 0)
        between.closed = False
        await lock.lost.wait()
        [second] = await until_waiting(other, "away/x")
        assert second > first
        while (await other.inspect(resource="pool")).holders_total:
            pass  # the client releases what it considers lost
        await holder.release()
        assert (await waiting).id == second
        assert await other.try_acquire("2/3:pool") is not None
        assert await other.try_acquire("1/3:pool") is None


async def test_a_client_resumes_the_session_of_an_earlier_one(genie):
    secret = "the secret of two lives"  # noqa: S105 - it guards nothing
    wire = await Wire.connect(genie.address)
    wire.send("hello", session=secret)
    await wire.expect("welcome")
    held = await wire.lock("exclusive:lives", ref="1")
    await wire.request("exclusive:lives", queueTimeout=3_600_000, ref="2")
    async with connect(*genie.address, session=secret) as client:
        assert (await wire.expect("error"))["code"] == "session-taken-over"
        assert await wire.receive() == ("closed", {})
        assert await client.try_acquire("lives") is None, "it is held for as long as the earlier life said"
        assert await client.release(held) == "success"
        lock = await client.acquire("lives")
    async with client:
        await lock.release()
        assert await client.try_acquire("lives") is not None
    assert not lock.lost.is_set()


async def test_two_processes_with_one_session_find_out(genie):
    """One of two clients ends with an error that says why, and the other one keeps the session. The server logs it."""
    secret = "the secret of two processes"  # noqa: S105 - it guards nothing

    async def ping_until_the_client_ends(client: Client) -> Client:
        with pytest.raises(RequestRejected, match="two processes use the same session=…"):
            while True:
                with suppress(ConnectionLost, Unavailable):
                    await client.ping()
        return client

    async with connect(*genie.address, session=secret) as one, connect(*genie.address, session=secret) as other:
        tasks = [asyncio.create_task(ping_until_the_client_ends(client)) for client in (one, other)]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        loser = done.pop().result()
        for task in pending:
            task.cancel()
        with pytest.raises(RequestRejected, match="session-taken-over"):
            await loser.acquire("a")
        with pytest.raises(RequestRejected, match="session-taken-over"):
            async with asyncio.timeout(WAIT_S):
                await anext(loser.watch("a"))
        with pytest.raises(RequestRejected, match="session-taken-over"):
            async with loser.watch("a"):
                pass
        async with (other if loser is one else one).lock("a"):
            pass
    assert genie.until("session taken over repeatedly")["takeovers"] == 3


@pytest.mark.parametrize("threads", [False, True])
async def test_a_client_that_has_ended_rejects_releases_by_id(threads):
    async with fake_server() as fake:
        client = sync.connect("127.0.0.1", fake.port) if threads else connect("127.0.0.1", fake.port)
        await (asyncio.to_thread(client.__enter__) if threads else client.__aenter__())
        for _ in range(3):
            line = await fake.accept()
            line.last = ""  # not the answer to a command
            line.say(error("session-taken-over"))
            await line.rest()
        for _ in range(2):
            with pytest.raises(RequestRejected, match="session-taken-over"):
                await (asyncio.to_thread(client.release, 5) if threads else client.release(5))
        connection = client._connection.aio if threads else client._connection
        assert not connection.session.calls.deferred_releases
        await (asyncio.to_thread(client.close) if threads else client.close())


async def test_an_invalid_secret_is_rejected_before_anything_is_sent():
    for module in (genie_module, sync):
        with pytest.raises(ValueError, match="16 to 128 characters"):
            module.connect(session="too short")
        with pytest.raises(ValueError, match="session_timeout"):
            module.connect(session_timeout=0)


class TestFailover:
    @pytest.fixture
    def pair(self, redis: Redis):
        with running_server(redis) as leader, running_server(redis) as follower:
            yield leader, follower

    @pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
    async def test_locks_and_queue_positions_are_kept(self, pair, end):
        leader, follower = pair
        async with (
            connect(*leader.address, **LONG_TIMEOUTS) as only,
            connect(addresses(follower, leader), **LONG_TIMEOUTS) as client,
        ):
            named = await only.acquire("named", transaction_timeout=3600)  # it has not heard of the follower
            async with client.lock("failover", transaction_timeout=3600, watchdog=True) as lock:
                waiting = asyncio.create_task(client.acquire("failover", queue_timeout=3600))
                [id_] = await until_waiting(client, "failover")
                leader.send(end)
                leader.wait()
                assert await until_waiting(client, "failover") == [id_]
            next_lock = await waiting
            assert (next_lock.id, lock.lost.is_set()) == (id_, False)
            assert next_lock.fence > lock.fence
            await next_lock.release()
            await asyncio.to_thread(leader.start)
            await named.release()  # the old leader tells where the new one is
            assert not named.lost.is_set()
            assert await client.try_acquire("named") is not None

    async def test_many_failovers_are_invisible_to_callers(self, pair):
        async def fail_over() -> None:
            for leader in (*pair, *pair):
                leader.send(signal.SIGTERM)
                await asyncio.to_thread(leader.wait)
                await asyncio.to_thread(leader.start)

        async with connect(addresses(*pair), **LONG_TIMEOUTS) as client:
            failing = asyncio.create_task(fail_over())
            while not failing.done():
                await run_workers(client, "failovers", 10)
            await failing
            found = await client.inspect()
            assert found.holders_total == found.queue_total == 0


class TestThreads:
    async def test_a_server_with_a_store_is_killed_and_restarted(self, with_store):
        def wait() -> tuple[int, bool]:
            with (
                sync.connect(*with_store.address, **LONG_TIMEOUTS) as client,
                client.lock("threads", queue_timeout=3600) as lock,
            ):
                return lock.id, lock.lost.is_set()

        async with connect(*with_store.address, **LONG_TIMEOUTS) as client:
            async with client.lock("threads", transaction_timeout=3600):
                waiting = asyncio.create_task(asyncio.to_thread(wait))
                [id_] = await until_waiting(client, "threads")
                await restart(with_store)
                assert await until_waiting(client, "threads") == [id_]
            assert await waiting == (id_, False)

    async def test_a_server_without_a_store_is_restarted(self, without_store):
        def hold() -> None:
            with (
                sync.connect(*without_store.address, **LONG_TIMEOUTS) as client,
                client.lock("threads", transaction_timeout=3600) as lock,
            ):
                assert lock.lost.wait(WAIT_S)

        def wait() -> int:
            with (
                sync.connect(*without_store.address, **LONG_TIMEOUTS) as client,
                client.lock("threads", queue_timeout=3600) as lock,
            ):
                return lock.id

        holding = asyncio.create_task(asyncio.to_thread(hold))
        async with connect(*without_store.address, **LONG_TIMEOUTS) as client:
            while not (await client.inspect(resource="threads")).holders_total:
                pass
            waiting = asyncio.create_task(asyncio.to_thread(wait))
            [id_] = await until_waiting(client, "threads")
            await restart(without_store)
            with pytest.raises(LockLost, match="the session ended"):
                await holding
            assert await waiting > id_


# -- connections that are cut ---------------------------------------------------------------------------------


def cut_once(command: str, number: int) -> Decide:
    """Cut the first time that this command comes, after so many of it."""
    seen = 0

    def decide(passing: str, _: bool) -> CutPosition | None:
        nonlocal seen
        seen += passing == command
        return "before" if passing == command and seen == number + 1 else None

    return decide


WORKERS = 4


PLAIN, UNITS, SUBTREES = ["exclusive:{}/x"], ["2/3:{}/x"], ["exclusive:{}/x", "exclusive:{}/**"]


async def run_workers(client: Client, name: str, rounds: int, locks: list[str] = PLAIN) -> None:
    """Many take turns, and nobody is inside with another. Whoever is cancelled gives back what they asked for.

    The workers use the `locks` in turn, each of which excludes all of them.
    """
    inside = 0

    async def take_turns(number: int) -> None:
        nonlocal inside
        lock_of_worker = locks[number % len(locks)].format(name)
        for turn in range(rounds):
            if (number + turn) % WORKERS == 0:
                given_up = asyncio.create_task(client.acquire(lock_of_worker, queue_timeout=3600))
                await asyncio.sleep(0)
                given_up.cancel()
            async with client.lock(lock_of_worker, queue_timeout=3600, transaction_timeout=3600) as lock:
                inside += 1
                assert inside == 1
                with suppress(ConnectionLost):
                    await lock.extend(3600)
                with suppress(ConnectionLost):
                    await client.ping()
                inside -= 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(WORKERS):
            tasks.create_task(take_turns(number))


async def is_free(genie: Genie, name: str) -> bool:
    async with connect(*genie.address) as client:
        found = await client.inspect(resource=f"{name}/**")
        return found.holders_total == found.queue_total == 0


@pytest.mark.parametrize(("number", "locks"), [(0, PLAIN), (1, PLAIN), (5, PLAIN), (1, UNITS), (1, SUBTREES)])
@pytest.mark.parametrize(
    "command", ["hello", "ping", "request", "release", "extend", "locked", "released", "extended", "pong"]
)
async def test_a_connection_lost_instead_of_any_message_is_invisible_to_callers(genie, command, number, locks):
    name = f"cut/{command}/{number}"
    async with proxy(genie.port, lines, cut_once(command, number)) as between:
        async with connect(f"127.0.0.1:{between.port},127.0.0.1:{between.port}", **LONG_TIMEOUTS) as client:
            await run_workers(client, name, 3, locks)
        assert between.cuts == ({} if command == "hello" and number else {command: 1})
    assert await is_free(genie, name)


@pytest.mark.parametrize("locks", [PLAIN, UNITS, SUBTREES])
@pytest.mark.parametrize("seed", range(5))
async def test_many_lost_connections_are_invisible_to_callers(genie, seed, locks):
    dice = random.Random(seed)  # noqa: S311 - no secret
    name = f"cuts/{seed}"
    async with proxy(genie.port, lines, lambda *_: "before" if dice.random() < 0.03 else None) as between:
        servers = [f"127.0.0.1:{between.port}"] * 10
        async with connect(servers, **LONG_TIMEOUTS) as client:
            await run_workers(client, name, 10, locks)
        assert sum(between.cuts.values()) >= 5
    assert await is_free(genie, name)
