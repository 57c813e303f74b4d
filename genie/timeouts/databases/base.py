"""What the handler requires of a database dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import URL, ColumnElement, Table, bindparam
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from genie.sql.engine import open_connection, open_transaction

CONNECT_TIMEOUT_S = 10.0
"""How long establishing a connection may take."""

LOCK_TIMEOUT_S = 30
"""How long a statement waits for rows or a file that others have locked."""


SERVER_OPTIONS: dict[str, Any] = {"pool_size": 2, "pool_pre_ping": True}
"""Engine options for a server: one connection holds the run lock, the other works; each is tested
before its use.
"""


class Database(ABC):
    """One database: how it is read and written, and how concurrent runs are excluded."""

    commits_in_order = False
    """Whether ids become visible in their order: no lower id can be committed after a higher one."""

    driver_errors: tuple[type[Exception], ...] = ()
    """Errors of the driver where it is called without SQLAlchemy."""

    def __init__(self, url: URL, engine: AsyncEngine) -> None:
        self.name = url.set(query={}).render_as_string(hide_password=True)  # which may contain a password
        self._engine = engine
        self._autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")

    async def connect(self) -> None:
        """Connect. ValueError if the driver rejects the URL."""
        try:
            async with self.reading():
                pass
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{self.name}: invalid URL: {error}") from error

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    def exists(self) -> bool:
        """Whether the database exists. False if connecting would create it."""
        return True

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A connection in autocommit mode: each statement sees what is committed when it begins,
        and locks nothing.
        """
        async with open_connection(self._autocommit) as connection:
            yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, committed if the block ends without an error."""
        async with open_transaction(self._engine) as connection:
            yield connection

    @asynccontextmanager
    async def creating(self) -> AsyncIterator[AsyncConnection]:
        """Like `writing`, for creating tables: one process at a time."""
        async with self.writing() as connection:
            yield connection

    @abstractmethod
    def try_lock(self) -> AbstractAsyncContextManager[bool]:
        """Try to get the run lock of the database: yields whether it was acquired, and releases it
        at the end.
        """

    def comparable_date(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return the expression of a ledger's date in a form that can be compared."""
        return column

    @abstractmethod
    def shifted_date(self, column: ColumnElement[Any], by: timedelta) -> ColumnElement[Any]:
        """Return the expression of a ledger's date, shifted."""

    @abstractmethod
    async def insert_rows(self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert many rows with the same columns (by their keys), as fast as the driver can."""

    async def update_rows(
        self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]], columns: Sequence[str]
    ) -> None:
        """Update these columns of many rows, each with values of its own.

        A row has its primary key, these columns, and all others that an INSERT needs.
        """
        if not rows:
            return
        (key,) = table.primary_key
        values = {column: bindparam(f"new_{column}", type_=table.c[column].type) for column in columns}
        statement = table.update().where(key == bindparam(f"old_{key.key}")).values(values)
        given = [
            {f"old_{key.key}": row[key.key], **{f"new_{column}": row[column] for column in columns}} for row in rows
        ]
        await connection.execute(statement, given)


def values_by_column(
    connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]]
) -> tuple[list[str], list[Sequence[Any]]]:
    """Return the names of the columns in the database, and the values of each in the driver's form."""
    columns = [table.c[key] for key in rows[0]]
    found: list[Sequence[Any]] = []
    for column in columns:
        values = [row[column.key] for row in rows]
        convert = column.type.dialect_impl(connection.dialect).bind_processor(connection.dialect)
        found.append(values if convert is None else converted(convert, values))
    return [column.name for column in columns], found


def converted(convert: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Convert values, each distinct one once: many rows have the same date, state or transfer."""
    known = {value: convert(value) for value in set(values)}
    return [known[value] for value in values]


def insert_into(connection: AsyncConnection, table: Table, names: Sequence[str]) -> str:
    """Return an INSERT statement up to VALUES."""
    quoted = connection.dialect.identifier_preparer
    into = f"{quoted.format_table(table)} ({', '.join(map(quoted.quote, names))})"
    return f"INSERT INTO {into} VALUES "  # noqa: S608 - names, and they are quoted
