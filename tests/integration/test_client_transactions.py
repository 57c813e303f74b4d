"""Transactions of the clients: locks that are released together, and work that is repeated after a deadlock."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from genie import Client, ConnectionLost, Deadlock, LockLost, QueueTimeout, Transaction, connect, shared, subtree, sync
from support.network.proxy import lines, proxy
from support.processes.servers import WAIT_S, Genie


@pytest.fixture
async def client(genie: Genie) -> AsyncIterator[Client]:
    async with connect(*genie.address) as client:
        yield client


@pytest.fixture
async def other(genie: Genie) -> AsyncIterator[Client]:
    async with connect(*genie.address) as client:
        yield client


@pytest.fixture
def threads(genie: Genie) -> Iterator[sync.Client]:
    with sync.connect(*genie.address) as client:
        yield client


async def holders(client: Client, name: str) -> int:
    return (await client.inspect(resource=name)).holders_total


# -- one attempt --------------------------------------------------------------------------------------------


async def test_all_locks_are_held_until_the_end_of_the_block(client, other):
    async with client.transaction() as tx:
        first = await tx.lock("t/1")
        second = await tx.lock("shared:t/2", "t/3")
        assert tx.fence == max(first.fence, second.fence)
        assert [await holders(other, name) for name in ("t/1", "t/2", "t/3")] == [1, 1, 1]
    assert [await holders(other, name) for name in ("t/1", "t/2", "t/3")] == [0, 0, 0]
    with pytest.raises(RuntimeError, match="has ended"):
        await tx.lock("t/4")


async def test_what_is_held_is_not_requested_again(client, other):
    async with client.transaction() as tx:
        both = await tx.lock("h/1", "shared:h/2")
        for again in (("h/1",), ("shared:h/1",), ("shared:h/2",), ("h/1", "shared:h/2")):
            assert (await tx.lock(*again)).id == both.id
        stronger = await tx.lock("h/2")
        assert stronger.id != both.id
        assert (await tx.lock("shared:h/2")).id == both.id
        with pytest.raises(QueueTimeout):
            await other.acquire("shared:h/2", queue_timeout=0)


async def test_an_error_of_the_block_is_propagated_and_all_locks_are_released(client, other):
    with pytest.raises(KeyError):
        async with client.transaction() as tx:
            await tx.lock("e/1")
            await tx.lock("e/2")
            raise KeyError
    assert await holders(other, "e/1") == await holders(other, "e/2") == 0


async def test_the_loss_of_any_lock_cancels_the_block(client, other):
    with pytest.raises(LockLost):
        async with client.transaction() as tx:
            lost = await tx.lock("l/1")
            await tx.lock("l/2")
            await other.release(lost.id)
            await asyncio.sleep(WAIT_S)
    assert await holders(other, "l/2") == 0
    await client.ping()


async def test_a_cancellation_of_the_block_stays_one(client, other):
    inside = asyncio.Event()

    async def work() -> None:
        async with client.transaction() as tx:
            await tx.lock("c/1")
            inside.set()
            await asyncio.sleep(WAIT_S)

    task = asyncio.ensure_future(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await holders(other, "c/1") == 0


async def test_a_name_that_runs_in_this_client_is_rejected(client):
    async with client.transaction("order-7"):
        with pytest.raises(ValueError, match="'order-7' runs in this client already"):
            async with client.transaction("order-7"):
                pass

        async def work(_: Transaction) -> None:
            pass

        with pytest.raises(ValueError, match="The key of an idempotent operation"):
            await client.run_transaction(work, name="order-7")
        await client.run_transaction(work, name="order-8")
    async with client.transaction("order-7"):
        pass


async def test_wrong_arguments_are_rejected_before_anything_is_sent(client):
    async def work(_: Transaction) -> None:
        raise AssertionError

    with pytest.raises(ValueError, match="attempts must be at least 1, not 0"):
        await client.run_transaction(work, attempts=0)
    with pytest.raises(TypeError, match="colour"):
        client.transaction(colour="red")
    with pytest.raises(ValueError, match="queue_timeout"):
        client.transaction(queue_timeout=-1)
    with pytest.raises(ValueError, match="transaction"):
        client.transaction("")


async def test_the_name_of_the_work_becomes_part_of_the_name_of_its_transaction(client):
    async def transfer(tx: Transaction) -> str:
        return tx.name

    first, second = await client.run_transaction(transfer), await client.run_transaction(transfer)
    assert first != second
    assert {first.rstrip("0123456789"), second.rstrip("0123456789")} == {"transfer-"}


# -- repetition ---------------------------------------------------------------------------------------------


async def test_who_lost_a_deadlock_does_not_lose_again(client):
    """Two rows of transfers in opposite orders: a hand-written loop needed up to 16 attempts for one of them."""
    attempts: dict[str, int] = {}

    async def transfers(first: str, second: str) -> None:
        for _ in range(15):

            async def transfer(tx: Transaction) -> None:
                attempts[tx.name] = attempts.get(tx.name, 0) + 1
                await tx.lock(first)
                await asyncio.sleep(0.01)
                await tx.lock(second)

            await client.run_transaction(transfer)

    await asyncio.gather(transfers("s/2", "s/13"), transfers("s/13", "s/2"))
    assert len(attempts) == 30
    assert max(attempts.values()) == 2


async def test_before_the_work_is_repeated_one_request_takes_everything_in_the_strongest_modes(client, other):
    held: list[list[str]] = []
    reached = asyncio.Event()

    async def read_then_write(tx: Transaction) -> None:
        found = await client.inspect(transaction=tx.name)
        held.append(sorted(name for row in found.holders for name in row.resources))
        await tx.lock(shared("w/1"))
        if len(held) == 1:
            reached.set()
            await blocked.wait()
        await tx.lock("w/2")
        await tx.lock("w/1")

    blocked = asyncio.Event()

    async def opponent() -> None:
        async with other.transaction(queue_timeout=WAIT_S) as tx:
            await tx.lock("w/2")
            await reached.wait()
            waiting = asyncio.ensure_future(tx.lock("w/1"))
            while not (await client.inspect(resource="w/1")).queue_total:
                pass
            blocked.set()
            await waiting

    await asyncio.gather(client.run_transaction(read_then_write), opponent())
    assert held == [[], ["exclusive:w/2", "shared:w/1"]]


async def test_a_repeated_attempt_locks_the_units_of_the_work_once(client, other):
    held: list[list[str]] = []

    async def work(tx: Transaction) -> None:
        await tx.lock("2/3:u/pool")
        if not held:
            reached.set()
            await blocked.wait()
        await tx.lock("u/1")
        found = await client.inspect(transaction=tx.name)
        held.append(sorted(name for row in found.holders for name in row.resources))

    reached, blocked = asyncio.Event(), asyncio.Event()

    async def opponent() -> None:
        async with other.transaction(queue_timeout=WAIT_S) as tx:
            await tx.lock("u/1")
            await reached.wait()
            waiting = asyncio.ensure_future(tx.lock("2/3:u/pool"))
            while not (await client.inspect(resource="u/pool")).queue_total:
                pass
            blocked.set()
            await waiting

    await asyncio.gather(client.run_transaction(work), opponent())
    assert held == [["2/3:u/pool", "exclusive:u/1"]]


@pytest.mark.parametrize("more", [(), ("u/x",)])
async def test_released_units_are_free_again(client, more):
    for _ in range(2):
        lock = await client.try_acquire("2/3:u/free", *more)
        assert lock is not None
        await lock.release()
    assert await holders(client, "u/free") == 0


async def test_a_subtree_excludes_the_names_below_it(client, other):
    async with client.lock(subtree("f/")):
        assert await other.try_acquire("f/1") is None
        assert await other.try_acquire("shared:f/1/2") is None
        assert await other.try_acquire("f") is not None
    assert await other.try_acquire("f/1") is not None


async def test_the_last_attempt_raises_the_deadlock(client):
    names = []

    async def work(tx: Transaction) -> None:
        names.append(tx.name)
        raise Deadlock(id=1, cycle=[tx.name])

    with pytest.raises(Deadlock):
        await client.run_transaction(work, attempts=3)
    assert len(names) == 3
    assert len(set(names)) == 1


async def test_other_errors_do_not_repeat_the_work(client):
    runs = []

    async def work(tx: Transaction) -> None:
        runs.append(tx)
        raise KeyError

    with pytest.raises(KeyError):
        await client.run_transaction(work)
    assert len(runs) == 1


# -- the client for threads ---------------------------------------------------------------------------------


def test_threads_do_not_lose_twice_either(threads):
    attempts: dict[str, int] = {}
    mutex = threading.Lock()

    def transfers(first: str, second: str) -> None:
        for _ in range(15):

            def transfer(tx: sync.Transaction) -> int:
                with mutex:
                    attempts[tx.name] = attempts.get(tx.name, 0) + 1
                tx.lock(first)
                threading.Event().wait(0.005)
                tx.lock(second)
                return tx.fence

            assert threads.run_transaction(transfer) > 0

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(transfers, "ts/2", "ts/13"), pool.submit(transfers, "ts/13", "ts/2")]:
            done.result()
    assert len(attempts) == 30
    assert max(attempts.values()) <= 2


def test_a_transaction_of_a_thread_holds_and_releases_all(threads, genie):
    with sync.connect(*genie.address) as other:
        with threads.transaction("thread-1") as tx:
            first = tx.lock("th/1")
            tx.lock("shared:th/2")
            assert tx.lock("th/1").id == first.id
            assert other.try_acquire("th/2") is None
            with pytest.raises(ValueError, match="already"), threads.transaction("thread-1"):
                pass
        assert other.inspect(resource="th/1").holders_total == 0
        assert other.inspect(resource="th/2").holders_total == 0
        with pytest.raises(LockLost), threads.transaction() as tx:
            other.release(tx.lock("th/1").id)
            tx.lock("th/2")
        assert other.inspect(resource="th/2").holders_total == 0


# -- the end of a block, and of a client --------------------------------------------------------------------


async def test_the_result_of_a_block_survives_a_release_that_is_not_confirmed(client, caplog):
    """The obvious retry would do the work twice."""

    async def work() -> str:
        async with client.lock("r/1") as lock:
            connection = client._connection
            connection.connect_timeout = 0.05
            connection.session.requests.on_released = lambda *_: None  # the reply is lost
            return f"done under {lock.id}"

    with caplog.at_level(logging.WARNING, "genie.client"):
        assert (await work()).startswith("done under ")
    assert "the release of exclusive:r/1 was not confirmed" in caplog.text


async def test_closing_a_client_names_the_locks_that_it_leaves_held(genie, other, caplog):
    async with connect(*genie.address) as closing:
        kept = await closing.acquire("k/1", "shared:k/2")
        await closing.acquire("k/3", on_disconnect="release")
        (await closing.acquire("k/4")).detach()
    assert f"{kept.id} (exclusive:k/1 shared:k/2)" in caplog.text
    assert "k/3" not in caplog.text
    assert "k/4" not in caplog.text
    assert await holders(other, "k/1") == 1
    await other.release(kept.id)


async def test_close_can_release_the_locks(genie, other, caplog):
    async with connect(*genie.address) as closing:
        await closing.acquire("kr/1")
        await closing.close(release=True)
    assert await holders(other, "kr/1") == 0
    assert caplog.text == ""


def test_closing_a_client_for_threads(genie, caplog):
    with sync.connect(*genie.address) as other:
        with sync.connect(*genie.address) as closing:
            kept = closing.acquire("kt/1")
        assert f"{kept.id} (exclusive:kt/1)" in caplog.text
        other.release(kept.id)
        with sync.connect(*genie.address) as closing:
            closing.acquire("kt/1")
            closing.close(release=True)
        assert other.inspect(resource="kt/1").holders_total == 0


async def test_work_of_the_wrong_kind_is_an_error_that_says_so(client, threads):
    async def coroutine_function(_: object) -> None: ...

    with pytest.raises(TypeError, match=r"the work must be a coroutine function, not <function .*plain"):
        await client.run_transaction(plain)
    with pytest.raises(
        TypeError, match=r"the work must be a function, not the coroutine function .*coroutine_function"
    ):
        await asyncio.to_thread(threads.run_transaction, coroutine_function)


def plain(_: object) -> None: ...


# -- what other tasks and threads do with a transaction ------------------------------------------------------


async def test_a_lock_that_another_task_waits_for_ends_with_the_block(client, other):
    busy = await other.acquire("late/b", transaction_timeout=3600)
    waits: list[asyncio.Task[object]] = []

    async def work(tx: Transaction) -> None:
        waits.append(asyncio.ensure_future(tx.lock("late/b")))
        await tx.lock("late/a")
        raise KeyError

    with pytest.raises(KeyError):
        await client.run_transaction(work, queue_timeout=None, watchdog=True)
    with pytest.raises(RuntimeError, match="has ended"):
        await waits[0]
    await busy.release()
    await client.ping()
    assert await holders(other, "late/a") == await holders(other, "late/b") == 0
    assert asyncio.current_task().cancelling() == 0


async def test_a_lock_that_is_granted_as_the_block_ends_is_released(client, other):
    async with client.transaction() as tx:
        waiting = asyncio.ensure_future(tx.lock("granted/a"))
        while not tx.fence:  # noqa: ASYNC110 - granted, and its task has not continued
            await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="has ended"):
        await waiting
    assert await holders(other, "granted/a") == 0


def test_a_lock_that_another_thread_waits_for_ends_with_the_block(threads, genie):
    with sync.connect(*genie.address) as other, ThreadPoolExecutor() as pool:
        busy = other.acquire("thread/b", transaction_timeout=3600)
        with threads.transaction(queue_timeout=None) as tx:
            tx.lock("thread/a")
            waiting = pool.submit(tx.lock, "thread/b")
            while not other.inspect(resource="thread/b").queue_total:
                pass
        with pytest.raises(RuntimeError, match="has ended"):
            waiting.result(WAIT_S)
        busy.release()
        assert not other.inspect(resource="thread/b").queue_total
        assert other.acquire("thread/b", "thread/a", queue_timeout=WAIT_S).held


async def test_a_cancellation_that_arrives_with_a_lost_lock_is_not_swallowed(client):
    """The lock is granted and lost before the task continues, so its loss has cancelled nothing."""

    async def work(tx: Transaction) -> None:
        await tx.lock("both/a")

    task = asyncio.ensure_future(client.run_transaction(work))
    request = None
    while request is None or not request.fence:
        await asyncio.sleep(0)
        request = next(iter(client._connection.session.requests.live.by_ref.values()), None)
    session = client._connection.session
    session.requests._lose(request, LockLost("lost", id=request.id))
    session.calls.take_outcomes()  # before the owner is notified
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_close_with_release_cancels_waiting_requests_first(genie, other, caplog):
    closing = await connect(*genie.address).__aenter__()
    await closing.acquire("first/a", transaction_timeout=3600)
    waiting = asyncio.ensure_future(closing.acquire("first/a", queue_timeout=None, transaction_timeout=3600))
    while not (await other.inspect(resource="first/a")).queue_total:
        pass
    await closing.close(release=True)
    with pytest.raises(ConnectionLost):
        await waiting
    assert await holders(other, "first/a") == 0
    assert not caplog.records


async def test_close_names_the_locks_whose_release_was_not_confirmed(genie, caplog):
    async with proxy(genie.port, lines) as between:
        closing = await connect("127.0.0.1", between.port, response_timeout=0.1).__aenter__()
        lock = await closing.acquire("half/a", transaction_timeout=3600)
        between.block("127.0.0.1")
        await closing.close(release=True)
    assert f"its locks stay held until they are released by id or time out: {lock.id} (exclusive:half/a)" in caplog.text
    assert "the server has not confirmed their release" in caplog.text


async def test_a_cancelled_close_closes(genie):
    async with proxy(genie.port, lines) as between:
        closing = await connect("127.0.0.1", between.port).__aenter__()
        await closing.acquire("half/b", transaction_timeout=0.1)
        between.block("127.0.0.1")
        task = asyncio.ensure_future(closing.close(release=True))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await closing.ping()
