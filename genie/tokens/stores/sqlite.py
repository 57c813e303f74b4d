"""SQLite: writers one after the other, and a change log that readers poll."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from sqlalchemy import URL, ColumnElement, bindparam, delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from genie.tokens.stores.base import Backend
from genie.tokens.stores.change_feed import TEXTS, Feeds, Follower, Get
from genie.tokens.stores.schema import CHANGES, TOKENS, ensure
from genie.wal import keep_wal

BUSY_S = 30.0
"""How long a writer waits for writers of other processes."""

READERS = 4
"""Connections of a process, each with a thread of its own."""

POLL_S = 0.05
"""How often it is asked whether anybody has committed anything, which reads no table."""

KEPT = 100_000
"""Rows of the change log, which are transactions. A reader that is further behind reads everything again."""

TRIM_EVERY = 100
"""Rows that a process writes before it cuts the log."""


class Sqlite(Backend):
    """A file, by aiosqlite."""

    def __init__(self, url: URL) -> None:
        if not url.database or ":memory:" in url.database or url.query.get("mode") == "memory":
            raise ValueError("SQLite in memory is one connection's own: give a file, or take MemoryTokenStore")
        waits = {"timeout": BUSY_S}
        pool = {"poolclass": AsyncAdaptedQueuePool, "pool_size": READERS, "max_overflow": 0, "pool_timeout": BUSY_S}
        engine = create_async_engine(url, connect_args=waits, **pool)
        super().__init__(url, engine, connect_args=waits)
        self._turn = asyncio.Lock()
        self._written = TRIM_EVERY

    async def prepare(self) -> None:
        """See `Backend`. Readers and a writer don't wait for each other in the mode WAL, which the file remembers."""
        async with self._engine.connect() as connection:
            await keep_wal(connection, BUSY_S)
        async with self.writing() as connection:
            await connection.run_sync(ensure, (TOKENS, CHANGES))

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """See `Backend`. It begins as a writer: one that begins as a reader may find that it is too late for that."""
        async with self._turn, self._engine.begin() as connection:
            await connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

    def among(self, ids: Sequence[str]) -> ColumnElement[bool]:
        """See `Backend`."""
        each = func.json_each(json.dumps(list(ids))).table_valued("value")
        return TOKENS.c.id.in_(select(each.c.value))

    async def publish(self, connection: AsyncConnection, texts: Iterable[str]) -> None:
        """See `Backend`."""
        rows = [{"changes": text} for text in texts]
        if not rows:
            return
        await connection.execute(insert(CHANGES), rows)
        self._written += len(rows)
        if self._written >= TRIM_EVERY:
            last = select(func.max(CHANGES.c.sequence)).scalar_subquery()
            await connection.execute(delete(CHANGES).where(CHANGES.c.sequence <= last - KEPT))
            self._written = 0

    def follower(self, feeds: Feeds, get: Get) -> Follower:
        """See `Backend`."""
        return _LogReader(self, feeds, get)


class _LogReader(Follower):
    """Asks whether somebody has committed, and then reads the log on from where it was."""

    def __init__(self, backend: Sqlite, feeds: Feeds, get: Get) -> None:
        super().__init__(feeds, get)
        self._backend = backend

    async def _follow(self) -> None:
        async with self._backend.alone() as connection:
            version = None
            last = await self._last(connection)
            self._begin()
            while not self._stopped:
                # Of other connections than this one, our own process's among them. Asked before the log is read:
                # what is committed in between is a new version again.
                now = (await connection.exec_driver_sql("PRAGMA data_version")).scalar_one()
                if now != version:
                    version = now
                    last = await self._read_on(connection, last)
                await self._sleep(POLL_S)

    async def _last(self, connection: AsyncConnection) -> int:
        return (await connection.execute(select(func.max(CHANGES.c.sequence)))).scalar_one() or 0

    async def _read_on(self, connection: AsyncConnection, last: int) -> int:
        """Tell what is in the log behind `last`; the new last of it."""
        behind = select(CHANGES).where(CHANGES.c.sequence > bindparam("last"))
        behind = behind.order_by(CHANGES.c.sequence).limit(TEXTS)
        while not self._stopped:
            rows = (await connection.execute(behind, {"last": last})).all()
            if not rows:
                break
            if rows[0].sequence != last + 1:
                last = await self._last(connection)
                self._feeds.resync()
            else:
                last = rows[-1].sequence
                await self._tell([row.changes for row in rows])
        return last
