"""The interface of a database, which each dialect implements for the timeout handler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import URL, ColumnElement, Table, bindparam
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from genie.sql.engine import close_engine, open_connection, open_transaction

CONNECT_TIMEOUT_S = 10.0
"""How long establishing a connection may take."""

LOCK_TIMEOUT_S = 30
"""How long a statement waits for rows or a file that others have locked."""


SERVER_OPTIONS: dict[str, Any] = {"pool_size": 2, "pool_pre_ping": True}
"""Engine options for a server: one connection holds the run lock, the other works; each is tested
before its use.
"""


class Database(ABC):
    """A ledger's database: connections for reading and writing, bulk statements, and the run lock."""

    commits_in_order = False
    """True if ids become visible in their order: no lower id can be committed after a higher one.
    """

    driver_errors: tuple[type[Exception], ...] = ()
    """Exceptions of the driver, which calls without SQLAlchemy can raise."""

    def __init__(self, url: URL, engine: AsyncEngine) -> None:
        self.name = url.set(query={}).render_as_string(hide_password=True)  # the query may have a password
        """The URL without its password and its query, for error messages."""
        self._engine = engine
        self._autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        """The connection pool of `_engine`, with each statement in a transaction of its own."""

    async def connect(self) -> None:
        """Check that a connection to the database is possible. Raises ValueError if the driver
        rejects the URL.
        """
        try:
            async with self.reading():
                pass
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{self.name}: invalid URL: {error}") from error

    async def close(self) -> None:
        """Close all connections."""
        await close_engine(self._engine)

    def exists(self) -> bool:
        """Return False if the database is a file that does not exist. Connecting would create the
        file.
        """
        return True

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Provide a connection in autocommit mode. Each statement sees what was committed before the
        statement began, and locks nothing.
        """
        async with open_connection(self._autocommit) as connection:
            yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Provide a connection in a transaction, which is committed if the block ends without an
        error.
        """
        async with open_transaction(self._engine) as connection:
            yield connection

    @asynccontextmanager
    async def schema_transaction(self) -> AsyncIterator[AsyncConnection]:
        """Provide a transaction for creating tables. Processes that create tables wait for each other."""
        async with self.writing() as connection:
            yield connection

    @abstractmethod
    def try_lock(self) -> AbstractAsyncContextManager[bool]:
        """Try to acquire the run lock, without waiting; yield whether the lock was acquired. The lock
        is released at the end of the block. It serializes the runs of all replicas.
        """

    def comparable_date(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return an SQL expression that converts a date of the ledger to a form that can be
        compared in SQL.
        """
        return column

    @abstractmethod
    def shifted_date(self, column: ColumnElement[Any], by: timedelta) -> ColumnElement[Any]:
        """Return an SQL expression that adds a duration to a date of the ledger."""

    @abstractmethod
    async def insert_rows(self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert many rows in the driver's fastest way. Each row maps column keys to values.

        All rows must have the same columns.
        """

    async def update_rows(
        self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]], columns: Sequence[str]
    ) -> None:
        """Update the given `columns` of many rows, each row with its own values.

        Each row maps column keys to values. It must contain the primary key and the updated
        columns. It must also contain all other columns that an INSERT requires, because some
        databases update by INSERT … ON DUPLICATE KEY UPDATE.
        """
        if not rows:
            return
        (key,) = table.primary_key
        values = {column: bindparam(f"new_{column}", type_=table.c[column].type) for column in columns}
        statement = table.update().where(key == bindparam(f"old_{key.key}")).values(values)
        parameters = [
            {f"old_{key.key}": row[key.key], **{f"new_{column}": row[column] for column in columns}} for row in rows
        ]
        await connection.execute(statement, parameters)


def values_by_column(
    connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]]
) -> tuple[list[str], list[Sequence[Any]]]:
    """Transpose rows, for a bulk statement.

    Returns the names of the columns in the database, and a list of values for each column. The
    values are converted as the driver requires.
    """
    columns = [table.c[key] for key in rows[0]]
    values_of_columns: list[Sequence[Any]] = []
    for column in columns:
        values = [row[column.key] for row in rows]
        convert = column.type.dialect_impl(connection.dialect).bind_processor(connection.dialect)
        values_of_columns.append(values if convert is None else convert_all(convert, values))
    return [column.name for column in columns], values_of_columns


def convert_all(convert: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Convert a list of values. Each distinct value is converted only once, because many rows have
    the same date or state.
    """
    results = {value: convert(value) for value in set(values)}
    return [results[value] for value in values]


def insert_into(connection: AsyncConnection, table: Table, names: Sequence[str]) -> str:
    """Return the beginning of an INSERT statement: `INSERT INTO table (names…) VALUES `."""
    preparer = connection.dialect.identifier_preparer
    target = f"{preparer.format_table(table)} ({', '.join(map(preparer.quote, names))})"
    return f"INSERT INTO {target} VALUES "  # noqa: S608 - only names, which are quoted
