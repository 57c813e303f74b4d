"""Options of both clients: sessions, watchdog, release by id, queue timeout, notes, and close."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from genie import Client, ConnectionLost, Deadlock, Disconnected, LockLost, QueueTimeout, RequestRejected, connect, sync
from genie.client import clock
from genie.client.handshake import Phase
from genie.client.note import default_note
from support.network.fake_server import PONG, fake_server, released
from support.processes.servers import WAIT_S, Genie


@pytest.fixture
def threads(genie: Genie):
    with sync.connect(*genie.address) as client:
        yield client


@pytest.fixture
def other_threads(genie: Genie):
    with sync.connect(*genie.address) as client:
        yield client


async def until_queued(client: Client, name: str) -> None:
    while not (await client.inspect(resource=name)).queue_total:
        pass


class TestLockBoundToTheSession:
    """Each is asked for with a long session and a long hold, so nothing but the end of the client can release it."""

    async def test_is_released_when_the_client_is_closed(self, genie, other):
        async with connect(*genie.address, session_timeout=3600) as client:
            options = {"on_disconnect": "release", "transaction_timeout": 3600}
            locks = [
                await client.acquire("options/a", **options),
                await client.try_acquire("options/b", **options),
                await client.acquire_any(["options/c"], 1, **options),
            ]
            kept = await client.acquire("options/kept", transaction_timeout=3600)
        for lock in locks:
            assert not lock.held
            assert lock.lost.is_set()
        assert kept.held
        async with other.lock("options/a", "options/b", "options/c", queue_timeout=WAIT_S):
            assert await other.try_acquire("options/kept") is None
        assert await other.release(locks[0].id) == "disconnected"
        assert await other.release(kept.id) == "success"

    async def test_is_lost_for_a_block_whose_client_is_closed(self, genie):
        client = connect(*genie.address)
        await client.__aenter__()
        with pytest.raises(Disconnected):
            async with client.lock("options/under", on_disconnect="release", transaction_timeout=3600):
                await client.close()
                await asyncio.Event().wait()

    def test_of_threads(self, genie, other_threads):
        with sync.connect(*genie.address, session_timeout=3600) as client:
            options = {"on_disconnect": "release", "transaction_timeout": 3600}
            locks = [
                client.acquire("options/s/a", **options),
                client.try_acquire("options/s/b", **options),
                client.acquire_any(["options/s/c"], 1, **options),
            ]
            kept = client.acquire("options/s/kept", transaction_timeout=3600)
        assert not any(lock.held for lock in locks)
        assert all(lock.lost.is_set() for lock in locks)
        assert kept.held
        with other_threads.lock("options/s/a", "options/s/b", "options/s/c", queue_timeout=WAIT_S):
            pass
        assert other_threads.release(kept.id) == "success"

    async def test_rejects_other_values_of_on_disconnect(self, client):
        with pytest.raises(ValueError, match="on_disconnect"):
            client.lock("a", on_disconnect="forget")
        with pytest.raises(ValueError, match="on_disconnect"):
            await client.acquire_any(["a"], 1, on_disconnect="forget")


class TestWatchdogWithoutABlock:
    @pytest.mark.parametrize("call", ["acquire", "try_acquire"])
    async def test_extends_the_lock(self, call):
        async with asyncio.timeout(WAIT_S), fake_server() as fake, connect("127.0.0.1", fake.port) as client:
            line = await fake.accept()
            asking = asyncio.create_task(getattr(client, call)("a", transaction_timeout=1.5, watchdog=True))
            await line.grant()
            lock = await asking
            assert await line.expect("extend") == {"id": lock.id, "transactionTimeout": 1500}

    @pytest.mark.parametrize("call", ["acquire", "try_acquire"])
    async def test_of_threads(self, call):
        async with asyncio.timeout(WAIT_S), fake_server() as fake:
            client = sync.connect("127.0.0.1", fake.port)
            opening = asyncio.create_task(asyncio.to_thread(client.__enter__))
            line = await fake.accept()
            await opening
            asking = asyncio.create_task(
                asyncio.to_thread(getattr(client, call), "a", transaction_timeout=1.5, watchdog=True)
            )
            await line.grant()
            lock = await asking
            assert await line.expect("extend") == {"id": lock.id, "transactionTimeout": 1500}
            await asyncio.to_thread(client.close)


class TestRequestById:
    async def test_another_client_extends_and_releases_it(self, client, other):
        lock = await client.acquire("options/handed", transaction_timeout=10)
        await other.extend(lock.id, 3600)
        assert (await client.inspect(id=lock.id)).holders[0].expires_in > 10
        assert await other.release(lock.id) == "success"
        async with asyncio.timeout(WAIT_S):
            await lock.lost.wait()
        with pytest.raises(LockLost, match="was released"):
            await other.extend(lock.id, 1)
        with pytest.raises(RequestRejected, match="unknown-id"):
            await other.extend(5, 1)

    async def test_a_waiting_request_can_not_be_extended(self, client, other):
        async with client.lock("options/waits"):
            waiting = asyncio.create_task(client.acquire("options/waits", queue_timeout=None))
            await until_queued(other, "options/waits")
            [row] = (await other.inspect(resource="options/waits")).queue
            with pytest.raises(RequestRejected, match="bad-request"):
                await other.extend(row.id, 60)
        await (await waiting).release()

    async def test_the_same_client_may_use_the_id(self, client):
        lock = await client.acquire("options/own", transaction_timeout=10)
        deadline = lock._request.expires_at
        await client.extend(lock.id, 3600)
        assert lock._request.expires_at > deadline + 3000
        await lock.release()

    def test_of_threads(self, threads, other_threads):
        lock = threads.acquire("options/s/handed", transaction_timeout=10)
        other_threads.extend(lock.id, 3600)
        assert threads.inspect(id=lock.id).holders[0].expires_in > 10
        assert other_threads.release(lock.id) == "success"
        assert lock.lost.wait(WAIT_S)
        assert not lock.held
        with pytest.raises(LockLost, match="was released"):
            other_threads.extend(lock.id, 1)


class TestHeld:
    async def test_until_the_release(self, client):
        async with client.lock("options/held") as lock:
            assert lock.held
        assert not lock.held
        assert not lock.lost.is_set()

    async def test_expires_on_the_clients_clock_before_any_message(self, client):
        lock = await client.acquire("options/clock", transaction_timeout=3600)
        lock._request.expires_at = clock.now()
        assert not lock.held
        assert not lock.lost.is_set()
        await client.release(lock.id)

    def test_of_threads(self, threads):
        with threads.lock("options/s/held", transaction_timeout=3600) as lock:
            assert lock.held
            deadline, lock._request.expires_at = lock._request.expires_at, 0.0
            assert not lock.held
            lock._request.expires_at = deadline
        assert not lock.held


class TestNoQueueTimeout:
    async def test_waits_until_the_grant(self, client, other):
        async with client.lock("options/forever"):
            waiting = asyncio.create_task(other.acquire("options/forever", queue_timeout=None))
            await until_queued(client, "options/forever")
            [row] = (await client.inspect(resource="options/forever")).queue
            assert row.expires_in is None
        await (await waiting).release()

    def test_of_threads(self, threads, other_threads):
        with ThreadPoolExecutor(1) as pool, threads.lock("options/s/forever"):
            waiting = pool.submit(other_threads.acquire, "options/s/forever", queue_timeout=None)
            while not (found := threads.inspect(resource="options/s/forever")).queue_total:
                pass
            assert found.queue[0].expires_in is None
            other_threads.release(found.queue[0].id)
            assert "cancelled by a release" in str(waiting.exception(WAIT_S))


class TestDuplicateResources:
    @pytest.mark.parametrize("named", [("options/d", "options/d"), ("shared:options/d", "exclusive:options/d")])
    async def test_are_locked_once_in_the_stronger_mode(self, client, other, named):
        async with client.lock(*named) as lock:
            assert lock.resources == ("exclusive:options/d",)
            [row] = (await other.inspect(id=lock.id)).holders
            assert row.resources == lock.resources
            assert await other.try_acquire("shared:options/d") is None

    def test_of_threads(self, threads):
        with threads.lock("shared:options/s/d", "options/s/d") as lock:
            assert lock.resources == ("exclusive:options/s/d",)


class TestSelfBlockingProgram:
    async def test_gets_the_hint_to_name_its_transaction(self, client, other):
        async with client.lock("options/self") as lock:
            with pytest.raises(TimeoutError) as own:
                await client.acquire("options/self", queue_timeout=0.01)
            with pytest.raises(QueueTimeout) as others:
                await other.acquire("options/self", queue_timeout=0.01, transaction="t")
        assert isinstance(own.value, QueueTimeout)
        assert own.value.hint.startswith(f"this client itself holds {lock.id}: ")
        assert others.value.hint.startswith(f"another client of this process itself holds {lock.id}: ")

    def test_of_threads(self, threads):
        with threads.lock("options/s/self"), pytest.raises(QueueTimeout, match="run_transaction"):
            threads.acquire("options/s/self", queue_timeout=0.01)


class TestNote:
    async def test_is_shown_by_inspect_and_in_queue_timeouts(self, client, other):
        async with client.lock("options/note", note="billing@host-7", transaction="t"):
            [row] = (await other.inspect(resource="options/note")).holders
            assert row.note == "billing@host-7"
            with pytest.raises(QueueTimeout, match=r"of 't' \(billing@host-7\) holds") as caught:
                await other.acquire("options/note", queue_timeout=0, note="x")
            assert caught.value.blockers[0].note == "billing@host-7"
        lock = await client.acquire_any(["options/note"], 1, note="any")
        [row] = (await other.inspect(id=lock.id)).holders
        assert row.note == "any"
        await lock.release()

    def test_of_threads(self, threads, other_threads):
        lock = threads.try_acquire("options/s/note", note="n")
        assert lock is not None
        assert other_threads.inspect(id=lock.id).holders[0].note == "n"
        lock.release()

    async def test_is_that_of_the_client_if_the_request_has_none(self, genie, other):
        async with connect(*genie.address, note="worker-7") as named, named.lock("options/own", "options/none"):
            with pytest.raises(QueueTimeout, match=r"\(worker-7\) holds exclusive:options/own"):
                await other.acquire("options/own", queue_timeout=0)
            async with other.lock("options/other"):
                with pytest.raises(QueueTimeout) as caught:
                    await named.acquire("options/other", queue_timeout=0)
                (blocker,) = caught.value.blockers
                assert blocker.note == default_note()
                assert str(os.getpid()) in str(caught.value)
        with sync.connect(*genie.address, note="") as silent, silent.lock("options/silent") as lock:
            assert (await other.inspect(id=lock.id)).holders[0].note is None

    async def test_of_the_waiter_is_shown_in_a_deadlock(self, client, other):
        async with client.lock("options/cycle/a", transaction="ta"), other.lock("options/cycle/b", transaction="tb"):
            waiting = asyncio.create_task(client.acquire("options/cycle/b", transaction="ta", note="first"))
            await until_queued(other, "options/cycle/b")
            with pytest.raises(Deadlock) as caught:
                await other.acquire("options/cycle/a", transaction="tb", note="second")
            assert [step.note for step in caught.value.waits] == ["second", "first"]
            waiting.cancel()
            await asyncio.wait([waiting])


class TestClose:
    async def test_ends_the_session_at_once(self, genie, other):
        async with connect(*genie.address, session_timeout=3600) as client, other.lock("options/bye"):
            waiting = asyncio.create_task(client.acquire("options/bye", queue_timeout=None))
            await until_queued(other, "options/bye")
            await client.close()
            with pytest.raises(ConnectionLost):
                await waiting
            assert (await other.inspect(resource="options/bye")).queue_total == 0

    @pytest.mark.parametrize("threads", [False, True])
    async def test_waits_for_a_hung_server_only_for_a_while(self, threads):
        async with asyncio.timeout(WAIT_S), fake_server() as fake:
            fake.polite = False
            if threads:
                client = sync.connect("127.0.0.1", fake.port)
                await asyncio.to_thread(client.__enter__)
                client._connection.aio.response_timeout = 0.05
            else:
                client = connect("127.0.0.1", fake.port)
                await client.__aenter__()
                client._connection.response_timeout = 0.05
            line = await fake.accept()
            await (asyncio.to_thread(client.close) if threads else client.close())
            assert await line.rest() == ["bye"]

    async def test_of_threads_stops_reconnecting(self):
        async with asyncio.timeout(WAIT_S), fake_server() as fake:
            client = sync.connect("127.0.0.1", fake.port)
            await asyncio.to_thread(client.__enter__)
            await asyncio.to_thread(client.close)
            assert client._connection.aio._reconnect_task is None
            assert len(fake.open) == 1

    async def test_sends_bye_after_everything_else(self):
        async with asyncio.timeout(WAIT_S), fake_server() as fake:
            fake.polite = False
            async with connect("127.0.0.1", fake.port) as client:
                line = await fake.accept()
                task = asyncio.create_task(client.acquire("a"))
                ref = (await line.expect("request"))["ref"]
                closing = asyncio.create_task(client.close())
                assert await line.expect("release") == {"ref": ref}
                line.say(released("success"))
                assert "ref" in await line.expect("bye")
                line.say('{"command":"bye","payload":{}}')
                await closing
                with pytest.raises(ConnectionLost):
                    await task

    async def test_during_a_resumption_sends_bye_after_it(self):
        async with asyncio.timeout(WAIT_S), fake_server() as fake:
            fake.polite = False
            async with connect("127.0.0.1", fake.port, response_timeout=WAIT_S) as client:
                line = await fake.accept()
                task = asyncio.create_task(client.acquire("a"))
                ref = (await line.expect("request"))["ref"]
                fake.silent = True
                line.cut()
                line = await fake.accept()
                await line.expect("hello")
                await line.expect("ping")
                fields = '"protocol":1,"server":"fake/1","namespace":"n","resumed":true,"quiet":true'
                line.say(f'{{"command":"welcome","payload":{{{fields}}}}}')
                while client._connection.session.handshake.phase is not Phase.RESUMING:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                closing = asyncio.create_task(client.close())
                with pytest.raises(ConnectionLost):
                    await task
                line.say(PONG)
                assert await line.expect("release") == {"ref": ref}
                await line.expect("bye")
                line.say('{"command":"bye","payload":{}}')
                await closing

    async def test_a_reopened_client_can_release_the_lock_by_id(self, genie, other):
        client = connect(*genie.address)
        async with client:
            lock = await client.acquire("options/again", transaction_timeout=3600)
        async with client:
            assert lock.held
            await lock.release()
            assert not lock.lost.is_set()
        assert await other.try_acquire("options/again") is not None


class TestClientThatWasNotEntered:
    """Its error is none that a loop which tries again catches."""

    async def test_the_error_says_how_to_enter_it(self, genie):
        client = connect(*genie.address)
        for call in (
            client.ping(),
            client.acquire("a"),
            client.try_acquire("a"),
            client.acquire_any(["a"], 1),
            client.inspect(),
            client.release(5),
            client.extend(5, 1),
            client.lock("a").__aenter__(),
            client.watch("a").__aenter__(),
            client.watch("a").__anext__(),
        ):
            with pytest.raises(RuntimeError, match=r"use `async with genie\.connect\(\)"):
                await call

    def test_of_threads(self, genie):
        client = sync.connect(*genie.address)
        for call in (
            client.ping,
            lambda: client.acquire("a"),
            lambda: client.acquire_any(["a"], 1),
            client.inspect,
            lambda: client.release(5),
            lambda: client.extend(5, 1),
            client.lock("a").__enter__,
            client.watch("a").__enter__,
            lambda: next(client.watch("a")),
        ):
            with pytest.raises(RuntimeError, match=r"use `with genie\.sync\.connect\(\)"):
                call()
