"""Mutual exclusion of handlers: by a database lock, or by a lock of Genie with fencing tokens."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.client.aio import Client, connect
from genie.errors import LockLost, QueueTimeout
from genie_ledger import ExpiredTransfer, RunSuperseded, TimeoutRun
from ledgers import FUTURE, PAST, Books, Desk, New
from support.processes.servers import WAIT_S, Genie, running_server

RESOURCE = "timeout-handler/test"


@pytest.fixture(scope="module")
def genie() -> Iterator[Genie]:
    with running_server() as server:
        yield server


@pytest.fixture
async def clients(genie: Genie) -> AsyncIterator[tuple[Client, Client]]:
    """Two replicas' connections."""
    async with asyncio.timeout(WAIT_S), connect(*genie.address) as one, connect(*genie.address) as other:
        yield one, other


async def fences(books: Books) -> list[int | None]:
    return [fence for (fence,) in await books.run("SELECT `fence` FROM `segment`")]


# -- by a lock of the database ---------------------------------------------------------------------------------


async def test_overlapping_runs_do_the_work_only_once(books: Books) -> None:
    desk, other_desk = Desk(), Desk()
    handler, other = books.handler(desk.take), books.handler(other_desk.take)
    await books.add_transfer("a", PAST)

    async def overlap(_ids: list[str]) -> None:
        assert await other.run_once() is None
        assert await handler.run_once() is None, "nor does the same one begin again"

    desk.meanwhile = overlap
    assert await handler.run_once() is not None
    assert (desk.ids, other_desk.ids) == (["a"], [])
    run = await other.run_once()
    assert run == TimeoutRun(interval=(1, 1), cleaned=0, inserted=0, expired=0, rejected=0, lagging=False)


async def test_the_lock_is_released_after_any_outcome(books: Books) -> None:
    desk = Desk()
    handler, other = books.handler(desk.take), books.handler(desk.take)
    await books.add_transfer("a", PAST)
    desk.fails = RuntimeError("the switch is away")
    with pytest.raises(RuntimeError, match="the switch"):
        await handler.run_once()
    entered = asyncio.Event()

    async def hang(_ids: list[str]) -> None:
        entered.set()
        await asyncio.Event().wait()

    desk.fails, desk.meanwhile = None, hang
    running = asyncio.create_task(handler.run_once())
    async with asyncio.timeout(WAIT_S):
        await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    desk.meanwhile = None
    assert await other.run_once() is not None
    assert desk.given == [["a"]] * 3


async def test_many_concurrent_runs_deliver_everything_once(books: Books) -> None:
    desk = Desk()
    for number in range(10):
        await books.add_transfer(f"{number}", PAST)
    handlers = [books.handler(desk.take, batch=3) for _ in range(4)]
    for _ in range(30):
        await asyncio.gather(*(handler.run_once() for handler in handlers))
        if len(desk.ids) == 10:
            break
    assert sorted(desk.ids) == [f"{number}" for number in range(10)]


OTHER_PROCESS = """
import asyncio, sys
from genie_ledger import TimeoutHandler

async def main():
    async with TimeoutHandler(sys.argv[1], on_expired=lambda expired: print(len(expired), flush=True)) as handler:
        while sys.stdin.readline():
            print(await handler.run_once() is not None, flush=True)

asyncio.run(main())
"""


async def test_the_lock_excludes_another_process(books: Books) -> None:
    desk = Desk()
    await books.add_transfer("a", PAST)
    pipe = asyncio.subprocess.PIPE
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OTHER_PROCESS, books.url, stdin=pipe, stdout=pipe
    )
    assert other.stdin is not None
    assert other.stdout is not None

    async def ask(*_ids: object) -> str:
        other.stdin.write(b"\n")
        async with asyncio.timeout(WAIT_S):
            return (await other.stdout.readline()).decode().strip()

    async def overlap(_ids: list[str]) -> None:
        assert await ask() == "False"

    desk.meanwhile = overlap
    try:
        assert await books.handler(desk.take).run_once() is not None
        assert desk.ids == ["a"]
        assert await ask() == "True", "and it was handed nothing"
    finally:
        other.stdin.close()
        await other.wait()


# -- by Genie's ------------------------------------------------------------------------------------------------


