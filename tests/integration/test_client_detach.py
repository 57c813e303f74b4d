"""Detached locks: one client acquires and detaches, another one extends and releases."""

from __future__ import annotations

import asyncio

import pytest

from genie import LockLost, connect, sync
from genie.client.sync_connection import SyncConnection
from support.network.clocks import LONG_TIMEOUTS
from support.network.proxy import Proxy, lines, proxy
from support.processes.servers import WAIT_S, Genie
from support.processes.waiting import until, wait_until


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
    wait_until(lambda: not connection.up)


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

    async def test_while_an_extension_waits_for_a_connection_does_not_take_it_back(self, first_way):
        first = sync.connect("127.0.0.1", first_way.port, **LONG_TIMEOUTS)
        await asyncio.to_thread(first.__enter__)
        link = first._connection
        lock = await asyncio.to_thread(first.acquire, "handover/s/waits")
        cut(first_way)
        await asyncio.to_thread(until_down, link)
        extending = asyncio.create_task(asyncio.to_thread(lock.extend, 3600))
        await until(lambda: link.aio.session.calls.deferred)
        lock.detach()
        first_way.closed = False
        await extending
        (holder,) = (await asyncio.to_thread(first.inspect, id=lock.id)).holders
        assert holder.expires_in > 3000
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
