"""Tables that another implementation has used: leftover rows, and a segment that it has moved."""

from __future__ import annotations

import pytest

from genie_ledger import Ledger, TimeoutRun
from ledgers import FUTURE, PAST, Books, Desk, catch_up

INSERT = (
    "INSERT INTO `transferTimeout` (`transferId`, `expirationDate`) "
    "SELECT `transferId`, `expirationDate` FROM `transfer` WHERE `transferId` IN ({})"
)


async def leave_rows(books: Books, *ids: str) -> None:
    """Rows of `transferTimeout`, written as the document's step 6 writes them."""
    await books.run(INSERT.format(", ".join(f"'{id}'" for id in ids)))


async def set_segment(books: Books, value: int) -> None:
    insert = "INSERT INTO `segment` (`segmentType`, `enumeration`, `tableName`, `value`) VALUES ('timeout', 0, :name, :value)"
    await books.run(insert, name="transferStateChange", value=value)


async def test_final_rows_up_to_the_segment_are_removed_by_the_next_run(books: Books) -> None:
    for id, *states in (("a", "COMMITTED"), ("b", "RESERVED"), ("c", "ABORTED"), ("d", "RESERVED")):
        await books.add_transfer(id, FUTURE, "RECEIVED_PREPARE", *states)
    await books.change("d", "FAILED")
    await leave_rows(books, *"abcd")
    await set_segment(books, 8)
    desk = Desk()
    run = await books.handler(desk.take).run_once()
    assert run == TimeoutRun(interval=(8, 9), cleaned=3, inserted=0, expired=0, rejected=0, lagging=False)
    assert await books.kept() == {"b": False}
    assert desk.given == []


async def test_rows_added_while_this_handler_is_in_use_are_removed(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take)
    await books.add_transfer("a", FUTURE, "RECEIVED_PREPARE", "COMMITTED")
    await books.add_transfer("b", FUTURE)
    await handler.run_once()
    await leave_rows(books, "a")
    run = await handler.run_once()
    assert run == TimeoutRun(interval=(3, 3), cleaned=1, inserted=0, expired=0, rejected=0, lagging=False)
    assert await books.kept() == {"b": False}


async def test_more_rows_than_a_run_examines(books: Books) -> None:
    """The handler examines the rows in batches, one run immediately after the other, and none of them twice."""
    ids = [f"{number}" for number in range(7)]
    for id in ids:
        await books.add_transfer(id, FUTURE, "RESERVED" if id == "3" else "COMMITTED")
    await leave_rows(books, *ids)
    await set_segment(books, 7)
    handler = books.handler(Desk().take, batch=2)
    runs = await catch_up(handler)
    assert [run.cleaned for run in runs] == [2, 1, 2, 1]
    assert [run.lagging for run in runs] == [True, True, True, False]
    assert await books.kept() == {"3": False}
    look = await handler._scanner.scan()
    assert look.is_empty


async def test_rows_whose_final_state_was_skipped_by_a_foreign_segment(books: Books) -> None:
    """This handler has stored the row. The foreign handler has read the final state, and did not delete the row."""
    desk = Desk()
    handler = books.handler(desk.take)
    for id in "abc":
        await books.add_transfer(id, FUTURE)
    await handler.run_once()
    await books.change("a", "COMMITTED")
    await books.change("b", "ABORTED")
    await books.run("UPDATE `segment` SET `value` = 5")
    await books.change("c", "FAILED")
    run = await handler.run_once()
    assert run == TimeoutRun(interval=(3, 6), cleaned=3, inserted=0, expired=0, rejected=0, lagging=False)
    assert await books.kept() == {}
    assert await books.segment() == 6


async def test_a_segment_moved_by_another_handler_is_never_moved_back(books: Books) -> None:
    desk = Desk()
    handler = books.handler(desk.take, batch=2)
    await books.add_transfer("a", FUTURE)
    await handler.run_once()
    for _ in range(4):
        await books.change("a", "RESERVED")
    await books.add_transfer("b", PAST)
    await books.run("UPDATE `segment` SET `value` = 5")
    values = []
    for _ in range(4):
        await handler.run_once()
        values.append(await books.segment())
    assert values == [5, 5, 6, 6]
    assert desk.ids == ["b"]
    look = await handler._scanner.scan()
    assert look.is_empty


@pytest.mark.parametrize("state", ["RESERVED", "SUSPENDED"])
async def test_rows_of_open_transfers_are_kept(books: Books, state: str) -> None:
    desk = Desk()
    await books.add_transfer("a", FUTURE, state)
    await leave_rows(books, "a")
    await set_segment(books, 1)
    handler = books.handler(desk.take)
    await handler.run_once()
    before = await books.ours()
    await handler.run_once()
    assert await books.ours() == before
    await books.change("a", "COMMITTED")
    await handler.run_once()
    assert await books.kept() == {}


async def test_they_are_examined_again_after_a_failed_run(books: Books) -> None:
    desk = Desk()
    await books.add_transfer("late", PAST)
    await books.add_transfer("done", PAST, "COMMITTED")
    await leave_rows(books, "late", "done")
    await set_segment(books, 2)
    handler = books.handler(desk.take)
    desk.fails = RuntimeError("the switch is away")
    with pytest.raises(RuntimeError, match="the switch"):
        await handler.run_once()
    assert await books.kept() == {"late": False, "done": False}
    desk.fails = None
    run = await handler.run_once()
    assert run is not None
    assert (run.cleaned, run.expired) == (1, 1)
    assert await books.kept() == {"late": True}


async def test_columns_may_have_any_name(books: Books) -> None:
    """Many rows are written past SQLAlchemy's own statements."""
    odd = {"expirationDate": 'bis 100% "x"', "deliveredDate": "a `b", "stateChangeId": "%s ?"}
    names = {f"transferTimeout.{ours}": theirs for ours, theirs in odd.items()}
    desk = Desk()
    await books.run("DROP TABLE `transferTimeout`")
    handler = books.handler(desk.take, ledger=Ledger(names=names))
    await books.add_transfer("a", FUTURE)
    await handler.run_once()
    await books.move("a", PAST)
    for _ in range(2):
        await handler.run_once()
    assert desk.given == [["a"]]
    assert (await handler._scanner.scan()).is_empty
