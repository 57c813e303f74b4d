"""Which transfers the document's plain query finds expired, and how far the handler is with each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import Select, func, null, select

from genie.timeouts.databases.base import Database
from genie.timeouts.databases.opening import translate_errors
from genie.timeouts.ledger import Ledger
from genie.timeouts.plan import EXACT, Segment
from genie.timeouts.queries import Queries
from genie.timeouts.schema import has_handler_tables


class Progress(StrEnum):
    """How far the handler is with an expired transfer."""

    NO_HANDLER = "no-handler"
    """No handler of this package has run on the ledger."""
    NOT_READ = "not-read"
    """Its last state change is after the segment: a run will read it and deliver the transfer."""
    DUE = "due"
    """The next run delivers it."""
    DATE_MOVED = "date-moved"
    """Its date was moved in the ledger. The handler delivers it once it has compared the dates."""
    HANDED_OVER = "handed-over"
    """It was delivered, and is not final yet."""
    MISSED = "missed"
    """The handler has read past its last state change without finding it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """An expired transfer: the number `change` of its last state change, and its state.

    `handed_over` is when it was delivered, or None. Dates are in UTC.
    """

    transfer_id: str
    expiration_date: datetime
    state: str
    change: int
    progress: Progress
    handed_over: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The transfers that are expired at `now`, the longest expired first. `segment`: the last state
    change that the handler has read.
    """

    now: datetime
    segment: int
    expired: list[Explained]


class _Row(NamedTuple):
    transfer_id: str
    expires: datetime
    state: str
    change: int
    timeout_id: int | None
    kept: datetime | None
    handed_over: datetime | None


async def explain(database: Database, ledger: Ledger, limit: int) -> Explanation:
    """Query the ledger without the handler's tables for expired transfers, at most `limit`.

    Reads all state changes, which takes seconds in a large ledger; writes and locks nothing.
    DatabaseFailed if it can't be read; WrongDate for an invalid date.
    """
    queries = Queries(ledger, database)
    with translate_errors(database):
        async with database.reading() as connection:
            known = await connection.run_sync(has_handler_tables, ledger.tables)
            row = (await connection.execute(queries.segment())).first() if known else None
            segment = Segment.of(row).start
            now = (await connection.execute(queries.now())).scalar_one()
            rows = (await connection.execute(_plain_query(database, ledger, now, known=known).limit(limit))).all()
    expired = [
        Explained(
            transfer_id=one.transfer_id,
            expiration_date=one.expires,
            state=one.state,
            change=one.change,
            progress=_progress(one, now, segment) if known else Progress.NO_HANDLER,
            handed_over=one.handed_over,
        )
        for one in (_Row(*row) for row in rows)
        if one.expires < now  # a local time that occurs twice has been compared as the first one
    ]
    return Explanation(now=now, segment=segment, expired=expired)


def _plain_query(database: Database, ledger: Ledger, now: datetime, *, known: bool) -> Select[Any]:
    """Return the document's "Select transfers for expiration without intermediate structures", with
    the handler's rows.
    """
    transfer, changes, timeout = ledger.tables.transfer, ledger.tables.state_change, ledger.tables.timeout
    newest = select(changes.c.transferId, func.max(changes.c.transferStateChangeId).label("change"))
    last = newest.group_by(changes.c.transferId).subquery()
    joined = transfer.join(last, last.c.transferId == transfer.c.transferId)
    joined = joined.join(changes, changes.c.transferStateChangeId == last.c.change)
    expires = database.comparable_date(transfer.c.expirationDate)
    copy: tuple[Any, ...] = (null(), null(), null())
    if known:
        joined = joined.outerjoin(timeout, timeout.c.transferId == transfer.c.transferId)
        copy = (
            timeout.c.transferTimeoutId,
            database.comparable_date(timeout.c.expirationDate),
            timeout.c.handedOverDate,
        )
    query = select(transfer.c.transferId, expires, changes.c.transferStateId, last.c.change, *copy).select_from(joined)
    query = query.where(changes.c.transferStateId.in_(ledger.processing_states), expires < now)
    return query.order_by(expires, transfer.c.transferId)


def _progress(one: _Row, now: datetime, segment: int) -> Progress:
    if one.timeout_id is None or one.kept is None:
        return Progress.NOT_READ if one.change > segment else Progress.MISSED
    if one.handed_over is None:
        return Progress.DUE if one.kept < now or one.change > segment else Progress.DATE_MOVED
    if one.expires - one.kept >= EXACT:
        return Progress.DATE_MOVED
    return Progress.NOT_READ if one.change > segment else Progress.HANDED_OVER
