"""Opening a ledger's database: checks all tables, and then creates those of the handler that do not exist."""

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
from genie_ledger.databases.base import Database
from genie_ledger.databases.opening import open_database, translate_errors
from genie_ledger.errors import DatabaseFailed
from genie_ledger.ledger import Ledger, LedgerTables
from genie_ledger.times import Utc


async def prepare(database: Database, ledger: Ledger) -> None:
    """Connect to a ledger's database, check its tables, and create the handler's tables that don't
    exist. The ledger's own tables must exist.

    Raises WrongSchema or DatabaseFailed if that fails, and ValueError if the driver rejects the
    URL. Nothing is created if a table is wrong.
    """
    await _connect_and_check(database, ledger, ledger.tables.ledger_owned)
    with translate_errors(database):
        async with database.schema_transaction() as connection:
            await connection.run_sync(create_tables, ledger.tables)


async def create_ledger(database: Database, ledger: Ledger) -> None:
    """Connect to a ledger's database, and create all tables that don't exist: those of the handler,
    and those of the ledger unless one of the two has rows.

    Raises WrongSchema or DatabaseFailed if that fails, and ValueError if the driver rejects the
    URL. Nothing is created if an existing table is wrong.
    """
    with translate_errors(database):
        await database.connect()
        async with database.schema_transaction() as connection:
            await connection.run_sync(create_tables, ledger.tables, of_ledger=True)


@asynccontextmanager
async def open_ledger(
    url: str, ledger: Ledger, *, create: bool = False, handler_tables: bool = True
) -> AsyncIterator[Database]:
    """Open the database of a URL for the duration of the block, and check its tables. With
    `create`, missing tables are created, those of the ledger too.

    Without `handler_tables`, only the two tables that belong to the ledger must exist. Raises
    WrongSchema or DatabaseFailed if that fails, and ValueError for an invalid URL.
    """
    database = open_database(url)
    try:
        if create:
            await create_ledger(database, ledger)
        else:
            required = ledger.tables.all if handler_tables else ledger.tables.ledger_owned
            await _connect_and_check(database, ledger, required)
        yield database
    finally:
        await database.close()


async def _connect_and_check(database: Database, ledger: Ledger, required: Sequence[Table]) -> None:
    """Connect to a database, which must exist, and check the required tables. Raises WrongSchema,
    DatabaseFailed or ValueError.
    """
    if not database.exists():
        raise DatabaseFailed(f"{database.name}: there is no such file")
    with translate_errors(database):
        await database.connect()
        async with database.reading() as connection:
            await connection.run_sync(check_tables, ledger.tables, required)


# -- creating and checking tables ---------------------------------------------------------------------------


def create_tables(connection: Connection, tables: LedgerTables, *, of_ledger: bool = False) -> None:
    """Create missing tables, columns and indexes. Raises WrongSchema with a list of all problems of
    the existing tables, before anything is created.

    The two tables that belong to the ledger are created only with `of_ledger`, and only if neither
    has rows. One of them may exist after an interrupted creation, because MariaDB commits each
    CREATE TABLE. Columns are added only to the handler's own tables.
    """
    inspector = inspect(connection)
    existing = [table for table in tables.all if inspector.has_table(table.name)]
    is_new = not any(_has_rows(connection, table) for table in tables.ledger_owned if table in existing)
    absent = [] if of_ledger and is_new else [table for table in tables.ledger_owned if table not in existing]
    problems = [_missing_table(table, tables) for table in absent]
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
    problems = [_missing_table(table, tables) for table in required if table not in existing]
    for table in existing:
        reflected = reflected_columns(inspector, table)
        # `_problems` accepts the absence of nullable columns, because `create_tables` adds them.
        not_added = (column for column in table.columns if column.nullable and column.name not in reflected)
        problems += [f"table {table.name}: {missing_column(column)}" for column in not_added]
        problems += [f"table {table.name}: {problem}" for problem in _problems(inspector, table, tables)]
    raise_problems(problems)


def _missing_table(table: Table, tables: LedgerTables) -> str:
    """Return the text of the problem that a table does not exist."""
    if table in tables.ledger_owned:
        return f"the ledger has no table {table.name}: create it, or map its name"
    return f"there is no table {table.name}"


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
    if table is not tables.state_change:
        yield from _engine_problems(inspector, table)
    if table not in tables.ledger_owned:
        yield from _insert_problems(inspector, table)
    if table is tables.timeout:
        yield from _reference_problems(inspector, tables)
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


def _engine_problems(inspector: Inspector, table: Table) -> Iterator[str]:
    """Describe the problem if a table of MariaDB or MySQL has an engine without transactions and
    foreign keys.
    """
    if inspector.dialect.name in ("mysql", "mariadb"):
        engine = inspector.get_table_options(table.name).get(f"{inspector.dialect.name}_engine", "")
        if engine.lower() != "innodb":
            yield f"its engine is {engine}, it must be InnoDB"


def _insert_problems(inspector: Inspector, table: Table) -> Iterator[str]:
    """Describe the columns of a table of the handler that make it impossible to insert a row: the
    handler writes all columns of the definition except the primary key, and no others.
    """
    names = {column.name for column in table.columns}
    (key,) = table.primary_key
    for name, reflected in reflected_columns(inspector, table).items():
        if name == key.name and not _is_generated(reflected, inspector.dialect):
            yield f"column {name} is not generated by the database, as by AUTO_INCREMENT"
        elif name not in names and not reflected["nullable"] and not _has_value(reflected):
            yield f"column {name} must be nullable or have a default: a run does not write it"


def _is_generated(reflected: ReflectedColumn, dialect: Dialect) -> bool:
    """Return whether the database assigns the values of a primary key. SQLite does so for the type
    INTEGER, and for no other.
    """
    if dialect.name == "sqlite":
        return str(reflected["type"]).upper() == "INTEGER"
    return reflected.get("autoincrement") is True or _has_value(reflected)


def _has_value(reflected: ReflectedColumn) -> bool:
    """Return whether a column that an INSERT does not name gets a value other than NULL."""
    return reflected["default"] is not None or bool(reflected.get("identity")) or bool(reflected.get("computed"))


def _reference_problems(inspector: Inspector, tables: LedgerTables) -> Iterator[str]:
    """Describe what makes it impossible to store the ids of the ledger's transfers in an existing
    `transferTimeout`: a foreign key to another table, or a shorter type.
    """
    id, copy = tables.transfer.c.transferId, tables.timeout.c.transferId
    expected = f"{tables.transfer.name}.{id.name}"
    for key in inspector.get_foreign_keys(tables.timeout.name):
        actual = f"{key['referred_table']}.{', '.join(key['referred_columns'])}"
        if copy.name in key["constrained_columns"] and actual.lower() != expected.lower():
            yield f"the foreign key of column {copy.name} refers to {actual}, it must refer to {expected}"
    length, copy_length = _reflected_length(inspector, id), _reflected_length(inspector, copy)
    if copy_length is not None and (length is None or length > copy_length):
        yield f"column {copy.name} has at most {copy_length} characters, {expected} has {length or 'no limit'}"


def _reflected_length(inspector: Inspector, column: Column[str]) -> int | None:
    """Return the maximum length of an existing column. None: there is no limit, as in SQLite, or no column."""
    if inspector.dialect.name == "sqlite" or not inspector.has_table(column.table.name):
        return None
    reflected = reflected_columns(inspector, column.table).get(column.name)
    return None if reflected is None else getattr(reflected["type"], "length", None)


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
