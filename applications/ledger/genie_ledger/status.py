"""The status of a ledger's timeout handler: how far it has read, and how many transfers it tracks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, func, select

from genie_ledger.databases.base import Database
from genie_ledger.databases.opening import translate_errors
from genie_ledger.ledger import Ledger
from genie_ledger.plan import Segment
from genie_ledger.queries import Queries, count_states, newest_change, tracked_transfers

RECENT_CHANGES = 100_000
"""Ids of the newest state changes among which transfers in unlisted states are counted, tracked or
not: a transfer whose states are all unlisted is never tracked.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The progress of the handler, and counts of the transfers that it tracks.

    `segment` is the id of the last state change that the handler has read, `last` the greatest id
    of a state change, and `lag` the number of unread state changes. `pending` counts the tracked
    transfers that were not delivered. `overdue` counts the pending transfers that are due: in
    processing, with their date in the past. `delivered` counts the delivered transfers that the
    handler does not know to be final. `unlisted` counts transfers in states that are neither
    processing nor final states, by state: tracked transfers, and transfers whose last state change is
    among the newest `RECENT_CHANGES` ids. At most 20 states are counted.
    """

    segment: int
    last: int
    lag: int
    pending: int
    overdue: int
    delivered: int
    unlisted: Mapping[str, int]


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
            unlisted: Counter[str] = Counter()
            for query in _unlisted_queries(ledger, database, last_change_id - RECENT_CHANGES):
                unlisted.update(dict((await connection.execute(query)).all()))
    return Status(
        segment=segment,
        last=last_change_id,
        lag=lag,
        pending=tracked_count - delivered,
        overdue=overdue,
        delivered=delivered,
        unlisted=dict(unlisted.most_common()),
    )


def _unlisted_queries(ledger: Ledger, database: Database, recent_after: int) -> tuple[Select[Any], Select[Any]]:
    """Return two queries that count transfers in unlisted states, by state. The first counts transfers
    whose last state change has an id greater than `recent_after`, the second all other tracked
    transfers.
    """
    queries, changes = Queries(ledger, database), ledger.tables.state_change
    change_id, state = changes.c.transferStateChangeId, changes.c.transferStateId
    recent = select(state).where(change_id > recent_after, queries.is_unlisted(state))
    recent = recent.where(change_id == newest_change(changes, changes))
    tracked = tracked_transfers(ledger, database)
    older = select(tracked.state).select_from(tracked.rows)
    older = older.where(queries.is_unlisted(tracked.state), tracked.last_change_id <= recent_after)
    return count_states(state, recent), count_states(tracked.state, older)


async def last_change(database: Database, ledger: Ledger) -> int:
    """Return the greatest id of a state change; 0 if there is no state change."""
    greatest = select(func.max(ledger.tables.state_change.c.transferStateChangeId))
    with translate_errors(database):
        async with database.reading() as connection:
            return (await connection.execute(greatest)).scalar_one() or 0
