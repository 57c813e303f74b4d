"""What the handler asks of a kind of database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import URL, ColumnElement, Table, bindparam
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

CONNECT_TIMEOUT_S = 10.0
"""How long a connection may take."""

LOCK_TIMEOUT_S = 30
"""How long a statement waits for rows or a file that others have locked."""


SERVER_OPTIONS: dict[str, Any] = {"pool_size": 2, "pool_pre_ping": True}
"""Of the engine of a server: one connection that holds the lock and one that works, each tested before its use."""


class Database(ABC):
    """One database: how it is read and written, and how two runs are kept apart in it."""

    commits_in_order = False
    """Whether nothing can be committed later with a smaller number than what is there."""

    driver_errors: tuple[type[Exception], ...] = ()
    """What comes of a driver that is asked past SQLAlchemy."""

    def __init__(self, url: URL, engine: AsyncEngine) -> None:
        self.name = url.set(query={}).render_as_string(hide_password=True)  # there may be a password in there, too
        self._engine = engine
        self._autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")

    async def connect(self) -> None:
        """Connect. ValueError, if the driver can't do what the URL says."""
        try:
            async with self.reading():
                pass
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{self.name}: the URL can't be right: {error}") from error

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    def exists(self) -> bool:
        """Whether it is there. False, where it would come into being when it is connected to."""
        return True

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Each statement sees what is committed when it begins, and locks nothing."""
        async with self._autocommit.connect() as connection:
            yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, which is committed if the block ends well."""
        async with self._engine.begin() as connection:
            yield connection

    @asynccontextmanager
    async def creating(self) -> AsyncIterator[AsyncConnection]:
        """As `writing`, for who creates tables: one at a time."""
        async with self.writing() as connection:
            yield connection

    @abstractmethod
    def try_lock(self) -> AbstractAsyncContextManager[bool]:
        """Whether nobody else has the turn in this database; if so it is ours until the block ends, or we do."""

    def comparable_date(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """A date of the ledger, so that it can be compared with others."""
        return column

    @abstractmethod
    def shifted_date(self, column: ColumnElement[Any], by: timedelta) -> ColumnElement[Any]:
        """A date of the ledger, moved."""

    @abstractmethod
    async def insert_rows(self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert many rows, which all have the same columns (by their keys), as fast as the driver can."""

    async def update_rows(
        self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]], columns: Sequence[str]
    ) -> None:
        """Write these columns of many rows, each with values of its own.

        A row has its primary key, these columns, and all others that can't be left out when a row is inserted.
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
    """The names of the columns in the database, and the values of each as its driver wants them."""
    columns = [table.c[key] for key in rows[0]]
    found: list[Sequence[Any]] = []
    for column in columns:
        values = [row[column.key] for row in rows]
        convert = column.type.dialect_impl(connection.dialect).bind_processor(connection.dialect)
        found.append(values if convert is None else converted(convert, values))
    return [column.name for column in columns], found


def converted(convert: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Each value, converted; each only once, for many rows have the same date, state or transfer."""
    known = {value: convert(value) for value in set(values)}
    return [known[value] for value in values]


def insert_into(connection: AsyncConnection, table: Table, names: Sequence[str]) -> str:
    """An INSERT as far as VALUES."""
    quoted = connection.dialect.identifier_preparer
    into = f"{quoted.format_table(table)} ({', '.join(map(quoted.quote, names))})"
    return f"INSERT INTO {into} VALUES "  # noqa: S608 - names, and they are quoted
