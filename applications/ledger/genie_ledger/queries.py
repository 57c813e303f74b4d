"""The queries of a run: the steps of the reference design, bounded, and correct under concurrent
writes.

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
    case,
    func,
    literal,
    null,
    or_,
    select,
    union_all,
    update,
)

from genie_ledger.databases.base import Database
from genie_ledger.ledger import Ledger
from genie_ledger.plan import DATE_TOLERANCE, DuePosition, StateKind
from genie_ledger.times import utc_now

SEGMENT = {"segmentType": "timeout", "enumeration": 0, "tableName": "transferStateChange"}
"""Key of the row of the reference design's `segment` that is the handler's high-water mark."""

MAX_UNLISTED_STATES = 20
"""Unlisted states that are counted, the most frequent: a column that is mapped by mistake may have
any number of values.
"""


class Queries:
    """Queries for one ledger in one database. The queries that find transfers select the columns of
    `plan.TransferRow`. "Tracked" transfers have a row in `transferTimeout`.
    """

    def __init__(self, ledger: Ledger, database: Database) -> None:
        self._processing_states = ledger.processing_states
        self._final_states = ledger.final_states
        self._transfer = ledger.tables.transfer
        self._changes = ledger.tables.state_change
        self._segment = ledger.tables.segment
        self._timeout = ledger.tables.timeout
        self._last_change = self._changes.alias("last")
        """The table of state changes, joined as a transfer's last state change."""
        self._last_state = self._last_change.c.transferStateId
        self._comparable_date = database.comparable_date
        self._shifted_date = database.shifted_date
        """Like `_comparable_date`, a function that returns an SQL expression."""

    def segment(self) -> Select[Any]:
        """Select the handler's row of the table `segment` (steps 1 and 2 of the reference design)."""
        is_ours = and_(*(self._segment.c[key] == value for key, value in SEGMENT.items()))
        columns = (self._segment.c.segmentId, self._segment.c.value, self._segment.c.fence, self._segment.c.readValue)
        return select(*columns).where(is_ours).order_by(self._segment.c.segmentId).limit(1)

    def now(self) -> Select[Any]:
        """Select the time of the run (step 5 of the reference design). This is the database's time,
        because all replicas share it.
        """
        return select(utc_now())

    def new_changes(self, after: int, limit: int) -> Executable:
        """Select the number of state changes with ids greater than `after`, and the greatest of
        their ids (step 4 of the reference design). Only the first `limit` state changes count.
        """
        id = self._changes.c.transferStateChangeId
        ids = select(id).where(id > after).order_by(id).limit(limit).subquery()
        return select(func.count(), func.max(ids.c[0])).select_from(ids)

    def count_changes(self, ranges: Sequence[tuple[int, int]]) -> CompoundSelect[Any]:
        """Count the state changes in each range (`first`, `last`] of ids. Selects a row for each
        range: the index of the range in `ranges`, and its number of state changes.
        """
        id = self._changes.c.transferStateChangeId
        return union_all(
            *(
                select(literal(index), func.count()).where(id > first, id <= last)
                for index, (first, last) in enumerate(ranges)
            )
        )

    def unlisted(self, first: int, last: int) -> Select[Any]:
        """Count the state changes in the range (`first`, `last`] of ids whose state is unlisted.
        Selects each state with its number of changes, at most `MAX_UNLISTED_STATES`.
        """
        id, state = self._changes.c.transferStateChangeId, self._changes.c.transferStateId
        return count_states(state, select(state).where(id > first, id <= last, self.is_unlisted(state)))

    def is_unlisted(self, state: ColumnElement[Any]) -> ColumnElement[bool]:
        """Return the SQL condition that a state is neither a processing nor a final state."""
        return state.not_in((*self._processing_states, *self._final_states))

    def newly_processing(self, first: int, last: int, now: datetime) -> Select[Any]:
        """Select transfers in processing whose last state change is in the range (`first`, `last`]
        of ids (step 6 of the reference design).

        A tracked transfer is selected only if its date has changed in the ledger, or has passed.
        """
        id, timeout = self._changes.c.transferStateChangeId, self._timeout
        newest_in_range = select(func.max(id).label("id")).where(id > first, id <= last)
        newest_ids = newest_in_range.group_by(self._changes.c.transferId).subquery()
        change = self._changes.alias("change")
        # The join starts with the few rows of the range: a planner that starts with the tracked rows
        # gets slower with their number.
        source = newest_ids.join(change, change.c.transferStateChangeId == newest_ids.c.id)
        query, expires = self._select_transfers(source, change, last=change, untracked=True)
        query = query.where(
            change.c.transferStateId.in_(self._processing_states),
            newest_ids.c.id == newest_change(self._changes, change),
        )
        is_due = and_(timeout.c.deliveredDate.is_(None), expires < now)
        return _keep_join_order(query.where(or_(timeout.c.transferTimeoutId.is_(None), self._is_rescheduled(), is_due)))

    def newly_final(self, first: int, last: int) -> Select[Any]:
        """Select tracked transfers with a final state change in the range (`first`, `last`] of ids
        (step 3 of the reference design).

        The selected transfers are final, or were delivered and may be in processing again.
        """
        id, timeout = self._changes.c.transferStateChangeId, self._timeout
        is_final = self._changes.c.transferStateId.in_(self._final_states)
        finals = select(self._changes.c.transferId, func.max(id).label("final"))
        finals_in_range = finals.where(id > first, id <= last, is_final).group_by(self._changes.c.transferId).subquery()
        source = finals_in_range.join(timeout, timeout.c.transferId == finals_in_range.c.transferId)
        query, _ = self._select_transfers(source, timeout, final=finals_in_range.c.final)
        return _keep_join_order(
            query.where(or_(self._last_state.in_(self._final_states), timeout.c.deliveredDate.is_not(None)))
        )

    def unchecked(self, limit: int) -> Select[Any]:
        """Select at most `limit` tracked rows that another implementation has inserted (step 3 of
        the reference design).

        This handler must check such a row once. Its transfer may have become final by a state
        change that the handler has already read.
        """
        timeout = self._timeout
        query, _ = self._select_transfers(timeout, timeout)
        query = query.where(timeout.c.stateChangeId.is_(None))
        return _keep_join_order(query.order_by(timeout.c.stateChangeId, timeout.c.transferTimeoutId).limit(limit))

    def due(self, now: datetime, limit: int, after: DuePosition | None) -> Select[Any]:
        """Select tracked transfers whose date has passed and that were not delivered, the longest
        expired first (step 7 of the reference design).

        Only rows that follow `after` in this order are selected; None selects from the first row.
        """
        timeout = self._timeout
        query, expires = self._select_transfers(timeout, timeout)
        query = query.where(timeout.c.deliveredDate.is_(None), timeout.c.expirationDate < now, expires.is_not(None))
        if after is not None:
            has_later_date = timeout.c.expirationDate > after.expiration_date
            follows = or_(has_later_date, timeout.c.transferTimeoutId > after.timeout_id)
            query = query.where(timeout.c.expirationDate >= after.expiration_date, follows)
        query = query.where(self._last_state.in_((*self._processing_states, *self._final_states)))
        return query.order_by(timeout.c.expirationDate, timeout.c.transferTimeoutId).limit(limit)

    def max_timeout_id(self) -> Select[Any]:
        """Select the greatest id of a tracked row."""
        return select(func.max(self._timeout.c.transferTimeoutId))

    def last_of_batch(self, after: int, size: int) -> Select[Any]:
        """Select the last id of the first `size` tracked rows with ids greater than `after`.
        Selects nothing if there are fewer rows.
        """
        id = self._timeout.c.transferTimeoutId
        return select(id).where(id > after).order_by(id).limit(1).offset(size - 1)

    def rescheduled(self, first: int, last: int | None, before: datetime | None) -> Select[Any]:
        """Select the tracked rows with ids in (`first`, `last`] whose date has changed in the
        ledger.

        Only rows whose new date is before `before` are selected. None for `last` or `before` means
        no limit.
        """
        timeout = self._timeout
        query, expires = self._select_transfers(timeout, timeout)
        query = query.where(timeout.c.transferTimeoutId > first, self._is_rescheduled())
        if before is not None:
            query = query.where(expires < before)
        return _keep_join_order(query if last is None else query.where(timeout.c.transferTimeoutId <= last))

    def first_rescheduled(self, first: int, last: int | None) -> Select[Any]:
        """Select the first id of a tracked row in (`first`, `last`] whose date has changed in the
        ledger. None for `last` means no limit.
        """
        timeout, id = self._timeout, self._timeout.c.transferTimeoutId
        joined = timeout.join(self._transfer, self._transfer.c.transferId == timeout.c.transferId)
        query = select(id).select_from(joined).where(id > first, self._is_rescheduled()).order_by(id).limit(1)
        return _keep_join_order(query if last is None else query.where(id <= last))

    def refresh_dates(self, timeout_ids: Sequence[int]) -> Update:
        """Update the copied dates of tracked rows: set them to the current dates in the ledger."""
        expires = select(self._comparable_date(self._transfer.c.expirationDate))
        expires = expires.where(self._transfer.c.transferId == self._timeout.c.transferId)
        is_listed = self._timeout.c.transferTimeoutId.in_(timeout_ids)
        return update(self._timeout).where(is_listed).values(expirationDate=expires.scalar_subquery())

    def _select_transfers(
        self,
        source: FromClause,
        identified: FromClause,
        *,
        last: FromClause | None = None,
        untracked: bool = False,
        final: ColumnElement[Any] | None = None,
    ) -> tuple[Select[Any], ColumnElement[Any]]:
        """Join `source` to the transfers, and select the columns of `plan.TransferRow`. Returns the
        query, and the expression of the expiration date.

        `identified` is the table in `source` that has the transfers' ids. `last` is the table in
        `source` with the transfers' last state changes; without it the last state changes are
        joined too. `untracked` includes transfers without a row in `transferTimeout`; otherwise
        `source` must contain this table. `final` is the expression for `TransferRow.final_change_id`.
        """
        timeout = self._timeout
        joined = source.join(self._transfer, self._transfer.c.transferId == identified.c.transferId)
        if untracked:
            joined = joined.outerjoin(timeout, timeout.c.transferId == identified.c.transferId)
        if last is None:
            last = self._last_change
            joined = joined.join(last, last.c.transferStateChangeId == newest_change(self._changes, identified))
        expires = self._comparable_date(self._transfer.c.expirationDate)
        # The transfer's own spelling: under a case-insensitive collation its state changes may differ.
        state = last.c.transferStateId
        state_kind = case(
            (state.in_(self._processing_states), literal(StateKind.PROCESSING.value)),
            (state.in_(self._final_states), literal(StateKind.FINAL.value)),
            else_=literal(StateKind.UNLISTED.value),
        )
        columns = (self._transfer.c.transferId, expires, state, state_kind, last.c.transferStateChangeId)
        tracked_columns = (
            timeout.c.transferTimeoutId,
            self._comparable_date(timeout.c.expirationDate),
            timeout.c.deliveredDate,
            timeout.c.stateChangeId,
        )
        final_column = null() if final is None else final
        return select(*columns, *tracked_columns, final_column).select_from(joined), expires

    def _is_rescheduled(self) -> ColumnElement[bool]:
        """Return the SQL condition for `TransferRow.is_rescheduled`: the ledger's date differs from the
        handler's copy. The raw columns are compared first, because that is faster than converting
        both dates.
        """
        timeout = self._timeout
        ledger_column, copy_column = self._transfer.c.expirationDate, timeout.c.expirationDate
        ledger_date, copy = self._comparable_date(ledger_column), self._comparable_date(copy_column)
        is_later = ledger_date >= self._shifted_date(copy, DATE_TOLERANCE)
        is_earlier = and_(ledger_date <= self._shifted_date(copy, -DATE_TOLERANCE), timeout.c.deliveredDate.is_(None))
        return and_(copy_column != ledger_column, or_(is_later, is_earlier))


