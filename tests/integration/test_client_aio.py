"""The asyncio client with a real server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from genie import (
    Client,
    ConnectionLost,
    Deadlock,
    Lock,
    LockError,
    LockLost,
    QueueTimeout,
    RequestRejected,
    TransactionTimeout,
    Unavailable,
    connect,
    exclusive,
    shared,
)
from support.processes.ports import free_port
from support.processes.servers import WAIT_S, Genie
from support.processes.waiting import wait_until


async def until_waiting(client: Client, name: str, count: int = 1) -> list[int]:
    while True:
        found = await client.inspect(resource=name)
        if found.queue_total == count:
            return [row.id for row in found.queue]


async def until_free(client: Client, name: str) -> None:
    while True:
        found = await client.inspect(resource=name)
        if found.queue_total == found.holders_total == 0:
            return


async def shorten(lock: Lock) -> None:
    """Let a lock time out while its block runs, which a short timeout from the start can't be relied upon to do."""
    with suppress(LockLost):
        await lock.extend(0.001)


async def test_a_lock_is_held_in_the_block_and_released_after_it(client, other):
    async with client.lock("held/a", "shared:held/b", transaction="t-held", priority=3) as lock:
        [held] = (await other.inspect(id=lock.id)).holders
        assert sorted(held.resources) == ["exclusive:held/a", "shared:held/b"]
        assert (held.transaction, held.priority, held.fence) == ("t-held", 3, lock.fence)
        assert lock.resources == ("exclusive:held/a", "shared:held/b")
        assert str(lock.id) in repr(lock)
    await until_free(other, "held/a")
    async with other.lock("held/a") as next_lock:
        assert next_lock.fence > lock.fence
        assert next_lock.id > lock.id
    assert not lock.lost.is_set()


async def test_one_connection_serves_many_tasks(client):
    inside = 0

    async def work() -> None:
        nonlocal inside
        async with client.lock("apart"):
            inside += 1
            assert inside == 1
            await client.ping()
            inside -= 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(work())


async def test_shared_locks_are_held_together(client):
    async with client.lock(shared("together")), client.lock(shared("together")):
        assert await client.try_acquire(exclusive("together")) is None


async def test_try_acquire_does_not_wait(client, other):
    lock = await client.try_acquire("try")
    assert await other.try_acquire("try") is None
    await lock.release()
    again = await other.try_acquire("try")
    await again.release()


async def test_a_queue_timeout_has_the_blockers(client, other):
    async with client.lock("late", transaction="holder") as lock:
        with pytest.raises(QueueTimeout, match=r"'holder' \(.*\) holds exclusive:late") as caught:
            await other.acquire("late", queue_timeout=0.001)
    assert caught.value.blockers[0].id == lock.id
    assert caught.value.blockers_total == 1
    assert caught.value.waited >= 0.001


async def test_try_acquire_raises_deadlock_too(client):
    async with client.lock("dead/a", transaction="t1"), client.lock("dead/b", transaction="t2"):
        waiting = asyncio.create_task(client.acquire("dead/b", transaction="t1"))
        await until_waiting(client, "dead/b")
        with pytest.raises(Deadlock) as caught:
            await client.acquire("dead/a", transaction="t2")
        assert caught.value.cycle == ("t2", "t1")
        assert [wait.resource for wait in caught.value.waits] == ["dead/a", "dead/b"]
        with pytest.raises(Deadlock):
            await client.try_acquire("dead/a", transaction="t2")
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_a_lock_that_times_out_cancels_the_block(client):
    task = asyncio.current_task()
    with pytest.raises(TransactionTimeout) as caught:
        async with client.lock("lost") as lock:
            shortened = asyncio.create_task(shorten(lock))
            await asyncio.Event().wait()
    await shortened
    assert caught.value.id == lock.id
    assert lock.lost.is_set()
    assert task.cancelling() == 0
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    await lock.release()
    with pytest.raises(TransactionTimeout):
        await lock.extend(1)


async def test_a_lock_released_by_another_client_is_lost(client, other):
    with pytest.raises(LockLost, match="released by its id"):
        async with client.lock("taken") as lock:
            assert await other.release(lock.id) == "success"
            await asyncio.Event().wait()
    assert await other.release(lock.id) == "success"


async def test_the_lost_event_is_set_for_a_lock_without_a_block(client, other):
    lock = await client.acquire("event")
    lost = lock.lost
    assert not lost.is_set()
    await other.release(lock.id)
    await lost.wait()


async def test_an_error_of_a_cancelled_block_is_the_cause_of_lock_lost(client):
    with pytest.raises(TransactionTimeout) as caught:
        async with client.lock("cause") as lock:
            shortened = asyncio.create_task(shorten(lock))
            try:
                await asyncio.Event().wait()
            finally:
                raise KeyError("of the block")
    await shortened
    assert isinstance(caught.value.__cause__, KeyError)
    assert asyncio.current_task().cancelling() == 0


