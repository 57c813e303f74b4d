"""Dates are UTC, whatever the time zone of the server, of this process, and of the writer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from genie_ledger import ExpiredTransfer, WrongDate
from ledgers import PAST, Books, Desk, New, hours
from support.databases.mariadb import mariadb
from support.databases.postgres import postgres
from support.processes.servers import WAIT_S

NEAR = 0.1
"""Hours: less than any time zone is away from UTC."""


@pytest.fixture(params=["Asia/Kolkata", "America/New_York"])
def process_zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


async def set_zone(books: Books, zone: str) -> None:
    """Set the time zone of PostgreSQL. MariaDB runs in a zone other than UTC from the start, and SQLite has no time zone."""
    if books.kind == "postgres":
        (name,) = (await books.run("SELECT current_database()"))[0]
        await books.run(f"ALTER DATABASE {name} SET timezone = '{zone}'")
        assert postgres().run("SHOW timezone", name) == zone
    if books.kind == "mariadb":
        assert mariadb().run("SELECT TIMESTAMPDIFF(MINUTE, UTC_TIMESTAMP, NOW())") == "330"


async def test_dates_do_not_depend_on_any_time_zone(books: Books, process_zone: str) -> None:
    given: list[ExpiredTransfer] = []

    def refuse(expired: list[ExpiredTransfer]) -> list[str]:
        given.extend(expired)
        return [one.transfer_id for one in expired]

    await set_zone(books, process_zone)
    await books.add_transfer("over", -NEAR)
    await books.add_transfer("not yet", NEAR)
    for _ in range(2):  # from what was just taken in, and from what had been
        await books.handler(refuse).run_once()
        (one,) = given
        assert one.transfer_id == "over"
        assert one.expiration_date.tzinfo is UTC
        assert abs(one.expiration_date - hours(-NEAR)) < timedelta(minutes=5)
        given.clear()
    for table, column in (("segment", "changedDate"), ("transferTimeout", "createdDate"), ("transfer", "createdDate")):
        for (written,) in await books.run(f"SELECT `{column}` FROM `{table}`"):  # noqa: S608
            at = datetime.fromisoformat(str(written)).replace(tzinfo=UTC)
            assert abs(at - datetime.now(UTC)) < timedelta(minutes=5), f"{table}.{column}"


AWARE = {"postgres": "TIMESTAMPTZ", "mariadb": "TIMESTAMP"}
"""Types whose values are shown in the time zone of the connection."""


@pytest.mark.parametrize("kind", AWARE)
async def test_columns_with_a_time_zone(kind: str, new_books: New, process_zone: str) -> None:
    books = await new_books(kind)
    await set_zone(books, process_zone)
    for table in ("transfer", "transferTimeout"):
        if kind == "postgres":
            change = "ALTER COLUMN `expirationDate` TYPE TIMESTAMPTZ USING `expirationDate` AT TIME ZONE 'UTC'"
        else:
            change = "MODIFY `expirationDate` TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP"
        await books.run(f"ALTER TABLE `{table}` {change}")
    desk = Desk()
    desk.refused = {"over"}
    await books.add_transfer("over", -NEAR)
    await books.add_transfer("not yet", NEAR)
    for _ in range(2):
        await books.handler(desk.take).run_once()
        differ = (
            "SELECT t.`transferId` FROM `transfer` t JOIN `transferTimeout` k ON k.`transferId` = t.`transferId` "
            "WHERE k.`expirationDate` <> t.`expirationDate`"
        )
        assert await books.run(differ) == []
    assert desk.given == [["over"], ["over"]]


async def test_a_fraction_that_the_copy_can_not_store_is_no_change(books: Books) -> None:
    """A copy of whole seconds is what the document has."""
    desk = Desk()
    await books.add_transfer("a", PAST)
    await books.run("UPDATE `transfer` SET `expirationDate` = '2091-02-03 04:05:06.789123'")
    if books.kind == "mariadb":
        await books.run("ALTER TABLE `transferTimeout` MODIFY `expirationDate` datetime NOT NULL")
    if books.kind == "postgres":
        await books.run("ALTER TABLE `transferTimeout` ALTER COLUMN `expirationDate` TYPE timestamp(0)")
    handler = books.handler(desk.take)
    await handler.run_once()
    look = await handler._scanner.scan()
    assert not look.plan.ids_to_refresh


@pytest.mark.server
@pytest.mark.parametrize("kind", ["TIMESTAMP", "TIMESTAMPTZ"])
async def test_dates_outside_of_the_range_of_python(kind: str, new_books: New) -> None:
    """In PostgreSQL; with them one transfer would keep all others from being found."""
    books = await new_books("postgres")
    for table in ("transfer", "transferTimeout"):
        await books.run(f"ALTER TABLE `{table}` ALTER COLUMN `expirationDate` TYPE {kind}")
    over, never = ("-infinity", "0044-03-15 BC"), ("infinity", "20000-01-01")
    for id in (*over, *never, "a"):
        await books.add_transfer(id, PAST)
        if id != "a":
            await books.run(f"UPDATE `transfer` SET `expirationDate` = '{id}' WHERE `transferId` = '{id}'")  # noqa: S608
    desk = Desk()
    desk.refused = {*over, "a"}
    handler = books.handler(desk.take)
    for _ in range(2):
        await handler.run_once()
        assert sorted(desk.given.pop()) == sorted([*over, "a"])
        assert not (await handler._scanner.scan()).plan.ids_to_refresh
    assert (await books.kept()).keys() == {*over, *never, "a"}


FORMS = {
    "2001-02-03T04:05:06": (4, 5, 6, 0),
    "2001-02-03 04:05:06.789": (4, 5, 6, 789_000),
    "2001-02-03 04:05": (4, 5, 0, 0),
    "2001-02-03": (0, 0, 0, 0),
    "2001-02-03T04:05:06Z": (4, 5, 6, 0),
    "2001-02-03 09:35:06+05:30": (4, 5, 6, 0),
}


async def test_sqlite_accepts_several_date_formats(new_books: New) -> None:
    books = await new_books("sqlite")
    given: dict[str, datetime] = {}

    def take(expired: list[ExpiredTransfer]) -> None:
        given.update((one.transfer_id, one.expiration_date) for one in expired)

    for form in FORMS:
        await books.add_transfer(form, PAST)
        await books.run("UPDATE `transfer` SET `expirationDate` = :form WHERE `transferId` = :form", form=form)
    await books.handler(take).run_once()
    assert given == {form: datetime(2001, 2, 3, *rest, tzinfo=UTC) for form, rest in FORMS.items()}
    soon = (datetime.now(UTC) + timedelta(hours=5.4)).replace(tzinfo=None).isoformat(" ", "seconds")
    await books.add_transfer("over", PAST)
    await books.run("UPDATE `transfer` SET `expirationDate` = :at WHERE `transferId` = 'over'", at=f"{soon}+05:30")
    await books.handler(take).run_once()
    assert "over" in given


@pytest.mark.parametrize("date", ["soon", "2001-02-03 25:00", "", 1_700_000_000_000])
async def test_sqlite_rejects_invalid_dates(new_books: New, date: object) -> None:
    books = await new_books("sqlite")
    await books.add_transfer("a", PAST)
    await books.run("UPDATE `transfer` SET `expirationDate` = :date", date=date)
    desk = Desk()
    before = await books.ours()
    handler = books.handler(desk.take)
    with pytest.raises(WrongDate, match=r"^invalid date .*: expected .* in UTC$") as wrong:
        await handler.run_once()
    assert "\n" not in str(wrong.value)
    assert (await books.ours(), desk.given) == (before, [])
    await books.move("a", PAST)
    await asyncio.wait_for(handler.run_once(), WAIT_S)
    assert desk.ids == ["a"]
