"""Late commits of the ledger, below the segment, are found. SQLite has none."""

from __future__ import annotations

import pytest

from ledgers import FUTURE, PAST, Books, Desk, New, catch_up


@pytest.fixture(params=["postgres", "mariadb"])
async def books(request: pytest.FixtureRequest, new_books: New) -> Books:
    return await new_books(request.param)


async def test_commits_below_the_segment_are_found(books: Books) -> None:
    """Expired, to be expired, and final: a transaction that is open over two runs."""
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("ends", FUTURE)
    async with books.transaction() as late:
        await late.add_transfer("late", PAST)
        await late.add_transfer("later", FUTURE)
        await late.change("ends", "COMMITTED")
        await books.add_transfer("a", PAST)
        assert (await handler.run_once()) is not None
        await books.add_transfer("b", PAST)
        assert (await handler.run_once()) is not None
        assert await books.segment() == 6
        assert desk.given == [["a"], ["b"]]
    run = await handler.run_once()
    assert run is not None
    assert (run.interval, run.inserted, run.cleaned) == ((6, 6), 2, 1)
    assert desk.given == [["a"], ["b"], ["late"]]
    assert await books.kept() == {"a": True, "b": True, "late": True, "later": False}
    look = await handler._scanner.scan()
    assert not look.recount.changed, "it is not looked at for ever"
    await handler.run_once()
    assert len(desk.given) == 3


async def test_a_late_commit_can_supersede_an_older_change(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", FUTURE)
    async with books.transaction() as late:
        await late.change("a", "COMMITTED")
        await books.change("a", "RESERVED")
        await handler.run_once()
    await books.move("a", PAST)
    await handler.run_once()
    assert desk.ids == ["a"], "its last change is the one with the greatest number"


async def test_a_failed_run_keeps_the_recheck_windows(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    async with books.transaction() as late:
        await late.add_transfer("late", PAST)
        await books.add_transfer("a", FUTURE)
        await handler.run_once()
    desk.fails = RuntimeError("the switch is away")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the switch"):
            await handler.run_once()
    desk.fails = None
    await books.handler(desk.take).run_once()
    assert desk.given == [["late"]] * 3


async def test_two_open_transactions_in_one_recheck_window(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    async with books.transaction() as second:
        async with books.transaction() as first:
            await first.add_transfer("first", PAST)
            await second.add_transfer("second", PAST)
            await books.add_transfer("a", FUTURE)
            await handler.run_once()
        await handler.run_once()
        assert desk.given == [["first"]]
    await handler.run_once()
    assert desk.given == [["first"], ["second"]]


async def test_transactions_longer_than_the_setting_are_not_rechecked(books: Books) -> None:
    """With 0 an interval is looked at once more, by the next run, and then forgotten."""
    desk = Desk()
    handler = books.handler(desk.take, longest_transaction=0)
    async with books.transaction() as missed:
        await missed.add_transfer("missed", PAST)
        async with books.transaction() as late:
            await late.add_transfer("late", PAST)
            await books.add_transfer("a", FUTURE)
            await handler.run_once()
        await handler.run_once()
        assert desk.ids == ["late"]
    await catch_up(handler)
    assert desk.ids == ["late"], "that is what the setting means"
    assert (await books.ours())["timeoutInterval"] == []
    await books.set_back(0)
    await catch_up(handler)
    assert desk.ids == ["late", "missed"], "and that is how one makes up for it"


async def test_recheck_windows_are_removed_after_their_time(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take, longest_transaction=3_600, batch=2)
    for number in range(6):
        await books.add_transfer(f"{number}", FUTURE)
    await catch_up(handler)
    looked = (await books.ours())["timeoutInterval"]
    assert [tuple(row[1:4]) for row in looked] == [(0, 2, 2), (2, 4, 2), (4, 6, 2)]
    await handler.run_once()
    assert (await books.ours())["timeoutInterval"] == looked
    before = {"postgres": "interval '1 hour'", "mariadb": "INTERVAL 1 HOUR"}[books.kind]
    await books.run(f"UPDATE `timeoutInterval` SET `lookedDate` = `lookedDate` - {before} WHERE `last` < 6")  # noqa: S608
    await catch_up(handler)
    await handler.run_once()
    assert (await books.ours())["timeoutInterval"] == looked[2:]
