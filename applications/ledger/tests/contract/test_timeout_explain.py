"""The explanation of expired transfers: the plain query, and the progress of the handler, in each kind of database."""

from __future__ import annotations

from zoneinfo import ZoneInfo

import pytest

from genie_ledger import Ledger, WrongSchema
from genie_ledger.explain import Explanation, explain
from genie_ledger.schema import open_ledger
from ledgers import FUTURE, PAST, Books, Desk


async def explain_books(books: Books, ledger: Ledger | None = None, limit: int = 100) -> Explanation:
    ledger = ledger or Ledger()
    async with open_ledger(books.url, ledger, handler_tables=False) as database:
        return await explain(database, ledger, limit)


def progress(found: Explanation) -> dict[str, str]:
    return {one.transfer_id: one.progress.value for one in found.expired}


async def test_it_lists_what_the_plain_query_finds(books: Books) -> None:
    for number, states in enumerate([(), ("RESERVED",), ("RESERVED", "COMMITTED"), ("SUSPENDED",), ("ABORTED",)]):
        await books.add_transfer(f"late {number}", PAST - number, "RECEIVED_PREPARE", *states)
        await books.add_transfer(f"open {number}", FUTURE, "RECEIVED_PREPARE", *states)
    found = await explain_books(books)
    assert {one.transfer_id for one in found.expired} == await books.expired() == {"late 0", "late 1"}
    late, reserved = sorted(found.expired, key=lambda one: one.transfer_id)
    assert (late.state, late.last_change_id, reserved.state, reserved.last_change_id) == (
        "RECEIVED_PREPARE",
        1,
        "RESERVED",
        4,
    )
    assert [one.transfer_id for one in found.expired] == ["late 1", "late 0"], "the longest expired first"
    assert late.expiration_date < found.now
    assert [one.transfer_id for one in (await explain_books(books, limit=1)).expired] == ["late 1"]


async def test_it_shows_the_progress_of_the_handler(books: Books) -> None:
    desk = Desk()
    desk.refused = {"due"}
    handler = books.handler(desk.take, longest_transaction=0)
    for id in ("delivered", "due", "again", "prolonged"):
        await books.add_transfer(id, 3 * PAST)
    for id in ("moved", "missed"):
        await books.add_transfer(id, FUTURE)
    assert set(progress(await explain_books(books)).values()) == {"not-read"}
    await handler.run_once()
    await books.move("moved", PAST)
    await books.move("prolonged", PAST)
    await books.move("missed", PAST)
    await books.run("DELETE FROM `transferTimeout` WHERE `transferId` = 'missed'")
    await books.change("again", "ABORTED")
    await books.change("again", "RESERVED")
    await books.add_transfer("new", PAST)
    found = await explain_books(books)
    assert progress(found) == {
        "delivered": "delivered",
        "due": "due",
        "again": "not-read",
        "prolonged": "date-moved",
        "moved": "date-moved",
        "missed": "missed",
        "new": "not-read",
    }
    assert found.segment == 6
    with_date = {one.transfer_id for one in found.expired if one.delivered_at is not None}
    assert with_date == {"delivered", "again", "prolonged"}
    desk.given.clear()
    await handler.run_once()
    assert sorted(desk.ids) == ["again", "due", "moved", "new", "prolonged"], "the next run does as it says"


async def test_it_does_not_need_the_tables_of_the_handler(books: Books) -> None:
    await books.add_transfer("a", PAST)
    await books.run("DROP TABLE `segment`")
    assert progress(await explain_books(books)) == {"a": "no-handler"}
    for table in ("transferTimeout", "timeoutInterval"):
        await books.run(f"DROP TABLE `{table}`")
    assert progress(await explain_books(books)) == {"a": "no-handler"}
    await books.run("DROP TABLE `transferStateChange`")
    with pytest.raises(WrongSchema, match=r"^the ledger has no table transferStateChange: "):
        await explain_books(books)


async def test_it_uses_the_time_zone_of_the_ledger(books: Books) -> None:
    books.zone = ZoneInfo("Asia/Kolkata")
    await books.add_transfer("over", -0.1)
    await books.add_transfer("not yet", 0.1)
    assert progress(await explain_books(books, Ledger(time_zone="Asia/Kolkata"))) == {"over": "not-read"}
