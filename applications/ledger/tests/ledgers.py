"""A ledger in a database of its own, of each kind, for the tests of its timeouts; and the plain query as oracle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Self

from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from genie_ledger import ExpiredTransfer, Ledger, TimeoutHandler, TimeoutRun
from genie_ledger.schema import open_ledger
from support.databases.mariadb import mariadb
from support.databases.postgres import postgres

KINDS = ("sqlite", "postgres", "mariadb")

NOW = {
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now')",
    "postgres": "timezone('utc', clock_timestamp())",
    "mariadb": "UTC_TIMESTAMP(6)",
}
PLAIN = """
SELECT t.`transferId`, t.`expirationDate`, tsc.`transferStateId`, ts.`transferStateChangeIdMax`
FROM `transfer` t
JOIN (SELECT `transferId`, MAX(`transferStateChangeId`) `transferStateChangeIdMax`
      FROM `transferStateChange`
      GROUP BY `transferId`) ts
ON ts.`transferId` = t.`transferId`
JOIN `transferStateChange` tsc
ON tsc.`transferStateChangeId` = ts.`transferStateChangeIdMax`
"""
"""The document's "Select transfers for expiration without intermediate structures", up to its conditions."""
EXPIRED = "WHERE tsc.`transferStateId` IN ('RECEIVED_PREPARE', 'RESERVED') AND t.`expirationDate` < "

OURS = ("segment", "transferTimeout", "timeoutInterval")


def hours(number: float) -> datetime:
    """So many hours from now."""
    return datetime.now(UTC).replace(microsecond=0) + timedelta(hours=number)


PAST, FUTURE = -1.0, 100.0


