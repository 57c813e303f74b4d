"""Moving the expiration dates of a ledger."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import func, select, update

from genie.timeouts.databases.database import Database
from genie.timeouts.databases.opening import plainly
from genie.timeouts.ledger import Ledger

CHUNK = 20_000
"""Transfers of one statement."""


async def shift(
    database: Database, ledger: Ledger, by: timedelta, told: Callable[[int, int], object] = lambda _, __: None
) -> int:
    """Move the expiration dates of all transfers; returns how many. It is one transaction: all are moved or none.

    `told` hears how many are moved, of how many. DatabaseFailed, where it fails.
    """
    transfer = ledger.tables.transfer
    id = transfer.c.transferId
    statement = update(transfer).values(expirationDate=database.later(transfer.c.expirationDate, by))
    moved = 0
    with plainly(database):
        async with database.writing() as connection:
            total = (await connection.execute(select(func.count()).select_from(transfer))).scalar_one()
            first: str | None = None
            while True:
                behind = [] if first is None else [id > first]
                end = select(id).where(*behind).order_by(id).limit(1).offset(CHUNK - 1)
                last = (await connection.execute(end)).scalar()
                some = behind if last is None else [*behind, id <= last]
                moved += (await connection.execute(statement.where(*some))).rowcount
                told(moved, max(moved, total))
                if last is None:
                    return moved
                first = last
