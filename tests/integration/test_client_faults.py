"""The clients when the server or the connection fails: with a scripted server."""

from __future__ import annotations

import asyncio
import re
import socket

import pytest

from genie import Client, ConnectionLost, LockLost, TransactionTimeout, Unavailable, connect, sync
from support.network.fake_server import PONG, fake_server, locked
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie

HELD = locked("1", expires_in=10_000)


@pytest.fixture
async def scripted():
    async with asyncio.timeout(WAIT_S), fake_server() as scripted:
        yield scripted


@pytest.fixture
async def client(scripted):
    async with connect("127.0.0.1", scripted.port) as client:
        yield client


async def wait_until_disconnected(client: Client) -> None:
    """Wait until the client knows that its connection has ended."""
    handler = client._connection._handler
    if handler is not None:
        await handler.closed.wait()


@pytest.mark.parametrize("name", ["ping", "inspect", "extend"])
async def test_calls_whose_connection_is_lost_raise_connection_lost(client, scripted, name):
    line = await scripted.accept()
    waiting = asyncio.create_task(client.acquire("a"))
    await line.grant()
    lock = await waiting
    call = asyncio.create_task(
        {"ping": client.ping, "inspect": client.inspect, "extend": lambda: lock.extend(5)}[name]()
    )
    await line.expect(name)
    scripted.last_words = [HELD]
    line.cut()
    with pytest.raises(ConnectionLost):
        await call
    assert not lock.lost.is_set()


async def test_a_held_lock_is_released_on_the_next_connection(client, scripted):
    line = await scripted.accept()

    async def work() -> None:
        async with client.lock("a"):
            scripted.last_words = [HELD]
            line.cut()
            await wait_until_disconnected(client)

    task = asyncio.create_task(work())
    await line.grant()
    await (await scripted.accept()).release(101)
    await task


async def test_a_lock_of_an_unknown_session_is_lost(client, scripted):
    line = await scripted.accept()

    async def work() -> None:
        async with client.lock("a"):
            scripted.sessions.clear()
            line.cut()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await line.grant()
    await (await scripted.accept()).release(101)
    with pytest.raises(LockLost, match="the session ended"):
        await task


async def test_a_lock_whose_server_has_stopped_expires_locally():
    async with fake_server() as scripted, connect("127.0.0.1", scripted.port) as client:

        async def work() -> None:
            async with client.lock("a", transaction_timeout=0.2):
                scripted.silent = True
                line.cut()
                await asyncio.Event().wait()

        line = await scripted.accept()
        client._connection.session.calls.response_timeout = 0.3  # to leave by
        task = asyncio.create_task(work())
        await line.grant()
        with pytest.raises(TransactionTimeout):
            await task


async def test_a_lock_whose_server_is_silent_expires_locally(client, scripted):
    line = await scripted.accept()
    waiting = asyncio.create_task(client.acquire("a", transaction_timeout=0.05))
    await line.grant()
    lock = await waiting
    await lock.lost.wait()
    with pytest.raises(TransactionTimeout):
        await lock.extend(1)


@pytest.mark.parametrize("raises", [False, True])
async def test_the_end_of_a_block_without_a_server_is_bounded_and_keeps_the_error(raises, caplog):
    async with asyncio.timeout(WAIT_S):
        async with fake_server() as scripted:
            client = connect("127.0.0.1", scripted.port)
            await client.__aenter__()
            line = await scripted.accept()
            block = client.lock("a", transaction_timeout=3600)
            entering = asyncio.create_task(line.grant())
            lock = await block.__aenter__()
            await entering
        await wait_until_disconnected(client)
        client._connection.session.calls.response_timeout = 0.3
        if raises:
            assert await block.__aexit__(KeyError, KeyError(), None) is None
        else:  # the work of the block has succeeded
            await block.__aexit__(None, None, None)
            expected = rf"a was not confirmed.*101 could not be released within 0.3 s: no server at .*{scripted.port}"
            assert re.search(expected, caplog.text)
        assert not lock.lost.is_set()
        async with fake_server(scripted.port) as again:
            again.sessions, again.last_words = scripted.sessions, [HELD]
            await (await again.accept()).release(101)
            await client.close()