async def test_a_block_that_swallows_its_cancellation_still_ends_with_lock_lost(client):
    with pytest.raises(TransactionTimeout):
        async with client.lock("swallow") as lock:
            shortened = asyncio.create_task(shorten(lock))
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
    await shortened
    await client.ping()


async def test_an_error_of_the_block_is_propagated_and_the_lock_released(client, other):
    with pytest.raises(KeyError):
        async with client.lock("error"):
            raise KeyError
    async with other.lock("error", queue_timeout=0):
        pass


async def test_a_cancellation_by_another_task_is_propagated(client, other):
    inside = asyncio.Event()

    async def work() -> None:
        async with client.lock("outside"):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with other.lock("outside", queue_timeout=0):
        pass


async def test_a_cancellation_by_another_task_during_the_loss_is_propagated(client, other):
    task = None

    async def work() -> None:
        async with client.lock("both") as lock:
            # The loss is told in this very turn of the loop, before the block hears of either.
            lock._request.on_lost, cancel = lambda: (task.cancel(), cancel()), lock._request.on_lost
            await other.release(lock.id)
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_two_nested_blocks_lost_at_once_raise_the_error_of_the_outer_one(client, other):
    with pytest.raises(LockLost) as caught:
        async with client.lock("nested/a") as outer, client.lock("nested/b") as inner:
            await asyncio.gather(other.release(outer.id), other.release(inner.id), asyncio.Event().wait())
    assert caught.value.id in {outer.id, inner.id}
    assert asyncio.current_task().cancelling() == 0
    await client.ping()


async def test_a_timeout_around_a_block_works(client, other):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001), client.lock("timeout"):
            await asyncio.Event().wait()
    await until_free(other, "timeout")


async def test_a_watchdog_extends_the_lock_while_the_block_runs(client):
    async with client.lock("watchdog", transaction_timeout=30, watchdog=True) as lock:
        link, request = client._connection, lock._request
        first = request.expires_at
        assert first - request.renew_at == pytest.approx(20), "when a third of it has passed"
        link.session.requests.live.renew_all(asyncio.get_running_loop().time())  # that is now
        link.flush_soon()
        while request.expires_at == first:
            await client.ping()
        assert not lock.lost.is_set()
    assert client._connection.session.on_timer(first + 100) == []
    assert client._connection.session.data_to_send() == b""


async def test_an_extended_lock_is_held_longer(client):
    lock = await client.acquire("extend")
    await lock.extend(60)
    assert (await client.inspect(id=lock.id)).holders[0].expires_in > 20
    await shorten(lock)
    await lock.lost.wait()


async def test_a_released_lock_can_not_be_extended_and_a_second_release_does_nothing(client):
    lock = await client.acquire("twice")
    await asyncio.gather(lock.release(), lock.release())
    await lock.release()
    with pytest.raises(LockLost, match="was released"):
        await lock.extend(1)
    assert not lock.lost.is_set()


async def test_release_by_id(client, other):
    id_ = (await client.acquire("by-id")).detach()  # so that this client does not release it at its end
    with suppress(LockLost):
        await other.extend(id_, 0.001)
    await until_free(other, "by-id")
    assert await other.release(id_) == "transaction-timeout"
    with pytest.raises(RequestRejected, match="unknown-id"):
        await other.release(5)


async def test_a_waiting_request_released_by_another_client_fails(client, other):
    async with client.lock("cancelled"):
        waiting = asyncio.create_task(client.acquire("cancelled"))
        [id_] = await until_waiting(other, "cancelled")
        await other.release(id_)
        with pytest.raises(LockError, match="cancelled by a release"):
            await waiting


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("taken", [False, True])
async def test_a_call_cancelled_at_any_await_releases_its_request(client, other, taken, turns):
    name = f"cancel/{turns}/{taken}"
    holder = await other.acquire(name) if taken else None

    async def work() -> None:
        async with client.lock(name):
            await client.ping()

    task = asyncio.create_task(work())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if holder is not None:
        await holder.release()
    await client.ping()
    await until_free(other, name)


async def test_a_grant_that_crosses_a_cancellation_is_released(client, other):
    async with client.lock("meet") as lock:
        task = asyncio.create_task(client.acquire("meet"))
        await until_waiting(other, "meet")
        settle = client._connection._deliver

        def granted(outcomes) -> None:
            settle(outcomes)
            if any(call.future is None and getattr(call, "fence", 0) > lock.fence for call, _, _ in outcomes):
                task.cancel()

        client._connection._deliver = granted
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_free(other, "meet")


async def test_close_releases_cancelled_requests(genie, other):
    async with connect(*genie.address) as client:
        task = asyncio.create_task(client.acquire("leaving"))
        await asyncio.sleep(0)
        assert client._connection.session.requests.live.by_ref
        task.cancel()
        await asyncio.wait([task])
    async with other.lock("leaving", queue_timeout=0):
        pass