def _keep_join_order(query: Select[Any]) -> Select[Any]:
    """Make MariaDB and MySQL join the tables in the given order. Other databases ignore this."""
    return query.prefix_with("STRAIGHT_JOIN", dialect="mysql").prefix_with("STRAIGHT_JOIN", dialect="mariadb")


def count_states(state: ColumnElement[Any], query: Select[Any]) -> Select[Any]:
    """Group the rows of `query` by their `state`: select each state with its number of rows, the most
    frequent `MAX_UNLISTED_STATES` states.
    """
    count = func.count()
    return query.add_columns(count).group_by(state).order_by(count.desc(), state).limit(MAX_UNLISTED_STATES)


# -- tracked transfers --------------------------------------------------------------------------------------


def newest_change(changes: FromClause, identified: FromClause) -> ScalarSelect[Any]:
    """Return a correlated subquery that selects the id of a transfer's last state change.
    `identified` is the table of the outer query that has the transfer's id.
    """
    all_changes = changes.alias("older")
    newest = select(func.max(all_changes.c.transferStateChangeId)).where(
        all_changes.c.transferId == identified.c.transferId
    )
    return newest.correlate_except(all_changes).scalar_subquery()


class TrackedTransfers(NamedTuple):
    """The rows of `transferTimeout`, each joined to its transfer and to the transfer's last state
    change.
    """

    rows: FromClause
    expires: ColumnElement[Any]
    state: ColumnElement[Any]
    last_change_id: ColumnElement[Any]


def tracked_transfers(ledger: Ledger, database: Database) -> TrackedTransfers:
    """Join the rows of `transferTimeout` to their transfers. Returns the join, and the expressions
    of the expiration date, of the state and of the last state change in the ledger.
    """
    tables = ledger.tables
    timeout, transfer = tables.timeout, tables.transfer
    last = tables.state_change.alias("last")
    rows = timeout.join(transfer, transfer.c.transferId == timeout.c.transferId)
    rows = rows.join(last, last.c.transferStateChangeId == newest_change(tables.state_change, timeout))
    expires = database.comparable_date(transfer.c.expirationDate)
    return TrackedTransfers(rows, expires, last.c.transferStateId, last.c.transferStateChangeId)
