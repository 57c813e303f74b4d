"""Final states of Mojaloop, unlisted states, and how a database compares states, in each kind of database."""

from __future__ import annotations

import pytest

from genie_ledger import FINAL_STATES, PROCESSING_STATES, Ledger
from genie_ledger.explain import explain
from genie_ledger.queries import MAX_UNLISTED_STATES
from genie_ledger.sample_data import finalize
from genie_ledger.schema import open_ledger
from genie_ledger.status import RECENT_CHANGES, Status, status
from ledgers import FUTURE, PAST, Books, Desk, New

CENTRAL_LEDGER = {
    "RECEIVED_PREPARE": "processing",
    "RESERVED": "processing",
    "RECEIVED_FULFIL": "final",
    "RECEIVED_FULFIL_DEPENDENT": "unlisted",
    "COMMITTED": "final",
    "FAILED": "final",
    "RESERVED_TIMEOUT": "final",
    "RECEIVED_REJECT": "final",
    "ABORTED_REJECTED": "final",
    "RECEIVED_ERROR": "unlisted",
    "ABORTED_ERROR": "final",
    "EXPIRED_PREPARED": "final",
    "EXPIRED_RESERVED": "final",
    "INVALID": "final",
    "SETTLED": "final",
    "RESERVED_FORWARDED": "unlisted",
}
"""The states that `seeds/transferState.js` of mojaloop/central-ledger inserts."""
UNLISTED = {state: 1 for state, meaning in CENTRAL_LEDGER.items() if meaning == "unlisted"}


async def status_of(books: Books, ledger: Ledger | None = None) -> Status:
    ledger = ledger or Ledger()
    async with open_ledger(books.url, ledger) as database:
        return await status(database, ledger)


async def finalize_in(books: Books, *, overdue: bool) -> int:
    async with open_ledger(books.url, Ledger()) as database:
        return await finalize(database, Ledger(), overdue=overdue)


def test_the_default_lists_agree_with_central_ledger() -> None:
    meanings = dict.fromkeys(PROCESSING_STATES, "processing") | dict.fromkeys(FINAL_STATES, "final")
    assert {state: meanings.get(state, "unlisted") for state in CENTRAL_LEDGER} == CENTRAL_LEDGER


async def test_every_state_of_central_ledger(books: Books) -> None:
    """Final transfers are no longer tracked, unlisted ones are counted and never finalized."""
    desk = Desk()
    handler = books.handler(desk.take)
    for state in CENTRAL_LEDGER:
        await books.add_transfer(state, FUTURE)
    await handler.run_once()
    for state in CENTRAL_LEDGER:
        await books.change(state, state)
        await books.move(state, PAST)
    run = await handler.run_once()
    assert run is not None
    assert run.unlisted == UNLISTED
    assert sorted(desk.ids) == ["RECEIVED_PREPARE", "RESERVED"]
    assert set(await books.kept()) == {"RECEIVED_PREPARE", "RESERVED", *UNLISTED}
    found = await status_of(books)
    assert (found.pending, found.overdue, found.delivered, found.unlisted) == (len(UNLISTED), 0, 2, UNLISTED)
    before = await books.last_states()
    assert await finalize_in(books, overdue=True) == 2
    after = await books.last_states()
    assert {id for id in after if after[id] != before[id]} == {"RECEIVED_PREPARE", "RESERVED"}
    assert await finalize_in(books, overdue=False) == 0
    run = await handler.run_once()
    assert run is not None
    assert run.unlisted == {}, "only new state changes are counted"


async def test_transfers_that_were_never_tracked_are_counted(books: Books) -> None:
    """A list with a misspelt state would otherwise look as if there was nothing to do."""
    ledger = Ledger(processing_states=["recieved"], final_states=["COMMITTED"])
    await books.add_transfer("a", PAST)
    await books.add_transfer("b", PAST, "RECEIVED_PREPARE", "RESERVED")
    await books.add_transfer("c", PAST, "RECEIVED_PREPARE", "COMMITTED")
    run = await books.handler(Desk().take, ledger=ledger).run_once()
    assert run is not None
    assert (run.inserted, dict(run.unlisted)) == (0, {"RECEIVED_PREPARE": 3, "RESERVED": 1})
    found = await status_of(books, ledger)
    assert (found.pending, dict(found.unlisted)) == (0, {"RECEIVED_PREPARE": 1, "RESERVED": 1})


async def test_tracked_transfers_are_counted_however_old_they_are(books: Books) -> None:
    await books.add_transfer("old", FUTURE)
    await books.handler(Desk().take).run_once()
    await books.change("old", "SUSPENDED")
    await books.add_transfer("never tracked", FUTURE, "SUSPENDED")
    await books.add_transfer("new", FUTURE)
    update = "UPDATE `transferStateChange` SET `transferStateChangeId` = :id WHERE `transferId` = 'new'"
    await books.run(update, id=RECENT_CHANGES + 10)
    assert dict((await status_of(books)).unlisted) == {"SUSPENDED": 1}


async def test_only_the_most_frequent_states_are_counted(books: Books) -> None:
    for number in range(MAX_UNLISTED_STATES + 2):
        await books.add_transfer(f"{number}", PAST, f"STATE {number}")
    await books.change("0", "FREQUENT")
    await books.change("1", "FREQUENT")
    run = await books.handler(Desk().take).run_once()
    assert run is not None
    assert len(run.unlisted) == len((await status_of(books)).unlisted) == MAX_UNLISTED_STATES
    assert next(iter(run.unlisted.items())) == ("FREQUENT", 2)


@pytest.mark.parametrize("state", ["reserved", "RESERVED ", "Received_Prepare"])
async def test_the_handler_and_explain_compare_states_as_the_database_does(books: Books, state: str) -> None:
    """MariaDB's default collation ignores case and spaces at the end; the others compare states exactly."""
    desk = Desk()
    await books.add_transfer("a", PAST, state)
    await books.add_transfer("b", PAST, "RESERVED")
    await books.change("b", state.lower().replace(state.lower().strip(), "committed"))
    async with open_ledger(books.url, Ledger()) as database:
        explained = {transfer.transfer_id for transfer in (await explain(database, Ledger(), 10)).expired}
    await books.handler(desk.take).run_once()
    ignores_case = books.kind == "mariadb"
    assert set(desk.ids) == explained == await books.expired() == ({"a"} if ignores_case else set())
    unlisted = (await status_of(books)).unlisted
    assert bool(unlisted) is not ignores_case


@pytest.mark.server
async def test_a_state_change_that_only_the_database_takes_for_final(new_books: New) -> None:
    books = await new_books("mariadb")
    handler = books.handler(Desk().take)
    await books.add_transfer("a", FUTURE)
    await handler.run_once()
    await books.change("a", "aborted")
    await handler.run_once()
    assert await books.kept() == {}