class Entries:
    """What the ledger writes, on one connection."""

    def __init__(self, books: Books, connection: AsyncConnection) -> None:
        self._books, self._connection = books, connection
        # Else asyncpg takes it for this machine's time, where the column has a time zone.
        self._at = "CAST(:at AS TIMESTAMP)" if books.kind == "postgres" else ":at"

    async def run(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        """With the names between backticks, as the document writes them."""
        quoted = statement if self._books.kind == "mariadb" else statement.replace("`", '"')
        found = await self._connection.execute(text(quoted), values)
        return [tuple(row) for row in found.all()] if found.returns_rows else []

    async def add_transfer(self, id: str, expires: float = PAST, *states: str) -> None:
        """One that expires in so many hours, and has gone through some states: RECEIVED_PREPARE, if none is told."""
        await self.run(
            f"INSERT INTO `transfer` (`transferId`, `amount`, `currencyId`, `expirationDate`) VALUES (:id, 1, 'USD', {self._at})",  # noqa: S608 - ours
            id=id,
            at=self._books.date(hours(expires)),
        )
        for state in states or ("RECEIVED_PREPARE",):
            await self.change(id, state)

    async def change(self, id: str, state: str) -> None:
        insert = "INSERT INTO `transferStateChange` (`transferId`, `transferStateId`) VALUES (:id, :state)"
        await self.run(insert, id=id, state=state)

    async def move(self, id: str, expires: float) -> None:
        update = f"UPDATE `transfer` SET `expirationDate` = {self._at} WHERE `transferId` = :id"  # noqa: S608 - ours
        await self.run(update, id=id, at=self._books.date(hours(expires)))


class Books:
    """A ledger, what the handler keeps about it, and handlers that are closed with it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.zone: tzinfo = UTC
        """In which expiration dates are written."""
        if kind == "sqlite":
            self.url = f"sqlite+aiosqlite:///{folder}/ledger.db"
        else:
            self.url = postgres().new_database() if kind == "postgres" else mariadb().new_database()
        in_utc: dict[str, dict[str, Any]] = {
            "sqlite": {"timeout": 5},
            "postgres": {"server_settings": {"timezone": "UTC"}},
            "mariadb": {"init_command": "SET time_zone = '+00:00'"},
        }
        self._engine = create_async_engine(self.url, poolclass=NullPool, connect_args=in_utc[kind])
        self._plain = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._connection: AsyncConnection | None = None
        self._handlers: list[TimeoutHandler] = []

    def date(self, at: datetime) -> Any:
        """As the driver wants it, without a time zone."""
        plain = at.astimezone(self.zone).replace(tzinfo=None)
        return plain.isoformat(" ") if self.kind == "sqlite" else plain

    def handler(self, on_expired: Callable[[list[ExpiredTransfer]], Any], **options: Any) -> TimeoutHandler:
        handler = TimeoutHandler(self.url, on_expired=on_expired, **options)
        self._handlers.append(handler)
        return handler

    async def create(self) -> Books:
        """Create all tables."""
        async with open_ledger(self.url, Ledger(), create=True):
            return self

    async def close(self) -> None:
        for handler in self._handlers:
            await handler.close()
        if self._connection is not None:
            await self._connection.close()
        await self._engine.dispose()

    # -- the ledger, one statement at a time or many in a transaction --

    async def entries(self) -> Entries:
        if self._connection is None:
            self._connection = await self._plain.connect()
        return Entries(self, self._connection)

    async def run(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        return await (await self.entries()).run(statement, **values)

    async def add_transfer(self, id: str, expires: float = PAST, *states: str) -> None:
        await (await self.entries()).add_transfer(id, expires, *states)

    async def change(self, id: str, state: str) -> None:
        await (await self.entries()).change(id, state)

    async def move(self, id: str, expires: float) -> None:
        await (await self.entries()).move(id, expires)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Entries]:
        """One of the ledger's, which is committed if the block ends well."""
        async with self._engine.begin() as connection:
            yield Entries(self, connection)

    # -- what is true --

    async def last_states(self) -> dict[str, str]:
        """Of all transfers, by the plain query."""
        return {id: state for id, _, state, _ in await self.run(PLAIN)}

    async def expired(self) -> set[str]:
        """Whose time has passed, by the plain query."""
        return {row[0] for row in await self.run(f"{PLAIN} {EXPIRED} {NOW[self.kind]}")}

    async def ours(self) -> dict[str, list[tuple[Any, ...]]]:
        """All that the handler keeps."""
        return {table: await self.run(f"SELECT * FROM `{table}` ORDER BY 1") for table in OURS}  # noqa: S608 - ours

    async def kept(self) -> dict[str, bool]:
        """Transfers that were taken in, and whether they are dealt with."""
        rows = await self.run("SELECT `transferId`, `deliveredDate` FROM `transferTimeout`")
        assert len({row[0] for row in rows}) == len(rows), "a transfer was taken in twice"
        return {id: date is not None for id, date in rows}

    async def segment(self) -> int | None:
        rows = await self.run("SELECT `value` FROM `segment`")
        assert len(rows) <= 1
        return int(rows[0][0]) if rows else None

    async def set_back(self, value: int) -> None:
        await self.run("UPDATE `segment` SET `value` = :value", value=value)


New = Callable[[str], Awaitable[Books]]
"""Makes a ledger of a kind."""


class Desk:
    """An `on_expired` that remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[list[str]] = []
        self.refused: set[str] = set()
        self.fails: Exception | None = None
        self.meanwhile: Callable[[list[str]], Awaitable[object]] | None = None

    async def take(self, expired: list[ExpiredTransfer]) -> set[str]:
        ids = [one.transfer_id for one in expired]
        self.given.append(ids)
        if self.meanwhile is not None:
            await self.meanwhile(ids)
        if self.fails is not None:
            raise self.fails
        return self.refused & set(ids)

    @property
    def ids(self) -> list[str]:
        """All that was given, one by one."""
        return [id for ids in self.given for id in ids]


async def catch_up(handler: TimeoutHandler, most: int = 500) -> list[TimeoutRun]:
    """Run until there is nothing to be done at once."""
    runs: list[TimeoutRun] = []
    while len(runs) < most:
        run = await handler.run_once()
        assert run is not None
        runs.append(run)
        if not run.lagging:
            return runs
    raise AssertionError(f"it is still behind after {most} runs: {runs[-3:]}")


class Fault:
    """Something that happens to the `number`-th statement of a handler (commits count), counted from 1."""

    def __init__(self, handler: TimeoutHandler, number: int, cause: Callable[[Any], None]) -> None:
        self._number, self._cause, self._left = number, cause, number
        self.statement = ""
        engine = handler._database._engine.sync_engine
        self._listened = [(engine, "before_cursor_execute", self._execute), (engine, "commit", self._commit)]

    def __enter__(self) -> Self:
        for each in self._listened:
            event.listen(*each)
        return self

    def __exit__(self, *_error: object) -> None:
        for each in self._listened:
            event.remove(*each)

    @property
    def happened(self) -> bool:
        return self._left <= 0

    def _execute(self, connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        self._one(connection, " ".join(statement.split()))

    def _commit(self, connection: Any) -> None:
        self._one(connection, "COMMIT")

    def _one(self, connection: Any, statement: str) -> None:
        self._left -= 1
        if self._left == 0:
            self.statement = statement
            self._cause(connection)


def refuse(_connection: Any) -> None:
    """The driver says that it could not be done."""
    raise OperationalError("a statement", None, Exception("the disk\nis full"))


def cut(connection: Any) -> None:
    """The server breaks the connection before the statement comes."""
    driver = connection.connection.driver_connection
    if connection.dialect.name == "postgresql":
        postgres().run(f"SELECT pg_terminate_backend({driver.get_server_pid()}, 5000)")
    else:
        mariadb().run(f"KILL {driver.thread_id()}")
