"""SQLite's mode WAL, in which readers and the writer don't wait for each other. A file remembers it."""

from __future__ import annotations

import asyncio
import sqlite3

from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

AGAIN_S = 0.05


async def keep_wal(connection: AsyncConnection, within_s: float) -> None:
    """Set the mode. While others write to the file SQLite refuses that at once, however long it is to wait for locks.

    sqlalchemy's OperationalError where it is refused for so long, or for another reason.
    """
    end = asyncio.get_running_loop().time() + within_s
    while (await connection.exec_driver_sql("PRAGMA journal_mode")).scalar_one() != "wal":
        try:
            await connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        except OperationalError as error:
            busy = getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            if not busy or asyncio.get_running_loop().time() > end:
                raise
            await asyncio.sleep(AGAIN_S)
