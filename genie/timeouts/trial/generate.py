"""A whole ledger of transfers by chance."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from sqlalchemy import func, select
from sqlalchemy import inspect as inspector
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.timeouts.databases.database import Database
from genie.timeouts.databases.opening import plainly
from genie.timeouts.errors import WrongSchema
from genie.timeouts.ledger import Ledger
from genie.timeouts.steps import Steps
from genie.timeouts.trial.transfers import DataSet, Transfer, transfers

CHUNK = 5_000
"""Transfers of one transaction, if not said otherwise."""


async def generate(
    database: Database,
    ledger: Ledger,
    data_set: DataSet,
    told: Callable[[int, int], object] = lambda _, __: None,
    *,
    chunk: int = CHUNK,
) -> int:
    """Write a data set to a ledger; returns how many state changes it has.

    `told` hears how many transfers are written, of how many.

    They are written in chunks of so many transfers, each in one transaction. ValueError, where the ledger has some of these transfers
    already; WrongSchema or DatabaseFailed, where they can't be written.
    """
    written = changes = 0
    with plainly(database):
        async with database.reading() as connection:
            await _check(connection, ledger)
            now = (await connection.execute(Steps(ledger, database).now())).scalar_one()
        made = transfers(data_set, ledger, now)
        while some := list(islice(made, chunk)):
            changes += await _write(database, ledger, some, data_set.seed)
            written += len(some)
            told(written, data_set.transfers)
    return changes


async def _check(connection: AsyncConnection, ledger: Ledger) -> None:
    transfer = ledger.tables.transfer
    found = await connection.run_sync(lambda inner: inspector(inner).get_columns(transfer.name))
    names = {column["name"] for column in found}
    for key in ("amount", "currencyId"):
        if transfer.c[key].name not in names:
            raise WrongSchema(f"table {transfer.name} has no column {transfer.c[key].name}, which is to be written")


async def _write(database: Database, ledger: Ledger, chunk: list[Transfer], seed: int) -> int:
    tables = ledger.tables
    ids = select(func.count()).where(tables.transfer.c.transferId.in_([one.transfer_id for one in chunk[:100]]))
    async with database.writing() as connection:
        if (await connection.execute(ids)).scalar_one():
            raise ValueError(f"the ledger has transfers of seed {seed} already: take another seed")
        await database.add(
            connection,
            tables.transfer,
            [
                {
                    "transferId": one.transfer_id,
                    "amount": one.amount,
                    "currencyId": one.currency,
                    "expirationDate": one.expires,
                }
                for one in chunk
            ],
        )
        changes = [{"transferId": one.transfer_id, "transferStateId": state} for one in chunk for state in one.states]
        await database.add(connection, tables.state_change, changes)
    return len(changes)