async def test_calls_on_a_closed_client_raise_connection_lost(genie):
    async with connect(*genie.address) as client:
        lock = await client.acquire("closed")
    for call in (client.ping(), client.acquire("x"), client.release(5), lock.release(), lock.extend(1)):
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await call
    async with connect(*genie.address) as client:
        assert await client.release(lock.id) == "success"


async def test_wrong_arguments_are_rejected_before_anything_is_sent(client):
    with pytest.raises(ValueError, match="queue_timeout"):
        client.lock("a", queue_timeout=-1)
    with pytest.raises(ValueError, match="exclsive"):
        await client.acquire("exclsive:a")
    block = client.lock("once")
    async with block:
        pass
    with pytest.raises(RuntimeError, match="entered only once"):
        await block.__aenter__()


async def test_the_first_reachable_server_is_used(genie):
    dead = free_port()
    async with connect(f"127.0.0.1:{dead},127.0.0.1:{genie.port}") as client:
        await client.ping()
    with pytest.raises(Unavailable, match=f"127.0.0.1:{dead}: .*refused|Connect call failed"):
        await connect("127.0.0.1", dead, connect_timeout=0.1).__aenter__()


async def test_the_address_comes_from_the_environment(genie, monkeypatch):
    monkeypatch.setenv("GENIE_HOST", "127.0.0.1")
    monkeypatch.setenv("GENIE_PORT", str(genie.port))
    async with connect() as client:
        await client.ping()


async def test_a_large_request_is_granted(client):
    names = [f"large/{number}/{'x' * 400}" for number in range(1024)]
    async with client.lock(*names) as lock:
        assert len(lock.resources) == 1024


def test_it_runs_on_uvloop(genie):
    """Whose timers for times that are past are no timers. Locks that last a moment have many of them."""
    uvloop = pytest.importorskip("uvloop")
    wrong = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        async with connect(*genie.address) as client:

            async def lock(number):
                for _ in range(100):
                    with suppress(LockError):
                        async with client.lock(f"uv/{number % 5}", transaction_timeout=0.002, queue_timeout=0.003):
                            pass

            await asyncio.gather(*(lock(number) for number in range(40)))
            await client.ping()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert wrong == []


def test_import_is_lazy_and_complete():
    program = (
        "import sys, genie\n"
        "heavy = {'asyncio', 'msgspec', 'orjson', 'importlib.metadata', 'genie.client.aio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert all(getattr(genie, name) is not None for name in genie.__all__)\n"
        "assert 'redis' not in sys.modules and 'genie.server' not in sys.modules\n"
        "assert genie.__version__.count('.') >= 2 and set(genie.__all__) <= set(dir(genie))\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=WAIT_S)


def test_a_lock_expires_even_while_the_event_loop_is_blocked(genie):
    """The clock of uvloop stands still during a callback."""
    uvloop = pytest.importorskip("uvloop")

    async def main() -> bool:
        async with connect(*genie.address) as client:
            lock = await client.acquire("aio/blocked", transaction_timeout=0.2)
            assert lock.held
            wait_until(lambda: not lock.held)  # the event loop runs no callback meanwhile
            return lock.held

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) is False


async def test_a_task_that_is_alone_sends_at_once_and_several_send_together(genie: Genie) -> None:
    async with connect(*genie.address) as client:
        link = client._connection
        transport = link._handler.transport
        written: list[bytes] = []
        link._handler.transport = SimpleNamespace(write=lambda data: (written.append(data), transport.write(data)))
        try:
            async with client.lock("alone"):
                pass
            assert [data.count(b"\n") for data in written] == [1, 1]
            written.clear()
            locks = await asyncio.gather(*(client.acquire(f"several-{number}") for number in range(9)))
            assert sorted(data.count(b"\n") for data in written) == [1, 8], "the first task is alone"
            written.clear()
            await asyncio.gather(*(lock.release() for lock in locks))
            assert sorted(data.count(b"\n") for data in written) == [1, 8]
        finally:
            link._handler.transport = transport


async def test_the_timeouts_of_releases_need_no_timers_and_leave_nothing(genie: Genie) -> None:
    async with connect(*genie.address) as client:
        locks = [await client.acquire(f"lock-{number}") for number in range(3)]
        releases = [asyncio.create_task(lock.release()) for lock in locks]
        await asyncio.sleep(0)
        assert len(client._connection.session.calls._deadlines) == 3
        await asyncio.gather(*releases)
        assert not client._connection.session.calls._deadlines
        assert client._connection._waiting_tasks == 0


async def test_the_first_of_many_calls_are_sent_while_the_others_are_made(client):
    handler = client._connection._handler
    transport, writes = handler.transport, []
    handler.transport = SimpleNamespace(write=lambda data: (writes.append(data.count(b"\n")), transport.write(data)))
    locks = await asyncio.gather(*(client.acquire(f"many/{number}") for number in range(70)))
    await asyncio.gather(*(lock.release() for lock in locks))
    handler.transport = transport
    assert writes == [1, 32, 32, 5, 1, 32, 32, 5]
