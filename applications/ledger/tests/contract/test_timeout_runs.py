"""Runs of the handler in each kind of database: what they find, deliver and store."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import Future
from datetime import UTC, datetime

import pytest

from genie_ledger import ExpiredTransfer, Ledger, TimeoutRun
from ledgers import FUTURE, PAST, Books, Desk, New, catch_up
from support.processes.servers import WAIT_S


async def test_without_a_segment_the_scan_starts_at_the_first_row(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    empty = await handler.run_once()
    assert empty == TimeoutRun(interval=(0, 0), cleaned=0, inserted=0, expired=0, rejected=0, lagging=False)
    assert (await books.ours(), desk.given) == ({"segment": [], "transferTimeout": [], "timeoutInterval": []}, [])
    await books.add_transfer("late", PAST, "RECEIVED_PREPARE", "RESERVED")
    await books.add_transfer("later", 2 * PAST)
    await books.add_transfer("open", FUTURE)
    await books.add_transfer("done", PAST, "RECEIVED_PREPARE", "COMMITTED")
    await books.add_transfer("other", PAST, "RECEIVED_PREPARE", "SOMETHING_ELSE")
    run = await handler.run_once()
    assert run == TimeoutRun(
        interval=(0, 8), cleaned=0, inserted=3, expired=2, rejected=0, lagging=False, unlisted={"SOMETHING_ELSE": 1}
    )
    assert desk.given == [["later", "late"]], "the longest expired first"
    assert await books.kept() == {"late": True, "later": True, "open": False}
    assert await books.segment() == 8
    run = await handler.run_once()
    assert run == TimeoutRun(interval=(8, 8), cleaned=0, inserted=0, expired=0, rejected=0, lagging=False)
    assert len(desk.given) == 1


async def test_the_callback_gets_all_fields_of_the_transfer(books: Books) -> None:
    given: list[ExpiredTransfer] = []
    await books.add_transfer("a", PAST, "RECEIVED_PREPARE", "RESERVED")
    await books.run("UPDATE `transfer` SET `expirationDate` = '2001-02-03 04:05:06'")
    await books.handler(given.extend).run_once()
    assert given == [ExpiredTransfer("a", datetime(2001, 2, 3, 4, 5, 6, tzinfo=UTC), "RESERVED")]


async def test_scanning_the_same_interval_again_changes_nothing(books: Books) -> None:
    desk = Desk()
    for number in range(6):
        await books.add_transfer(f"{number}", PAST if number % 2 else FUTURE)
    handler = books.handler(desk.take)
    await handler.run_once()
    kept = (await books.ours())["transferTimeout"]
    for value in (0, 3):
        await books.set_back(value)
        run = await handler.run_once()
        assert run == TimeoutRun(interval=(value, 6), cleaned=0, inserted=0, expired=0, rejected=0, lagging=False)
    await books.run("DELETE FROM `segment`")
    assert await handler.run_once() is not None
    assert await books.segment() == 6
    assert (await books.ours())["transferTimeout"] == kept
    assert sorted(desk.ids) == ["1", "3", "5"]


async def test_transfers_final_between_two_runs_are_never_delivered(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("waits", FUTURE)
    await books.add_transfer("ends", FUTURE)
    await handler.run_once()
    await books.move("waits", PAST)
    await books.move("ends", PAST)
    await books.change("ends", "ABORTED")
    run = await handler.run_once()
    assert run == TimeoutRun(interval=(2, 3), cleaned=1, inserted=0, expired=1, rejected=0, lagging=False)
    assert (desk.ids, await books.kept()) == (["waits"], {"waits": True})


async def test_transfers_final_beyond_the_interval_are_not_delivered(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take, batch=2)
    for id in "ab":
        await books.add_transfer(id, PAST)
    await books.add_transfer("c", FUTURE)
    await books.change("a", "COMMITTED")
    await books.change("c", "RESERVED")
    runs = await catch_up(handler)
    assert [run.interval for run in runs] == [(0, 2), (2, 4), (4, 5)]
    assert [run.lagging for run in runs] == [True, True, False]
    assert desk.ids == ["b"]
    assert await books.kept() == {"b": True, "c": False}


async def test_a_backlog_of_expired_transfers_is_delivered_in_batches(books: Books) -> None:
    desk = Desk()
    for number in range(7):
        await books.add_transfer(f"{number}", FUTURE + number)
    await catch_up(books.handler(desk.take))
    for number in range(7):
        await books.move(f"{number}", PAST - number)
    runs = await catch_up(books.handler(desk.take, batch=3))
    assert desk.given == [["6", "5", "4"], ["3", "2", "1"], ["0"]]
    assert [run.lagging for run in runs] == [True, True, False]


async def test_it_reports_a_backlog_while_rows_remain_to_be_removed(books: Books) -> None:
    desk = Desk()
    for number in range(5):
        await books.add_transfer(f"{number}", FUTURE)
    await catch_up(books.handler(desk.take))
    for number in range(5):
        await books.move(f"{number}", PAST - 5 + number)
        if number < 4:
            await books.change(f"{number}", "ABORTED")
    await books.run(
        "UPDATE `transferTimeout` SET `expirationDate` = (SELECT t.`expirationDate` FROM `transfer` t "
        "WHERE t.`transferId` = `transferTimeout`.`transferId`)"
    )
    await books.set_back(9)
    await catch_up(books.handler(desk.take, batch=2))
    assert desk.ids == ["4"]


@pytest.mark.parametrize("restart", [False, True])
async def test_a_moved_date_takes_effect(books: Books, restart: bool) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("later", 0.5)
    await books.add_transfer("sooner", FUTURE)
    await handler.run_once()
    await books.move("later", FUTURE)
    await books.move("sooner", PAST)
    handler = books.handler(desk.take) if restart else handler
    assert (await catch_up(handler))[-1].inserted == 0
    assert desk.ids == ["sooner"]
    dates = "SELECT `transferId`, `expirationDate` FROM `{}` ORDER BY 1"
    ours, theirs = await books.run(dates.format("transferTimeout")), await books.run(dates.format("transfer"))
    assert [(id, str(date)[:19]) for id, date in ours] == [(id, str(date)[:19]) for id, date in theirs]


async def test_an_expired_transfer_whose_date_is_moved_is_not_delivered(books: Books) -> None:
    desk = Desk()
    desk.refused = {"a"}
    handler = books.handler(desk.take)
    await books.add_transfer("a", PAST)
    await handler.run_once()
    await books.move("a", FUTURE)
    await handler.run_once()
    await handler.run_once()
    await books.move("a", PAST)
    await handler.run_once()
    assert desk.given == [["a"], ["a"]]


async def test_only_rejected_transfers_are_delivered_again(books: Books) -> None:
    desk = Desk()
    desk.refused = {"b"}
    handler = books.handler(desk.take)
    for id in "abc":
        await books.add_transfer(id, PAST)
    run = await handler.run_once()
    assert run is not None
    assert (run.expired, run.rejected, run.lagging) == (3, 1, False)
    assert await books.kept() == {"a": True, "b": False, "c": True}
    await handler.run_once()
    desk.refused = set()
    await handler.run_once()
    await handler.run_once()
    assert [sorted(ids) for ids in desk.given] == [["a", "b", "c"], ["b"], ["b"]]


async def test_repeatedly_rejected_transfers_do_not_block_the_others(books: Books) -> None:
    """Though there is more of it than a run hands over; and it has its turn again."""
    desk = Desk()
    handler = books.handler(desk.take, batch=3)
    for number in range(7):
        await books.add_transfer(f"stuck {number}", PAST - 10 + number)
    for number in range(4):
        await books.add_transfer(f"{number}", PAST)
    desk.refused = {f"stuck {number}" for number in range(7)}
    runs = [await handler.run_once() for _ in range(12)]
    assert not any(run is not None and run.lagging and run.rejected and run.interval[0] == 11 for run in runs)
    assert sorted(id for id in desk.ids if id not in desk.refused) == ["0", "1", "2", "3"]
    assert min(desk.ids.count(id) for id in desk.refused) > 1
    desk.refused = set()
    for _ in range(4):
        await catch_up(handler)
    assert all((await books.kept()).values())


@pytest.mark.server
async def test_a_removed_date_does_not_block_the_others(new_books: New) -> None:
    for kind, change in (
        ("postgres", "ALTER COLUMN `expirationDate` DROP NOT NULL"),
        ("mariadb", "MODIFY `expirationDate` DATETIME"),
    ):
        books = await new_books(kind)
        await books.run(f"ALTER TABLE `transfer` {change}")
        desk = Desk()
        handler = books.handler(desk.take, batch=2)
        for number in range(3):
            await books.add_transfer(f"{number}", PAST - 3 + number)
        desk.refused = {"0", "1", "2"}
        await catch_up(handler)
        await books.run("UPDATE `transfer` SET `expirationDate` = NULL WHERE `transferId` <> '2'")
        desk.given.clear()
        for _ in range(2):
            await catch_up(books.handler(desk.take, batch=2))
        assert desk.given == [["2"], ["2"]]


async def test_a_callback_that_raises_rolls_back_the_run(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", FUTURE)
    await books.add_transfer("gone", FUTURE)
    await handler.run_once()
    await books.add_transfer("b", PAST)
    await books.move("a", 2 * PAST)
    await books.change("gone", "FAILED")
    before = await books.ours()
    desk.fails = RuntimeError("the switch is away")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^the switch is away$"):
            await handler.run_once()
        assert await books.ours() == before
    desk.fails = None
    run = await handler.run_once()
    assert run == TimeoutRun(interval=(2, 4), cleaned=1, inserted=1, expired=2, rejected=0, lagging=False)
    assert desk.given == [["a", "b"]] * 3


async def test_an_error_of_the_callback_is_propagated(books: Books) -> None:
    await books.add_transfer("a", PAST)
    for error in (OSError("its own file"), TimeoutError("its own time"), ValueError("its own value")):
        desk = Desk()
        desk.fails = error
        with pytest.raises(type(error), match=r"^its own"):
            await books.handler(desk.take).run_once()


async def test_an_error_of_the_callback_that_asyncio_treats_specially_is_reported(books: Books) -> None:
    """It neither ends the loop of runs nor stops it for ever."""
    await books.add_transfer("a", PAST)
    cancelled: Future[None] = Future()
    cancelled.cancel()

    def exhausted(expired: list[ExpiredTransfer]) -> list[str]:
        return [next(one.transfer_id for one in expired if one.transfer_id == "b")]

    def of_a_thread(_expired: list[ExpiredTransfer]) -> None:
        cancelled.result()

    async def of_a_task(_expired: list[ExpiredTransfer]) -> None:
        await asyncio.wrap_future(cancelled)

    for on_expired, name in (
        (exhausted, "StopIteration"),
        (of_a_thread, "CancelledError"),
        (of_a_task, "CancelledError"),
    ):
        with pytest.raises(RuntimeError, match=f"^on_expired raised {name}"):
            async with asyncio.timeout(WAIT_S):
                await books.handler(on_expired).run_once()
    assert (await books.handler(lambda _: None).run_once()) is not None


async def test_callbacks_may_be_sync_async_or_return_an_awaitable(books: Books) -> None:
    await books.add_transfer("a", PAST)
    given: list[str] = []

    def plain(expired: list[ExpiredTransfer]) -> tuple[str, ...]:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        given.append("plain")
        return tuple(one.transfer_id for one in expired)

    class Callable:
        async def __call__(self, expired: list[ExpiredTransfer]) -> list[str]:
            given.append("called")
            return [one.transfer_id for one in expired]

    async def awaited(_expired: list[ExpiredTransfer]) -> None:
        given.append("awaited")

    for on_expired in (plain, Callable(), awaited, plain):
        await books.handler(on_expired).run_once()
    assert given == ["plain", "called", "awaited"]


async def test_the_callback_can_write_to_the_ledger(books: Books) -> None:
    """Also where there is only one writer at a time; and the next run cleans up behind it."""
    desk = Desk()

    async def expire(ids: list[str]) -> None:
        async with asyncio.timeout(WAIT_S), books.transaction() as entries:
            for id in ids:
                await entries.change(id, "EXPIRED")

    desk.meanwhile = expire
    handler = books.handler(desk.take)
    for id in "abc":
        await books.add_transfer(id, PAST)
    await handler.run_once()
    assert await books.expired() == set()
    run = await handler.run_once()
    assert run == TimeoutRun(interval=(3, 6), cleaned=3, inserted=0, expired=0, rejected=0, lagging=False)
    assert (desk.ids, await books.kept()) == (["a", "b", "c"], {})
    await books.change("b", "RESERVED")
    await handler.run_once()
    assert desk.given[1:] == [["b"]], "it has been final in between"


async def test_the_callback_may_change_its_list(books: Books) -> None:
    """The callback may remove the items that it has processed."""
    for id in "abc":
        await books.add_transfer(id, PAST)

    async def take_from_it(expired: list[ExpiredTransfer]) -> list[str]:
        ids = []
        while expired:
            ids.append(expired.pop().transfer_id)
        return [id for id in ids if id == "b"]

    run = await books.handler(take_from_it).run_once()
    assert run is not None
    assert (run.expired, run.rejected) == (3, 1)
    assert await books.kept() == {"a": True, "b": False, "c": True}


async def test_invalid_results_of_the_callback(books: Books) -> None:
    await books.add_transfer("a", PAST)
    before = await books.ours()
    none_or_ids = "on_expired must return None or the ids that it rejects, not "
    said: list[object] = []
    handler = books.handler(lambda _expired: said[-1])
    for each, error, text in (
        ("a", TypeError, f"{none_or_ids}'a'"),
        (b"a", TypeError, f"{none_or_ids}b'a'"),
        (True, TypeError, f"{none_or_ids}True"),
        (7, TypeError, f"{none_or_ids}7"),
        (["a", "x"], ValueError, "on_expired returned ids that it was not given: x"),
        ([1], ValueError, "on_expired returned ids that it was not given: 1"),
        ([["a"]], TypeError, "unhashable type"),
    ):
        said.append(each)
        with pytest.raises(error, match=re.escape(text)):
            await handler.run_once()
        assert await books.ours() == before
    said.append(["a"])
    assert await handler.run_once() == TimeoutRun(
        interval=(0, 1), cleaned=0, inserted=1, expired=1, rejected=1, lagging=False
    )


async def test_the_states_are_configurable(books: Books) -> None:
    desk = Desk()
    ledger = Ledger(processing_states=["OPEN", "HALF"], final_states=["SHUT"])
    for id, *states in (("a", "OPEN"), ("b", "OPEN", "SHUT"), ("c", "RESERVED"), ("d", "SHUT", "HALF")):
        await books.add_transfer(id, PAST, *states)
    await books.handler(desk.take, ledger=ledger).run_once()
    assert (sorted(desk.ids), await books.kept()) == (["a", "d"], {"a": True, "d": True})


async def test_a_transfer_in_an_unknown_state_is_neither_delivered_nor_removed(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", FUTURE)
    await handler.run_once()
    await books.move("a", PAST)
    await books.change("a", "SUSPENDED")
    for _ in range(2):
        await handler.run_once()
    assert (desk.ids, await books.kept()) == ([], {"a": False})
    await books.change("a", "RESERVED")
    await handler.run_once()
    assert desk.ids == ["a"]
