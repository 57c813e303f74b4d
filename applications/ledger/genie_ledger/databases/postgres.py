"""PostgreSQL: advisory locks, and COPY."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, timedelta
from typing import Any, cast

from sqlalchemy import (
    URL,
    ColumnElement,
    DateTime,
    Interval,
    Table,
    case,
    func,
    literal,
    literal_column,
    select,
    type_coerce,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.sql.engine import lock_schema, open_connection, release_or_invalidate, schema_lock_key, server_engine
from genie_ledger.databases.base import CONNECT_TIMEOUT_S, LOCK_TIMEOUT_S, SERVER_OPTIONS, Database, values_by_column
from genie_ledger.times import Utc

_MIN_DATE = literal_column("TIMESTAMP '0001-01-01 00:00:00'", Utc)
_MAX_DATE = literal_column("TIMESTAMP '9999-12-31 23:59:59.999999'", Utc)

_RUN_LOCK, _TABLES_LOCK = "genie timeouts", "genie timeouts' tables"
"""Names of advisory locks."""

_PLANNER_SETTINGS = {"enable_hashjoin": "off", "enable_mergejoin": "off", "jit": "off"}
"""With these settings, joins use indexes: every query selects few rows of large tables, and a plan that reads
a whole table gets slower as it grows.
"""

_KEEPALIVE_SETTINGS = {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "10", "tcp_keepalives_count": "3"}
"""With these settings, in seconds, the server ends a connection that no longer responds after a minute. With the usual
defaults that takes two hours.
"""


class Postgres(Database):
    """A database, by asyncpg. The tables are in its first schema (`search_path`)."""

    def __init__(self, url: URL) -> None:
        settings = {"timezone": "UTC", "lock_timeout": f"{LOCK_TIMEOUT_S}s", **_PLANNER_SETTINGS}
        engine = server_engine(
            url,
            **SERVER_OPTIONS,
            connect_args={"timeout": CONNECT_TIMEOUT_S, "server_settings": settings},
        )
        super().__init__(url, engine)
        import asyncpg  # noqa: PLC0415 - it need not be installed for other databases

        self.driver_errors = (asyncpg.PostgresError, asyncpg.InterfaceError)

    @asynccontextmanager
    async def schema_transaction(self) -> AsyncIterator[AsyncConnection]:
        """Provide a transaction for creating tables, under an advisory lock that serializes
        processes.
        """
        async with self.writing() as connection:
            await lock_schema(connection, _TABLES_LOCK)
            yield connection

    @asynccontextmanager
    async def try_lock(self) -> AsyncIterator[bool]:
        """Try to acquire the run lock, an advisory lock of the schema, without waiting; yield
        whether the lock was acquired. The lock ends with the connection, so a crashed process does
        not keep it. If the machine of the process has crashed, the server notices within a minute.
        """
        key = schema_lock_key(_RUN_LOCK)
        async with open_connection(self._autocommit) as connection:
            keepalive = (func.set_config(name, value, False) for name, value in _KEEPALIVE_SETTINGS.items())
            query = select(func.pg_try_advisory_lock(*key), *keepalive)
            acquired = bool((await connection.execute(query)).one()[0])
            try:
                yield acquired
            finally:
                if acquired:
                    await release_or_invalidate(connection, select(func.pg_advisory_unlock(*key)))

    def comparable_date(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return an SQL expression that limits a date to Python's range: earlier dates become
        Python's first date, later dates its last date.
        """
        return type_coerce(
            case((column > _MAX_DATE, _MAX_DATE), (column < _MIN_DATE, _MIN_DATE), else_=column), column.type
        )

    def shifted_date(self, column: ColumnElement[Any], by: timedelta) -> ColumnElement[Any]:
        """Return an SQL expression that adds a duration to a date of the ledger."""
        return type_coerce(column, DateTime()) + literal(by, Interval())

    async def insert_rows(self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert many rows by COPY, in the connection's transaction."""
        if not rows:
            return
        driver: Any = (await connection.get_raw_connection()).driver_connection
        names, columns = values_by_column(connection, table, rows)
        dialect = cast("Any", connection.dialect)
        asyncpg = dialect.dbapi.asyncpg
        try:
            # asyncpg would interpret naive values for a column WITH TIME ZONE as local time: make them aware.
            statement = await driver.prepare(str(select(*(table.c[key] for key in rows[0])).compile(dialect=dialect)))
            columns = [
                [value and value.replace(tzinfo=UTC) for value in values]
                if attribute.type.name == "timestamptz"
                else values
                for attribute, values in zip(statement.get_attributes(), columns, strict=True)
            ]
            await driver.copy_records_to_table(table.name, records=zip(*columns, strict=True), columns=names)
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:  # raised without SQLAlchemy
            raise DBAPIError(statement=f"COPY {table.name}", params=None, orig=error) from error
