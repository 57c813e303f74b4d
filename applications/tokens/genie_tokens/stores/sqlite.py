"""SQLite: one writer at a time, and a change log that readers poll."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from sqlalchemy import URL, ColumnElement, bindparam, delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.sql.engine import open_connection
from genie.sql.sqlite import enable_wal, file_engine, write_transaction
from genie_tokens.stores.base import Backend
from genie_tokens.stores.change_feed import PAYLOADS_PER_BATCH, ChangeFeeds, ChangeListener, Get
from genie_tokens.stores.schema import CHANGES, TOKENS, create_tables

LOCK_TIMEOUT_S = 30.0
"""How long a writer waits for writers of other processes."""

POOL_SIZE = 4
"""Connections of a process. Each has its own thread."""

POLL_INTERVAL_S = 0.05
"""Interval of checks for commits; a check reads no table."""

MAX_LOG_ROWS = 100_000
"""Maximum number of rows in the change log, one for each payload. A reader that lags by more must
resync.
"""

TRIM_INTERVAL_ROWS = 100
"""Number of rows that a process writes before it trims the log."""


class Sqlite(Backend):
    """A file, by aiosqlite."""

    def __init__(self, url: URL) -> None:
        engine = file_engine(
            url, lock_timeout_s=LOCK_TIMEOUT_S, pool_size=POOL_SIZE, hint="name a file, or use MemoryTokenStore"
        )
        super().__init__(url, engine, connect_args={"timeout": LOCK_TIMEOUT_S})
        self._write_lock = asyncio.Lock()
        """Serializes the write transactions of this process."""
        self._rows_since_trim = TRIM_INTERVAL_ROWS  # so that the first write trims the change log

    async def prepare(self) -> None:
        """Enable the WAL mode, create the tables that don't exist, and check the others."""
        async with open_connection(self._engine) as connection:
            await enable_wal(connection, LOCK_TIMEOUT_S)
        async with self.writing() as connection:
            await connection.run_sync(create_tables, (TOKENS, CHANGES))

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Provide a connection in a write transaction, which is committed if the block ends without
        an error.

        Write transactions of this process wait for each other by a lock in memory, because SQLite
        would poll.
        """
        async with self._write_lock, write_transaction(self._engine) as connection:
            yield connection

    def id_in(self, ids: Sequence[str]) -> ColumnElement[bool]:
        """Return the SQL condition that a token's id is one of `ids`, which are passed as a JSON
        array.
        """
        rows = func.json_each(json.dumps(list(ids))).table_valued("value")
        return TOKENS.c.id.in_(select(rows.c.value))

    async def publish(self, connection: AsyncConnection, payloads: Iterable[str]) -> None:
        """Append payloads to the change log. After each `TRIM_INTERVAL_ROWS` rows, delete all but
        the newest `MAX_LOG_ROWS` rows of the log.
        """
        rows = [{"changes": payload} for payload in payloads]
        if not rows:
            return
        await connection.execute(insert(CHANGES), rows)
        self._rows_since_trim += len(rows)
        if self._rows_since_trim >= TRIM_INTERVAL_ROWS:
            newest = select(func.max(CHANGES.c.sequence)).scalar_subquery()
            await connection.execute(delete(CHANGES).where(CHANGES.c.sequence <= newest - MAX_LOG_ROWS))
            self._rows_since_trim = 0

    def listener(self, feeds: ChangeFeeds, get: Get) -> ChangeListener:
        """Create the listener that polls the change log."""
        return _LogPoller(self, feeds, get)


class _LogPoller(ChangeListener):
    """Polls for commits, and then reads the new rows of the change log."""

    def __init__(self, backend: Sqlite, feeds: ChangeFeeds, get: Get) -> None:
        super().__init__(feeds, get)
        self._backend = backend

    async def _listen(self) -> None:
        """Check every `POLL_INTERVAL_S` whether another connection has committed, and then publish
        the new rows of the change log. Returns when the listener is stopped.
        """
        async with self._backend.dedicated() as connection:
            previous_version = None
            last_sequence = await self._newest_sequence(connection)
            self._on_connected()
            while not self._stopped:
                # `data_version` changes with each commit of another connection, in any process. It is read before the
                # log, so that a commit in between is found at the next check.
                version = (await connection.exec_driver_sql("PRAGMA data_version")).scalar_one()
                if version != previous_version:
                    previous_version = version
                    last_sequence = await self._publish_log(connection, last_sequence)
                await self._wait_for_wake(POLL_INTERVAL_S)

    async def _newest_sequence(self, connection: AsyncConnection) -> int:
        return (await connection.execute(select(func.max(CHANGES.c.sequence)))).scalar_one() or 0

    async def _publish_log(self, connection: AsyncConnection, last_sequence: int) -> int:
        """Publish the rows of the change log after `last_sequence`, and return the sequence number
        of the last row read.

        If rows after `last_sequence` were deleted from the log, make the readers resync instead,
        and continue after the newest row.
        """
        query = select(CHANGES).where(CHANGES.c.sequence > bindparam("last"))
        query = query.order_by(CHANGES.c.sequence).limit(PAYLOADS_PER_BATCH)
        while not self._stopped:
            rows = (await connection.execute(query, {"last": last_sequence})).all()
            if not rows:
                break
            if rows[0].sequence != last_sequence + 1:  # rows in between were deleted
                last_sequence = await self._newest_sequence(connection)
                self._feeds.resync()
            else:
                last_sequence = rows[-1].sequence
                await self._publish([row.changes for row in rows])
        return last_sequence
