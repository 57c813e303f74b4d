"""PostgreSQL: rows are locked in one order by all, and changes are told by NOTIFY."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ARRAY, URL, ColumnElement, Row, Text, bindparam, event, func, literal, select
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.sql import Select

from genie.tokens.stores.base import Backend
from genie.tokens.stores.change_feed import TEXTS, Feeds, Follower, Get
from genie.tokens.stores.schema import TOKENS, ensure

CONNECTIONS = 10
"""Of a process, and one more that listens."""

HEARTBEAT_S = 10.0
"""After so long without a word it is asked whether the connection is still there."""

MOST_HEARD = 10_000
"""Texts that were heard and not read yet. Beyond them the readers are told to read everything again."""


class Postgres(Backend):
    """A database, by asyncpg. The tables are in its first schema (`search_path`)."""

    def __init__(self, url: URL) -> None:
        # Who waited for a row has to see what became of it: what stricter levels refuse.
        engine = create_async_engine(url, isolation_level="READ COMMITTED", pool_size=CONNECTIONS, max_overflow=0)
        event.listen(engine.sync_engine, "checkout", _refuse_closed)
        super().__init__(url, engine, isolation_level="AUTOCOMMIT")
        self._reading = engine.execution_options(isolation_level="AUTOCOMMIT")
        self.channel = ""

    async def prepare(self) -> None:
        """See `Backend`. Two who create the same tables would fail: they come one after the other."""
        async with self.writing() as connection:
            schema = str((await connection.execute(select(func.current_schema()))).scalar_one())
            self.channel = f"genie_tokens_{hashlib.sha256(schema.encode()).hexdigest()[:16]}"
            await connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(self.channel))))
            await connection.run_sync(ensure, (TOKENS,))

    async def rows(self, query: Select[Any]) -> Sequence[Row[Any]]:
        """See `Backend`. One statement needs no transaction around it."""
        async with self._reading.connect() as connection:
            found: Sequence[Row[Any]] = (await connection.execute(query)).all()
            return found

    def among(self, ids: Sequence[str]) -> ColumnElement[bool]:
        """See `Backend`."""
        return TOKENS.c.id == func.any(literal(list(ids), ARRAY(Text)))

    async def publish(self, connection: AsyncConnection, texts: Iterable[str]) -> None:
        """See `Backend`."""
        each = func.unnest(bindparam("texts", list(texts), ARRAY(Text))).column_valued("text")
        await connection.execute(select(func.pg_notify(self.channel, each)))

    def follower(self, feeds: Feeds, get: Get) -> Follower:
        """See `Backend`."""
        return _Listener(self, feeds, get)


def _refuse_closed(connection: Any, _record: object, _proxy: object) -> None:
    """Take another connection where the server has closed this one meanwhile: known without asking it."""
    if connection.driver_connection.is_closed():
        raise DisconnectionError


class _Listener(Follower):
    """Has a connection of its own, on which it hears what was committed, in that order."""

    def __init__(self, backend: Postgres, feeds: Feeds, get: Get) -> None:
        super().__init__(feeds, get)
        self._backend = backend

    async def _follow(self) -> None:
        async with self._backend.alone() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            heard: deque[str] = deque(maxlen=MOST_HEARD + 1)

            def hear(_connection: object, _process: int, _channel: str, text: object) -> None:
                heard.append(str(text))
                self._wake.set()

            def lose(_connection: object) -> None:
                self._wake.set()

            driver.add_termination_listener(lose)
            await driver.add_listener(self._backend.channel, hear)
            try:
                self._begin()
                await self._listen(driver, heard)
            finally:
                driver.remove_termination_listener(lose)
                if not driver.is_closed():
                    await driver.remove_listener(self._backend.channel, hear)

    async def _listen(self, driver: Any, heard: deque[str]) -> None:
        while not self._stopped:
            if driver.is_closed():
                raise ConnectionError("the connection that listens for changes of tokens is lost")
            if len(heard) > MOST_HEARD:
                heard.clear()
                self._feeds.resync()
            elif heard:
                await self._tell([heard.popleft() for _ in range(min(TEXTS, len(heard)))])
            elif not await self._sleep(HEARTBEAT_S):
                await driver.execute("SELECT 1", timeout=HEARTBEAT_S)
