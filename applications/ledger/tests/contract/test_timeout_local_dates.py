"""A ledger with expiration dates in local time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy.dialects import postgresql, sqlite

from genie_ledger import ExpiredTransfer, Ledger, WrongDate, WrongSchema
from genie_ledger.schema import open_ledger
from genie_ledger.status import status
from genie_ledger.times import Utc
from ledgers import PAST, Books, Desk, New, hours

NEAR = 0.1
"""Hours: less than any time zone is away from UTC."""


@pytest.fixture(params=["Asia/Kolkata", "America/New_York"])
async def local_books(books: Books, request: pytest.FixtureRequest) -> Books:
    books.zone = ZoneInfo(request.param)
    return books


def ledger_of(books: Books) -> Ledger:
    return Ledger(time_zone=str(books.zone))


async def test_dates_are_in_the_time_zone_of_the_ledger(local_books: Books) -> None:
    given: list[ExpiredTransfer] = []

    def refuse(expired: list[ExpiredTransfer]) -> list[str]:
        given.extend(expired)
        return [one.transfer_id for one in expired]

    await local_books.add_transfer("over", -NEAR)
    await local_books.add_transfer("not yet", NEAR)
    for _ in range(2):  # from a row that the same run writes, and from one that was there
        await local_books.handler(refuse, ledger=ledger_of(local_books)).run_once()
        (one,) = given
        assert one.transfer_id == "over"
        assert one.expiration_date.tzinfo is UTC
        assert abs(one.expiration_date - hours(-NEAR)) < timedelta(minutes=5)
        given.clear()
    async with open_ledger(local_books.url, ledger_of(local_books)) as database:
        assert (await status(database, ledger_of(local_books))).overdue == 1
    copies = (
        "SELECT k.`expirationDate`, t.`expirationDate` FROM `transferTimeout` k "
        "JOIN `transfer` t ON t.`transferId` = k.`transferId`"
    )
    for copy, original in await local_books.run(copies):
        assert str(copy)[:19] == str(original)[:19], "the copy is in the ledger's time, too"
    for (written,) in await local_books.run("SELECT `createdDate` FROM `transferTimeout`"):
        assert abs(datetime.fromisoformat(str(written)).replace(tzinfo=UTC) - datetime.now(UTC)) < timedelta(minutes=5)


async def test_a_moved_date_takes_effect(local_books: Books) -> None:
    desk = Desk()
    handler = local_books.handler(desk.take, ledger=ledger_of(local_books))
    for id in "ab":
        await local_books.add_transfer(id, NEAR)
    await handler.run_once()
    await local_books.move("a", -NEAR)
    await handler.run_once()
    await local_books.move("a", NEAR)
    await handler.run_once()
    assert (desk.given, await local_books.kept()) == ([["a"]], {"a": False, "b": False})
    look = await handler._scanner.scan()
    assert look.is_empty


TYPES = [("postgres", "TIMESTAMPTZ", "TIMESTAMP"), ("mariadb", "TIMESTAMP", "TIMESTAMP")]


@pytest.mark.parametrize("table", ["transfer", "transferTimeout"])
@pytest.mark.parametrize(("kind", "type", "shown"), TYPES)
async def test_a_column_with_a_time_zone_can_not_hold_local_times(
    kind: str, type: str, shown: str, table: str, new_books: New
) -> None:
    books = await new_books(kind)
    change = f"ALTER COLUMN `expirationDate` TYPE {type}"
    if kind == "mariadb":
        change = f"MODIFY `expirationDate` {type} NOT NULL DEFAULT CURRENT_TIMESTAMP"
    await books.run(f"ALTER TABLE `{table}` {change}")
    said = f"table {table}: column expirationDate is {shown}, which is in UTC already: leave out the time zone Asia/Kolkata"
    with pytest.raises(WrongSchema, match=f"^{re.escape(said)}$"):
        await books.handler(Desk().take, ledger=Ledger(time_zone="Asia/Kolkata")).run_once()


@pytest.mark.parametrize("date", ["2001-02-03T04:05:06Z", "2001-02-03 09:35:06+05:30", "2001-02-03 04:05-01:00"])
async def test_sqlite_rejects_local_dates_with_an_offset(new_books: New, date: str) -> None:
    books = await new_books("sqlite")
    await books.add_transfer("a", PAST)
    await books.run("UPDATE `transfer` SET `expirationDate` = :date", date=date)
    handler = books.handler(Desk().take, ledger=Ledger(time_zone="Asia/Kolkata"))
    with pytest.raises(
        WrongDate, match=r"^date '2001-.*' has an offset from UTC: with the time zone Asia/Kolkata dates must"
    ):
        await handler.run_once()


async def test_sqlite_accepts_several_formats_of_local_dates(new_books: New) -> None:
    books = await new_books("sqlite")
    given: dict[str, datetime] = {}

    def take(expired: list[ExpiredTransfer]) -> None:
        given.update((one.transfer_id, one.expiration_date) for one in expired)

    forms = ("2001-02-03T04:05:06", "2001-02-03 04:05:06.789", "2001-02-03 04:05", "2001-02-03")
    for form in forms:
        await books.add_transfer(form, PAST)
        await books.run("UPDATE `transfer` SET `expirationDate` = :form WHERE `transferId` = :form", form=form)
    await books.handler(take, ledger=Ledger(time_zone="Asia/Kolkata")).run_once()
    zone = ZoneInfo("Asia/Kolkata")
    assert given == {form: datetime.fromisoformat(form).replace(tzinfo=zone) for form in forms}


NEW_YORK = Utc(ZoneInfo("America/New_York"))


@pytest.mark.parametrize(
    ("local", "utc"),
    [
        ("2025-07-01 12:00:00.000", "2025-07-01 16:00:00+00:00"),
        ("2025-01-01 12:00:00.000", "2025-01-01 17:00:00+00:00"),
        ("2025-11-02 00:59:59.000", "2025-11-02 04:59:59+00:00"),
        ("2025-11-02 01:30:00.000", "2025-11-02 06:30:00+00:00"),  # it occurs twice: the second one
        ("2025-03-09 02:30:00.000", "2025-03-09 07:30:00+00:00"),  # it is skipped: as if clocks had not been set yet
        ("9999-12-31 23:59:59.000", "9999-12-31 23:59:59.999999+00:00"),
    ],
)
def test_nothing_expires_early_at_a_change_of_daylight_saving_time(local: str, utc: str) -> None:
    assert NEW_YORK.process_result_value(local, sqlite.dialect()) == datetime.fromisoformat(utc)


@pytest.mark.parametrize("utc", ["2025-11-02 06:30:00+00:00", "2025-07-01 16:00:00+00:00", "0001-01-01 00:00:00+00:00"])
def test_conversion_to_local_time_and_back(utc: str) -> None:
    at, dialect = datetime.fromisoformat(utc), postgresql.dialect()
    read = NEW_YORK.process_result_value(NEW_YORK.process_bind_param(at, dialect), dialect)
    assert read is not None
    assert abs(read - at) < timedelta(hours=5) if at.year == 1 else read == at


@pytest.mark.parametrize("name", ["Mars/Olympus", "", "../UTC", "+03:00", "Europe"])
def test_an_unknown_time_zone(name: str) -> None:
    said = f"time_zone: {name!r} is not a time zone of the IANA database, such as UTC, Europe/Berlin or Etc/GMT-3"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        Ledger(time_zone=name)
