"""Engines and advisory locks of database servers.

A connection can become half-open: a firewall or a proxy drops its packets, and neither side is informed. Every wait for
the server in this module has a time limit, because the drivers would wait forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any

from sqlalchemy import URL, ColumnElement, Executable, func, literal, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from genie.tasks import run_to_completion

__all__ = [
    "close_engine",
    "lock_schema",
    "open_connection",
    "open_transaction",
    "release_or_invalidate",
    "schema_lock_key",
    "server_engine",
]

OPEN_GRACE_S = 1.0
"""How long a cancellation waits for a connection that is being opened."""

OPEN_TIMEOUT_S = 40.0
"""How long opening a connection may take, with the test of a pooled one. More than the 30 s for which a pool lets a caller
wait.
"""

CLOSE_TIMEOUT_S = 30.0
"""How long returning a connection to its pool may take, with the rollback, and closing the connections of a pool."""

RELEASE_TIMEOUT_S = 10.0
"""How long releasing a lock of a database session may take."""


def server_engine(url: URL, *, pool_size: int, **options: Any) -> AsyncEngine:
    """Create an engine for a database server, with at most `pool_size` connections.

    The isolation level is READ COMMITTED: a statement that has waited for a locked row must see what the other
    transaction wrote. Under stricter levels the statement would fail. `options` are passed to `create_async_engine`.
    """
    return create_async_engine(url, isolation_level="READ COMMITTED", pool_size=pool_size, max_overflow=0, **options)


@asynccontextmanager
async def open_connection(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Check a connection out of the engine's pool, and return it to the pool at the end of the block.

    A cancellation of this task is delayed until the connection is completely open or closed. Otherwise a cancellation while
    SQLAlchemy sets the isolation level, after the checkout, would leak the connection from the pool. The delay for opening
    is at most `OPEN_GRACE_S`: a connection that takes longer still waits for the server, before the checkout.

    Raises TimeoutError if the connection is not open after `OPEN_TIMEOUT_S`.
    """
    connection = engine.connect()
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await run_to_completion(connection.start(), grace_s=OPEN_GRACE_S)
        yield connection
    finally:
        was_checked_out = connection.sync_connection is not None
        if was_checked_out:
            # If it takes too long, the pool discards the connection.
            await run_to_completion(_limit_close(connection.close()))


async def close_engine(engine: AsyncEngine) -> None:
    """Close the connections of an engine's pool. After `CLOSE_TIMEOUT_S` the rest is left to the garbage collector."""
    await _limit_close(engine.dispose())


async def _limit_close(close: Awaitable[None]) -> None:
    """Await `close` for at most `CLOSE_TIMEOUT_S`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await close


@asynccontextmanager
async def open_transaction(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Run a block in a transaction on a connection of the pool. Commits at the end of the block, rolls back after an error."""
    async with open_connection(engine) as connection, connection.begin():
        yield connection


def schema_lock_key(name: str) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Return the key of a PostgreSQL advisory lock, as SQL expressions for two integers.

    The integers are hashes of `name` and of the current schema, so that each schema has its own locks.
    """
    return func.hashtext(literal(name)), func.hashtext(func.current_schema())


async def lock_schema(connection: AsyncConnection, name: str) -> None:
    """Wait for a PostgreSQL advisory lock on `name` in the current schema. The end of the transaction releases it."""
    await connection.execute(select(func.pg_advisory_xact_lock(*schema_lock_key(name))))


async def release_or_invalidate(connection: AsyncConnection, release: Executable) -> None:
    """Execute `release`, the statement that releases a lock of this database session.

    If the statement fails, or takes longer than `RELEASE_TIMEOUT_S`, the connection is closed, which also ends the lock.
    Closing it at once would not do, because a server may notice late that a connection was closed.
    """
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            await connection.execute(release)
    except (DBAPIError, TimeoutError):
        await connection.invalidate()
