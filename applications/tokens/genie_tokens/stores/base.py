"""The interface of a database, which each dialect implements for the SQL token store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import URL, ColumnElement, Row, Select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from genie.sql.engine import close_engine, open_connection, open_transaction
from genie_tokens.stores.change_feed import ChangeFeeds, ChangeListener, Get


class Backend(ABC):
    """A database: its connections, its transactions, and the publication of changes to other
    processes.

    `dedicated_options` are the engine options of connections outside of the pool.
    """

    def __init__(self, url: URL, engine: AsyncEngine, **dedicated_options: Any) -> None:
        self._engine = engine
        self._dedicated_engine = create_async_engine(url, poolclass=NullPool, **dedicated_options)

    async def close(self) -> None:
        """Close all connections."""
        await close_engine(self._engine)
        await close_engine(self._dedicated_engine)

    @abstractmethod
    async def prepare(self) -> None:
        """Create the tables that don't exist, and check the others."""

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Provide a connection in a transaction, which is committed if the block ends without an
        error.
        """
        async with open_transaction(self._engine) as connection:
            yield connection

    @asynccontextmanager
    async def dedicated(self) -> AsyncIterator[AsyncConnection]:
        """Provide a connection outside of the pool. The connection is closed at the end of the block."""
        async with open_connection(self._dedicated_engine) as connection:
            yield connection

    async def rows(self, query: Select[Any]) -> Sequence[Row[Any]]:
        """Execute a query, and return its rows."""
        async with open_connection(self._engine) as connection:
            rows: Sequence[Row[Any]] = (await connection.execute(query)).all()
            return rows

    @abstractmethod
    def id_in(self, ids: Sequence[str]) -> ColumnElement[bool]:
        """Return the SQL condition that a token's id is one of `ids`, which are passed as a single
        parameter.
        """

    @abstractmethod
    async def publish(self, connection: AsyncConnection, payloads: Iterable[str]) -> None:
        """Publish changes to all listeners once the connection's transaction is committed."""

    @abstractmethod
    def listener(self, feeds: ChangeFeeds, get: Get) -> ChangeListener:
        """Create the listener that passes the changes published by any process to `feeds`.

        `get` reads tokens by id from the store.
        """
