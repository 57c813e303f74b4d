"""SQLite files shared by several processes: engine, WAL mode, write transactions."""

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

WAL_RETRY_INTERVAL_S = 0.05


def file_engine(url: URL, *, lock_timeout_s: float, pool_size: int, instead: str) -> AsyncEngine:
    """Create an engine for a file. Statements and callers wait `lock_timeout_s` for locks and connections.

    ValueError for a database in memory, which belongs to one connection; `instead` says what to use.
    """
    if not url.database or ":memory:" in url.database or url.query.get("mode") == "memory":
        raise ValueError(f"an SQLite database in memory belongs to one connection: {instead}")
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
    """A transaction that takes the write lock at its begin.

    One that begins as a reader fails at its first write if another connection has written since.
    """
    async with open_transaction(engine) as connection:
        await connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield connection


async def enable_wal(connection: AsyncConnection, timeout_s: float) -> None:
    """Set the journal mode WAL, in which readers and the writer don't block each other. The file keeps it.

    While another connection writes, SQLite rejects this at once, whatever the lock timeout; so it is
    retried. SQLAlchemy's OperationalError after `timeout_s`, or for any other reason.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while (await connection.exec_driver_sql("PRAGMA journal_mode")).scalar_one() != "wal":
        try:
            await connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        except OperationalError as error:
            busy = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            if not busy or asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(WAL_RETRY_INTERVAL_S)
