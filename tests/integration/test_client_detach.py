"""Detached locks: one client acquires and detaches, another one extends and releases."""

from __future__ import annotations

import asyncio
import time

import pytest

from clocks import LONG_TIMEOUTS
from genie import LockLost, connect, sync
from genie.client.sync_connection import SyncConnection
from proxy import Proxy, lines, proxy
from servers import WAIT_S, Genie


@pytest.fixture
async def first_way(genie: Genie):
    """The connection of the client that acquires the lock, which the tests cut."""
    async with asyncio.timeout(WAIT_S), proxy(genie.port, lines) as between:
        yield between


@pytest.fixture
async def second(genie: Genie):
    async with connect(*genie.address) as client:
        yield client


@pytest.fixture
async def third(genie: Genie):
    async with connect(*genie.address) as client:
        yield client


def cut(way: Proxy) -> None:
    way.closed = True
    way.cut()


def until_down(connection: SyncConnection) -> None:
    end = time.monotonic() + WAIT_S
    while connection.up:
        assert time.monotonic() < end
        time.sleep(0.001)


class TestWithAsyncio:
    async def test_stays_held_while_the_first_client_is_disconnected_for_longer_than_its_timeout(
        self, first_way, second, third
    ):
        async with connect("127.0.0.1", first_way.port, **LONG_TIMEOUTS) as first:
            link = first._connection
            lock = await first.acquire("handover/cut", transaction_timeout=60)
            await second.extend(lock.detach(), 3600)
            handler = link._handler
            cut(first_way)
            await handler.closed.wait()
            link._deliver(link.session.on_timer(lock._request.expires_at))
            first_way.closed = False
            await first.ping()
            assert await third.try_acquire("handover/cut") is None
            assert not lock.lost.is_set()
        await second.extend(lock.id, 3600)
        assert await second.release(lock.id) == "success"
        await (await third.acquire("handover/cut")).release()

    async def test_stays_held_when_the_block_ends_and_the_client_is_closed(self, genie, second, third):
        async with connect(*genie.address) as first:
            async with first.lock("handover/block", transaction_timeout=60, watchdog=True) as lock:
                await second.extend(lock.detach(), 3600)
                assert not lock.held
            assert await third.try_acquire("handover/block") is None
        assert await third.try_acquire("handover/block") is None
        assert await second.release(lock.id) == "success"

    async def test_does_not_cancel_the_block_when_the_second_client_releases_it(self, genie, second, third):
        async with connect(*genie.address) as first, first.lock("handover/early") as lock:
            assert await second.release(lock.detach()) == "success"
            async with third.lock("handover/early"):
                await first.ping()
            assert not lock.lost.is_set()

    async def test_can_be_extended_and_released_only_by_its_id(self, genie):
        async with asyncio.timeout(WAIT_S), connect(*genie.address) as first:
            lock = await first.acquire("handover/id")
            assert lock.detach() == lock.detach() == lock.id
            assert "detached" in repr(lock)
            with pytest.raises(RuntimeError, match=rf"detached: use .*client\.release\({lock.id}\)"):
                await lock.release()
            with pytest.raises(RuntimeError, match="detached"):
                await lock.extend(5)
            await first.extend(lock.id, 5)
            assert await first.release(lock.id) == "success"

    async def test_while_an_extension_waits_for_a_connection_makes_it_raise_runtime_error(self, first_way):
        async with connect("127.0.0.1", first_way.port, **LONG_TIMEOUTS) as first:
            lock = await first.acquire("handover/waits")
            handler = first._connection._handler
            cut(first_way)
            await handler.closed.wait()
            extending = asyncio.create_task(lock.extend(5))
            await asyncio.sleep(0)
            lock.detach()
            first_way.closed = False
            with pytest.raises(RuntimeError, match="detached"):
                await extending
            await first.release(lock.id)

    async def test_is_rejected_for_a_lock_bound_to_the_session_or_an_ended_one(self, genie):
        async with asyncio.timeout(WAIT_S), connect(*genie.address) as first:
            async with first.lock("handover/bound", on_disconnect="release") as lock:
                with pytest.raises(ValueError, match="on_disconnect"):
                    lock.detach()
                assert lock.held
            with pytest.raises(ValueError, match="on_disconnect"):
                lock.detach()
            lock = await first.acquire("handover/ended")
            await lock.release()
            with pytest.raises(LockLost, match="was released"):
                lock.detach()