async def test_a_run_holds_the_lock_and_stores_its_fencing_token(books: Books, clients: tuple[Client, Client]) -> None:
    desk, other_desk = Desk(), Desk()
    handler = books.handler(desk.take, client=clients[0], name="test")
    other = books.handler(other_desk.take, client=clients[1], name="test")
    held: list[int] = []

    async def look(_ids: list[str]) -> None:
        (holder,) = (await clients[1].inspect(resource=RESOURCE)).holders
        assert holder.resources == (f"exclusive:{RESOURCE}",)
        held.append(holder.fence)
        assert await other.run_once() is None

    await books.add_transfer("a", PAST)
    desk.meanwhile = look
    assert await handler.run_once() is not None
    assert (await clients[1].inspect(resource=RESOURCE)).holders_total == 0
    assert await fences(books) == held
    await books.add_transfer("b", FUTURE)
    run = await other.run_once()
    assert run is not None
    assert run.inserted == 1
    (fence,) = await fences(books)
    assert fence is not None
    assert fence > held[0]
    assert (desk.ids, other_desk.ids) == (["a"], [])


async def test_handlers_of_other_names_do_not_wait(books: Books, clients: tuple[Client, Client]) -> None:
    async with clients[0].lock("exclusive:timeout-handler/another"):
        assert await books.handler(Desk().take, client=clients[1], name="test").run_once() is not None
    async with clients[0].lock("shared:timeout-handler/ledger"):
        assert await books.handler(Desk().take, client=clients[1]).run_once() is None


async def test_a_run_that_has_lost_its_lock_changes_nothing(books: Books, clients: tuple[Client, Client]) -> None:
    desk = Desk()
    handler = books.handler(desk.take, client=clients[0], name="test")
    await books.add_transfer("a", PAST)
    before = await books.ours()

    async def release_the_lock(_ids: list[str]) -> None:
        (holder,) = (await clients[1].inspect(resource=RESOURCE)).holders
        await clients[1].release(holder.id)
        await asyncio.Event().wait()

    desk.meanwhile = release_the_lock
    with pytest.raises(LockLost) as lost:
        await handler.run_once()
    assert "\n" not in str(lost.value)
    assert await books.ours() == before
    desk.meanwhile = None
    assert await handler.run_once() is not None
    assert desk.given == [["a"], ["a"]]


@pytest.mark.parametrize("another", [False, True])
async def test_a_run_that_ignores_the_loss_of_its_lock_changes_nothing(
    books: Books, clients: tuple[Client, Client], another: bool
) -> None:
    """Also if it takes no notice, and whether or not another has done the work meanwhile."""
    other_desk = Desk()
    other = books.handler(other_desk.take, client=clients[1], name="test")
    found: list[dict[str, list[tuple[object, ...]]]] = []

    async def stubborn(_expired: list[ExpiredTransfer]) -> None:
        async def keep_running() -> None:
            (holder,) = (await clients[1].inspect(resource=RESOURCE)).holders
            await clients[1].release(holder.id)
            if another:
                assert await other.run_once() is not None
            found.append(await books.ours())

        task = asyncio.create_task(keep_running())
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue
        task.result()

    await books.add_transfer("a", PAST)
    handler = books.handler(stubborn, client=clients[0], name="test")
    with pytest.raises((LockLost, RunSuperseded)):
        await handler.run_once()
    assert [await books.ours()] == found
    assert other_desk.ids == (["a"] if another else [])


async def test_an_error_of_the_callbacks_own_locks_is_propagated(books: Books, clients: tuple[Client, Client]) -> None:
    """Who deals with expired transfers may use Genie, too."""

    async def time_out_on_a_lock(_expired: list[ExpiredTransfer]) -> None:
        async with clients[1].lock("accounts/7"):
            await clients[0].acquire("accounts/7", queue_timeout=0)

    await books.add_transfer("a", PAST)
    before = await books.ours()
    with pytest.raises(QueueTimeout, match="accounts/7"):
        await books.handler(time_out_on_a_lock, client=clients[0], name="test").run_once()
    assert await books.ours() == before


@pytest.mark.server
async def test_a_committed_run_is_reported_although_the_lock_server_has_stopped(books: Books) -> None:
    desk = Desk()
    await books.add_transfer("a", PAST)
    with running_server() as server:
        async with connect(*server.address) as client:
            client._connection.response_timeout = 0.2  # for what is asked when it has gone

            async def end(_ids: list[str]) -> None:
                await asyncio.to_thread(server.kill)

            desk.meanwhile = end
            run = await books.handler(desk.take, client=client, name="test").run_once()
    assert run is not None
    assert (run.expired, await books.kept()) == (1, {"a": True})


