"""Engines and advisory locks of database servers."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, ColumnElement, Executable, func, literal, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine


def server_engine(url: URL, *, pool_size: int, **options: Any) -> AsyncEngine:
    """Create an engine for a server.

    READ COMMITTED: a statement that has waited for a row must see what the other transaction wrote;
    stricter levels reject that. `options` are those of SQLAlchemy.
    """
    return create_async_engine(url, isolation_level="READ COMMITTED", pool_size=pool_size, max_overflow=0, **options)


def schema_lock(name: str) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Return the key of PostgreSQL's advisory lock of a name in the current schema."""
    return func.hashtext(literal(name)), func.hashtext(func.current_schema())


async def lock_schema(connection: AsyncConnection, name: str) -> None:
    """Wait for PostgreSQL's advisory lock of a name in the current schema, until the transaction ends."""
    await connection.execute(select(func.pg_advisory_xact_lock(*schema_lock(name))))


async def release_or_invalidate(connection: AsyncConnection, release: Executable) -> None:
    """Release a lock of a connection's session; if that fails discard the connection, which ends the lock too.

    Discarding it in any case would not do: the server may notice that late, and holds the lock until then.
    """
    try:
        await connection.execute(release)
    except DBAPIError:
        await connection.invalidate()
