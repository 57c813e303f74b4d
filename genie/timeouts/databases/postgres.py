"""PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, tzinfo
from typing import Any, cast

from sqlalchemy import URL, ColumnElement, Table, func, literal, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from genie.timeouts.databases.database import CONNECT_S, LOCKED_S, Database

_TURN, _CREATING = literal("genie timeouts"), literal("genie timeouts' tables")


def _of_schema(lock: ColumnElement[str]) -> tuple[ColumnElement[int], ColumnElement[int]]:
    return func.hashtext(lock), func.hashtext(func.current_schema())


class Postgres(Database):
    """A database, by asyncpg. The tables are in its first schema (`search_path`)."""

    def __init__(self, url: URL) -> None:
        settings = {"timezone": "UTC", "lock_timeout": f"{LOCKED_S}s", "jit": "off"}
        engine = create_async_engine(
            url,
            isolation_level="READ COMMITTED",
            pool_size=2,
            max_overflow=0,
            pool_pre_ping=True,
            connect_args={"timeout": CONNECT_S, "server_settings": settings},
        )
        super().__init__(url, engine)

    @asynccontextmanager
    async def creating(self) -> AsyncIterator[AsyncConnection]:
        """See `Database`."""
        async with self.writing() as connection:
            await connection.execute(select(func.pg_advisory_xact_lock(*_of_schema(_CREATING))))
            yield connection

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[bool]:
        """See `Database`. An advisory lock of the schema, which ends with the connection."""
        key = _of_schema(_TURN)
        async with self._reading.connect() as connection:
            got = bool((await connection.execute(select(func.pg_try_advisory_lock(*key)))).scalar_one())
            try:
                yield got
            except BaseException:
                await connection.invalidate()
                raise
            if got:
                try:
                    await connection.execute(select(func.pg_advisory_unlock(*key)))
                except DBAPIError:
                    await connection.invalidate()  # whose connection is gone has no lock any more

    async def add(self, connection: AsyncConnection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """See `Database`. By COPY, in the same transaction."""
        if not rows:
            return
        driver: Any = (await connection.get_raw_connection()).driver_connection
        columns = [table.c[key] for key in rows[0]]
        names, dialect = [column.name for column in columns], cast("Any", connection.dialect)
        to_driver = [column.type.dialect_impl(dialect).bind_processor(dialect) for column in columns]
        asyncpg = dialect.dbapi.asyncpg
        try:
            # What is naive would be taken for this machine's time, where the column has a time zone.
            named = await driver.prepare(str(select(*columns).compile(dialect=dialect)))
            zones = [UTC if each.type.name == "timestamptz" else None for each in named.get_attributes()]
            how = list(zip(to_driver, zones, strict=True))
            records = [
                tuple(_converted(value, *each) for value, each in zip(row.values(), how, strict=True)) for row in rows
            ]
            await driver.copy_records_to_table(table.name, records=records, columns=names)
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:  # SQLAlchemy has no part in it
            raise DBAPIError(f"COPY {table.name}", None, error) from error


def _converted(value: Any, convert: Callable[[Any], Any] | None, zone: tzinfo | None) -> Any:
    made = value if convert is None else convert(value)
    return made if zone is None or made is None else made.replace(tzinfo=zone)
