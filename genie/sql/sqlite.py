"""SQLite files that several processes share: engine, WAL mode, write transactions."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import URL
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from genie.sql.engine import open_transaction

__all__ = ["enable_wal", "file_engine", "write_transaction"]

WAL_RETRY_INTERVAL_S = 0.05
"""Pause between two attempts to set the journal mode."""


def file_engine(url: URL, *, lock_timeout_s: float, pool_size: int, hint: str) -> AsyncEngine:
    """Create an engine for an SQLite file.

    `lock_timeout_s` limits the wait for SQLite's file locks, and the wait for a free connection of the pool.

    Raises:
        ValueError: for a database in memory, since each connection would have its own database. The message ends with
            `hint`, which says what to use instead.

    """
    if not url.database or ":memory:" in url.database or url.query.get("mode") == "memory":
        raise ValueError(f"an SQLite database in memory belongs to one connection: {hint}")
    return create_async_engine(
        url,
        connect_args={"timeout": lock_timeout_s},
        poolclass=AsyncAdaptedQueuePool,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=lock_timeout_s,
    )


@asynccontextmanager
async def write_transaction(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Run a block in a transaction that acquires SQLite's write lock at its start, not at the first write.

    Otherwise the first write would fail if another connection has written since the first read of this transaction.
    """
    async with open_transaction(engine) as connection:
        await connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield connection


async def enable_wal(connection: AsyncConnection, timeout_s: float) -> None:
    """Set a file's journal mode to WAL, in which readers and the writer don't block each other. The file keeps this mode.

    While another connection writes, SQLite rejects the change at once, whatever the lock timeout is. So this function
    retries it for `timeout_s` seconds.

    Raises:
        OperationalError: of SQLAlchemy, if the file is busy for all this time, or at once for any other error.

    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while (await connection.exec_driver_sql("PRAGMA journal_mode")).scalar_one() != "wal":
        try:
            await connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        except OperationalError as error:
            is_busy = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            if not is_busy or asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(WAL_RETRY_INTERVAL_S)
