"""The asyncio client: a cancellation at every await of each public coroutine, and use from where it can't be used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Generator
from pathlib import Path
from typing import Any

import pytest

from genie import Client, Lock, QueueTimeout, Transaction, connect, sync
from support.processes.servers import WAIT_S, Genie

NAME = "cancelled/lock"
HELD = "cancelled-held"
MAX_AWAITS = 60
"""More awaits than any call has, so that a loop over them ends."""

Known = list[Lock]
"""The locks that the caller knows."""


class CancelledAtAwait:
    """Awaits a coroutine, and cancels the task at its `number`-th await.

    `when_done` delays the cancellation until the awaited future is done, and the task has not continued yet.
    """

    def __init__(self, awaitable: Awaitable[object], number: int, *, when_done: bool) -> None:
        self._awaitable = awaitable
        self._number = number
        self._when_done = when_done
        self.reached = False

    def __await__(self) -> Generator[Any, Any, None]:
        """Yield what the coroutine yields."""
        inner = self._awaitable.__await__()
        task = asyncio.current_task()
        assert task is not None
        count, result, error = 0, None, None
        while True:
            try:
                future = inner.send(result) if error is None else inner.throw(error)
            except StopIteration:
                return
            count += 1
            if count == self._number:
                self.reached = True
                if self._when_done and future is not None:
                    future.add_done_callback(lambda _: task.cancel())
                else:
                    asyncio.get_running_loop().call_soon(task.cancel)
            try:
                result, error = (yield future), None
            except BaseException as thrown:  # noqa: BLE001 - passed on to the coroutine
                result, error = None, thrown


async def block(client: Client, _: Known) -> None:
    async with client.lock(NAME, transaction_timeout=600, watchdog=True):
        pass


async def elect(client: Client, _: Known) -> None:
    async with client.elect(NAME):
        pass


async def acquire(client: Client, known: Known) -> None:
    known.append(await client.acquire(NAME, transaction_timeout=600, watchdog=True))


async def try_acquire(client: Client, known: Known) -> None:
    lock = await client.try_acquire(NAME, transaction_timeout=600)
    assert lock is not None
    known.append(lock)


async def acquire_any(client: Client, known: Known) -> None:
    known.append(await client.acquire_any([NAME], 1, transaction_timeout=600))


async def time_out(client: Client, _: Known) -> None:
    with contextlib.suppress(QueueTimeout):
        await client.acquire(HELD, queue_timeout=0)


async def transaction(client: Client, _: Known) -> None:
    async with client.transaction(transaction_timeout=600, watchdog=True) as tx:
        await tx.lock(NAME)
        await tx.lock("cancelled/second")


async def run_transaction(client: Client, _: Known) -> None:
    async def work(tx: Transaction) -> None:
        await tx.lock(NAME)
        await tx.lock("cancelled/second")

    await client.run_transaction(work, transaction_timeout=600, watchdog=True)


async def release(_: Client, known: Known) -> None:
    await known[0].release()


async def release_by_id(client: Client, known: Known) -> None:
    await client.release(known[0].id)


async def extend(_: Client, known: Known) -> None:
    await known[0].extend(600)


async def extend_by_id(client: Client, known: Known) -> None:
    await client.extend(known[0].id, 600)


async def ping(client: Client, _: Known) -> None:
    await client.ping()


async def inspect(client: Client, _: Known) -> None:
    await client.inspect(resource=NAME)


async def watch(client: Client, _: Known) -> None:
    async with client.watch(HELD) as changes:
        await anext(changes)


FINDS_THE_LOCK_HELD = [release, release_by_id, extend, extend_by_id]
CALLS = [
    *(block, elect, acquire, try_acquire, acquire_any, time_out, ping, inspect, watch, transaction, run_transaction),
    *FINDS_THE_LOCK_HELD,
]


@pytest.fixture
async def client(genie: Genie) -> AsyncIterator[Client]:
    async with connect(*genie.address) as client:
        yield client


@pytest.fixture
async def other(genie: Genie) -> AsyncIterator[Client]:
    async with connect(*genie.address) as client:
        yield client


@pytest.mark.parametrize("when_done", [False, True], ids=["while it waits", "as it continues"])
@pytest.mark.parametrize("call", CALLS)
async def test_a_cancellation_at_any_await_of_a_call(client, other, call, when_done):
    async with other.lock(HELD, transaction_timeout=600):
        for number in range(1, MAX_AWAITS):
            known = [await client.acquire(NAME, transaction_timeout=600)] if call in FINDS_THE_LOCK_HELD else []
            cancelled = CancelledAtAwait(call(client, known), number, when_done=when_done)
            task = asyncio.ensure_future(await_it(cancelled))
            await asyncio.wait({task})
            assert task.cancelled() == cancelled.reached, task
            for lock in known:
                await lock.release()  # does nothing if it is not held
            free = await other.acquire(NAME, "cancelled/second", queue_timeout=WAIT_S)
            await free.release()
            await client.ping()
            session = client._connection.session
            assert (session.requests.held(), list(session.watches.all())) == ([], [])
            if not cancelled.reached:
                break
    assert 2 <= number < MAX_AWAITS, "cancelled at each await"


async def await_it(awaitable: Awaitable[None]) -> None:
    await awaitable


async def enter_and_close(genie: Genie) -> None:
    async with connect(*genie.address):
        pass


@pytest.mark.parametrize("when_done", [False, True], ids=["while it waits", "as it continues"])
async def test_a_cancellation_at_any_await_of_entering_and_closing_leaves_no_connection(genie, when_done):
    before = connections(genie)
    for number in range(1, MAX_AWAITS):
        cancelled = CancelledAtAwait(enter_and_close(genie), number, when_done=when_done)
        task = asyncio.ensure_future(await_it(cancelled))
        await asyncio.wait({task})
        assert task.cancelled() or not cancelled.reached
        assert len(asyncio.all_tasks()) == 1
        if not cancelled.reached:
            break
    assert 2 <= number < MAX_AWAITS
    async with asyncio.timeout(WAIT_S):
        while connections(genie) > before:  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0)  # an aborted transport closes its socket in the next iterations of the event loop
    assert connections(genie) == before


def connections(genie: Genie) -> int:
    """Return how many sockets of this process are connected to the server."""
    return sum(peer_of(int(entry.name)) == genie.address for entry in Path("/proc/self/fd").iterdir())


def peer_of(descriptor: int) -> object:
    """Return the address to which a file descriptor is connected, or None."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            return duplicate.getpeername()
    except OSError:  # closed, or not connected
        return None


