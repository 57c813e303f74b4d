"""The queries of a run: the steps of the document, bounded, and correct under concurrent writes.

A transfer's state is that of its last state change over all, whatever the scanned range: a final
transfer is not delivered because an older change was read. Its expiration date is the ledger's; the
handler's copy only serves to find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Executable,
    FromClause,
    ScalarSelect,
    Select,
    Update,
    and_,
    func,
    literal,
    null,
    or_,
    select,
    union_all,
    update,
)

from genie.timeouts.databases.base import Database
from genie.timeouts.ledger import Ledger
from genie.timeouts.plan import EXACT
from genie.timeouts.times import utc_now

SEGMENT = {"segmentType": "timeout", "enumeration": 0, "tableName": "transferStateChange"}
"""Key of the row of the document's `segment` that is the handler's high-water mark."""


class Queries:
    """Queries for one ledger in one database. Those that find transfers select the columns of
    `plan.TransferRow`.
    """

    def __init__(self, ledger: Ledger, database: Database) -> None:
        self._processing, self._final = ledger.processing_states, ledger.final_states
        self._transfer, self._changes = ledger.tables.transfer, ledger.tables.state_change
        self._segment, self._timeout = ledger.tables.segment, ledger.tables.timeout
        self._last = self._changes.alias("last")
        self._state = self._last.c.transferStateId
        self._date, self._later = database.comparable_date, database.shifted_date

    def segment(self) -> Select[Any]:
        """Select the row of `segment` (steps 1 and 2)."""
        here = and_(*(self._segment.c[key] == value for key, value in SEGMENT.items()))
        columns = (self._segment.c.segmentId, self._segment.c.value, self._segment.c.fence, self._segment.c.readValue)
        return select(*columns).where(here).order_by(self._segment.c.segmentId).limit(1)

    def now(self) -> Select[Any]:
        """Select the time of the run (step 5): the database's, which all replicas share."""
        return select(utc_now())

    def new_changes(self, first: int, most: int) -> Executable:
        """Select the number of state changes after `first`, up to `most`, and the last of them
        (step 4).
        """
        id = self._changes.c.transferStateChangeId
        found = select(id).where(id > first).order_by(id).limit(most).subquery()
        return select(func.count(), func.max(found.c[0])).select_from(found)

    def count(self, intervals: Sequence[tuple[int, int]]) -> CompoundSelect[Any]:
        """Select the index of each range in the list, and its number of state changes."""
        id = self._changes.c.transferStateChangeId
        return union_all(
            *(
                select(literal(number), func.count()).where(id > first, id <= last)
                for number, (first, last) in enumerate(intervals)
            )
        )

    def new(self, first: int, last: int, now: datetime) -> Select[Any]:
        """Select transfers in processing with a state change above `first` and up to `last` (step
        6).

        Tracked ones only if their date has changed or has passed.
        """
        id, kept = self._changes.c.transferStateChangeId, self._timeout
        newest = select(func.max(id).label("id")).where(id > first, id <= last)
        some = newest.group_by(self._changes.c.transferId).subquery()
        change = self._changes.alias("change")
        # The join starts with the few rows of the range: a planner that starts with the tracked rows
        # gets slower with their number.
        found = some.join(change, change.c.transferStateChangeId == some.c.id)
        query, expires = self._select(found, change, kept, last=change, outer=True)
        query = query.where(
            change.c.transferStateId.in_(self._processing), some.c.id == newest_change(self._changes, change)
        )
        due = and_(kept.c.handedOverDate.is_(None), expires < now)
        return _in_order(query.where(or_(kept.c.transferTimeoutId.is_(None), self._moved(kept), due)))

    def done(self, first: int, last: int) -> Select[Any]:
        """Select tracked transfers with a final state change above `first` and up to `last` (step
        3).

        They are final, or were delivered and may be in processing again.
        """
        id, kept = self._changes.c.transferStateChangeId, self._timeout
        final = self._changes.c.transferStateId.in_(self._final)
        some = select(self._changes.c.transferId, func.max(id).label("final")).where(id > first, id <= last, final)
        ends = some.group_by(self._changes.c.transferId).subquery()
        source = ends.join(kept, kept.c.transferId == ends.c.transferId)
        query, _ = self._select(source, kept, kept, final=ends.c.final)
        return _in_order(query.where(or_(self._state.in_(self._final), kept.c.handedOverDate.is_not(None))))

    def unchecked(self, most: int) -> Select[Any]:
        """Select rows of another implementation: their transfers may have become final at or below
        the segment (step 3).
        """
        kept = self._timeout
        query, _ = self._select(kept, kept, kept)
        query = query.where(kept.c.stateChangeId.is_(None))
        return _in_order(query.order_by(kept.c.stateChangeId, kept.c.transferTimeoutId).limit(most))

    def due(self, now: datetime, most: int, after: tuple[datetime, int] | None) -> Select[Any]:
        """Select tracked transfers whose date has passed and that were not delivered, the longest
        expired first (step 7).

        `after`: only rows after this date and number.
        """
        kept = self._timeout
        query, expires = self._select(kept, kept, kept)
        query = query.where(kept.c.handedOverDate.is_(None), kept.c.expirationDate < now, expires.is_not(None))
        if after is not None:
            date, id = after
            later = or_(kept.c.expirationDate > date, kept.c.transferTimeoutId > id)
            query = query.where(kept.c.expirationDate >= date, later)
        query = query.where(self._state.in_((*self._processing, *self._final)))
        return query.order_by(kept.c.expirationDate, kept.c.transferTimeoutId).limit(most)

    def max_timeout_id(self) -> Select[Any]:
        """Select the greatest number of a tracked row."""
        return select(func.max(self._timeout.c.transferTimeoutId))

    def last_of_batch(self, first: int, most: int) -> Select[Any]:
        """Select the number of the last of the `most` rows after `first`; nothing if there are
        fewer.
        """
        id = self._timeout.c.transferTimeoutId
        return select(id).where(id > first).order_by(id).limit(1).offset(most - 1)

    def moved(self, first: int, last: int | None, before: datetime | None) -> Select[Any]:
        """Select the tracked rows above `first` and up to `last` whose date has changed in the
        ledger, to one before `before`.
        """
        kept = self._timeout
        query, expires = self._select(kept, kept, kept)
        query = query.where(kept.c.transferTimeoutId > first, self._moved(kept))
        if before is not None:
            query = query.where(expires < before)
        return _in_order(query if last is None else query.where(kept.c.transferTimeoutId <= last))

    def first_moved(self, first: int, last: int | None) -> Select[Any]:
        """Select the number of the first of these rows whose date has changed in the ledger."""
        kept, id = self._timeout, self._timeout.c.transferTimeoutId
        joined = kept.join(self._transfer, self._transfer.c.transferId == kept.c.transferId)
        query = select(id).select_from(joined).where(id > first, self._moved(kept)).order_by(id).limit(1)
        return _in_order(query if last is None else query.where(id <= last))

    def refresh_dates(self, timeout_ids: Sequence[int]) -> Update:
        """Copy the ledger's dates again."""
        expires = select(self._date(self._transfer.c.expirationDate))
        expires = expires.where(self._transfer.c.transferId == self._timeout.c.transferId)
        these = self._timeout.c.transferTimeoutId.in_(timeout_ids)
        return update(self._timeout).where(these).values(expirationDate=expires.scalar_subquery())

    def _select(
        self,
        source: FromClause,
        whose: FromClause,
        kept: FromClause,
        *,
        last: FromClause | None = None,
        outer: bool = False,
        final: ColumnElement[Any] | None = None,
    ) -> tuple[Select[Any], ColumnElement[Any]]:
        """Select transfers as `plan.TransferRow`, and return their expiration date too.

        `last` is their last state change, if the source has it. With `outer` they need not be
        tracked.
        """
        joined = source.join(self._transfer, self._transfer.c.transferId == whose.c.transferId)
        if outer:
            joined = joined.outerjoin(kept, kept.c.transferId == whose.c.transferId)
        if last is None:
            last = self._last
            joined = joined.join(last, last.c.transferStateChangeId == newest_change(self._changes, whose))
        expires = self._date(self._transfer.c.expirationDate)
        # The transfer's own spelling: under a case-insensitive collation its state changes may differ.
        columns = (self._transfer.c.transferId, expires, last.c.transferStateId, last.c.transferStateChangeId)
        copy = (
            kept.c.transferTimeoutId,
            self._date(kept.c.expirationDate),
            kept.c.handedOverDate,
            kept.c.stateChangeId,
        )
        return select(*columns, *copy, null() if final is None else final).select_from(joined), expires

    def _moved(self, kept: FromClause) -> ColumnElement[bool]:
        """The condition of `TransferRow.moved`. Comparing the raw columns first is faster."""
        expires, copy = self._transfer.c.expirationDate, kept.c.expirationDate
        theirs, ours = self._date(expires), self._date(copy)
        later = theirs >= self._later(ours, EXACT)
        earlier = and_(theirs <= self._later(ours, -EXACT), kept.c.handedOverDate.is_(None))
        return and_(copy != expires, or_(later, earlier))


