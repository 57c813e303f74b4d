"""The status of a ledger's timeout handler: how far it has read, and how many transfers it tracks."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select

from genie.timeouts.databases.base import Database
from genie.timeouts.databases.opening import translate_errors
from genie.timeouts.ledger import Ledger
from genie.timeouts.plan import Segment
from genie.timeouts.queries import Queries, tracked_transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The progress of the handler, and counts of the transfers that it tracks.

    `segment` is the id of the last state change that the handler has read, `last` the greatest id
    of a state change, and `lag` the number of unread state changes. `pending` counts the tracked
    transfers that were not delivered. `overdue` counts the pending transfers that are due: in
    processing, with their date in the past. `delivered` counts the delivered transfers that the
    handler does not know to be final.
    """

    segment: int
    last: int
    lag: int
    pending: int
    overdue: int
    delivered: int


async def status(database: Database, ledger: Ledger) -> Status:
    """Read the status of a ledger's handler. Raises DatabaseFailed if the database can't be read."""
    queries, tables = Queries(ledger, database), ledger.tables
    last_change_id = await last_change(database, ledger)
    change_id, delivered_date = tables.state_change.c.transferStateChangeId, tables.timeout.c.deliveredDate
    tracked = tracked_transfers(ledger, database)
    with translate_errors(database):
        async with database.reading() as connection:
            segment = Segment.from_row((await connection.execute(queries.segment())).first()).start
            now = (await connection.execute(queries.now())).scalar_one()
            lag = (await connection.execute(select(func.count()).where(change_id > segment))).scalar_one()
            counts = select(func.count(), func.count(delivered_date)).select_from(tables.timeout)
            tracked_count, delivered = (await connection.execute(counts)).one()
            overdue_query = (
                select(func.count())
                .select_from(tracked.rows)
                .where(delivered_date.is_(None), tracked.expires < now)
                .where(tracked.state.in_(ledger.processing_states))
            )
            overdue = (await connection.execute(overdue_query)).scalar_one()
    return Status(
        segment=segment,
        last=last_change_id,
        lag=lag,
        pending=tracked_count - delivered,
        overdue=overdue,
        delivered=delivered,
    )


async def last_change(database: Database, ledger: Ledger) -> int:
    """Return the greatest id of a state change; 0 if there is no state change."""
    greatest = select(func.max(ledger.tables.state_change.c.transferStateChangeId))
    with translate_errors(database):
        async with database.reading() as connection:
            return (await connection.execute(greatest)).scalar_one() or 0
