"""`FencedTable`: invalid arguments, composite keys and the number of statements."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, String, Table, create_engine, event, select
from sqlalchemy.dialects import mssql
from sqlalchemy.ext.asyncio import create_async_engine

import genie
from genie.sql import FencedTable
from support.processes.servers import WAIT_S

FENCE = 1_790_000_000_000_000


def table(*columns: Column[Any]) -> Table:
    return Table("rates", MetaData(), *columns)


RATES = table(
    Column("bank", String(10), primary_key=True),
    Column("currency", String(3), primary_key=True),
    Column("rate", Integer),
    Column("rate_fence", BigInteger, key="fence"),
)
FENCED = FencedTable(RATES)


@pytest.fixture
def connection() -> Iterator[Connection]:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        RATES.create(connection)
        connection.execute(RATES.insert().values(bank="UBS", currency="EUR", rate=95))
        yield connection
    engine.dispose()


def test_composite_keys_and_renamed_columns(connection: Connection) -> None:
    row = FENCED.read(connection, ("UBS", "EUR"), fence=FENCE)
    assert (row.bank, row.currency, row.rate, row.fence) == ("UBS", "EUR", 95, FENCE)
    FENCED.write(connection, ("UBS", "EUR"), {"rate": 96}, fence=FENCE)
    assert FENCED.read_or_create(connection, ("UBS", "USD"), {"rate": 80}, fence=FENCE).rate == 80
    with pytest.raises(genie.StaleFence, match=r"rates \('UBS', 'EUR'\) was used with fence"):
        FENCED.read(connection, ("UBS", "EUR"), fence=FENCE - 1)
    found = connection.execute(select(RATES).order_by(RATES.c.currency)).all()
    assert [tuple(row) for row in found] == [("UBS", "EUR", 96, FENCE), ("UBS", "USD", 80, FENCE)]


def test_stale_fence_is_a_subclass_of_lock_lost() -> None:
    assert issubclass(genie.StaleFence, genie.LockLost)


def test_each_access_is_one_statement(connection: Connection) -> None:
    executed: list[str] = []

    @event.listens_for(connection, "before_cursor_execute")
    def before(_: Any, __: Any, statement: str, *___: Any) -> None:
        executed.append(statement.split(maxsplit=1)[0])

    FENCED.read(connection, ("UBS", "EUR"), fence=FENCE)
    FENCED.write(connection, ("UBS", "EUR"), {"rate": 96}, fence=FENCE)
    FENCED.read_or_create(connection, ("UBS", "EUR"), {}, fence=FENCE)
    assert executed == ["UPDATE", "UPDATE", "INSERT"]


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ([Column("id", Integer)], ValueError, "table rates has no primary key"),
        (
            [Column("id", Integer, primary_key=True)],
            ValueError,
            r"no column 'fence': add Column\('fence', BigInteger\)",
        ),
        (
            [Column("id", Integer, primary_key=True), Column("fence", Integer)],
            TypeError,
            r"column rates.fence must be a BigInteger, not Integer\(\)",
        ),
        (
            [Column("id", Integer, primary_key=True), Column("fence", BigInteger), Column("shared_fence", Integer)],
            TypeError,
            "column rates.shared_fence must be a BigInteger",
        ),
    ],
)
def test_a_table_without_a_key_or_fence_column_is_rejected(
    columns: list[Column[Any]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FencedTable(table(*columns))


@pytest.mark.parametrize(
    ("key", "values", "options", "error", "message"),
    [
        ("UBS", {}, {}, ValueError, r"the key of rates is \(bank, currency\), not 'UBS'"),
        (("UBS", "EUR", 1), {}, {}, ValueError, r"the key of rates is \(bank, currency\)"),
        (("UBS", "EUR"), {"rat": 1}, {}, ValueError, "table rates has no column 'rat'"),
        (("UBS", "EUR"), {"bank": "CS"}, {}, ValueError, "values must not contain 'bank'"),
        (("UBS", "EUR"), {"fence": 1}, {}, ValueError, "values must not contain 'fence'"),
        (("UBS", "EUR"), {}, {"fence": "1"}, TypeError, "fence must be an integer, the `fence` of a lock, not '1'"),
        (("UBS", "EUR"), {}, {"fence": None}, TypeError, "fence must be an integer"),
        (("UBS", "EUR"), {}, {"fence": True}, TypeError, "fence must be an integer"),
        (("UBS", "EUR"), {}, {"fence": 1.5}, TypeError, "fence must be an integer"),
        (("UBS", "EUR"), {}, {"fence": 0}, ValueError, "fence must be from 1 to 9007199254740991, not 0"),
        (("UBS", "EUR"), {}, {"fence": 2**53}, ValueError, "fence must be from 1 to 9007199254740991"),
    ],
)
def test_invalid_arguments_change_nothing(
    connection: Connection,
    key: Any,
    values: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    fence = options.get("fence", FENCE)
    with pytest.raises(error, match=message):
        FENCED.write(connection, key, values, fence=fence)
    with pytest.raises(error, match=message):
        FENCED.read_or_create(connection, key, values, fence=fence)
    if not values:
        with pytest.raises(error, match=message):
            FENCED.read(connection, key, fence=fence)
    assert [tuple(row) for row in connection.execute(select(RATES))] == [("UBS", "EUR", 95, None)]


def test_a_shared_read_needs_the_shared_fence_column(connection: Connection) -> None:
    for call in (
        lambda: FENCED.read(connection, ("UBS", "EUR"), fence=FENCE, shared=True),
        lambda: FENCED.read_or_create(connection, ("UBS", "EUR"), {}, fence=FENCE, shared=True),
    ):
        with pytest.raises(ValueError, match=r"no column 'shared_fence'.*add Column\('shared_fence', BigInteger\)"):
            call()


async def test_an_asyncio_connection_is_rejected_with_advice() -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    async with engine.connect() as connection:
        with pytest.raises(
            TypeError, match=r"not AsyncConnection; .*await connection\.run_sync\(table\.read, key, fence="
        ):
            FENCED.read(connection, ("UBS", "EUR"), fence=FENCE)  # type: ignore[arg-type]
    await engine.dispose()


def test_unsupported_databases_are_rejected(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "dialect", mssql.dialect())
    with pytest.raises(ValueError, match="fences are supported in postgresql, sqlite, mariadb, mysql, not in mssql"):
        FENCED.read(connection, ("UBS", "EUR"), fence=FENCE)


def test_it_is_loaded_by_name() -> None:
    program = (
        "import sys, genie\n"
        "assert genie.sql.__all__ == ['FencedTable'] and 'sqlalchemy' not in sys.modules\n"
        "sys.modules['sqlalchemy'] = None\n"
        "try:\n"
        "    genie.sql.FencedTable\n"
        "except ModuleNotFoundError as error:\n"
        "    assert str(error) == \"FencedTable needs SQLAlchemy: pip install 'genie-lock[sql]'\", error\n"
        "else:\n"
        "    raise AssertionError('it is there')\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=WAIT_S)