def _in_order(query: Select[Any]) -> Select[Any]:
    """Make MariaDB and MySQL join the tables in the given order."""
    return query.prefix_with("STRAIGHT_JOIN", dialect="mysql").prefix_with("STRAIGHT_JOIN", dialect="mariadb")


# -- tracked transfers --------------------------------------------------------------------------------------


def newest_change(changes: FromClause, whose: FromClause) -> ScalarSelect[Any]:
    """Select the number of a transfer's last state change."""
    older = changes.alias("older")
    newest = select(func.max(older.c.transferStateChangeId)).where(older.c.transferId == whose.c.transferId)
    return newest.correlate_except(older).scalar_subquery()


class TrackedTransfers(NamedTuple):
    """The rows of `transferTimeout`, each joined to its transfer and to the transfer's last state
    change.
    """

    rows: FromClause
    expires: ColumnElement[Any]
    state: ColumnElement[Any]


def tracked_transfers(ledger: Ledger, database: Database) -> TrackedTransfers:
    """Return the join, with the expressions of the expiration date and of the state."""
    tables = ledger.tables
    timeout, transfer = tables.timeout, tables.transfer
    last = tables.state_change.alias("last")
    rows = timeout.join(transfer, transfer.c.transferId == timeout.c.transferId)
    rows = rows.join(last, last.c.transferStateChangeId == newest_change(tables.state_change, timeout))
    return TrackedTransfers(rows, database.comparable_date(transfer.c.expirationDate), last.c.transferStateId)
