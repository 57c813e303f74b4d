"""Explaining expired transfers: the reference design's plain query finds them without the handler's
tables, and each is shown with the handler's progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import Select, func, null, select

from genie_ledger.databases.base import Database
from genie_ledger.databases.opening import translate_errors
from genie_ledger.ledger import Ledger
from genie_ledger.plan import DATE_TOLERANCE, Segment
from genie_ledger.queries import Queries
from genie_ledger.schema import has_handler_tables


class Progress(StrEnum):
    """The handler's progress with an expired transfer."""

    NO_HANDLER = "no-handler"
    """No handler of this package has run on the ledger."""
    NOT_READ = "not-read"
    """Its last state change is beyond the segment: a run will read it and deliver the transfer."""
    DUE = "due"
    """The next run delivers it."""
    DATE_MOVED = "date-moved"
    """Its date was moved in the ledger. The handler delivers it once it has compared the dates."""
    DELIVERED = "delivered"
    """The transfer was delivered, and is not final yet."""
    MISSED = "missed"
    """The handler has read past its last state change, and does not track it: the change was
    committed too late.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """An expired transfer, and the handler's progress with it.

    `last_change_id` is the id of its last state change. `delivered_at` is when it was delivered, or None.
    Dates are in UTC.
    """

    transfer_id: str
    expiration_date: datetime
    state: str
    last_change_id: int
    progress: Progress
    delivered_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The transfers that are expired at `now`, the longest expired first. `segment`: the id of the
    last state change that the handler has read.
    """

    now: datetime
    segment: int
    expired: list[Explained]


class _Row(NamedTuple):
    """A row of `_expired_query`; the last three values are those of `transferTimeout`."""

    transfer_id: str
    expires: datetime
    state: str
    last_change_id: int
    timeout_id: int | None
    copied_date: datetime | None
    delivered_at: datetime | None


async def explain(database: Database, ledger: Ledger, limit: int) -> Explanation:
    """Find the expired transfers of a ledger, and the handler's progress with each of them. At most
    `limit` transfers are returned.

    Reads all state changes, which takes seconds in a large ledger. Writes and locks nothing. Raises
    DatabaseFailed if the database can't be read, and WrongDate for an invalid date.
    """
    queries = Queries(ledger, database)
    with translate_errors(database):
        async with database.reading() as connection:
            has_handler = await connection.run_sync(has_handler_tables, ledger.tables)
            segment_row = (await connection.execute(queries.segment())).first() if has_handler else None
            last_read = Segment.from_row(segment_row).start
            now = (await connection.execute(queries.now())).scalar_one()
            query = _expired_query(database, ledger, now, has_handler=has_handler).limit(limit)
            rows = [_Row(*row) for row in await connection.execute(query)]
    expired = [
        Explained(
            transfer_id=row.transfer_id,
            expiration_date=row.expires,
            state=row.state,
            last_change_id=row.last_change_id,
            progress=_progress(row, now, last_read) if has_handler else Progress.NO_HANDLER,
            delivered_at=row.delivered_at,
        )
        for row in rows
        if row.expires < now  # for a local time that occurs twice, SQL compares the earlier time
    ]
    return Explanation(now=now, segment=last_read, expired=expired)


def _expired_query(database: Database, ledger: Ledger, now: datetime, *, has_handler: bool) -> Select[Any]:
    """Return a query for the expired transfers that reads only the ledger's tables. The reference
    design calls the query "Select transfers for expiration without intermediate structures".

    The query selects the columns of `_Row`. Without the handler's tables (`has_handler` is False)
    the columns of `transferTimeout` are NULL.
    """
    transfer, changes, timeout = ledger.tables.transfer, ledger.tables.state_change, ledger.tables.timeout
    newest = select(changes.c.transferId, func.max(changes.c.transferStateChangeId).label("change"))
    last = newest.group_by(changes.c.transferId).subquery()
    joined = transfer.join(last, last.c.transferId == transfer.c.transferId)
    joined = joined.join(changes, changes.c.transferStateChangeId == last.c.change)
    expires = database.comparable_date(transfer.c.expirationDate)
    handler_columns: tuple[Any, ...] = (null(), null(), null())
    if has_handler:
        joined = joined.outerjoin(timeout, timeout.c.transferId == transfer.c.transferId)
        handler_columns = (
            timeout.c.transferTimeoutId,
            database.comparable_date(timeout.c.expirationDate),
            timeout.c.deliveredDate,
        )
    columns = (transfer.c.transferId, expires, changes.c.transferStateId, last.c.change)
    query = select(*columns, *handler_columns).select_from(joined)
    query = query.where(changes.c.transferStateId.in_(ledger.processing_states), expires < now)
    return query.order_by(expires, transfer.c.transferId)


def _progress(row: _Row, now: datetime, last_read: int) -> Progress:
    """Return the handler's progress with an expired transfer. `last_read` is the id of the last
    state change that the handler has read.
    """
    if row.timeout_id is None or row.copied_date is None:  # not tracked
        return Progress.NOT_READ if row.last_change_id > last_read else Progress.MISSED
    if row.delivered_at is None:
        return Progress.DUE if row.copied_date < now or row.last_change_id > last_read else Progress.DATE_MOVED
    if row.expires - row.copied_date >= DATE_TOLERANCE:  # it was delivered for an earlier date
        return Progress.DATE_MOVED
    return Progress.NOT_READ if row.last_change_id > last_read else Progress.DELIVERED
