"""The scan phase of a run: reads what has changed in the ledger since the last run, and plans the
writes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from genie_ledger.databases.base import Database
from genie_ledger.ledger import Ledger
from genie_ledger.plan import (
    DuePosition,
    RecheckWindow,
    Recount,
    ScanResult,
    Segment,
    TransferRow,
    compare_counts,
    make_plan,
    windows_to_recount,
)
from genie_ledger.queries import Queries
from genie_ledger.sweep import ROWS_PER_SLICE, Compared, IdleSweep, Phase, Sweep


class Scanner:
    """Scans one ledger. A scanner only reads; between runs it remembers which rows to look at next."""

    def __init__(self, ledger: Ledger, database: Database, *, batch: int, max_transaction_age: timedelta) -> None:
        self._ledger = ledger
        self._database = database
        self._queries = Queries(ledger, database)
        self._batch_size = batch
        self._max_transaction_age = max_transaction_age
        self._sweep = Sweep(batch)
        """Which rows have their dates compared with the ledger's next."""
        self._due_after: DuePosition | None = None
        """The row after which the next scan reads due rows; None: from the first."""

    @property
    def catching_up(self) -> bool:
        """True if the next run compares a whole batch of dates with the ledger's, because the last
        run has found moved dates.
        """
        return self._sweep.phase is not Phase.SAMPLE

    def advance(self, result: ScanResult, *, has_rejected: bool) -> None:
        """Record that the result of a scan was applied, so that the next scan continues after it.

        Usually the next scan starts with the first due row, because delivered rows are no longer
        due. Rows of this scan may still be due, e.g. if transfers were rejected (`has_rejected`).
        Then the next scan continues after the last due row of this scan. So rejected transfers
        don't keep others from being delivered.
        """
        may_still_be_due = has_rejected or not result.plan or self._due_after is not None
        self._due_after = result.due_until if may_still_be_due else None
        self._sweep.advance(result.compared)

    async def scan(self) -> ScanResult:
        """Read what has changed in the ledger since the last run, and plan what to deliver and to write.

        - new state changes: those after the segment, up to one batch
        - recheck windows: ranges of ids that are counted again, because a transaction that was open
          when they were read may have committed into them later
        - due transfers: tracked transfers whose expiration date has passed
        - unchecked rows: rows that another implementation has written to the handler's tables
        - moved dates: expiration dates that were changed in the ledger
        """
        queries = self._queries
        async with self._database.reading() as connection:
            segment = Segment.from_row((await connection.execute(queries.segment())).first())
            new_changes = await connection.execute(queries.new_changes(segment.start, self._batch_size))
            change_count, last_change_id = new_changes.one()
            # Read after the changes: a change with a lower id that becomes visible later is of a transaction open now.
            now = (await connection.execute(queries.now())).scalar_one()
            recount = await self._recount(connection, now)
            rows = await self._rows(connection, queries.due(now, self._batch_size, self._due_after))
            due_until = _due_position(rows[-1]) if len(rows) == self._batch_size else None
            unchecked = await self._rows(connection, queries.unchecked(self._batch_size))
            rescheduled, compared = await self._compare_dates(connection, now)
            rows += [*unchecked, *rescheduled]
            ranges = [(window.first, window.last) for window, _ in recount.changed]
            unlisted: dict[str, int] = {}
            if change_count:
                counts = await connection.execute(queries.unlisted(segment.start, last_change_id))
                unlisted = dict(counts.all())
                ranges.append((segment.start, last_change_id))
            for first_id, last_id in ranges:
                rows += await self._rows(connection, queries.newly_final(first_id, last_id))
                rows += await self._rows(connection, queries.newly_processing(first_id, last_id, now))
        return ScanResult(
            now=now,
            segment=segment,
            last_change_id=last_change_id if change_count else segment.start,
            change_count=change_count,
            due_until=due_until,
            more_unchecked=len(unchecked) == self._batch_size,
            unlisted=unlisted,
            compared=compared,
            recount=recount,
            plan=make_plan(rows, now, self._batch_size),
        )

    async def _recount(self, connection: AsyncConnection, now: datetime) -> Recount:
        """Count the state changes of the recheck windows again, to find state changes that were
        committed after their range was scanned.
        """
        if self._database.commits_in_order:  # no change is committed late
            return Recount()
        stored_windows = (await connection.execute(select(*self._ledger.tables.interval.c))).all()
        windows = windows_to_recount(
            [RecheckWindow(*row) for row in stored_windows], now, self._max_transaction_age, self._batch_size
        )
        if not windows:
            return Recount()
        query = self._queries.count_changes([(window.first, window.last) for window in windows])
        counts = dict((await connection.execute(query)).all())
        return compare_counts(
            ((window, counts[index]) for index, window in enumerate(windows)), now, self._max_transaction_age
        )

    def start_idle_sweep(self) -> IdleSweep:
        """Start to compare all dates with the ledger's, in slices, between two runs."""
        return IdleSweep(self._sweep.position)

    async def compare_slice(self, idle: IdleSweep) -> None:
        """Compare the dates of the next slice of rows with the ledger's.

        If a date was moved, `idle.found_rescheduled` is set, and the next run begins with the row of this date.
        """
        async with self._database.reading() as connection:
            first = await self._sweep_position(connection)
            last = (await connection.execute(self._queries.last_of_batch(first, ROWS_PER_SLICE))).scalar()
            rescheduled_id = (await connection.execute(self._queries.first_rescheduled(first, last))).scalar()
        if rescheduled_id is not None:
            self._sweep.start_at(rescheduled_id)
            idle.found_rescheduled = True
        else:
            self._sweep.position = last or 0
            idle.advance(first, last)

    async def _sweep_position(self, connection: AsyncConnection) -> int:
        """Return the id of the row after which to compare dates.

        The first position is chosen at random: with frequent restarts, a sweep that always begins
        with the first row would never reach the last rows.
        """
        if self._sweep.position is None:
            newest = (await connection.execute(self._queries.max_timeout_id())).scalar() or 0
            self._sweep.position = random.randint(0, newest)  # noqa: S311 - no secret
        return self._sweep.position

    async def _compare_dates(self, connection: AsyncConnection, now: datetime) -> tuple[list[TransferRow], Compared]:
        """Compare the dates of the next batch of tracked rows with the dates in the ledger. After the
        end of the table, continue with its first rows.

        Returns the rows whose dates differ, and which rows were compared. In the phase OVERDUE,
        only rows whose new date has passed are returned.
        """
        first, batch_size = await self._sweep_position(connection), self._sweep.row_count
        last = (await connection.execute(self._queries.last_of_batch(first, batch_size))).scalar()
        ranges = [(first, last)]
        wrapped = last is None  # the end of the table was reached
        covers_table = wrapped and first == 0
        if wrapped and first:  # continue with the first rows, at most to the row where this batch began
            last_after_wrap = (await connection.execute(self._queries.last_of_batch(0, batch_size))).scalar()
            covers_table = last_after_wrap is None or last_after_wrap >= first
            last = first if covers_table else last_after_wrap
            ranges.append((0, last))
        max_date = now if self._sweep.phase is Phase.OVERDUE else None
        rows: list[TransferRow] = []
        for range_first, range_last in ranges:
            rows += await self._rows(connection, self._queries.rescheduled(range_first, range_last, max_date))
        found = bool(rows)
        if max_date is not None and not found:  # look for changed dates that have not passed yet
            found = any([(await connection.execute(self._queries.first_rescheduled(*ids))).first() for ids in ranges])
        return rows, Compared(
            first=first, last=last or 0, wrapped=wrapped, covers_table=covers_table, found_rescheduled=found
        )

    async def _rows(self, connection: AsyncConnection, query: Select[Any]) -> list[TransferRow]:
        rows: Sequence[Any] = (await connection.execute(query)).all()
        return [TransferRow(*row) for row in rows]


def _due_position(row: TransferRow) -> DuePosition | None:
    """Return the position of a row in the order of `Queries.due`. Returns None for a row that is
    not tracked.
    """
    if row.copied_date is None or row.timeout_id is None:
        return None
    return DuePosition(row.copied_date, row.timeout_id)
