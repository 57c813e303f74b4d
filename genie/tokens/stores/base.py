"""What a token store in SQL asks of its kind of database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import URL, ColumnElement, Row, Select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from genie.tokens.stores.change_feed import Feeds, Follower, Get


class Backend(ABC):
    """A kind of database: how it is connected to, how it writes, and how it tells others of changes."""

    def __init__(self, url: URL, engine: AsyncEngine, **alone: Any) -> None:
        self._engine = engine
        self._alone = create_async_engine(url, poolclass=NullPool, **alone)

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()
        await self._alone.dispose()

    @abstractmethod
    async def prepare(self) -> None:
        """Create the tables, or check those that are there."""

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction."""
        async with self._engine.begin() as connection:
            yield connection

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[AsyncConnection]:
        """A connection that belongs to nobody else and is closed at the end."""
        async with self._alone.connect() as connection:
            yield connection

    async def rows(self, query: Select[Any]) -> Sequence[Row[Any]]:
        """What a query finds."""
        async with self._engine.connect() as connection:
            found: Sequence[Row[Any]] = (await connection.execute(query)).all()
            return found

    @abstractmethod
    def among(self, ids: Sequence[str]) -> ColumnElement[bool]:
        """That a token's id is one of these, however many: they are one parameter."""

    @abstractmethod
    async def publish(self, connection: AsyncConnection, texts: Iterable[str]) -> None:
        """Tell all who follow, when the connection's transaction is committed."""

    @abstractmethod
    def follower(self, feeds: Feeds, get: Get) -> Follower:
        """Who hears what others publish."""
