"""PostgreSQL: row locks, and change notifications by LISTEN and NOTIFY."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ARRAY, URL, ColumnElement, Row, Text, bindparam, event, func, literal, select
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import Select

from genie.sql.engine import lock_schema, open_connection, server_engine
from genie_tokens.stores.base import Backend
from genie_tokens.stores.change_feed import PAYLOADS_PER_BATCH, ChangeFeeds, ChangeListener, Get
from genie_tokens.stores.schema import TOKENS, create_tables

POOL_SIZE = 10
"""Connections of a process, besides the one that receives notifications. They are not tested before each use, which would
take a round trip: `_reject_closed` recognizes a connection that the server has closed, and on a half-open connection the
test would wait as long as the call.
"""

HEARTBEAT_INTERVAL_S = 10.0
"""Time without a notification after which the connection is tested by a query."""

MAX_BUFFERED_PAYLOADS = 10_000
"""Notifications that are received and not processed yet. If there are more, the feeds resync."""


class Postgres(Backend):
    """A database, by asyncpg. The tables are in its first schema (`search_path`)."""

    def __init__(self, url: URL) -> None:
        engine = server_engine(url, pool_size=POOL_SIZE)
        event.listen(engine.sync_engine, "checkout", _reject_closed)
        super().__init__(url, engine, isolation_level="AUTOCOMMIT")
        self._autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        """For single statements, which need no transaction."""
        self.channel = ""
        """The name of the channel for notifications; set by `prepare`."""

    async def prepare(self) -> None:
        """Create the tables that don't exist, and check the others. Derive the name of the
        notification channel from the name of the database schema.

        An advisory lock serializes processes, because CREATE TABLE fails if another process creates
        the same table concurrently.
        """
        async with self.writing() as connection:
            schema = str((await connection.execute(select(func.current_schema()))).scalar_one())
            self.channel = f"genie_tokens_{hashlib.sha256(schema.encode()).hexdigest()[:16]}"
            await lock_schema(connection, "genie tokens' tables")
            await connection.run_sync(create_tables, (TOKENS,))

    async def rows(self, query: Select[Any]) -> Sequence[Row[Any]]:
        """Execute a query, and return its rows. A single statement needs no transaction."""
        async with open_connection(self._autocommit) as connection:
            rows: Sequence[Row[Any]] = (await connection.execute(query)).all()
            return rows

    def id_in(self, ids: Sequence[str]) -> ColumnElement[bool]:
        """Return the SQL condition that a token's id is one of `ids`, which are passed as an array."""
        return TOKENS.c.id == func.any(literal(list(ids), ARRAY(Text)))

    async def publish(self, connection: AsyncConnection, payloads: Iterable[str]) -> None:
        """Send payloads by NOTIFY, which takes effect when the connection's transaction commits."""
        payload = func.unnest(bindparam("payloads", list(payloads), ARRAY(Text))).column_valued("payload")
        await connection.execute(select(func.pg_notify(self.channel, payload)))

    def listener(self, feeds: ChangeFeeds, get: Get) -> ChangeListener:
        """Create the listener that receives the notifications."""
        return _NotificationListener(self, feeds, get)


def _reject_closed(connection: Any, _record: object, _proxy: object) -> None:
    """Make the connection pool replace a connection that the server has closed. The driver knows
    about the close without a round trip.
    """
    if connection.driver_connection.is_closed():
        raise DisconnectionError


class _NotificationListener(ChangeListener):
    """Receives NOTIFY messages, in commit order, on a dedicated connection."""

    def __init__(self, backend: Postgres, feeds: ChangeFeeds, get: Get) -> None:
        super().__init__(feeds, get)
        self._backend = backend

    async def _listen(self) -> None:
        """Receive notifications until the listener is stopped or the connection fails.

        Callbacks of the driver buffer the notifications, and `_publish_buffered` publishes them.
        """
        async with self._backend.dedicated() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            buffer: deque[str] = deque(maxlen=MAX_BUFFERED_PAYLOADS + 1)  # full: notifications may have been lost

            def on_notification(_connection: object, _process: int, _channel: str, payload: object) -> None:
                buffer.append(str(payload))
                self._wake.set()

            def on_terminated(_connection: object) -> None:
                self._wake.set()

            driver.add_termination_listener(on_terminated)
            try:
                async with asyncio.timeout(HEARTBEAT_INTERVAL_S):
                    await driver.add_listener(self._backend.channel, on_notification)
                self._on_connected()
                await self._publish_buffered(driver, buffer)
            except BaseException:
                driver.terminate()  # without a farewell, because the server may not reply
                raise
            finally:
                driver.remove_termination_listener(on_terminated)

    async def _publish_buffered(self, driver: Any, buffer: deque[str]) -> None:
        """Publish buffered notifications until the listener is stopped.

        If the buffer has overflowed, makes the readers resync. After `HEARTBEAT_INTERVAL_S` without
        a notification, tests the connection by a query. Raises ConnectionError if the connection
        was closed.
        """
        while not self._stopped:
            if driver.is_closed():
                raise ConnectionError("the connection for notifications of token changes was closed")
            if len(buffer) > MAX_BUFFERED_PAYLOADS:
                buffer.clear()
                self._feeds.resync()
            elif buffer:
                await self._publish([buffer.popleft() for _ in range(min(PAYLOADS_PER_BATCH, len(buffer)))])
            elif not await self._wait_for_wake(HEARTBEAT_INTERVAL_S):
                await driver.execute("SELECT 1", timeout=HEARTBEAT_INTERVAL_S)
