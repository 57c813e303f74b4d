"""Engines and advisory locks of database servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import URL, ColumnElement, Executable, func, literal, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from genie.tasks import run_to_completion


def server_engine(url: URL, *, pool_size: int, **options: Any) -> AsyncEngine:
    """Create an engine for a database server, with at most `pool_size` connections.

    The isolation level is READ COMMITTED: a statement that has waited for a locked row must see
    what the other transaction wrote; stricter levels fail then. `options` are those of SQLAlchemy's
    `create_async_engine`.
    """
    return create_async_engine(url, isolation_level="READ COMMITTED", pool_size=pool_size, max_overflow=0, **options)


@asynccontextmanager
async def open_connection(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A connection of the engine's pool, which is returned at the end of the block.

    A cancellation waits until the connection is open or closed. After the checkout from the pool
    SQLAlchemy may still wait for the driver, to set the isolation level: if that is cancelled, the
    connection never returns to the pool.
    """
    connection = engine.connect()
    try:
        await run_to_completion(connection.start())
        yield connection
    finally:
        if connection.sync_connection is not None:  # None: opening it has failed
            await run_to_completion(connection.close())


@asynccontextmanager
async def open_transaction(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A connection in a transaction, which is committed if the block ends without an error."""
    async with open_connection(engine) as connection, connection.begin():
        yield connection


def schema_lock(name: str) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Return the two key arguments of a PostgreSQL advisory lock, which identify a name in the
    current schema.
    """
    return func.hashtext(literal(name)), func.hashtext(func.current_schema())


async def lock_schema(connection: AsyncConnection, name: str) -> None:
    """Acquire a PostgreSQL advisory lock for a name in the current schema; it ends with the
    transaction.
    """
    await connection.execute(select(func.pg_advisory_xact_lock(*schema_lock(name))))


async def release_or_invalidate(connection: AsyncConnection, release: Executable) -> None:
    """Release a lock that belongs to a connection's session; if that fails, close the connection,
    which ends the lock.

    Closing alone would not suffice: a server may notice late that a connection was closed.
    """
    try:
        await connection.execute(release)
    except DBAPIError:
        await connection.invalidate()
