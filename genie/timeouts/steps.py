"""The questions of a run, as SQL: the steps of the document, bounded, and right when others write meanwhile.

A transfer's state is its last state change over all, whatever the interval: what has become final is not handed over
because an older change was read. Its expiration date is the ledger's; the handler's copy only finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    CompoundSelect,
    Executable,
    FromClause,
    Select,
    Update,
    and_,
    func,
    literal,
    or_,
    select,
    union_all,
    update,
)

from genie.timeouts.databases.database import Database
from genie.timeouts.ledger import Ledger
from genie.timeouts.times import utc_now

SEGMENT = {"segmentType": "timeout", "enumeration": 0, "tableName": "transferStateChange"}
"""The row of the document's `segment` that says how far the handler has come."""


class Steps:
    """For one ledger in one database. What finds transfers has the columns of `plan.Found`."""

    def __init__(self, ledger: Ledger, database: Database) -> None:
        self._processing, self._final = ledger.processing_states, ledger.final_states
        self._transfer, self._changes = ledger.tables.transfer, ledger.tables.state_change
        self._segment, self._timeout = ledger.tables.segment, ledger.tables.timeout
        self._date = database.date

    def segment(self) -> Select[Any]:
        """The row of `segment`, if there is one (steps 1 and 2)."""
        here = and_(*(self._segment.c[key] == value for key, value in SEGMENT.items()))
        columns = (self._segment.c.segmentId, self._segment.c.value, self._segment.c.fence)
        return select(*columns).where(here).order_by(self._segment.c.segmentId).limit(1)

    def now(self) -> Select[Any]:
        """The one time that a run goes by (step 5): the database's, which all replicas share."""
        return select(utc_now())

    def new_changes(self, first: int, most: int) -> Executable:
        """How many state changes there are behind `first`, up to `most`, and the last of them (step 4)."""
        id = self._changes.c.transferStateChangeId
        found = select(id).where(id > first).order_by(id).limit(most).subquery()
        return select(func.count(), func.max(found.c[0])).select_from(found)

    def count(self, intervals: Sequence[tuple[int, int]]) -> CompoundSelect[Any]:
        """The number of each interval in the list, and how many state changes it has."""
        id = self._changes.c.transferStateChangeId
        return union_all(
            *(
                select(literal(number), func.count()).where(id > first, id <= last)
                for number, (first, last) in enumerate(intervals)
            )
        )

    def changed(self, first: int, last: int, now: datetime) -> Select[Any]:
        """Transfers with a state change above `first`, up to `last`, that are to be taken in or cleaned up (3 and 6)."""
        id = self._changes.c.transferStateChangeId
        some = select(self._changes.c.transferId).where(id > first, id <= last).distinct().subquery()
        kept = self._timeout
        found = some.outerjoin(kept, kept.c.transferId == some.c.transferId)
        query, expires, state = self._found(found, some, kept)
        due = and_(kept.c.handedOverDate.is_(None), expires < now)
        other = or_(kept.c.transferTimeoutId.is_(None), self._date(kept.c.expirationDate) != expires, due)
        done = and_(kept.c.transferTimeoutId.is_not(None), state.in_(self._final))
        return query.where(or_(and_(state.in_(self._processing), other), done))

    def due(self, now: datetime, most: int) -> Select[Any]:
        """Of what was taken in: whose date has passed and nobody has dealt with, the longest first (step 7)."""
        kept = self._timeout
        query, _, state = self._found(kept, kept, kept)
        query = query.where(kept.c.handedOverDate.is_(None), kept.c.expirationDate < now)
        query = query.where(state.in_((*self._processing, *self._final)))
        return query.order_by(kept.c.expirationDate, kept.c.transferTimeoutId).limit(most)

    def newest_kept(self) -> Select[Any]:
        """The greatest number of what was taken in."""
        return select(func.max(self._timeout.c.transferTimeoutId))

    def end_of_some(self, first: int, most: int) -> Select[Any]:
        """The last number of the `most` rows behind `first` that wait; none, if there are fewer."""
        id = self._timeout.c.transferTimeoutId
        waiting = select(id).where(self._timeout.c.handedOverDate.is_(None), id > first)
        return waiting.order_by(id).limit(1).offset(most - 1)

    def moved(self, first: int, last: int | None) -> Select[Any]:
        """What waits, above `first`, up to `last`, and whose date has changed in the ledger."""
        kept = self._timeout
        query, expires, _ = self._found(kept, kept, kept)
        query = query.where(kept.c.handedOverDate.is_(None), kept.c.transferTimeoutId > first)
        if last is not None:
            query = query.where(kept.c.transferTimeoutId <= last)
        return query.where(self._date(kept.c.expirationDate) != expires)

    def refresh(self, timeout_ids: Sequence[int]) -> Update:
        """Copy the ledger's dates anew."""
        expires = select(self._date(self._transfer.c.expirationDate))
        expires = expires.where(self._transfer.c.transferId == self._timeout.c.transferId)
        these = self._timeout.c.transferTimeoutId.in_(timeout_ids)
        return update(self._timeout).where(these).values(expirationDate=expires.scalar_subquery())

    def _found(self, source: FromClause, whose: FromClause, kept: FromClause) -> tuple[Select[Any], Any, Any]:
        """Transfers with their last state, and where the expiration date and the state stand."""
        last, older = self._changes.alias("last"), self._changes.alias("older")
        newest = select(func.max(older.c.transferStateChangeId)).where(older.c.transferId == whose.c.transferId)
        expires, state = self._date(self._transfer.c.expirationDate), last.c.transferStateId
        joined = source.join(self._transfer, self._transfer.c.transferId == whose.c.transferId)
        joined = joined.join(last, last.c.transferStateChangeId == newest.correlate_except(older).scalar_subquery())
        columns = (whose.c.transferId, expires, state)
        copy = (kept.c.transferTimeoutId, self._date(kept.c.expirationDate), kept.c.handedOverDate)
        return select(*columns, *copy).select_from(joined), expires, state
