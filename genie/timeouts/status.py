"""How far the handler of a ledger has read, and what is left to do."""

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
    """A snapshot.

    The handler has read the state changes up to `segment`; the greatest is `last`, and `lag` of
    them are unread. `pending`: tracked transfers that were not delivered. `overdue`: those of them
    that are due, in processing with their date in the past. `handed_over`: delivered transfers that
    are not final yet, as far as the handler has read.
    """

    segment: int
    last: int
    lag: int
    pending: int
    overdue: int
    handed_over: int


async def status(database: Database, ledger: Ledger) -> Status:
    """Read the status. DatabaseFailed if it can't be read."""
    queries, tables = Queries(ledger, database), ledger.tables
    last = await last_change(database, ledger)
    number, handed_over = tables.state_change.c.transferStateChangeId, tables.timeout.c.handedOverDate
    found = tracked_transfers(ledger, database)
    with translate_errors(database):
        async with database.reading() as connection:
            segment = Segment.of((await connection.execute(queries.segment())).first()).start
            now = (await connection.execute(queries.now())).scalar_one()
            lag = (await connection.execute(select(func.count()).where(number > segment))).scalar_one()
            counts = select(func.count(), func.count(handed_over)).select_from(tables.timeout)
            kept, dealt_with = (await connection.execute(counts)).one()
            overdue = select(func.count()).select_from(found.rows).where(handed_over.is_(None), found.expires < now)
            overdue = overdue.where(found.state.in_(ledger.processing_states))
            overdue_now = (await connection.execute(overdue)).scalar_one()
    return Status(
        segment=segment,
        last=last,
        lag=lag,
        pending=kept - dealt_with,
        overdue=overdue_now,
        handed_over=dealt_with,
    )


async def last_change(database: Database, ledger: Ledger) -> int:
    """Return the greatest number of a state change; 0 if there is none."""
    greatest = select(func.max(ledger.tables.state_change.c.transferStateChangeId))
    with translate_errors(database):
        async with database.reading() as connection:
            return (await connection.execute(greatest)).scalar_one() or 0
