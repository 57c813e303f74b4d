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
from genie.timeouts.databases.base import LOCK_TIMEOUT_S, Database, insert_into, values_by_column
from genie.timeouts.times import Utc

LOCK_SUFFIX = "-timeouts"
"""Suffix of a file beside the database, always empty, whose lock is the run lock."""


_OFFSETS = ("*[zZ]", "*:*[+-][0-9][0-9]:[0-9][0-9]")
"""GLOB patterns of a date with an offset from UTC."""


class Sqlite(Database):
    """A file, by aiosqlite.

    A writer has the file to itself until it commits, so ids are committed in order. The run lock
    can't be a lock of that file: the ledger could not write during a delivery.
    """

    commits_in_order = True
    driver_errors = (sqlite3.Error,)

    def __init__(self, url: URL) -> None:
        engine = file_engine(
            url, lock_timeout_s=LOCK_TIMEOUT_S, pool_size=2, instead="name a file, as in sqlite:///ledger.db"
        )
        self._file = os.path.realpath(url.database or "")  # the same lock for every path to the file
        super().__init__(url, engine)

    def exists(self) -> bool:
        """See `Database`."""
        return Path(self._file).exists()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """See `Database`."""
        async with write_transaction(self._engine) as connection:
            yield connection

    @asynccontextmanager
    async def creating(self) -> AsyncIterator[AsyncConnection]:
        """See `Database`. A new file is put into WAL mode."""
        async with self.reading() as connection:
            empty = not (await connection.exec_driver_sql("PRAGMA schema_version")).scalar_one()
            if empty:
                await enable_wal(connection, LOCK_TIMEOUT_S)
        async with self.writing() as connection:
            yield connection

    @asynccontextmanager
    async def try_lock(self) -> AsyncIterator[bool]:
        """See `Database`. The operating system releases the lock with the process."""
        lock = await asyncio.to_thread(self._lock)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.close()

    def _lock(self) -> sqlite3.Connection | None:
        lock = sqlite3.connect(self._file + LOCK_SUFFIX, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            lock.close()
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            return None
        return lock

    def comparable_date(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """See `Database`. Other programs may have written it in any form; an invalid date stays as
        it is.

        So does a date with an offset if the ledger has a time zone: it is rejected when it is read.
        """
        one_form: ColumnElement[Any] = func.strftime("%Y-%m-%d %H:%M:%f", column, type_=column.type)
        if isinstance(column.type, Utc) and column.type.zone is not None:
            offset = or_(*(type_coerce(column, String).op("GLOB")(form) for form in _OFFSETS))
            one_form = case((offset, column), else_=one_form)
        return func.coalesce(one_form, column, type_=column.type)

    def shifted_date(self, column: ColumnElement[Any], by: timedelta) -> ColumnElement[Any]:
        """See `Database`. An invalid date stays as it is."""
        moved = func.strftime("%Y-%m-%d %H:%M:%f", column, f"{by.total_seconds():+.3f} seconds", type_=column.type)
        return func.coalesce(moved, column, type_=column.type)

    async def insert_rows(self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """See `Database`."""
        if rows:
            names, columns = values_by_column(connection, table, rows)
            text = f"{insert_into(connection, table, names)}({', '.join('?' for _ in names)})"
            await connection.exec_driver_sql(text, list(zip(*columns, strict=True)))
