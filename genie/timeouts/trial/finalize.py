"""Final states for what the handler waits for."""

from __future__ import annotations

from sqlalchemy import insert, literal, select

from genie.timeouts.databases.database import Database
from genie.timeouts.databases.opening import plainly
from genie.timeouts.ledger import Ledger
from genie.timeouts.steps import Steps
from genie.timeouts.waiting import waiting


async def finalize(
    database: Database, ledger: Ledger, state: str = "ABORTED", *, limit: int | None = None, overdue: bool = False
) -> int:
    """Write a final state change for the transfers that were taken in; returns how many. Those that are final stay.

    `limit`: so many at most, those that expire first. `overdue`: only those whose date has passed. ValueError for a
    state that is not final; DatabaseFailed, where it fails.
    """
    if state not in ledger.final_states:
        raise ValueError(f"{state!r} is no final state; those are {', '.join(ledger.final_states)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    found, changes, timeout = waiting(ledger, database), ledger.tables.state_change, ledger.tables.timeout
    these = select(timeout.c.transferId, literal(state)).select_from(found.rows)
    these = these.where(found.state.not_in(ledger.final_states))
    these = these.order_by(timeout.c.expirationDate, timeout.c.transferTimeoutId).limit(limit)
    with plainly(database):
        async with database.writing() as connection:
            if overdue:
                now = (await connection.execute(Steps(ledger, database).now())).scalar_one()
                these = these.where(found.expires < now)
            columns = [changes.c.transferId, changes.c.transferStateId]
            done = await connection.execute(insert(changes).from_select(columns, these, include_defaults=False))
            return done.rowcount
