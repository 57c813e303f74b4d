"""Accounts whose rows remember fences, in a real database of each kind, and holders of locks that use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, Column, Integer, MetaData, Row, String, Table, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from genie.sql import FencedTable
from support.databases.mariadb import mariadb
from support.databases.postgres import postgres
from support.processes.servers import WAIT_S

DIALECTS = ("sqlite", "postgresql", "mariadb")
KINDS = (*DIALECTS, "sqlite before 3.35")
"""SQLite before 3.35 has no RETURNING: a newer one is used as if it had none."""

OLDER, NEWER = 1_790_000_000_000_033, 1_790_000_000_000_034

TABLE = Table(
    "accounts",
    MetaData(),
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("balance", Integer, nullable=False),
    Column("note", String(20)),
    Column("fence", BigInteger),
    Column("shared_fence", BigInteger),
)
ACCOUNTS = FencedTable(TABLE)

WAITING = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()",
    "mariadb": "SELECT variable_value FROM information_schema.global_status "
    "WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS'",
}
"""How many transactions wait for a row. SQLite cannot tell."""


def database_url(kind: str, folder: Path) -> str:
    """The URL of an empty database."""
    if kind == "postgresql":
        return postgres().new_database()
    if kind == "mariadb":
        return mariadb().new_database()
    return f"sqlite+aiosqlite:///{folder}/accounts.db"


class Accounts:
    """The table in one database, with accounts 1 and 2 of 100 each. Each method is a transaction of its own."""

    def __init__(self, kind: str, url: str, **options: Any) -> None:
        self.kind = kind
        sqlite = kind.startswith("sqlite")
        arguments = {"timeout": WAIT_S} if sqlite else {}
        self.engine = create_async_engine(url, connect_args=arguments, **options)
        if kind == "sqlite before 3.35":
            dialect = self.engine.dialect
            dialect.insert_returning = dialect.update_returning = dialect.delete_returning = False

    async def create(self) -> None:
        async with self.engine.begin() as connection:
            await connection.run_sync(TABLE.metadata.create_all)
            await connection.execute(insert(TABLE), [{"id": 1, "balance": 100}, {"id": 2, "balance": 100}])

    @asynccontextmanager
    async def transaction(self, level: str | None = None) -> AsyncIterator[AsyncConnection]:
        async with self.engine.connect() as connection:
            if level is not None:
                await connection.execution_options(isolation_level=level)
            async with connection.begin():
                yield connection

    async def read(self, fence: int, key: int = 1, *, shared: bool = False) -> int:
        """The balance."""
        async with self.engine.begin() as connection:
            return await read(connection, fence, key, shared=shared)

    async def write(self, fence: int, balance: int, key: int = 1) -> None:
        async with self.engine.begin() as connection:
            await write(connection, fence, balance, key)

    async def read_or_create(self, fence: int, balance: int, key: int) -> int:
        async with self.engine.begin() as connection:
            row = await connection.run_sync(ACCOUNTS.read_or_create, key, {"balance": balance}, fence=fence)
            return int(row.balance)

    async def look(self, key: int = 1) -> Row[Any] | None:
        """What is committed, without a fence."""
        async with self.engine.begin() as connection:
            return (await connection.execute(select(TABLE).where(TABLE.c.id == key))).first()

    async def balance(self, key: int = 1) -> int:
        row = await self.look(key)
        assert row is not None
        return int(row.balance)

    async def until_one_waits(self) -> None:
        """Until a transaction waits for a row of another one."""
        async with asyncio.timeout(WAIT_S), self.engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            while not int((await connection.execute(text(WAITING[self.kind]))).scalar_one()):  # noqa: ASYNC110 - of the server
                await asyncio.sleep(0.01)


async def read(connection: AsyncConnection, fence: int, key: int = 1, *, shared: bool = False) -> int:
    row = await connection.run_sync(ACCOUNTS.read, key, fence=fence, shared=shared)
    return int(row.balance)


async def write(connection: AsyncConnection, fence: int, balance: int, key: int = 1) -> None:
    await connection.run_sync(ACCOUNTS.write, key, {"balance": balance}, fence=fence)
