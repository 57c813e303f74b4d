"""SQLite: a file, with one writer at a time."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import URL, ColumnElement, String, Table, case, func, or_, type_coerce
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.sql.sqlite import enable_wal, file_engine, write_transaction
from genie_ledger.databases.base import LOCK_TIMEOUT_S, Database, insert_into, values_by_column
from genie_ledger.times import Utc

LOCK_SUFFIX = "-timeouts"
"""Suffix of the lock file: an empty database in the ledger's folder, whose write lock is the run
lock.
"""

_OFFSET_PATTERNS = ("*[zZ]", "*:*[+-][0-9][0-9]:[0-9][0-9]")
"""GLOB patterns of a date with an offset from UTC."""


class Sqlite(Database):
    """A file, by aiosqlite.

    SQLite has one writer at a time, so ids are committed in order. The run lock is the write lock
    of another file: otherwise the ledger could not write during a delivery.
    """

    commits_in_order = True
    driver_errors = (sqlite3.Error,)

    def __init__(self, url: URL) -> None:
        engine = file_engine(
            url, lock_timeout_s=LOCK_TIMEOUT_S, pool_size=2, hint="name a file, as in sqlite:///ledger.db"
        )
        self._file = os.path.realpath(url.database or "")  # so that every path to the file has the same lock file
        super().__init__(url, engine)

    def exists(self) -> bool:
        """Return whether the file exists: connecting would create it."""
        return Path(self._file).exists()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Provide a connection in a transaction that acquires the write lock at its beginning."""
        async with write_transaction(self._engine) as connection:
            yield connection

    @asynccontextmanager
    async def schema_transaction(self) -> AsyncIterator[AsyncConnection]:
        """Provide a transaction for creating tables. The WAL mode of a new file is enabled first."""
        async with self.reading() as connection:
            is_empty = not (await connection.exec_driver_sql("PRAGMA schema_version")).scalar_one()
            if is_empty:
                await enable_wal(connection, LOCK_TIMEOUT_S)
        async with self.writing() as connection:
            yield connection

    @asynccontextmanager
    async def try_lock(self) -> AsyncIterator[bool]:
        """Try to acquire the run lock, an exclusive lock of the lock file, without waiting; yield
        whether the lock was acquired.

        The operating system releases the lock when the process ends.
        """
        lock_connection = await asyncio.to_thread(self._try_lock_file)
        try:
            yield lock_connection is not None
        finally:
            if lock_connection is not None:
                lock_connection.close()  # releases the lock

    def _try_lock_file(self) -> sqlite3.Connection | None:
        """Lock the lock file by an exclusive transaction, without waiting.

        Returns the connection that holds the lock, or None if another process holds the lock.
        Closing the connection releases the lock.
        """
        path = self._file + LOCK_SUFFIX
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            connection.close()
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            return None
        return connection

    def comparable_date(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return an SQL expression that converts a date to one text format, so that dates can be
        compared as text. Programs that write to the ledger may use several formats.

        Invalid dates are not converted. If the ledger has a time zone, dates with an offset from
        UTC are not converted. Both are rejected when they are read.
        """
        normalized: ColumnElement[Any] = func.strftime("%Y-%m-%d %H:%M:%f", column, type_=column.type)
        if isinstance(column.type, Utc) and column.type.zone is not None:
            has_offset = or_(*(type_coerce(column, String).op("GLOB")(pattern) for pattern in _OFFSET_PATTERNS))
            normalized = case((has_offset, column), else_=normalized)
        return func.coalesce(normalized, column, type_=column.type)

    def shifted_date(self, column: ColumnElement[Any], by: timedelta) -> ColumnElement[Any]:
        """Return an SQL expression that adds a duration to a date of the ledger. An invalid date
        stays as it is.
        """
        shifted = func.strftime("%Y-%m-%d %H:%M:%f", column, f"{by.total_seconds():+.3f} seconds", type_=column.type)
        return func.coalesce(shifted, column, type_=column.type)

    async def insert_rows(self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert many rows by one `executemany`."""
        if rows:
            names, columns = values_by_column(connection, table, rows)
            statement = f"{insert_into(connection, table, names)}({', '.join('?' for _ in names)})"
            await connection.exec_driver_sql(statement, list(zip(*columns, strict=True)))
