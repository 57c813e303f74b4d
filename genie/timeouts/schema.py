"""Opening a ledger's database: its tables are created where they don't exist, and checked where
they do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Date,
    DateTime,
    Dialect,
    Index,
    Inspector,
    Integer,
    String,
    Table,
    inspect,
    literal,
    select,
    text,
)
from sqlalchemy.dialects.mysql import TIMESTAMP, VARCHAR
from sqlalchemy.engine.interfaces import ReflectedColumn
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable

from genie.sql.schema_check import (
    WrongSchema,
    check,
    key_problems,
    missing_column,
    reflected_columns,
    wrong_type,
)
from genie.timeouts.databases.base import Database
from genie.timeouts.databases.opening import open_database, translate_errors
from genie.timeouts.errors import DatabaseFailed
from genie.timeouts.ledger import Ledger, LedgerTables
from genie.timeouts.times import Utc


async def prepare(database: Database, ledger: Ledger) -> None:
    """Create the tables that don't exist, check those that do. WrongSchema or DatabaseFailed.

    ValueError for a URL that can't be connected to.
    """
    with translate_errors(database):
        await database.connect()
        async with database.creating() as connection:
            await connection.run_sync(create_tables, ledger.tables)


@asynccontextmanager
async def open_ledger(
    url: str, ledger: Ledger, *, create: bool = False, handler_tables: bool = True
) -> AsyncIterator[Database]:
    """The database of a URL, until the block ends. `create`: create missing tables; else they are
    only checked.

    Without `handler_tables` only the ledger's own two tables must exist. WrongSchema or
    DatabaseFailed; ValueError for an invalid URL.
    """
    database = open_database(url)
    try:
        if create:
            await prepare(database, ledger)
        elif not database.exists():
            raise DatabaseFailed(f"{database.name}: there is no such file")
        else:
            with translate_errors(database):
                await database.connect()
                async with database.reading() as connection:
                    await connection.run_sync(
                        check_tables, ledger.tables, ledger.tables.all if handler_tables else ledger.tables.of_ledger
                    )
        yield database
    finally:
        await database.close()


# -- The tables of a ledger and of its timeouts: created where they are absent, checked where they are there --------


def create_tables(connection: Connection, tables: LedgerTables) -> None:
    """Create what is missing. One WrongSchema names all that is wrong with what exists.

    The ledger's own two tables are created only under their default names, and only if neither
    exists or has rows: a ledger's own tables are not invented. (MariaDB creates tables one by one,
    and may be interrupted after the first.) Missing columns are added to the handler's own tables.
    """
    inspector = inspect(connection)
    existing = [table for table in tables.all if inspector.has_table(table.name)]
    wrong = [f"there is no table {table.name}" for table in _missing(connection, tables, existing)]
    wrong += [f"table {table.name}: {problem}" for table in existing for problem in _problems(inspector, table, tables)]
    check(wrong)
    if tables.transfer in existing:
        _adopt_id_type(connection, inspector, tables)
    for table in tables.all:
        if table not in existing:
            connection.execute(CreateTable(table))
        missing = (
            _indexes(inspector, table)
            if table in existing
            else sorted(table.indexes, key=lambda index: str(index.name))
        )
        if table in existing:
            _add_columns(connection, inspector, table)
        for index in missing:
            connection.execute(CreateIndex(index))


def has_handler_tables(connection: Connection, tables: LedgerTables) -> bool:
    """Whether a handler of this package has created its tables."""
    try:
        check_tables(connection, tables, tables.all)
    except WrongSchema:
        return False
    return True


def check_tables(connection: Connection, tables: LedgerTables, needed: Sequence[Table]) -> None:
    """Check the tables, and change nothing. One WrongSchema names all that is missing or wrong."""
    inspector = inspect(connection)
    existing = [table for table in needed if inspector.has_table(table.name)]
    wrong = [f"there is no table {table.name}" for table in needed if table not in existing]
    for table in existing:
        found = reflected_columns(inspector, table)
        added = (column for column in table.columns if column.nullable and column.name not in found)
        wrong += [f"table {table.name}: {missing_column(column)}" for column in added]
        wrong += [f"table {table.name}: {problem}" for problem in _problems(inspector, table, tables)]
    check(wrong)


def _missing(connection: Connection, tables: LedgerTables, existing: list[Table]) -> list[Table]:
    missing = [table for table in tables.of_ledger if table not in existing]
    own = any(table.name != table.info["name"] for table in tables.of_ledger)
    return (
        missing if own or any(_has_rows(connection, table) for table in tables.of_ledger if table in existing) else []
    )


def _has_rows(connection: Connection, table: Table) -> bool:
    return connection.execute(select(literal(1)).select_from(table).limit(1)).first() is not None


def _adopt_id_type(connection: Connection, inspector: Inspector, tables: LedgerTables) -> None:
    """Give our foreign key the type of the ledger's ids: its length, and in MariaDB and MySQL its
    collation.
    """
    theirs, ours = tables.transfer.c.transferId, tables.timeout.c.transferId
    (found,) = (column for column in inspector.get_columns(tables.transfer.name) if column["name"] == theirs.name)
    ours.type = found["type"]
    if connection.dialect.name in ("mysql", "mariadb"):
        asked = text(
            "SELECT character_set_name, collation_name FROM information_schema.columns "
            "WHERE table_schema = DATABASE() AND table_name = :table AND column_name = :column"
        )
        charset, collation = connection.execute(asked, {"table": tables.transfer.name, "column": theirs.name}).one()
        ours.type = VARCHAR(getattr(found["type"], "length", None), charset=charset, collation=collation)


def _add_columns(connection: Connection, inspector: Inspector, table: Table) -> None:
    found = reflected_columns(inspector, table)
    for column in table.columns:
        if column.name not in found and column.nullable:
            name = connection.dialect.identifier_preparer.format_table(table)
            added = str(CreateColumn(column).compile(dialect=connection.dialect)).strip()
            connection.exec_driver_sql(f"ALTER TABLE {name} ADD COLUMN {added}")


def _problems(inspector: Inspector, table: Table, tables: LedgerTables) -> Iterator[str]:
    found = reflected_columns(inspector, table)
    for column in table.columns:
        if column.name in found:
            yield from _column_problems(column, found[column.name])
            yield from _zone_problems(column, found[column.name], inspector.dialect)
        elif not column.nullable and column.info.get("needed", True):
            yield missing_column(column)
    yield from key_problems(inspector, table)
    if table is tables.state_change:
        for index in _indexes(inspector, table):
            create = str(CreateIndex(index).compile(dialect=inspector.dialect)).strip()
            yield f"without an index the last state of a transfer takes too long to find: {create}"


def _column_problems(column: Column[object], found: ReflectedColumn) -> Iterator[str]:
    kinds: tuple[str, type | tuple[type, ...]]
    if isinstance(column.type, Utc):
        kinds = "a date with a time", DateTime
    elif isinstance(column.type, String):
        kinds = "a string", String
    elif isinstance(column.type, BigInteger | Integer):
        kinds = "an integer", Integer
    else:
        return
    expected, types = kinds
    if not isinstance(found["type"], types) or isinstance(found["type"], Date):
        yield wrong_type(column, found, expected)


def _zone_problems(column: Column[object], found: ReflectedColumn, dialect: Dialect) -> Iterator[str]:
    """A column of instants, whatever the session's time zone, can't hold local times."""
    if not isinstance(column.type, Utc) or column.type.zone is None:
        return
    in_mysql = dialect.name in ("mysql", "mariadb") and isinstance(found["type"], TIMESTAMP)
    if in_mysql or getattr(found["type"], "timezone", False):
        zone = column.type.zone.key
        yield f"column {column.name} is {found['type']}, which is in UTC already: leave out the time zone {zone}"


def _indexes(inspector: Inspector, table: Table) -> list[Index]:
    """Return the indexes that no existing one replaces: one that begins with the same column and is
    as unique.
    """
    found = [(index["column_names"][0], bool(index["unique"])) for index in inspector.get_indexes(table.name)]
    found += [(names["column_names"][0], True) for names in inspector.get_unique_constraints(table.name)]
    return sorted(
        (
            index
            for index in table.indexes
            if not any(first == index.columns[0].name and unique >= bool(index.unique) for first, unique in found)
        ),
        key=lambda index: str(index.name),
    )