async def test_a_release_without_a_reply_is_bounded(client, scripted):
    line = await scripted.accept()
    waiting = asyncio.create_task(client.acquire("a", transaction_timeout=3600))
    await line.grant()
    lock = await waiting
    client._connection.session.calls.response_timeout = 0.3
    with pytest.raises(Unavailable, match="the server does not answer"):
        await lock.release()


async def test_a_call_waits_for_a_server_only_for_the_response_timeout():
    async with fake_server() as scripted:
        client = connect("127.0.0.1", scripted.port)
        await client.__aenter__()
        await scripted.accept()
    await wait_until_disconnected(client)
    client._connection.session.calls.response_timeout = 0.3
    for call in (client.try_acquire("a"), client.acquire("a", queue_timeout=0.05), client.ping(), client.release(5)):
        with pytest.raises(Unavailable, match=rf"no server at 127\.0\.0\.1:{scripted.port}: .*"):
            await call
    await client.close()


async def test_a_call_cancelled_while_disconnected_sends_nothing():
    async with fake_server() as scripted:
        client = connect("127.0.0.1", scripted.port)
        await client.__aenter__()
        await scripted.accept()
    await wait_until_disconnected(client)
    call = asyncio.create_task(client.acquire("a"))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    async with asyncio.timeout(WAIT_S), fake_server(scripted.port) as scripted:
        ping = asyncio.create_task(client.ping())
        line = await scripted.accept()
        await line.expect("ping")
        line.say(PONG)
        await ping
        await client.close()


async def test_close_fails_waiting_calls_and_releases_their_requests(client, scripted):
    line = await scripted.accept()
    acquiring, first = asyncio.create_task(client.acquire("a")), asyncio.create_task(client.ping())
    await line.expect("request")
    await line.expect("ping")
    line.say(PONG)
    await first
    second = asyncio.create_task(client.ping())
    await line.expect("ping")
    closing = asyncio.create_task(client.close())
    with pytest.raises(ConnectionLost, match="the client was closed"):
        await acquiring
    await line.cancelled("1")
    await closing
    with pytest.raises(ConnectionLost):
        await second
    with pytest.raises(ConnectionLost, match="the client was closed"):
        await client.ping()


async def test_a_server_that_sends_an_invalid_line_is_left(client, scripted):
    line = await scripted.accept()
    call = asyncio.create_task(client.ping())
    await line.expect("ping")
    line.say("HTTP/1.1 400 Bad Request")
    with pytest.raises(ConnectionLost, match="invalid message: b'HTTP"):
        await call
    await scripted.accept()


async def test_after_a_successful_connection_the_reconnect_has_no_delay(client, scripted):
    line = await scripted.accept()
    call = asyncio.create_task(client.ping())
    await line.expect("ping")
    line.say(PONG)
    await call
    assert client._connection._servers.next_round_delay_s == 0


async def test_the_first_part_of_a_message_does_not_reset_the_backoff(client, scripted):
    """The whole message may be the error `unavailable`, after which the client waits before it connects again."""
    line = await scripted.accept()
    connection = client._connection
    call = asyncio.create_task(client.ping())
    await line.expect("ping")
    answer = line.with_ref(PONG).encode() + b"\n"
    delay_s = connection._servers.next_round_delay_s
    connection.on_data(connection._handler, answer[:10])
    assert connection._servers.next_round_delay_s == delay_s > 0
    connection.on_data(connection._handler, answer[10:])
    await call
    assert connection._servers.next_round_delay_s == 0


async def test_a_lock_lost_before_its_block_raises_lock_lost(client, scripted):
    line = await scripted.accept()

    entered = False

    async def work() -> None:
        nonlocal entered
        async with client.lock("a"):
            entered = True

    task = asyncio.create_task(work())
    await line.expect("request")
    line.say(
        locked("1"), '{"command":"released","payload":{"id":101,"reason":"transaction-timeout","held":5,"ref":"1"}}'
    )
    with pytest.raises(TransactionTimeout, match=r"was held for 0\.005 s"):
        await task
    assert not entered


async def test_a_failed_block_does_not_wait_for_a_server():
    async with asyncio.timeout(WAIT_S):
        async with fake_server() as scripted:
            client = connect("127.0.0.1", scripted.port, connect_timeout=3600)
            await client.__aenter__()
            line = await scripted.accept()
            granting = asyncio.create_task(line.grant())
            block = client.lock("a")
            await block.__aenter__()
            await granting
        await wait_until_disconnected(client)
        await block.__aexit__(KeyError, KeyError(), None)
        await client.close()