class TestWithThreads:
    async def test_stays_held_while_the_first_client_is_disconnected_for_longer_than_its_timeout(
        self, first_way, second, third
    ):
        first = sync.connect("127.0.0.1", first_way.port, **LONG_TIMEOUTS)
        await asyncio.to_thread(first.__enter__)
        link = first._connection
        lock = await asyncio.to_thread(first.acquire, "handover/s/cut", transaction_timeout=60)
        await second.extend(lock.detach(), 3600)
        cut(first_way)
        await asyncio.to_thread(until_down, link)
        aio = link.aio
        link._execute_and_wait(lambda: aio._deliver(aio.session.on_timer(lock._request.expires_at)))
        first_way.closed = False
        await asyncio.to_thread(first.ping)
        assert await third.try_acquire("handover/s/cut") is None
        assert not lock.lost.is_set()
        await asyncio.to_thread(first.close)
        await second.extend(lock.id, 3600)
        assert await second.release(lock.id) == "success"
        await (await third.acquire("handover/s/cut")).release()

    def test_stays_held_when_the_block_ends_and_the_client_is_closed(self, genie):
        with sync.connect(*genie.address) as second:
            with sync.connect(*genie.address) as first:
                with first.lock("handover/s/block", transaction_timeout=60, watchdog=True) as lock:
                    second.extend(lock.detach(), 3600)
                    assert not lock.held
                assert second.try_acquire("handover/s/block") is None
            assert second.try_acquire("handover/s/block") is None
            assert second.release(lock.id) == "success"

    def test_is_not_lost_when_the_second_client_releases_it(self, genie):
        with sync.connect(*genie.address) as second, sync.connect(*genie.address) as first:
            with first.lock("handover/s/early") as lock:
                assert second.release(lock.detach()) == "success"
                with second.lock("handover/s/early"):
                    first.ping()
            assert not lock.lost.is_set()

    def test_can_be_extended_and_released_only_by_its_id(self, genie):
        with sync.connect(*genie.address) as first:
            lock = first.acquire("handover/s/id")
            assert lock.detach() == lock.detach() == lock.id
            assert "detached" in repr(lock)
            with pytest.raises(RuntimeError, match=rf"detached: use .*client\.release\({lock.id}\)"):
                lock.release()
            with pytest.raises(RuntimeError, match="detached"):
                lock.extend(5)
            first.extend(lock.id, 5)
            assert first.release(lock.id) == "success"

    async def test_while_an_extension_waits_for_a_connection_makes_it_raise_runtime_error(self, first_way):
        first = sync.connect("127.0.0.1", first_way.port, **LONG_TIMEOUTS)
        await asyncio.to_thread(first.__enter__)
        link = first._connection
        lock = await asyncio.to_thread(first.acquire, "handover/s/waits")
        waits = asyncio.Event()
        loop, ready = asyncio.get_running_loop(), link.aio.wait_until_connected

        async def ready_and_seen() -> None:
            loop.call_soon_threadsafe(waits.set)
            await ready()

        link.aio.wait_until_connected = ready_and_seen
        cut(first_way)
        await asyncio.to_thread(until_down, link)
        extending = asyncio.create_task(asyncio.to_thread(lock.extend, 5))
        await waits.wait()
        lock.detach()
        first_way.closed = False
        with pytest.raises(RuntimeError, match="detached"):
            await extending
        await asyncio.to_thread(first.release, lock.id)
        await asyncio.to_thread(first.close)

    def test_is_rejected_for_a_lock_bound_to_the_session_or_an_ended_one(self, genie):
        with sync.connect(*genie.address) as first:
            with first.lock("handover/s/bound", on_disconnect="release") as lock:
                with pytest.raises(ValueError, match="on_disconnect"):
                    lock.detach()
                assert lock.held
            lock = first.acquire("handover/s/ended")
            lock.release()
            with pytest.raises(LockLost, match="was released"):
                lock.detach()
