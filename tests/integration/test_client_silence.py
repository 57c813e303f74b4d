"""The clients leave a server that stops while the connection to it stands, and nobody notices but by the clock."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fake import fake_server
from genie import ConnectionLost, connect, sync
from servers import WAIT_S, Genie, Redis, running_server

HOLD_S = 20.0


@pytest.fixture
def pair(redis: Redis) -> Iterator[tuple[Genie, Genie]]:
    """A leader, and one that follows it."""
    with running_server(redis, lease=1) as leader, running_server(redis, lease=1) as follower:
        yield leader, follower


def addresses(*nodes: Genie) -> list[str]:
    return [f"127.0.0.1:{node.port}" for node in nodes]


def stop(leader: Genie, follower: Genie) -> None:
    leader.send(signal.SIGSTOP)
    follower.until("leading")


def go_on(leader: Genie, follower: Genie) -> None:
    leader.send(signal.SIGCONT)
    assert leader.until("following")["leader"] == f"127.0.0.1:{follower.port}"


async def test_who_waits_and_who_holds_go_on_with_the_next_leader(pair: tuple[Genie, Genie]) -> None:
    leader, follower = pair
    servers = addresses(leader, follower)
    async with connect(servers) as holder, connect(servers) as waiter:
        async with holder.lock("a", transaction_timeout=HOLD_S, watchdog=True) as lock:
            waiting = asyncio.create_task(waiter.acquire("a", queue_timeout=WAIT_S))
            while not (await holder.inspect(resource="a"))["queueTotal"]:
                pass
            await asyncio.to_thread(stop, leader, follower)
            with pytest.raises(ConnectionLost, match="the server does not answer"):
                await holder.ping()
            await lock.extend(HOLD_S)
        granted = await waiting
        assert granted.fence > lock.fence
        await asyncio.to_thread(go_on, leader, follower)
        await granted.release()
    assert not lock.lost.is_set()
    assert not granted.lost.is_set()


def test_threads_who_waits_and_who_holds_go_on_with_the_next_leader(pair: tuple[Genie, Genie]) -> None:
    leader, follower = pair
    servers = addresses(leader, follower)
    with sync.connect(servers) as holder, sync.connect(servers) as waiter, ThreadPoolExecutor() as threads:
        with holder.lock("a", transaction_timeout=HOLD_S, watchdog=True) as lock:
            waiting = threads.submit(waiter.acquire, "a", queue_timeout=WAIT_S)
            while not holder.inspect(resource="a")["queueTotal"]:
                pass
            stop(leader, follower)
        granted = waiting.result()
        assert granted.fence > lock.fence
        go_on(leader, follower)
        granted.release()
    assert not lock.lost.is_set()
    assert not granted.lost.is_set()


async def test_a_server_that_falls_silent_is_asked_and_then_left() -> None:
    async with (
        asyncio.timeout(WAIT_S),
        fake_server() as first,
        fake_server() as second,
        connect([f"127.0.0.1:{fake.port}" for fake in (first, second)], connect_timeout=0.5) as client,
    ):
        line = await first.accept()
        waiting = asyncio.create_task(client.acquire("a"))
        await line.expect("request")
        await line.expect("ping")
        assert await line.reader.read() == b"", "nothing more is said, and the connection ends"
        await (await second.accept()).grant()
        assert (await waiting).id == 101


async def test_threads_a_server_that_falls_silent_is_asked_and_then_left() -> None:
    def work(to: list[str]) -> int:
        with sync.connect(to, connect_timeout=0.5) as client:
            return client.acquire("a").id

    async with asyncio.timeout(WAIT_S), fake_server() as first, fake_server() as second:
        to = [f"127.0.0.1:{fake.port}" for fake in (first, second)]
        task = asyncio.create_task(asyncio.to_thread(work, to))
        line = await first.accept()
        await line.expect("request")
        await line.expect("ping")
        assert await line.reader.read() == b"", "nothing more is said, and the connection ends"
        await (await second.accept()).grant()
        assert await task == 101
