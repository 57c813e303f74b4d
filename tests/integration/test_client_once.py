"""`genie.once`: a job that other machines skip while it runs, and for a time after it has succeeded."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from datetime import UTC
from typing import Any

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler

import genie as package
from genie import sync
from support.network.proxy import Cut, lines, proxy
from support.processes.servers import WAIT_S, Genie

Decorate = Callable[..., Callable[..., Any]]


@pytest.fixture(params=["function", "coroutine function"])
def once(request: pytest.FixtureRequest, genie: Genie) -> Iterator[Decorate]:
    """`genie.once` for a plain function, whose decorated form is plain, too, and runs a coroutine in one of the cases."""

    def decorate(name: str, hold: float, port: int = genie.port) -> Any:
        def of(job: Callable[..., Any]) -> Callable[..., Any]:
            if request.param == "function":
                return decorator(job)

            async def coroutine(*arguments: Any) -> Any:
                return job(*arguments)

            return lambda *arguments: asyncio.run(decorator(coroutine)(*arguments))

        decorator = package.once(name, hold, host="127.0.0.1", port=port)
        return of

    yield decorate
    with sync.connect(*genie.address) as client:
        for lock in client.inspect().holders:
            client.release(lock.id)


def test_a_job_that_fails_may_run_again_at_once(once: Decorate) -> None:
    @once("jobs/fails", 300)
    def job(word: str) -> str:
        runs.append(1)
        if len(runs) == 1:
            raise package.QueueTimeout(id=7, waited=1.0)  # an error of the job, not of the lock on the job
        return word

    runs: list[int] = []
    with pytest.raises(package.QueueTimeout):
        job("done")
    assert job("done") == "done"
    assert job("done") is None


def test_a_job_is_skipped_while_it_runs_elsewhere(once: Decorate, genie: Genie) -> None:
    with sync.connect(*genie.address) as client:

        @once("jobs/nested", 300)
        def outer() -> str:
            assert client.inspect(resource="jobs/nested").holders[0].expires_in > 250
            with sync.connect(*genie.address) as other:
                return "ran twice" if other.try_acquire("jobs/nested") else "skipped"

        assert outer() == "skipped"


def test_a_job_that_has_run_stays_locked_for_the_whole_hold(once: Decorate, genie: Genie) -> None:
    with sync.connect(*genie.address) as client:

        @once("jobs/held", 300)
        def job() -> None:
            lock = client.inspect(resource="jobs/held").holders[0]
            client.extend(lock.id, 30)

        job()
        assert client.inspect(resource="jobs/held").holders[0].expires_in > 250
        assert client.release(client.inspect(resource="jobs/held").holders[0].id) == "success"
        job()
        assert client.inspect(resource="jobs/held").holders_total == 1


@pytest.mark.parametrize("position", ["before", "after"])
async def test_a_job_that_has_succeeded_is_not_repeated_after_a_lost_connection(
    position: Any, once: Decorate, genie: Genie, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxy(genie.port, lines) as between:

        @once("jobs/cut", 300, between.port)
        def job() -> str:
            between.arm(Cut(to_server=True, kind="extend", position=position))
            return "done"

        assert await asyncio.to_thread(job) == "done"
        assert "the job jobs/cut has succeeded, but its lock could not be extended" in caplog.text
        assert await asyncio.to_thread(job) is None


def test_a_job_whose_lock_is_lost_raises(once: Decorate, genie: Genie) -> None:
    @once("jobs/lost", 300)
    def job() -> None:
        with sync.connect(*genie.address) as client:
            client.release(client.inspect(resource="jobs/lost").holders[0].id)

    with pytest.raises(package.LockLost):
        job()


async def test_a_coroutine_is_cancelled_when_its_lock_is_lost(genie: Genie) -> None:
    @package.once("jobs/cancelled", 300, host="127.0.0.1", port=genie.port)
    async def job() -> None:
        async with package.connect(*genie.address) as client:
            await client.release((await client.inspect(resource="jobs/cancelled")).holders[0].id)
        await asyncio.Event().wait()

    with pytest.raises(package.LockLost):
        await asyncio.wait_for(job(), WAIT_S)


async def test_a_decorated_coroutine_function_is_one(genie: Genie) -> None:
    """Schedulers and web frameworks treat coroutine functions in a way of their own."""

    @package.once("jobs/scheduled", 300, host="127.0.0.1", port=genie.port)
    async def job() -> None:
        ran.set()

    ran = asyncio.Event()
    assert inspect.iscoroutinefunction(job)
    scheduler = AsyncIOScheduler(timezone=UTC)
    scheduler.add_job(job, "date")
    scheduler.start()
    await asyncio.wait_for(ran.wait(), WAIT_S)
    scheduler.shutdown()


def test_a_job_that_only_returns_a_coroutine_is_an_error(genie: Genie) -> None:
    async def work() -> None: ...

    coroutine = work()

    @package.once("jobs/wrapped", 300, host="127.0.0.1", port=genie.port)
    def job() -> Any:
        return coroutine

    with pytest.raises(TypeError, match="decorate the coroutine function itself"):
        job()
    coroutine.close()
    with sync.connect(*genie.address) as client:
        assert client.inspect(resource="jobs/wrapped").holders_total == 0
    with pytest.raises(TypeError, match="generator function"):

        @package.once("jobs/generator", 300)
        def generator() -> Iterator[int]:
            yield 1


def test_wrong_arguments_are_errors_of_the_decorator() -> None:
    with pytest.raises(ValueError, match="transaction_timeout"):
        package.once("jobs/a", 0)
    with pytest.raises(ValueError, match="jobs/:"):
        package.once("wrong:jobs/:", 1)