async def test_a_watchdog_continues_on_the_new_connection(client, scripted):
    line = await scripted.accept()
    block = client.lock("a", transaction_timeout=20, watchdog=True)
    entering = asyncio.create_task(block.__aenter__())
    await line.grant()
    await entering
    scripted.last_words = [HELD]
    line.cut()
    line = await scripted.accept()
    assert await line.expect("extend") == {"id": 101, "transactionTimeout": 20000}
    line.say('{"command":"extended","payload":{"id":101,"transactionTimeout":20000}}')
    leaving = asyncio.create_task(block.__aexit__(None, None, None))
    await line.release()
    await leaving


async def test_a_lock_survives_a_lost_connection_to_a_real_server(genie: Genie):
    async with asyncio.timeout(WAIT_S), connect(*genie.address) as client, connect(*genie.address) as other:
        async with client.lock("survive") as lock:
            client._connection._handler.transport.abort()
            await wait_until_disconnected(client)
            assert await other.try_acquire("survive") is None
            await lock.extend(20)
        async with other.lock("survive", queue_timeout=0):
            pass
        assert not lock.lost.is_set()


# -- threads --------------------------------------------------------------------------------------------------


async def test_threads_a_held_lock_is_released_on_the_next_connection(scripted):
    cut = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> bool:
        with sync.connect("127.0.0.1", scripted.port) as client:
            with client.lock("a") as lock:
                loop.call_soon_threadsafe(cut.set)
                with pytest.raises(ConnectionLost):
                    client.ping()
            return lock.lost.is_set()

    task = asyncio.create_task(asyncio.to_thread(work))
    line = await scripted.accept()
    await line.grant()
    await cut.wait()
    await line.expect("ping")
    scripted.last_words = [HELD]
    line.cut()
    await (await scripted.accept()).release(101)
    assert await task is False


async def test_threads_a_lock_of_an_unknown_session_is_lost(scripted):
    def work() -> None:
        with (
            sync.connect("127.0.0.1", scripted.port) as client,
            pytest.raises(LockLost, match="the session ended"),
            client.lock("a") as lock,
        ):
            assert lock.lost.wait(WAIT_S)

    task = asyncio.create_task(asyncio.to_thread(work))
    line = await scripted.accept()
    await line.grant()
    scripted.sessions.clear()
    line.cut()
    await (await scripted.accept()).release(101)
    await task


async def test_threads_calls_wait_for_a_server_only_for_the_response_timeout():
    def work(port: int) -> None:
        with sync.connect("127.0.0.1", port) as client:
            with pytest.raises(ConnectionLost):
                client.ping()
            client._connection.aio.session.calls.response_timeout = 0.3
            with pytest.raises(Unavailable, match="no server at"):
                client.ping()
            with pytest.raises(Unavailable, match="5 could not be released"):
                client.release(5)
            with pytest.raises(Unavailable, match=r"within 0.3 s: no server at"):
                client.try_acquire("a")

    async with fake_server() as scripted:
        task = asyncio.create_task(asyncio.to_thread(work, scripted.port))
        line = await scripted.accept()
        await line.expect("ping")
    await task


async def test_threads_more_data_than_the_socket_buffer_is_sent():
    full = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(port: int) -> None:
        with sync.connect("127.0.0.1", port) as client:
            aio = client._connection.aio
            flush, transport = aio.flush, aio._handler.transport

            def flush_and_look() -> None:
                flush()
                if transport.get_write_buffer_size():
                    loop.call_soon_threadsafe(full.set)

            aio.flush = flush_and_look
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
            client.acquire(*(f"{number}/{'x' * 500}" for number in range(1024)))

    async with asyncio.timeout(WAIT_S), fake_server() as scripted:
        task = asyncio.create_task(asyncio.to_thread(work, scripted.port))
        line = await scripted.accept()
        line.writer.transport.pause_reading()
        await full.wait()
        line.writer.transport.resume_reading()
        await line.grant()
        await task


async def test_a_client_without_a_reachable_server_leaves_no_open_socket():
    dead = free_port()
    with pytest.raises(Unavailable), sync.connect("127.0.0.1", dead, connect_timeout=0.1):
        pass
    with pytest.raises(Unavailable):
        async with connect("127.0.0.1", dead, connect_timeout=0.1):
            pass
