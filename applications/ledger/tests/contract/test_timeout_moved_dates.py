"""Dates that were moved in the ledger are found among many rows, by runs that compare few of them each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import event

from genie_ledger import TimeoutHandler, TimeoutRun
from ledgers import FUTURE, PAST, Books, Desk, catch_up
from support.processes.servers import WAIT_S

ROWS, PER_RUN, PER_SCAN = 120, 5, 20
ALL = {f"{number}" for number in range(ROWS)}


@pytest.fixture
def begin() -> float:
    """The start position of the first run in the table, from 0 to 1, which is random outside of tests."""
    return 0.5


@pytest.fixture(autouse=True)
def compare_few_rows(begin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run compare few rows, without a delay between the slices, so that a short table takes many runs."""
    monkeypatch.setattr("genie_ledger.scan.random.randint", lambda low, high: round(low + begin * (high - low)))
    monkeypatch.setattr("genie_ledger.sweep.ROWS_PER_RUN", PER_RUN)
    monkeypatch.setattr("genie_ledger.scan.ROWS_PER_SLICE", PER_SCAN)
    monkeypatch.setattr("genie_ledger.handler.SLICE_INTERVAL_S", 0.0)


@pytest.fixture
async def waiting(books: Books) -> Books:
    """A ledger whose open transfers the handler has already copied."""
    async with books.transaction() as entries:
        for id in sorted(ALL):
            await entries.add_transfer(id, FUTURE)
    await catch_up(books.handler(Desk().take, longest_transaction=0))
    await catch_up(books.handler(Desk().take, longest_transaction=0))
    return books


async def until(handler: TimeoutHandler, done: Callable[[], bool]) -> list[TimeoutRun]:
    """Run the handler until a condition is true; return its runs."""
    runs: list[TimeoutRun] = []
    reached = asyncio.Event()

    def on_progress(result: TimeoutRun | Exception | None) -> None:
        assert isinstance(result, TimeoutRun), result
        runs.append(result)
        if done():
            reached.set()

    running = asyncio.create_task(handler.run(on_progress))
    try:
        async with asyncio.timeout(WAIT_S):
            await reached.wait()
    finally:
        running.cancel()
        await asyncio.wait({running})
    return runs


@pytest.mark.parametrize("moved", [{"70"}, {"3", "44", "119"}, ALL], ids=["one", "some", "all"])
async def test_all_moved_dates_are_found_before_the_next_scheduled_run(waiting: Books, moved: set[str]) -> None:
    desk = Desk()
    async with waiting.transaction() as entries:
        for id in moved:
            await entries.move(id, PAST)
    handler = waiting.handler(desk.take, every=3_600.0, batch=50)
    runs = await until(handler, lambda: len(desk.ids) >= len(moved))
    assert sorted(desk.ids) == sorted(moved)
    assert len(runs) <= 2 + 2 * min(len(moved), 3) + ROWS // 50, "dates that were moved in bulk are found in bulk"


async def test_a_run_without_changes_compares_few_rows(waiting: Books) -> None:
    handler = waiting.handler(Desk().take)
    numbers = [row[0] for row in await waiting.run("SELECT `transferTimeoutId` FROM `transferTimeout` ORDER BY 1")]
    seen: set[int] = set()
    counts = []
    for _ in range(ROWS // PER_RUN + 1):
        statements: list[str] = []

        def note(*args: object, said: list[str] = statements) -> None:
            said.append(str(args[2]))

        engine = handler._database._engine.sync_engine
        event.listen(engine, "before_cursor_execute", note)
        look = await handler._scanner.scan()
        event.remove(engine, "before_cursor_execute", note)
        assert look.is_empty
        first, last = look.compared.first, look.compared.last
        some = [n for n in numbers if (n > first or n <= last if look.compared.wrapped else first < n <= last)]
        assert len(some) <= 2 * PER_RUN if look.compared.wrapped else len(some) == PER_RUN
        seen.update(some)
        counts.append(len(statements))
        handler._scanner.advance(look, has_rejected=False)
    assert seen == set(numbers), "in the end it has compared all"
    assert max(counts) <= 12


@pytest.mark.parametrize("begin", [0.0, 0.3, 0.7, 118 / ROWS, 1.0])
async def test_the_runs_after_a_moved_date_compare_many_rows(waiting: Books) -> None:
    desk = Desk()
    handler = waiting.handler(desk.take, batch=50)
    await waiting.run("UPDATE `transfer` SET `expirationDate` = '2001-02-03 04:05:06'")
    runs = await catch_up(handler)
    assert set(desk.ids) == ALL
    assert len(desk.ids) == ROWS
    batches = ROWS // 50 + 2  # the last of a table that is read around its end is one more
    assert len(runs) <= 1 + batches + 2, "a sample, the overdue ones, and the others until a batch has nothing new"


async def test_moved_dates_found_by_a_failed_run_are_found_by_the_next(waiting: Books) -> None:
    desk = Desk()
    await waiting.run("UPDATE `transfer` SET `expirationDate` = '2001-02-03 04:05:06'")
    handler = waiting.handler(desk.take)
    desk.fails = RuntimeError("the switch is away")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the switch"):
            await handler.run_once()
    desk.fails = None
    await handler.run_once()
    assert len(desk.given[0]) >= PER_RUN
    assert desk.given[0] == desk.given[1] == desk.given[2]


async def test_after_a_failed_run_nothing_is_compared(waiting: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moved date would start the next run at once, and that one would fail, too."""
    desk = Desk()
    await waiting.add_transfer("late", PAST)
    desk.fails = RuntimeError("the switch is away")
    handler = waiting.handler(desk.take, every=3_600.0)
    slept: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def sleep(seconds: float) -> None:
        slept.set_result(seconds)
        await asyncio.Event().wait()

    monkeypatch.setattr("genie_ledger.handler.asyncio.sleep", sleep)
    result: list[object] = []
    running = asyncio.create_task(handler.run(result.append))
    async with asyncio.timeout(WAIT_S):
        assert await slept == 3_600.0
    running.cancel()
    assert result == [desk.fails]


@pytest.mark.parametrize("begin", [0.0, 0.7, 116 / ROWS, 118 / ROWS, 1.0])
async def test_overdue_transfers_are_found_before_the_other_dates_are_copied(waiting: Books) -> None:
    """Only the first run copies other dates, too: it does not know yet that dates were moved."""
    desk = Desk()
    overdue = {"3", "44", "99", "119"}
    await waiting.run("UPDATE `transfer` SET `expirationDate` = '2091-02-03 04:05:06'")
    async with waiting.transaction() as entries:
        for id in overdue:
            await entries.move(id, PAST)
    copied = "SELECT COUNT(*) FROM `transferTimeout` WHERE `expirationDate` = '2091-02-03 04:05:06'"
    if waiting.kind == "sqlite":
        copied = copied.replace("06'", "06.000'")
    handler = waiting.handler(desk.take, batch=40)
    counts = []
    while len(desk.ids) < len(overdue):
        run = await handler.run_once()
        assert run is not None
        assert run.lagging
        counts += [number for (number,) in await waiting.run(copied)]
    assert 0 < counts[0] < 2 * PER_RUN, "at the end of the table it reads the rest, and as many from the beginning"
    assert set(counts) == {counts[0]}, "what the first run has compared, and no more"
    assert set(desk.ids) == overdue
    await catch_up(handler)
    ((number,),) = await waiting.run(copied)
    assert number == ROWS - len(overdue)
    assert (await handler._scanner.scan()).is_empty
