"""The scan phase of a run: finds what there is to do. It only reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.timeouts.databases.base import Database
from genie.timeouts.ledger import Ledger
from genie.timeouts.plan import (
    RecheckWindow,
    Recount,
    ScanResult,
    Segment,
    TransferRow,
    make_plan,
    recount,
    windows_to_recount,
)
from genie.timeouts.queries import Queries
from genie.timeouts.sweep import ROWS_PER_SLICE, Compared, IdleSweep, Phase, Sweep


class Scanner:
    """Scans one ledger."""

    def __init__(self, ledger: Ledger, database: Database, *, batch: int, max_transaction_age: timedelta) -> None:
        self._ledger, self._database = ledger, database
        self._queries = Queries(ledger, database)
        self._batch, self._max_transaction_age = batch, max_transaction_age
        self._sweep = Sweep(batch)
        self._due_after: tuple[datetime, int] | None = None

    @property
    def catching_up(self) -> bool:
        """Whether the next run compares a whole batch of dates, because the last one has found
        moved ones.
        """
        return self._sweep.phase is not Phase.SAMPLE

    def advance(self, result: ScanResult, has_rejected: bool) -> None:
        """The result was applied: continue after it. Rejected transfers do not keep others from
        being delivered.

        If more may be due the next scan continues after the last due row of this one.
        """
        again = has_rejected or not result.plan or self._due_after is not None
        self._due_after = result.due_until if again else None
        self._sweep.advance(result.compared)

    async def scan(self) -> ScanResult:
        """Find the new state changes, the due transfers, and what has changed."""
        async with self._database.reading() as connection:
            segment = Segment.of((await connection.execute(self._queries.segment())).first())
            found = await connection.execute(self._queries.new_changes(segment.start, self._batch))
            changes, last = found.one()
            # Read after the changes: those that may still appear among them belong to transactions that are open now.
            now = (await connection.execute(self._queries.now())).scalar_one()
            recounted = await self._recount(connection, now)
            rows = await self._rows(connection, self._queries.due(now, self._batch, self._due_after))
            due_until = _position_of(rows[-1]) if len(rows) == self._batch else None
            unchecked = await self._rows(connection, self._queries.unchecked(self._batch))
            moved, compared = await self._compare(connection, now)
            rows += [*unchecked, *moved]
            ranges = [(one.first, one.last) for one, _ in recounted.changed]
            if changes:
                ranges.append((segment.start, last))
            for range_ in ranges:
                rows += await self._rows(connection, self._queries.done(*range_))
                rows += await self._rows(connection, self._queries.new(*range_, now))
        return ScanResult(
            now=now,
            segment=segment,
            last=last if changes else segment.start,
            change_count=changes,
            due_until=due_until,
            more_unchecked=len(unchecked) == self._batch,
            compared=compared,
            recounted=recounted,
            plan=make_plan(rows, now, self._ledger, self._batch),
        )

    async def _recount(self, connection: AsyncConnection, now: datetime) -> Recount:
        if self._database.commits_in_order:
            return Recount()
        kept = (await connection.execute(select(*self._ledger.tables.interval.c))).all()
        counted = windows_to_recount([RecheckWindow(*row) for row in kept], now, self._max_transaction_age, self._batch)
        if not counted:
            return Recount()
        found = await connection.execute(self._queries.count([(one.first, one.last) for one in counted]))
        counts = dict(found.all())
        return recount(((one, counts[number]) for number, one in enumerate(counted)), now, self._max_transaction_age)

    def start_idle_sweep(self) -> IdleSweep:
        """Start the comparison of all dates between two runs."""
        return IdleSweep(self._sweep.position)

    async def compare_slice(self, idle: IdleSweep) -> None:
        """Compare the dates of the next slice of rows. The next run begins with the first moved
        one.
        """
        async with self._database.reading() as connection:
            first = await self._position(connection)
            last = (await connection.execute(self._queries.last_of_batch(first, ROWS_PER_SLICE))).scalar()
            moved = (await connection.execute(self._queries.first_moved(first, last))).scalar()
        if moved is not None:
            self._sweep.found(moved)
            idle.found = True
        else:
            self._sweep.position = last or 0
            idle.advance(first, last)

    async def _position(self, connection: AsyncConnection) -> int:
        """Return the row after which to compare dates; a random one at first, since restarts could
        keep it near the first.
        """
        if self._sweep.position is None:
            newest = (await connection.execute(self._queries.max_timeout_id())).scalar() or 0
            self._sweep.position = random.randint(0, newest)  # noqa: S311 - no secret
        return self._sweep.position

    async def _compare(self, connection: AsyncConnection, now: datetime) -> tuple[list[TransferRow], Compared]:
        """Compare the dates of the next rows with the ledger's, wrapping at the end of the table."""
        first, most = await self._position(connection), self._sweep.rows
        last = (await connection.execute(self._queries.last_of_batch(first, most))).scalar()
        ranges = [(first, last)]
        wrapped, whole = last is None, last is None and not first
        if wrapped and first:
            end = (await connection.execute(self._queries.last_of_batch(0, most))).scalar()
            whole = end is None or end >= first
            last = first if whole else end
            ranges.append((0, last))
        before = now if self._sweep.phase is Phase.OVERDUE else None
        rows = [row for each in ranges for row in await self._rows(connection, self._queries.moved(*each, before))]
        moved = bool(rows)
        if before is not None and not moved:
            moved = any([(await connection.execute(self._queries.first_moved(*each))).first() for each in ranges])
        return rows, Compared(first=first, last=last or 0, wrapped=wrapped, whole=whole, moved=moved)

    async def _rows(self, connection: AsyncConnection, query: Select[Any]) -> list[TransferRow]:
        rows: Sequence[Any] = (await connection.execute(query)).all()
        return [TransferRow(*row) for row in rows]


def _position_of(due: TransferRow) -> tuple[datetime, int] | None:
    return None if due.copied_date is None or due.timeout_id is None else (due.copied_date, due.timeout_id)
