"""Ledgers with their own tables: what is accepted, what is reported as an error, and what is added."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from genie_ledger import DatabaseFailed, Ledger, TimeoutHandler, WrongSchema
from ledgers import FUTURE, OURS, PAST, Books, Desk, New, catch_up

NAMES = {
    "transfer": "payments",
    "transfer.transferId": "payment id",
    "transfer.expirationDate": "order",
    "transferStateChange": "History",
    "transferStateChange.transferStateChangeId": "number",
    "transferStateChange.transferId": "payment id",
    "transferStateChange.transferStateId": "state",
    "segment": "our segment",
    "segment.value": "last",
    "transferTimeout": "payment_timeout",
    "transferTimeout.expirationDate": "until",
    "timeoutInterval.first": "from",
}
DATE = {"sqlite": "DATETIME", "postgres": "TIMESTAMP", "mariadb": "DATETIME"}
COUNTED = {
    "sqlite": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "postgres": "BIGSERIAL PRIMARY KEY",
    "mariadb": "BIGINT AUTO_INCREMENT PRIMARY KEY",
}
TABLES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'",
    "postgres": "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'",
    "mariadb": "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()",
}


async def own_tables(books: Books, *, date: str | None = None, index: str = "(`payment id`)", ended: str = "") -> None:
    """Without amounts, and with more than is asked for."""
    date = date or DATE[books.kind]
    await books.run(
        f"CREATE TABLE `payments` (`payment id` VARCHAR(60) PRIMARY KEY, `order` {date} NOT NULL, note TEXT){ended}"
    )
    await books.run(
        f"CREATE TABLE `History` (`number` {COUNTED[books.kind]}, `payment id` VARCHAR(60) NOT NULL, "
        f"`state` VARCHAR(20) NOT NULL){ended}"
    )
    if index:
        await books.run(f"CREATE INDEX own ON `History` {index}")


async def tables(books: Books) -> set[str]:
    return {name for (name,) in await books.run(TABLES[books.kind])}


async def test_a_ledger_with_other_names(empty_books: Books) -> None:
    books, desk = empty_books, Desk()
    await own_tables(books)
    for id, date in (("a", "2001-02-03 04:05:06"), ("b", "2091-02-03 04:05:06"), ("c", "2001-02-03 04:05:06")):
        await books.run(f"INSERT INTO `payments` (`payment id`, `order`) VALUES ('{id}', '{date}')")  # noqa: S608
        await books.run(f"INSERT INTO `History` (`payment id`, `state`) VALUES ('{id}', 'RESERVED')")  # noqa: S608
    handler = books.handler(desk.take, ledger=Ledger(names=NAMES))
    await handler.run_once()
    assert desk.given == [["a", "c"]]
    await books.run("INSERT INTO `History` (`payment id`, `state`) VALUES ('a', 'COMMITTED')")
    await books.run("UPDATE `payments` SET `order` = '2001-02-03 04:05:06'")
    run = await handler.run_once()
    assert run is not None
    assert (run.cleaned, desk.given) == (1, [["a", "c"], ["b"]])
    assert await tables(books) == {"payments", "History", "our segment", "payment_timeout", "timeoutInterval"}
    assert await books.run("SELECT `last` FROM `our segment`") == [(4,)]
    until = await books.run("SELECT `transferId`, `until` FROM `payment_timeout` ORDER BY 1")
    assert [(id, str(date)[:19]) for id, date in until] == [("b", "2001-02-03 04:05:06"), ("c", "2001-02-03 04:05:06")]
    await books.handler(desk.take, ledger=Ledger(names=NAMES)).open()


async def test_ids_may_be_longer_than_in_the_specification(empty_books: Books) -> None:
    books, desk, id = empty_books, Desk(), "x" * 60
    await own_tables(books)
    await books.run(f"INSERT INTO `payments` (`payment id`, `order`) VALUES ('{id}', '2001-02-03 04:05:06')")  # noqa: S608
    await books.run(f"INSERT INTO `History` (`payment id`, `state`) VALUES ('{id}', 'RESERVED')")  # noqa: S608
    await books.handler(desk.take, ledger=Ledger(names=NAMES)).run_once()
    assert desk.ids == [id]


async def test_two_ledgers_in_one_database(books: Books) -> None:
    own, usual = Desk(), Desk()
    await own_tables(books)
    await books.add_transfer("usual", PAST)
    await books.run("INSERT INTO `payments` (`payment id`, `order`) VALUES ('own', '2001-02-03 04:05:06')")
    await books.run("INSERT INTO `History` (`payment id`, `state`) VALUES ('own', 'RESERVED')")
    names = NAMES | {"timeoutInterval": "payment_interval"}
    await books.handler(own.take, ledger=Ledger(names=names)).run_once()
    await books.handler(usual.take).run_once()
    assert (own.ids, usual.ids) == (["own"], ["usual"])


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ({"index": ""}, "without an index the last state of a transfer takes too long to find: CREATE INDEX "),
        ({"index": "(`state`, `payment id`)"}, "without an index the last state of a transfer takes too long to find"),
        ({"date": "DATE"}, "table payments: column order is DATE, it must be a date with a time"),
        ({"date": "INTEGER"}, "table payments: column order is INTEGER, it must be a date with a time"),
    ],
)
async def test_the_errors_of_a_ledger_are_listed_and_nothing_is_created(
    empty_books: Books, how: dict[str, str], wrong: str
) -> None:
    await own_tables(empty_books, **how)
    handler = empty_books.handler(Desk().take, ledger=Ledger(names=NAMES))
    for _ in range(2):
        with pytest.raises(WrongSchema) as said:
            await handler.run_once()
        assert wrong in str(said.value)
        assert "\n" not in str(said.value)
    assert await tables(empty_books) == {"payments", "History"}


async def test_a_ledger_without_tables(empty_books: Books) -> None:
    await empty_books.run("CREATE TABLE `others` (`id` INTEGER PRIMARY KEY)")
    for names, missing in (
        ({}, ("transfer", "transferStateChange")),
        ({"transfer": "payments"}, ("payments", "transferStateChange")),
        ({"transferStateChange": "History"}, ("transfer", "History")),
    ):
        with pytest.raises(WrongSchema) as said:
            await empty_books.handler(Desk().take, ledger=Ledger(names=names)).run_once()
        assert str(said.value) == "; ".join(
            f"the ledger has no table {name}: create it, or map its name" for name in missing
        )
    assert await tables(empty_books) == {"others"}


async def test_a_forgotten_mapping_creates_nothing(empty_books: Books) -> None:
    await own_tables(empty_books)
    for forgotten in ("transfer", "transferStateChange"):
        names = {name: own for name, own in NAMES.items() if name != forgotten}
        with pytest.raises(WrongSchema, match=f"^the ledger has no table {forgotten}: create it, or map its name$"):
            await empty_books.handler(Desk().take, ledger=Ledger(names=names)).run_once()
    assert await tables(empty_books) == {"payments", "History"}


OTHER_TIMEOUT = {
    "another table": (
        ("{id}", "{copy}", "FOREIGN KEY (`transferId`) REFERENCES `others` (`id`)"),
        "the foreign key of column transferId refers to others.id, it must refer to payments.payment id",
    ),
    "a column without a value": (
        ("{id}", "{copy}", "`own` INTEGER NOT NULL", "`other` INTEGER NOT NULL DEFAULT 1", "`nullable` INTEGER"),
        "column own must be nullable or have a default: a run does not write it",
    ),
    "a key that is not generated": (
        ("`transferTimeoutId` BIGINT PRIMARY KEY", "{copy}"),
        "column transferTimeoutId is not generated by the database, as by AUTO_INCREMENT",
    ),
    "a shorter id": (
        ("{id}", "`transferId` VARCHAR(36) NOT NULL"),
        "column transferId has at most 36 characters, payments.payment id has 60",
    ),
}
"""Definitions of columns of `transferTimeout`, and the message about them."""


@pytest.mark.parametrize("problem", OTHER_TIMEOUT)
async def test_a_table_of_the_handler_that_can_not_be_written_is_reported_first(
    empty_books: Books, problem: str
) -> None:
    """A run would deliver, fail to write, and deliver again."""
    books, desk = empty_books, Desk()
    await own_tables(books)
    await books.run("CREATE TABLE `others` (`id` VARCHAR(60) PRIMARY KEY)")
    definitions, message = OTHER_TIMEOUT[problem]
    parts = {"id": f"`transferTimeoutId` {COUNTED[books.kind]}", "copy": "`transferId` VARCHAR(60) NOT NULL"}
    dates = [f"`{column}` {DATE[books.kind]}" for column in ("until", "createdDate")]
    columns = ", ".join([*dates, *definitions]).format(**parts)
    await books.run(f"CREATE TABLE `payment_timeout` ({columns})")
    await books.run("INSERT INTO `payments` (`payment id`, `order`) VALUES ('a', '2001-02-03 04:05:06')")
    await books.run("INSERT INTO `History` (`payment id`, `state`) VALUES ('a', 'RESERVED')")
    handler = books.handler(desk.take, ledger=Ledger(names=NAMES))
    if (books.kind, problem) == ("sqlite", "a shorter id"):  # SQLite does not limit the length
        await handler.run_once()
        return
    with pytest.raises(WrongSchema, match=f"^table payment_timeout: {message}$"):
        await handler.run_once()
    assert desk.given == []
    assert await tables(books) == {"payments", "History", "others", "payment_timeout"}


@pytest.mark.server
@pytest.mark.parametrize("table", ["transfer", "transferTimeout", "segment"])
async def test_an_engine_without_transactions_is_rejected(new_books: New, table: str) -> None:
    books = await new_books("mariadb")
    for name in ("transferStateChange", "transferTimeout"):
        await books.run(f"ALTER TABLE `{name}` DROP FOREIGN KEY `{name}_ibfk_1`")
    await books.run(f"ALTER TABLE `{table}` ENGINE = MyISAM")
    with pytest.raises(WrongSchema, match=f"^table {table}: its engine is MyISAM, it must be InnoDB$"):
        await books.handler(Desk().take).run_once()


async def test_an_incomplete_ledger_is_not_completed(empty_books: Books) -> None:
    date = DATE[empty_books.kind]
    await empty_books.run(
        f"CREATE TABLE `transfer` (`transferId` VARCHAR(36) PRIMARY KEY, `expirationDate` {date} NOT NULL)"
    )
    await empty_books.run("INSERT INTO `transfer` VALUES ('a', '2001-02-03 04:05:06')")
    with pytest.raises(WrongSchema, match=r"^the ledger has no table transferStateChange: "):
        await empty_books.handler(Desk().take).run_once()
    with pytest.raises(WrongSchema, match=r"^the ledger has no table transferStateChange: "):
        await empty_books.create()
    assert await tables(empty_books) == {"transfer"}


async def test_all_missing_columns_and_wrong_types_are_listed(empty_books: Books) -> None:
    books = empty_books
    await books.run("CREATE TABLE `transfer` (`transferId` INTEGER PRIMARY KEY)")
    await books.run(f"CREATE TABLE `transferStateChange` (`id` {COUNTED[books.kind]}, `transferId` VARCHAR(36))")
    with pytest.raises(WrongSchema) as said:
        await books.handler(Desk().take).run_once()
    text = str(said.value)
    assert text.startswith("table transfer: column transferId is INTEGER, it must be a string; "), text
    for wrong in (
        "table transfer: column expirationDate is missing",
        "table transferStateChange: column transferStateChangeId is missing",
        "table transferStateChange: column transferStateId is missing",
        "table transferStateChange: its primary key is not transferStateChangeId",
    ):
        assert wrong in text
    assert "\n" not in text
    assert await tables(books) == {"transfer", "transferStateChange"}


SEGMENT = """
CREATE TABLE `segment` (
  `segmentId` int(11) NOT NULL AUTO_INCREMENT,
  `segmentType` varchar(50) NOT NULL,
  `enumeration` int(11) NOT NULL DEFAULT '0',
  `tableName` varchar(50) NOT NULL,
  `value` bigint(20) NOT NULL,
  `changedDate` datetime NOT NULL DEFAULT CURRENT_TIMESTAMP,
  PRIMARY KEY (`segmentId`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8;
"""
TRANSFER_TIMEOUT = """
CREATE TABLE `transferTimeout` (
  `transferTimeoutId` bigint(20) NOT NULL AUTO_INCREMENT,
  `transferId` varchar(36) NOT NULL,
  `expirationDate` datetime NOT NULL,
  `createdDate` datetime NOT NULL DEFAULT CURRENT_TIMESTAMP,
  PRIMARY KEY (`transferTimeoutId`),
  UNIQUE KEY `transfertimeout_transferid_unique` (`transferId`),
  CONSTRAINT `transfertimeout_transferid_foreign` FOREIGN KEY (`transferId`) REFERENCES `transfer` (`transferId`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8;
"""
LEDGER = """
CREATE TABLE `transfer` (
  `transferId` varchar(36) NOT NULL,
  `amount` decimal(18,2) NOT NULL,
  `currencyId` varchar(3) NOT NULL,
  `expirationDate` datetime NOT NULL,
  `createdDate` datetime NOT NULL DEFAULT CURRENT_TIMESTAMP,
  PRIMARY KEY (`transferId`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8;
CREATE TABLE `transferStateChange` (
  `transferStateChangeId` bigint(20) unsigned NOT NULL AUTO_INCREMENT,
  `transferId` varchar(36) NOT NULL,
  `transferStateId` varchar(50) NOT NULL,
  `createdDate` datetime NOT NULL DEFAULT CURRENT_TIMESTAMP,
  PRIMARY KEY (`transferStateChangeId`),
  KEY `transferstatechange_transferid_index` (`transferId`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8;
"""


@pytest.fixture
async def seeds(new_books: New) -> Books:
    """A database of MariaDB with the ledger that the document speaks of: `utf8`, and whole seconds."""
    books = await new_books("mariadb")
    for table in ("timeoutInterval", "transferTimeout", "segment", "transferStateChange", "transfer"):
        await books.run(f"DROP TABLE `{table}`")
    for statement in LEDGER.split(";\n")[:-1]:
        await books.run(statement)
    return books


@pytest.mark.server
@pytest.mark.parametrize("there", [(), (SEGMENT,), (TRANSFER_TIMEOUT,), (SEGMENT, TRANSFER_TIMEOUT)])
async def test_the_tables_of_the_specification(seeds: Books, there: tuple[str, ...]) -> None:
    for statement in there:
        await seeds.run(statement)
    await seeds.add_transfer("a", PAST)
    await seeds.add_transfer("b", FUTURE)
    await seeds.add_transfer("c", FUTURE)
    if SEGMENT in there:
        await seeds.run(
            "INSERT INTO segment(segmentType, enumeration, tableName, value) "
            "VALUES ('timeout', 0, 'transferStateChange', 1), ('timeout', 1, 'transferStateChange', 100)"
        )
    if TRANSFER_TIMEOUT in there:
        await seeds.run(
            "INSERT INTO transferTimeout(transferId, expirationDate) "
            "SELECT transferId, expirationDate FROM transfer WHERE transferId <> 'c'"
        )
    desk = Desk()
    handler = seeds.handler(desk.take)
    await catch_up(handler)
    kept = {"b": False, "c": False}
    assert await seeds.kept() == (kept if there == (SEGMENT,) else {"a": True, **kept})
    assert desk.ids == ([] if there == (SEGMENT,) else ["a"])
    await seeds.move("b", PAST)
    await seeds.change("c", "ABORTED")
    await catch_up(handler)
    assert desk.ids[-1] == "b"
    assert "c" not in await seeds.kept()
    values = await seeds.run("SELECT enumeration, value, fence FROM segment ORDER BY 1")
    assert values == [(0, 4, None), (1, 100, None)][: 2 if SEGMENT in there else 1]
    await seeds.handler(desk.take).open()


async def test_missing_columns_of_the_handlers_tables_are_added_or_reported(books: Books) -> None:
    """Whatever it is, a run is not left to find it out."""
    for table, column in (
        ("transferTimeout", "deliveredDate"),
        ("transferTimeout", "createdDate"),
        ("segment", "fence"),
    ):
        if column == "deliveredDate":
            on = " ON `transferTimeout`" if books.kind == "mariadb" else ""
            await books.run(f"DROP INDEX `transfertimeout_due`{on}")
        await books.run(f"ALTER TABLE `{table}` DROP COLUMN `{column}`")
    desk = Desk()
    await books.add_transfer("a", PAST)
    with pytest.raises(WrongSchema, match=r"^table transferTimeout: column createdDate is missing$"):
        await books.handler(desk.take).run_once()
    date = DATE[books.kind]
    await books.run(f"ALTER TABLE `transferTimeout` ADD COLUMN `createdDate` {date}")
    await books.handler(desk.take).run_once()
    assert (desk.ids, await books.kept()) == (["a"], {"a": True})


async def test_concurrent_creation_of_all_tables(empty_books: Books) -> None:
    await asyncio.gather(*(empty_books.create() for _ in range(6)))
    assert len(await tables(empty_books)) == 5


async def test_concurrent_opening_of_a_ledger_without_tables_of_the_handler(books: Books) -> None:
    for table in OURS:
        await books.run(f"DROP TABLE `{table}`")
    await asyncio.gather(*(books.handler(Desk().take).open() for _ in range(6)))
    assert len(await tables(books)) == 5
    desk = Desk()
    await books.add_transfer("a", PAST)
    await books.handler(desk.take).run_once()
    assert desk.ids == ["a"]


async def test_creating_the_tables_of_an_empty_file_waits_for_its_writer(tmp_path: Path) -> None:
    """SQLite does not wait for them by itself where it is to remember how to write to the file."""
    books = Books("sqlite", tmp_path)
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        opening = asyncio.create_task(books.create())
        await asyncio.wait([opening], timeout=0.3)
        other.execute("COMMIT")
        await opening
    assert len(await tables(books)) == 5
    await books.close()


@pytest.mark.server
async def test_ids_that_are_equal_to_the_database_are_one_transfer(new_books: New) -> None:
    """Where 'A' and 'a' are the same, state changes may have either: it is one transfer, taken in and delivered once."""
    books = await new_books("mariadb")
    desk = Desk()
    desk.refused = {"a"}
    handler = books.handler(desk.take)
    await books.add_transfer("a", PAST)
    await books.change("A", "RESERVED")
    await handler.run_once()
    await books.change("A ", "RESERVED")
    await handler.run_once()
    assert desk.given == [["a"], ["a"]]
    await books.change("A", "FAILED")
    await handler.run_once()
    assert await books.kept() == {}


async def test_a_lock_file_that_can_not_be_opened(new_books: New, tmp_path: Path) -> None:
    books = await new_books("sqlite")
    (tmp_path / "ledger.db-timeouts").mkdir()
    with pytest.raises(DatabaseFailed, match=r"ledger\.db: unable to open database file$"):
        await books.handler(Desk().take).run_once()


async def test_a_file_with_two_names_has_one_lock(new_books: New, tmp_path: Path) -> None:
    books = await new_books("sqlite")
    (tmp_path / "link.db").symlink_to(tmp_path / "ledger.db")
    desk = Desk()
    await books.add_transfer("a", PAST)
    async with TimeoutHandler(f"sqlite:///{tmp_path}/link.db", on_expired=desk.take) as other:

        async def overlap(_ids: list[str]) -> None:
            assert await other.run_once() is None

        desk.meanwhile = overlap
        assert await books.handler(desk.take).run_once() is not None
    assert desk.ids == ["a"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"transfer": "x", "segment": "x"}, "transfer and segment can't both be called 'x'"),
        ({"transfer": "segment"}, "transfer and segment can't both be called 'segment'"),
        (
            {"transfer.transferId": "expirationDate"},
            "transfer.transferId and transfer.expirationDate can't both be called 'expirationDate'",
        ),
        ({"transfer": ""}, "transfer: a name can't be empty"),
    ],
)
def test_invalid_names(names: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        Ledger(names=names)
