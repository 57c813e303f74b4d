"""Fencing tokens in real databases: late reads and writes of former lock holders are rejected."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, MetaData, String, Table, event, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from genie import StaleFence
from genie.sql import FencedTable
from support.databases.fenced_accounts import (
    ACCOUNTS,
    KINDS,
    NEWER,
    OLDER,
    TABLE,
    WAITING,
    Accounts,
    database_url,
    read,
    write,
)
from support.databases.mariadb import mariadb
from support.processes.servers import WAIT_S


@pytest.fixture(params=KINDS)
async def accounts(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Accounts]:
    accounts = Accounts(request.param, database_url(request.param, tmp_path))
    await accounts.create()
    yield accounts
    await accounts.engine.dispose()


@pytest.fixture(params=["transactions", "autocommit"])
async def each_way(accounts: Accounts, request: pytest.FixtureRequest) -> AsyncIterator[Accounts]:
    """Each read and write is a transaction of its own; or the database is in autocommit mode."""
    if request.param == "autocommit":
        other = Accounts(accounts.kind, accounts.engine.url, isolation_level="AUTOCOMMIT")  # type: ignore[arg-type]
        yield other
        await other.engine.dispose()
    else:
        yield accounts


async def plain_read(accounts: Accounts, _: int) -> int:
    """A read without a fence, as of a store that checks writes only."""
    return await accounts.balance()


# -- the paused holder ---------------------------------------------------------------------------------------------


async def test_a_write_after_the_write_of_the_next_holder_is_rejected(each_way: Accounts) -> None:
    balance = await each_way.read(OLDER)
    await each_way.write(NEWER, await each_way.read(NEWER) + 20)
    with pytest.raises(StaleFence) as refused:
        await each_way.write(OLDER, balance - 10)
    assert (refused.value.fence, refused.value.seen) == (OLDER, NEWER)
    assert str(refused.value) == (
        f"accounts 1 was used with fence {NEWER}, which is greater than {OLDER}: another holder has locked it since"
    )
    row = await each_way.look()
    assert row is not None
    assert (row.balance, row.fence) == (120, NEWER)


async def late_write_between_read_and_write(
    accounts: Accounts, newer_reads: Callable[[Accounts, int], Awaitable[int]]
) -> None:
    balance = await accounts.read(OLDER)
    newer_balance = await newer_reads(accounts, NEWER)
    try:
        await accounts.write(OLDER, balance - 10)
    finally:
        await accounts.write(NEWER, newer_balance + 20)


async def test_a_late_write_between_the_read_and_the_write_of_the_next_holder_is_rejected(each_way: Accounts) -> None:
    with pytest.raises(StaleFence):
        await late_write_between_read_and_write(each_way, Accounts.read)
    assert await each_way.balance() == 120


async def test_without_a_check_of_reads_that_update_is_lost(each_way: Accounts) -> None:
    """Shows that the test above depends on the check on read: both writes are accepted, and one of them is lost."""
    await late_write_between_read_and_write(each_way, plain_read)
    assert await each_way.balance() == 120


async def test_a_late_read_is_rejected(each_way: Accounts) -> None:
    await each_way.read(NEWER)
    with pytest.raises(StaleFence):
        await each_way.read(OLDER)
    row = await each_way.look()
    assert row is not None
    assert row.fence == NEWER


async def test_a_late_write_waits_for_the_reading_transaction_and_is_rejected(accounts: Accounts) -> None:
    balance = await accounts.read(OLDER)
    async with accounts.transaction() as newer:
        newer_balance = await read(newer, NEWER)
        late = asyncio.create_task(accounts.write(OLDER, balance - 10))
        if accounts.kind in WAITING:
            await accounts.until_one_waits()
        await write(newer, NEWER, newer_balance + 20)
        assert not late.done()
    with pytest.raises(StaleFence):
        await late
    assert await accounts.balance() == 120


async def test_a_read_waits_for_an_earlier_uncommitted_write(accounts: Accounts) -> None:
    async with accounts.transaction() as older:
        await write(older, OLDER, await read(older, OLDER) - 10)
        newer = asyncio.create_task(accounts.read(NEWER))
        if accounts.kind in WAITING:
            await accounts.until_one_waits()
    assert await newer == 90
    with pytest.raises(StaleFence):
        await accounts.write(OLDER, 80)


# -- transactions of the caller -------------------------------------------------------------------------------------


async def test_a_rejection_rolls_back_the_earlier_writes_of_the_transaction(accounts: Accounts) -> None:
    async with accounts.transaction() as older:
        await read(older, OLDER, 1)
        await read(older, OLDER, 2)
    await accounts.read(NEWER, 2)
    with pytest.raises(StaleFence):
        async with accounts.transaction() as older:
            await write(older, OLDER, 90, 1)
            await write(older, OLDER, 110, 2)
    assert (await accounts.balance(1), await accounts.balance(2)) == (100, 100)


async def test_a_write_that_depends_on_another_row_must_read_it_again(accounts: Accounts) -> None:
    """A row protects itself only: what account 2 gets depends on account 1, which was changed meanwhile."""
    await accounts.read(OLDER, 1)
    await accounts.write(NEWER, 50, 1)
    with pytest.raises(StaleFence):
        async with accounts.transaction() as older:
            await write(older, OLDER, 100 + 100, 2)
            await read(older, OLDER, 1)
    assert await accounts.balance(2) == 100


async def test_nothing_is_committed_or_rolled_back_for_the_caller(accounts: Accounts) -> None:
    with pytest.raises(KeyError):
        async with accounts.transaction() as newer:
            await write(newer, NEWER, await read(newer, NEWER) + 20)
            raise KeyError
    row = await accounts.look()
    assert row is not None
    assert (row.balance, row.fence) == (100, None), "the fence is rolled back with the rest"
    await accounts.write(OLDER, 90)


async def test_one_holder_can_use_its_fencing_token_repeatedly(each_way: Accounts) -> None:
    for balance in range(5):
        await each_way.read(NEWER)
        await each_way.write(NEWER, balance)
        await each_way.write(NEWER, balance)  # changes nothing, which is no refusal
        assert await each_way.read(NEWER) == balance


async def test_a_write_without_a_read_is_checked_too(each_way: Accounts) -> None:
    await each_way.write(NEWER, 120)
    with pytest.raises(StaleFence):
        await each_way.write(OLDER, 90)
    assert await each_way.read(NEWER) == 120


async def test_values_may_be_expressions_and_other_columns_stay(accounts: Accounts) -> None:
    async with accounts.transaction() as connection:
        values = {"balance": TABLE.c.balance - 30, "note": "paid"}
        await connection.run_sync(ACCOUNTS.write, 1, values, fence=NEWER)
        row = await connection.run_sync(ACCOUNTS.read, 1, fence=NEWER)
        assert (row.id, row.balance, row.note, row.fence, row.shared_fence) == (1, 70, "paid", NEWER, None)
        await connection.run_sync(ACCOUNTS.write, 1, {"note": None}, fence=NEWER)
    row = await accounts.look()
    assert row is not None
    assert tuple(row) == (1, 70, None, NEWER, None)


# -- rows that do not exist yet --------------------------------------------------------------------------------------


async def test_a_missing_row_is_not_a_stale_fence(each_way: Accounts) -> None:
    with pytest.raises(LookupError, match=r"accounts has no row 3.*read_or_create"):
        await each_way.read(NEWER, 3)
    with pytest.raises(LookupError, match="accounts has no row 3"):
        await each_way.write(NEWER, 0, 3)
    assert await each_way.look(3) is None


async def test_a_created_row_rejects_the_insert_of_an_older_holder(each_way: Accounts) -> None:
    assert await each_way.read_or_create(NEWER, 0, 3) == 0
    with pytest.raises(StaleFence):
        await each_way.read_or_create(OLDER, 500, 3)
    await each_way.write(NEWER, 20, 3)
    assert await each_way.balance(3) == 20


async def test_a_row_created_by_an_older_holder_can_be_read(each_way: Accounts) -> None:
    assert await each_way.read_or_create(OLDER, 500, 3) == 500
    assert await each_way.read_or_create(NEWER, 0, 3) == 500
    with pytest.raises(StaleFence):
        await each_way.write(OLDER, 490, 3)


async def test_two_holders_that_create_a_row_at_the_same_time_get_one_row(accounts: Accounts) -> None:
    for key in range(10, 20):
        older, newer = await asyncio.gather(
            accounts.read_or_create(OLDER, 500, key), accounts.read_or_create(NEWER, 0, key), return_exceptions=True
        )
        row = await accounts.look(key)
        assert row is not None
        assert (row.fence, row.balance) == (NEWER, newer)
        assert isinstance(older, StaleFence) or older == newer == 500


@pytest.mark.parametrize("kind", KINDS)
async def test_keys_of_several_columns_and_columns_of_other_names(kind: str, tmp_path: Path) -> None:
    table = Table(
        "rates",
        MetaData(),
        Column("the_bank", String(10), primary_key=True, key="bank"),
        Column("currency", String(3), primary_key=True),
        Column("the_rate", BigInteger, unique=True, key="rate"),
        Column("row_fence", BigInteger, key="fence"),
    )
    rates = FencedTable(table)
    other = Accounts(kind, database_url(kind, tmp_path))
    async with other.engine.begin() as connection:
        await connection.run_sync(table.create)
        for fence in (OLDER, NEWER):
            row = await connection.run_sync(rates.read_or_create, ("UBS", "EUR"), {"rate": fence}, fence=fence)
            assert (row.bank, row.currency, row.rate, row.fence) == ("UBS", "EUR", OLDER, fence)
        await connection.run_sync(rates.write, ("UBS", "EUR"), {"rate": 96}, fence=NEWER)
        assert (await connection.run_sync(rates.read, ("UBS", "EUR"), fence=NEWER)).rate == 96
        with pytest.raises(StaleFence, match=r"rates \('UBS', 'EUR'\) was used with fence"):
            await connection.run_sync(rates.read, ("UBS", "EUR"), fence=OLDER)
    with pytest.raises(ValueError if kind == "mariadb" else IntegrityError, match=r"unique|UNIQUE"):
        async with other.engine.begin() as connection:
            await connection.run_sync(rates.read_or_create, ("UBS", "USD"), {"rate": 96}, fence=NEWER)
    await other.engine.dispose()


# -- shared locks ----------------------------------------------------------------------------------------------------


async def test_shared_holders_do_not_reject_each_other(each_way: Accounts) -> None:
    assert await each_way.read(NEWER, shared=True) == 100
    assert await each_way.read(OLDER, shared=True) == 100
    row = await each_way.look()
    assert row is not None
    assert (row.fence, row.shared_fence) == (None, NEWER)


async def test_a_late_write_after_the_read_of_a_shared_holder_is_rejected(each_way: Accounts) -> None:
    balance = await each_way.read(OLDER)
    await each_way.read(NEWER, shared=True)
    with pytest.raises(StaleFence):
        await each_way.write(OLDER, balance - 10)
    with pytest.raises(StaleFence):
        await each_way.read(OLDER)
    assert await each_way.balance() == 100


async def test_a_shared_read_after_the_next_exclusive_holder_is_rejected(each_way: Accounts) -> None:
    await each_way.read(OLDER, shared=True)
    await each_way.read(NEWER)
    with pytest.raises(StaleFence):
        await each_way.read(OLDER, shared=True)
    await each_way.write(NEWER, 120)
    assert await each_way.read(NEWER + 1, shared=True) == 120
    row = await each_way.look()
    assert row is not None
    assert (row.fence, row.shared_fence) == (NEWER, NEWER + 1)


async def test_a_row_can_be_created_under_a_shared_lock(accounts: Accounts) -> None:
    async with accounts.transaction() as connection:
        await connection.run_sync(ACCOUNTS.read_or_create, 3, {"balance": 7}, fence=NEWER, shared=True)
        await connection.run_sync(ACCOUNTS.read_or_create, 3, {"balance": 8}, fence=OLDER, shared=True)
    row = await accounts.look(3)
    assert row is not None
    assert (row.balance, row.fence, row.shared_fence) == (7, None, NEWER)


# -- isolation levels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accounts", ["postgresql"], indirect=True)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_postgresql_aborts_a_late_transaction_with_an_older_snapshot(accounts: Accounts, level: str) -> None:
    async with accounts.transaction(level) as older:
        assert (await older.execute(select(TABLE.c.balance))).all() == [(100,), (100,)]  # takes the snapshot
        await accounts.read(NEWER)
        with pytest.raises(DBAPIError) as refused:
            await write(older, OLDER, 90)
        assert getattr(refused.value.orig, "sqlstate", None) == "40001"
        await older.rollback()
    async with accounts.transaction(level) as older:
        with pytest.raises(StaleFence):
            await write(older, OLDER, 90)
    assert await accounts.balance() == 100


@pytest.mark.parametrize("accounts", ["postgresql", "mariadb"], indirect=True)
async def test_a_late_write_under_repeatable_read_waits_and_is_rejected(accounts: Accounts) -> None:
    """PostgreSQL takes the snapshot at the first statement, MariaDB not before the first SELECT."""

    async def write_late() -> None:
        async with accounts.transaction("REPEATABLE READ") as older:
            if accounts.kind == "mariadb":
                await older.execute(text("SET SESSION innodb_snapshot_isolation = ON"))
            await write(older, OLDER, 90)

    async with accounts.transaction() as newer:
        newer_balance = await read(newer, NEWER)
        late = asyncio.create_task(write_late())
        await accounts.until_one_waits()
        await write(newer, NEWER, newer_balance + 20)
    if accounts.kind == "mariadb":
        with pytest.raises(StaleFence):
            await late
    else:
        with pytest.raises(DBAPIError) as refused:
            await late
        assert getattr(refused.value.orig, "sqlstate", None) == "40001"
    assert await accounts.balance() == 120


@pytest.mark.parametrize("accounts", ["mariadb"], indirect=True)
@pytest.mark.parametrize("before", [None, NEWER], ids=["new fence", "fence that the row has already"])
async def test_mariadb_reads_committed_rows_instead_of_its_snapshot(accounts: Accounts, before: int | None) -> None:
    """As MySQL does, and as MariaDB did up to version 11.6: REPEATABLE READ, in which writes see newer rows than reads."""
    if before is not None:
        await accounts.read(before)
    async with accounts.transaction("REPEATABLE READ") as newer:
        await newer.execute(text("SET SESSION innodb_snapshot_isolation = OFF"))
        assert (await newer.execute(select(TABLE.c.balance))).all() == [(100,), (100,)]  # takes the snapshot
        await accounts.write(before or OLDER, 90)
        assert await read(newer, NEWER) == 90


@pytest.mark.parametrize("accounts", ["mariadb"], indirect=True)
async def test_mariadb_aborts_a_late_transaction_with_an_older_snapshot(accounts: Accounts) -> None:
    """As MariaDB does from version 11.6 on."""
    async with accounts.transaction("REPEATABLE READ") as older:
        await older.execute(text("SET SESSION innodb_snapshot_isolation = ON"))
        assert (await older.execute(select(TABLE.c.balance))).all() == [(100,), (100,)]  # takes the snapshot
        await accounts.read(NEWER)
        with pytest.raises(DBAPIError, match="changed since last read"):
            await write(older, OLDER, 90)
        await older.rollback()
    assert await accounts.balance() == 100


@pytest.mark.parametrize("accounts", ["mariadb"], indirect=True)
async def test_mariadb_reports_a_stale_fence_even_with_an_older_snapshot(accounts: Accounts) -> None:
    async with accounts.transaction("REPEATABLE READ") as older:
        await older.execute(text("SET SESSION innodb_snapshot_isolation = OFF"))
        assert (await older.execute(select(TABLE.c.balance))).all() == [(100,), (100,)]
        await accounts.read(NEWER)
        with pytest.raises(StaleFence):
            await write(older, OLDER, 90)


@pytest.mark.parametrize("accounts", ["sqlite"], indirect=True)
async def test_sqlite_aborts_a_late_transaction_with_an_older_snapshot(accounts: Accounts) -> None:
    async with accounts.engine.connect() as connection:
        await connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    async with accounts.engine.connect() as older:
        await older.exec_driver_sql("BEGIN DEFERRED")
        assert (await older.execute(select(TABLE.c.balance))).all() == [(100,), (100,)]
        await accounts.read(NEWER)
        with pytest.raises(DBAPIError, match="database is locked"):
            await write(older, OLDER, 90)
        await older.rollback()
        await older.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(StaleFence):
            await write(older, OLDER, 90)
    assert await accounts.balance() == 100


# -- databases without UPDATE … RETURNING ------------------------------------------------------------------------------


@pytest.mark.parametrize("accounts", ["mariadb", "sqlite before 3.35"], indirect=True)
async def test_a_newer_holder_between_the_two_statements_of_a_read_is_detected(accounts: Accounts) -> None:
    """In autocommit mode no transaction keeps the two together. So the first stores the fence and the second reads."""
    newer = f"UPDATE accounts SET balance = 120, fence = {NEWER} WHERE id = 1"  # noqa: S608 - a number
    ahead = [newer]

    def newer_holder() -> None:
        if accounts.kind == "mariadb":
            mariadb().run(ahead.pop(), accounts.engine.url.database)
        else:
            with sqlite3.connect(accounts.engine.url.database or "", timeout=WAIT_S) as connection:
                connection.execute(ahead.pop())
            connection.close()

    other = Accounts(accounts.kind, accounts.engine.url, isolation_level="AUTOCOMMIT")  # type: ignore[arg-type]

    @event.listens_for(other.engine.sync_engine, "after_cursor_execute")
    def executed(*_: Any) -> None:
        if ahead:
            newer_holder()

    with pytest.raises(StaleFence):
        await other.read(OLDER)
    assert not ahead
    with pytest.raises(StaleFence):
        await other.write(OLDER, 90)
    await other.engine.dispose()