async def test_the_loss_of_the_lock_during_the_commit_is_ignored(
    books: Books, clients: tuple[Client, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is told: a LockLost would say that nothing was."""
    desk = Desk()
    handler = books.handler(desk.take, client=clients[0], name="test")
    writing = handler._database.writing
    running: list[asyncio.Task[TimeoutRun | None]] = []

    @asynccontextmanager
    async def late() -> AsyncIterator[AsyncConnection]:
        async with writing() as connection:
            yield connection
            (holder,) = (await clients[1].inspect(resource=RESOURCE)).holders
            await clients[1].release(holder.id)
            while not running[0].cancelling():  # noqa: ASYNC110 - a task tells it to nobody
                await asyncio.sleep(0.01)

    await books.add_transfer("a", PAST)
    await handler.open()
    monkeypatch.setattr(handler._database, "writing", late)
    running.append(asyncio.create_task(handler.run_once()))
    async with asyncio.timeout(WAIT_S):
        run = await running[0]
    assert run is not None
    assert (run.expired, await books.kept()) == (1, {"a": True})


@pytest.mark.server
async def test_the_connection_that_holds_the_lock_may_be_idle_for_long(new_books: New) -> None:
    books = await new_books("mariadb")
    desk = Desk()
    await books.add_transfer("a", PAST)
    (usual,) = (await books.run("SELECT @@GLOBAL.wait_timeout"))[0]
    await books.run("SET GLOBAL wait_timeout = 7")
    try:
        handler = books.handler(desk.take)
        await handler.run_once()
        async with handler._database.try_lock() as ours, handler._database.reading() as other:
            assert ours
            assert (await other.exec_driver_sql("SELECT @@SESSION.wait_timeout")).scalar_one() >= 3_600
    finally:
        await books.run(f"SET GLOBAL wait_timeout = {usual}")


@pytest.mark.server
async def test_the_server_soon_notices_that_the_machine_of_the_holder_is_gone(new_books: New) -> None:
    """The connection that has held the lock is the only one in the pool."""
    database = (await new_books("postgres")).handler(Desk().take)._database
    async with database.try_lock() as ours:
        assert ours
    names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
    async with database.reading() as connection:
        assert [(await connection.exec_driver_sql(f"SHOW {name}")).scalar_one() for name in names] == ["30", "10", "3"]


async def test_a_commit_completes_however_often_the_run_is_cancelled(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that nobody else has the turn."""
    desk = Desk()
    handler, other = books.handler(desk.take), books.handler(desk.take)
    writing = handler._database.writing
    entered, go_on = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[AsyncConnection]:
        async with writing() as connection:
            yield connection
            entered.set()
            await go_on.wait()

    await books.add_transfer("a", PAST)
    await handler.open()
    await other.open()
    monkeypatch.setattr(handler._database, "writing", slow)
    running = asyncio.create_task(handler.run_once())
    async with asyncio.timeout(WAIT_S):
        await entered.wait()
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not running.done()
        assert await other.run_once() is None
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert await books.kept() == {"a": True}


async def test_concurrent_first_runs_of_a_handler(books: Books) -> None:
    """One opens it, and the connections are enough for that."""
    desk = Desk()
    await books.add_transfer("a", PAST)
    handler = books.handler(desk.take)
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(handler.run_once() for _ in range(4)))
    assert desk.ids == ["a"]


async def test_a_stalled_run_can_not_write_after_a_later_run(books: Books) -> None:
    """The stalled run has read with the smaller fencing token. It cannot write, even if the later run has not moved the segment."""
    stalled, other = books.handler(Desk().take), books.handler(Desk().take)
    await books.add_transfer("ends", FUTURE)
    assert await stalled.run_once() is not None
    for with_news in (False, True):
        if with_news:
            await books.add_transfer("new", PAST)
        await books.move("ends", FUTURE + with_news + 1)
        look = await stalled._scanner.scan()
        await other._applier.apply(await other._scanner.scan(), delivered={"new"}, fence=6, before_commit=lambda: None)
        before = await books.ours()
        with pytest.raises(RunSuperseded) as lost:
            await stalled._applier.apply(look, delivered={"new"}, fence=5, before_commit=lambda: None)
        assert str(lost.value) == "a run with fencing token 6 has written, this one has 5"
        assert (await books.ours(), await fences(books)) == (before, [6])
        if with_news:  # one without a lock of Genie's is found out by the segment
            with pytest.raises(RunSuperseded, match="another run has moved the segment from 1 to 2"):
                await stalled._applier.apply(look, delivered={"new"}, fence=None, before_commit=lambda: None)
            assert await books.ours() == before
    await stalled._applier.apply(await stalled._scanner.scan(), delivered=set(), fence=6, before_commit=lambda: None)
    await stalled._applier.apply(await stalled._scanner.scan(), delivered=set(), fence=None, before_commit=lambda: None)
    assert await fences(books) == [6], "a run without a lock keeps the last fence"