# -- where a client can't be used ---------------------------------------------------------------------------


async def test_another_event_loop_gets_an_error_that_says_so(client):
    errors = []

    async def use() -> None:
        for call in (client.ping, lambda: client.acquire(NAME), lambda: client.release(1)):
            try:
                await call()
            except RuntimeError as error:
                errors.append(str(error))

    thread = threading.Thread(target=lambda: asyncio.run(use()))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert len(errors) == 3
    assert all("another event loop" in error for error in errors), errors


async def test_a_pickled_client_or_lock_gets_an_error_that_says_what_is_right(client, genie):
    lock = await client.acquire(NAME)
    with pytest.raises(TypeError, match="make a new client in the other process"):
        pickle.dumps(client)
    with pytest.raises(TypeError, match=f"lock {lock.id} can't be pickled: call `detach`"):
        pickle.dumps(lock)
    await lock.release()
    with sync.connect(*genie.address) as threads, pytest.raises(TypeError, match="make a new client"):
        pickle.dumps(threads)


# -- the end of a process -----------------------------------------------------------------------------------

ASYNCIO = """
import asyncio, sys, genie
async def main():
    client = genie.connect(sys.argv[1], int(sys.argv[2]))
    await client.__aenter__()
    await client.acquire("exit/held", transaction_timeout=600, watchdog=True)
    waiting = asyncio.ensure_future(client.acquire("exit/waits", queue_timeout=600))
    while not (await client.inspect(resource="exit/waits")).queue_total:
        pass
asyncio.run(main())
"""
THREADS = """
import sys, threading, genie.sync
client = genie.sync.connect(sys.argv[1], int(sys.argv[2]))
client.__enter__()
client.acquire("exit/held", transaction_timeout=600, watchdog=True)
def wait():
    client.acquire("exit/waits", queue_timeout=600)
def work():
    while True:
        with client.lock("exit/busy"):
            client.ping()
for target in (wait, work, work):
    threading.Thread(target=target, daemon=True).start()
while not client.inspect(resource="exit/waits").queue_total:
    pass
"""


@pytest.mark.parametrize("program", [ASYNCIO, THREADS], ids=["asyncio", "threads"])
async def test_a_process_that_ends_without_closing_its_client(genie, other, program):
    """The process prints nothing, and its waiting requests end with the process; locks with `onDisconnect: keep` stay held."""
    async with other.lock("exit/waits", transaction_timeout=600):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, *map(str, genie.address), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
        assert (process.returncode, output.decode()) == (0, "")
        found = await other.inspect(resource="exit/waits")
        assert found.queue_total == 0
    [held] = (await other.inspect(resource="exit/held")).holders
    await other.release(held.id)
