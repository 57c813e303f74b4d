"""The clients leave a server that hangs while its TCP connection stays open."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from genie import Client, ConnectionLost, connect, sync
from genie.client import clock
from support.network.clocks import shorten_keepalive
from support.network.fake_server import fake_server
from support.processes.servers import WAIT_S, Genie, Redis, running_server

HOLD_S = WAIT_S


@pytest.fixture
def pair(redis: Redis) -> Iterator[tuple[Genie, Genie]]:
    """Two of which one leads, and is replaced before clients have borne its silence for long enough."""
    with running_server(redis, lease=3) as first, running_server(redis, lease=3) as second:
        yield first, second


def addresses(*nodes: Genie) -> list[str]:
    return [f"127.0.0.1:{node.port}" for node in nodes]


def stop_the_leader(pair: tuple[Genie, Genie], client: Client | sync.Client) -> tuple[Genie, Genie]:
    """Stop the one that answers this client; returns it, and the one that will lead."""
    link = client._connection
    address = link.address if isinstance(client, Client) else link.aio.address
    leader, follower = pair if address[:2] == pair[0].address else pair[::-1]
    for genie in pair:
        genie.log_so_far()  # what they have done before does not count
    leader.send(signal.SIGSTOP)
    return leader, follower


def resume_the_leader(leader: Genie, follower: Genie) -> None:
    leader.send(signal.SIGCONT)
    assert leader.until("leader changed")["leader"] == f"127.0.0.1:{follower.port}"


async def test_waiting_requests_and_locks_move_to_the_next_leader(pair: tuple[Genie, Genie]) -> None:
    servers = addresses(*pair)
    async with (
        connect(servers, session_timeout=HOLD_S, response_timeout=HOLD_S) as holder,
        connect(servers, session_timeout=HOLD_S, response_timeout=HOLD_S) as waiter,
    ):
        async with holder.lock("a", transaction_timeout=HOLD_S, watchdog=True) as lock:
            waiting = asyncio.create_task(waiter.acquire("a", queue_timeout=WAIT_S, transaction_timeout=HOLD_S))
            while not (await holder.inspect(resource="a")).queue_total:
                pass
            leader, follower = stop_the_leader(pair, holder)
            asking = asyncio.create_task(holder.ping())
            await asyncio.to_thread(follower.until, "leadership acquired")
            with pytest.raises(ConnectionLost, match="the server does not answer"):
                await asking
            await lock.extend(HOLD_S)
        granted = await waiting
        assert granted.fence > lock.fence
        await asyncio.to_thread(resume_the_leader, leader, follower)
        await granted.release()
    assert not lock.lost.is_set()
    assert not granted.lost.is_set()


def test_threads_waiting_requests_and_locks_move_to_the_next_leader(pair: tuple[Genie, Genie]) -> None:
    servers = addresses(*pair)
    with (
        sync.connect(servers, session_timeout=HOLD_S, response_timeout=HOLD_S) as holder,
        sync.connect(servers, session_timeout=HOLD_S, response_timeout=HOLD_S) as waiter,
        ThreadPoolExecutor() as threads,
    ):
        with holder.lock("a", transaction_timeout=HOLD_S, watchdog=True) as lock:
            waiting = threads.submit(waiter.acquire, "a", queue_timeout=WAIT_S, transaction_timeout=HOLD_S)
            while not holder.inspect(resource="a").queue_total:
                pass
            leader, follower = stop_the_leader(pair, holder)
            follower.until("leadership acquired")
        granted = waiting.result()
        assert granted.fence > lock.fence
        resume_the_leader(leader, follower)
        granted.release()
    assert not lock.lost.is_set()
    assert not granted.lost.is_set()


async def test_a_silent_server_is_pinged_and_then_left() -> None:
    async with (
        asyncio.timeout(WAIT_S),
        fake_server() as first,
        fake_server() as second,
        connect([f"127.0.0.1:{fake.port}" for fake in (first, second)]) as client,
    ):
        line = await first.accept()
        waiting = asyncio.create_task(client.acquire("a"))
        await line.expect("request")
        shorten_keepalive(client._connection.session, asyncio.get_running_loop().time())
        client._connection.flush_soon()
        await line.expect("ping")
        assert await line.rest() == [], "nothing more is said, and the connection ends"
        await (await second.accept()).grant()
        assert (await waiting).id == 101


async def test_threads_a_silent_server_is_pinged_and_then_left() -> None:
    def work() -> int:
        with client:
            return client.acquire("a").id

    async with asyncio.timeout(WAIT_S), fake_server() as first, fake_server() as second:
        client = sync.connect([f"127.0.0.1:{fake.port}" for fake in (first, second)])
        task = asyncio.create_task(asyncio.to_thread(work))
        line = await first.accept()
        await line.expect("request")
        aio = client._connection.aio
        client._connection._execute_and_wait(lambda: (shorten_keepalive(aio.session, clock.now()), aio.flush()))
        await line.expect("ping")
        assert await line.rest() == [], "nothing more is said, and the connection ends"
        await (await second.accept()).grant()
        assert await task == 101
