"""MariaDB and MySQL: named locks, and multi-row statements."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import URL, ColumnElement, Table, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.sql.engine import open_connection, release_or_invalidate, server_engine
from genie_ledger.databases.base import (
    CONNECT_TIMEOUT_S,
    LOCK_TIMEOUT_S,
    SERVER_OPTIONS,
    Database,
    convert_all,
    insert_into,
    values_by_column,
)

IDLE_TIMEOUT_S = 8 * 3600
"""How long a connection may be idle: the usual default, set because a server may have a shorter
one.
"""

ROWS_PER_INSERT = 5_000
"""Rows of one statement: less than a megabyte, which every server accepts."""


class Mysql(Database):
    """A database, by asyncmy."""

    def __init__(self, url: URL) -> None:
        # The connection that holds the run lock is idle during the delivery, however long that takes.
        settings = (
            f"SET time_zone = '+00:00', innodb_lock_wait_timeout = {LOCK_TIMEOUT_S}, wait_timeout = {IDLE_TIMEOUT_S}"
        )
        engine = server_engine(
            url,
            **SERVER_OPTIONS,
            enable_from_linting=False,  # SQLAlchemy would report a join by a correlated subquery as a missing join
            connect_args={"connect_timeout": int(CONNECT_TIMEOUT_S), "init_command": settings},
        )
        super().__init__(url, engine)

    @asynccontextmanager
    async def schema_transaction(self) -> AsyncIterator[AsyncConnection]:
        """Provide a transaction for creating tables, under a named lock.

        The lock serializes the processes that create tables. The transaction alone would not,
        because each CREATE TABLE commits implicitly. Raises TimeoutError if another process holds
        the lock for `LOCK_TIMEOUT_S`.
        """
        async with self._named_lock("tables", LOCK_TIMEOUT_S) as acquired, self.writing() as connection:
            if not acquired:
                raise TimeoutError(f"another process has been creating the tables for {LOCK_TIMEOUT_S} s")
            yield connection

    @asynccontextmanager
    async def try_lock(self) -> AsyncIterator[bool]:
        """Try to acquire the run lock, a named lock of the server, without waiting; yield whether
        the lock was acquired.
        """
        async with self._named_lock("run", 0) as acquired:
            yield acquired

    @asynccontextmanager
    async def _named_lock(self, purpose: str, wait_s: int) -> AsyncIterator[bool]:
        """Acquire a named lock of the server for the duration of the block; yield whether the lock
        was acquired within `wait_s` seconds.

        The lock ends with the connection. A lock's name has at most 64 characters and is shared by
        all databases of the server, so it contains a hash of the database's name.
        """
        name = func.concat(f"genie {purpose} ", func.left(func.sha2(func.database(), 256), 40))
        async with open_connection(self._autocommit) as connection:
            acquired = bool((await connection.execute(select(func.get_lock(name, wait_s)))).scalar_one())
            try:
                yield acquired
            finally:
                if acquired:
                    await release_or_invalidate(connection, select(func.release_lock(name)))

    def shifted_date(self, column: ColumnElement[Any], by: timedelta) -> ColumnElement[Any]:
        """Return an SQL expression that adds a duration to a date of the ledger."""
        return func.timestampadd(literal_column("MICROSECOND"), by // timedelta(microseconds=1), column)

    async def insert_rows(self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert many rows by multi-row statements, because the driver's `executemany` takes twice
        as long.
        """
        await self._insert(connection, table, rows, "")

    async def update_rows(
        self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]], columns: Sequence[str]
    ) -> None:
        """Update the given columns of many rows by INSERT … ON DUPLICATE KEY UPDATE, because one
        UPDATE per row would take a round trip each.
        """
        quote = connection.dialect.identifier_preparer.quote
        names = [quote(table.c[column].name) for column in columns]
        await self._insert(
            connection,
            table,
            rows,
            f" ON DUPLICATE KEY UPDATE {', '.join(f'{name} = VALUES({name})' for name in names)}",
        )

    async def _insert(
        self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]], suffix: str
    ) -> None:
        """Insert many rows by multi-row INSERT statements that end with `suffix`."""
        if not rows:
            return
        driver: Any = (await connection.get_raw_connection()).driver_connection
        names, columns = values_by_column(connection, table, rows)
        literals = [convert_all(driver.literal, column) for column in columns]
        tuples = [f"({','.join(row)})" for row in zip(*literals, strict=True)]
        # SQLAlchemy writes % in names as %%, which the driver only unescapes in statements with parameters.
        insert = insert_into(connection, table, names).replace("%%", "%")
        suffix = suffix.replace("%%", "%")
        for start in range(0, len(tuples), ROWS_PER_INSERT):
            statement = insert + ",".join(tuples[start : start + ROWS_PER_INSERT]) + suffix
            await connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
