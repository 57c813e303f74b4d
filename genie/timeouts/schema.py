"""Opening a ledger's database: creates the tables that do not exist, and checks those that do."""

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
    key_problems,
    missing_column,
    raise_problems,
    reflected_columns,
    wrong_type,
)
from genie.timeouts.databases.base import Database
from genie.timeouts.databases.opening import open_database, translate_errors
from genie.timeouts.errors import DatabaseFailed
from genie.timeouts.ledger import Ledger, LedgerTables
from genie.timeouts.times import Utc


async def prepare(database: Database, ledger: Ledger) -> None:
    """Connect to a ledger's database, create the tables that don't exist, and check the others.

    Raises WrongSchema or DatabaseFailed if that fails, and ValueError if the driver rejects the
    URL.
    """
    with translate_errors(database):
        await database.connect()
        async with database.schema_transaction() as connection:
            await connection.run_sync(create_tables, ledger.tables)


@asynccontextmanager
async def open_ledger(
    url: str, ledger: Ledger, *, create: bool = False, handler_tables: bool = True
) -> AsyncIterator[Database]:
    """Open the database of a URL for the duration of the block, and check its tables. With
    `create`, missing tables are created.

    Without `handler_tables`, only the two tables that belong to the ledger must exist. Raises
    WrongSchema or DatabaseFailed if that fails, and ValueError for an invalid URL.
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
                    required = ledger.tables.all if handler_tables else ledger.tables.ledger_owned
                    await connection.run_sync(check_tables, ledger.tables, required)
        yield database
    finally:
        await database.close()


# -- creating and checking tables ---------------------------------------------------------------------------


def create_tables(connection: Connection, tables: LedgerTables) -> None:
    """Create missing tables, columns and indexes. Raises WrongSchema with a list of all problems of
    the existing tables.

    The two tables that belong to the ledger are created only for an empty ledger: see
    `_absent_ledger_tables`. Columns are added only to the handler's own tables.
    """
    inspector = inspect(connection)
    existing = [table for table in tables.all if inspector.has_table(table.name)]
    problems = [f"there is no table {table.name}" for table in _absent_ledger_tables(connection, tables, existing)]
    problems += [
        f"table {table.name}: {problem}" for table in existing for problem in _problems(inspector, table, tables)
    ]
    raise_problems(problems)
    if tables.transfer in existing:
        _adopt_id_type(connection, inspector, tables)
    for table in tables.all:
        if table in existing:
            indexes = _missing_indexes(inspector, table)
            _add_columns(connection, inspector, table)
        else:
            indexes = sorted(table.indexes, key=lambda index: str(index.name))
            connection.execute(CreateTable(table))
        for index in indexes:
            connection.execute(CreateIndex(index))


def has_handler_tables(connection: Connection, tables: LedgerTables) -> bool:
    """Return whether the handler's tables exist, with all columns that Genie adds to the columns of
    the reference design.
    """
    try:
        check_tables(connection, tables, tables.all)
    except WrongSchema:
        return False
    return True


def check_tables(connection: Connection, tables: LedgerTables, required: Sequence[Table]) -> None:
    """Check that the required tables exist and have the right columns, without changing anything.
    Raises WrongSchema with a list of all problems.
    """
    inspector = inspect(connection)
    existing = [table for table in required if inspector.has_table(table.name)]
    problems = [f"there is no table {table.name}" for table in required if table not in existing]
    for table in existing:
        reflected = reflected_columns(inspector, table)
        # `_problems` accepts the absence of nullable columns, because `create_tables` adds them.
        not_added = (column for column in table.columns if column.nullable and column.name not in reflected)
        problems += [f"table {table.name}: {missing_column(column)}" for column in not_added]
        problems += [f"table {table.name}: {problem}" for problem in _problems(inspector, table, tables)]
    raise_problems(problems)


def _absent_ledger_tables(connection: Connection, tables: LedgerTables, existing: list[Table]) -> list[Table]:
    """Return the tables that only the ledger may create, and that don't exist.

    The list is empty for a new ledger, because Genie may create the tables of a new ledger. A
    ledger is new if its tables have the default names, and the existing tables have no rows. One
    of the tables may exist after an interrupted creation, because MariaDB commits each CREATE
    TABLE.
    """
    renamed = any(table.name != table.info["reference_name"] for table in tables.ledger_owned)
    if not renamed and not any(_has_rows(connection, table) for table in tables.ledger_owned if table in existing):
        return []
    return [table for table in tables.ledger_owned if table not in existing]


def _has_rows(connection: Connection, table: Table) -> bool:
    return connection.execute(select(literal(1)).select_from(table).limit(1)).first() is not None


def _adopt_id_type(connection: Connection, inspector: Inspector, tables: LedgerTables) -> None:
    """Give the foreign key of `transferTimeout` the type of the ledger's transfer ids. The ledger's
    type may differ from the default in its length, and in MariaDB and MySQL in its collation.
    """
    referenced, foreign_key = tables.transfer.c.transferId, tables.timeout.c.transferId
    reflected = reflected_columns(inspector, tables.transfer)[referenced.name]
    foreign_key.type = reflected["type"]
    if connection.dialect.name in ("mysql", "mariadb"):
        query = text(
            "SELECT character_set_name, collation_name FROM information_schema.columns "
            "WHERE table_schema = DATABASE() AND table_name = :table AND column_name = :column"
        )
        charset, collation = connection.execute(query, {"table": tables.transfer.name, "column": referenced.name}).one()
        length = getattr(reflected["type"], "length", None)
        foreign_key.type = VARCHAR(length, charset=charset, collation=collation)


def _add_columns(connection: Connection, inspector: Inspector, table: Table) -> None:
    """Add the nullable columns that an existing table lacks."""
    reflected = reflected_columns(inspector, table)
    for column in table.columns:
        if column.name not in reflected and column.nullable:
            name = connection.dialect.identifier_preparer.format_table(table)
            definition = str(CreateColumn(column).compile(dialect=connection.dialect)).strip()
            connection.exec_driver_sql(f"ALTER TABLE {name} ADD COLUMN {definition}")


def _problems(inspector: Inspector, table: Table, tables: LedgerTables) -> Iterator[str]:
    """Compare an existing table with its definition, and describe each problem that `create_tables`
    can't fix.
    """
    reflected = reflected_columns(inspector, table)
    for column in table.columns:
        if column.name in reflected:
            yield from _type_problems(column, reflected[column.name])
            yield from _zone_problems(column, reflected[column.name], inspector.dialect)
        elif not column.nullable and not column.info.get("optional", False):
            yield missing_column(column)
    yield from key_problems(inspector, table)
    if table is tables.state_change:
        for index in _missing_indexes(inspector, table):
            statement = str(CreateIndex(index).compile(dialect=inspector.dialect)).strip()
            yield f"without an index the last state of a transfer takes too long to find: {statement}"


def _type_problems(column: Column[object], reflected: ReflectedColumn) -> Iterator[str]:
    """Describe the problem if a column's type in the database is not of the expected kind, such as
    a string or an integer.
    """
    kind: tuple[str, type]
    if isinstance(column.type, Utc):
        kind = "a date with a time", DateTime
    elif isinstance(column.type, String):
        kind = "a string", String
    elif isinstance(column.type, BigInteger | Integer):
        kind = "an integer", Integer
    else:
        return
    expected, base_type = kind
    if not isinstance(reflected["type"], base_type) or isinstance(reflected["type"], Date):
        yield wrong_type(column, reflected, expected)


def _zone_problems(column: Column[object], reflected: ReflectedColumn, dialect: Dialect) -> Iterator[str]:
    """Describe the problem if a column that is to hold local times has a type that stores points in
    time, such as TIMESTAMP WITH TIME ZONE.
    """
    if not isinstance(column.type, Utc) or column.type.zone is None:
        return
    is_mysql_timestamp = dialect.name in ("mysql", "mariadb") and isinstance(reflected["type"], TIMESTAMP)
    if is_mysql_timestamp or getattr(reflected["type"], "timezone", False):
        zone = column.type.zone.key
        yield f"column {column.name} is {reflected['type']}, which is in UTC already: leave out the time zone {zone}"


def _missing_indexes(inspector: Inspector, table: Table) -> list[Index]:
    """Return the indexes of a table's definition that the existing table lacks.

    An existing index with the same first column counts as a replacement, if it is unique or need
    not be unique.
    """
    existing = [(index["column_names"][0], bool(index["unique"])) for index in inspector.get_indexes(table.name)]
    existing += [(unique["column_names"][0], True) for unique in inspector.get_unique_constraints(table.name)]
    return sorted(
        (
            index
            for index in table.indexes
            if not any(
                first_column == index.columns[0].name and (is_unique or not index.unique)
                for first_column, is_unique in existing
            )
        ),
        key=lambda index: str(index.name),
    )
