"""How far the handler of a ledger has come, and what is left."""

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
    """Numbers of one moment.

    The handler has read the state changes up to `segment`; the greatest there is is `last`, and `lag` of them are not
    read yet. `pending`: transfers that were taken in and not handed over. `overdue`: those of them that are to be
    handed over, for they are in processing and their date has passed. `handed_over`: those that were, and that are not
    final yet, as far as the handler has seen.
    """

    segment: int
    last: int
    lag: int
    pending: int
    overdue: int
    handed_over: int


async def status(database: Database, ledger: Ledger) -> Status:
    """See how it stands. DatabaseFailed, where it can't be read."""
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
    """The greatest number of a state change; 0, if there is none."""
    greatest = select(func.max(ledger.tables.state_change.c.transferStateChangeId))
    with translate_errors(database):
        async with database.reading() as connection:
            return (await connection.execute(greatest)).scalar_one() or 0
