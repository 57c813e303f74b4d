"""MariaDB and MySQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import URL, ColumnElement, Table, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.sql.engine import open_connection, release_or_invalidate, server_engine
from genie.timeouts.databases.base import (
    CONNECT_TIMEOUT_S,
    LOCK_TIMEOUT_S,
    SERVER_OPTIONS,
    Database,
    converted,
    insert_into,
    values_by_column,
)

IDLE_TIMEOUT_S = 8 * 3600
"""How long a connection may be idle: the server's usual default, set in case its own is shorter."""

ROWS_PER_INSERT = 5_000
"""Rows of one statement: less than a megabyte, which every server accepts."""


class Mysql(Database):
    """A database, by asyncmy."""

    def __init__(self, url: URL) -> None:
        # The default isolation level lets a reader block writers. And the connection that holds the run
        # lock is idle during the delivery, however long that takes.
        settings = (
            f"SET time_zone = '+00:00', innodb_lock_wait_timeout = {LOCK_TIMEOUT_S}, wait_timeout = {IDLE_TIMEOUT_S}"
        )
        engine = server_engine(
            url,
            **SERVER_OPTIONS,
            enable_from_linting=False,  # it does not see that a subquery joins the last state change to its transfer
            connect_args={"connect_timeout": int(CONNECT_TIMEOUT_S), "init_command": settings},
        )
        super().__init__(url, engine)

    @asynccontextmanager
    async def creating(self) -> AsyncIterator[AsyncConnection]:
        """See `Database`. Here each CREATE TABLE commits on its own, so a named lock excludes
        others.
        """
        async with self._locked("tables", LOCK_TIMEOUT_S) as got, self.writing() as connection:
            if not got:
                raise TimeoutError(f"another process has been creating the tables for {LOCK_TIMEOUT_S} s")
            yield connection

    @asynccontextmanager
    async def try_lock(self) -> AsyncIterator[bool]:
        """See `Database`."""
        async with self._locked("run", 0) as got:
            yield got

    @asynccontextmanager
    async def _locked(self, what: str, wait_s: int) -> AsyncIterator[bool]:
        """A named lock of the server, which ends with the connection. Names have at most 64
        characters.
        """
        name = func.concat(f"genie {what} ", func.left(func.sha2(func.database(), 256), 40))
        async with open_connection(self._autocommit) as connection:
            got = bool((await connection.execute(select(func.get_lock(name, wait_s)))).scalar_one())
            try:
                yield got
            finally:
                if got:
                    await release_or_invalidate(connection, select(func.release_lock(name)))

    def shifted_date(self, column: ColumnElement[Any], by: timedelta) -> ColumnElement[Any]:
        """See `Database`."""
        return func.timestampadd(literal_column("MICROSECOND"), by // timedelta(microseconds=1), column)

    async def insert_rows(self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """See `Database`. Uses long statements; the driver's executemany takes twice as long."""
        await self._insert(connection, table, rows, "")

    async def update_rows(
        self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]], columns: Sequence[str]
    ) -> None:
        """See `Database`. Uses INSERT … ON DUPLICATE KEY UPDATE: one UPDATE per row would take a
        round trip each.
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
        self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]], rest: str
    ) -> None:
        """Insert many rows. `rest` is the end of each statement."""
        if not rows:
            return
        driver: Any = (await connection.get_raw_connection()).driver_connection
        names, columns = values_by_column(connection, table, rows)
        literals = [converted(driver.literal, column) for column in columns]
        lines = [f"({','.join(line)})" for line in zip(*literals, strict=True)]
        insert = insert_into(connection, table, names).replace("%%", "%")  # escaped only in statements with parameters
        rest = rest.replace("%%", "%")
        for start in range(0, len(lines), ROWS_PER_INSERT):
            text = insert + ",".join(lines[start : start + ROWS_PER_INSERT]) + rest
            await connection.exec_driver_sql(text, execution_options={"no_parameters": True})
