"""A ledger's database, ready to be used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from genie.timeouts.databases.database import Database
from genie.timeouts.databases.opening import open_database, plainly
from genie.timeouts.errors import DatabaseFailed
from genie.timeouts.ledger import Ledger
from genie.timeouts.schema import check, ensure


async def prepare(database: Database, ledger: Ledger) -> None:
    """Create the tables that are absent, check those that are there. WrongSchema or DatabaseFailed.

    ValueError for a URL with which nothing can be connected.
    """
    with plainly(database):
        await database.reach()
        async with database.creating() as connection:
            await connection.run_sync(ensure, ledger.tables)


@asynccontextmanager
async def opened(
    url: str, ledger: Ledger, *, create: bool = False, handler_tables: bool = True
) -> AsyncIterator[Database]:
    """The database of a URL until the block ends. With `create` its tables are made ready; else they are only checked.

    Without `handler_tables` only the ledger's own two tables have to be there.

    WrongSchema or DatabaseFailed, and ValueError for a URL that can't be right.
    """
    database = open_database(url)
    try:
        if create:
            await prepare(database, ledger)
        elif not database.exists():
            raise DatabaseFailed(f"{database.name}: there is no such file")
        else:
            with plainly(database):
                await database.reach()
                async with database.reading() as connection:
                    await connection.run_sync(
                        check, ledger.tables, ledger.tables.all if handler_tables else ledger.tables.of_ledger
                    )
        yield database
    finally:
        await database.close()
