"""The first half of a run: what there is to do. It only reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.timeouts.databases.base import Database
from genie.timeouts.ledger import Ledger
from genie.timeouts.plan import Found, Interval, Look, Recount, Segment, plan, recount, to_count
from genie.timeouts.queries import Steps
from genie.timeouts.sweep import ROWS_PER_SCAN, Compared, Phase, Scan, Sweep


class Reading:
    """For one ledger in one database."""

    def __init__(self, ledger: Ledger, database: Database, *, batch: int, open_for: timedelta) -> None:
        self._ledger, self._database = ledger, database
        self._steps = Steps(ledger, database)
        self._batch, self._open_for = batch, open_for
        self._sweep = Sweep(batch)
        self._due_behind: tuple[datetime, int] | None = None

    @property
    def catching_up(self) -> bool:
        """Whether the next run compares a whole batch of dates, because the last one has found moved ones."""
        return self._sweep.phase is not Phase.SAMPLE

    def go_on(self, look: Look, refused: bool) -> None:
        """What was found is dealt with, but for what was refused: that does not keep the rest from its turn.

        If more may be due, the next look for it begins behind what this one has found, and so on to the last of it.
        """
        again = refused or not look.plan or self._due_behind is not None
        self._due_behind = look.due_to if again else None
        self._sweep.advance(look.compared)

    async def look(self) -> Look:
        """See what is new, what is due, and what has changed."""
        async with self._database.reading() as connection:
            segment = Segment.of((await connection.execute(self._steps.segment())).first())
            found = await connection.execute(self._steps.new_changes(segment.start, self._batch))
            changes, last = found.one()
            # Asked behind that: what may still appear among those changes belongs to transactions that are open now.
            now = (await connection.execute(self._steps.now())).scalar_one()
            recounted = await self._recount(connection, now)
            rows = await self._rows(connection, self._steps.due(now, self._batch, self._due_behind))
            due_to = _place(rows[-1]) if len(rows) == self._batch else None
            of_others = await self._rows(connection, self._steps.unchecked(self._batch))
            moved, compared = await self._compare(connection, now)
            rows += [*of_others, *moved]
            stretches = [(one.first, one.last) for one, _ in recounted.again]
            if changes:
                stretches.append((segment.start, last))
            for stretch in stretches:
                rows += await self._rows(connection, self._steps.done(*stretch))
                rows += await self._rows(connection, self._steps.new(*stretch, now))
        return Look(
            now=now,
            segment=segment,
            last=last if changes else segment.start,
            changes=changes,
            due_to=due_to,
            unchecked=len(of_others) == self._batch,
            compared=compared,
            recounted=recounted,
            plan=plan(rows, now, self._ledger, self._batch),
        )

    async def _recount(self, connection: AsyncConnection, now: datetime) -> Recount:
        if self._database.commits_in_order:
            return Recount()
        kept = (await connection.execute(select(*self._ledger.tables.interval.c))).all()
        counted = to_count([Interval(*row) for row in kept], now, self._open_for, self._batch)
        if not counted:
            return Recount()
        found = await connection.execute(self._steps.count([(one.first, one.last) for one in counted]))
        counts = dict(found.all())
        return recount(((one, counts[number]) for number, one in enumerate(counted)), now, self._open_for)

    def start_scan(self) -> Scan:
        """Begin to compare all dates between two runs."""
        return Scan(self._sweep.position)

    async def scan(self, scan: Scan) -> None:
        """Compare the dates of the next slice of rows. If one was moved, the next run begins with its row."""
        async with self._database.reading() as connection:
            first = await self._position(connection)
            last = (await connection.execute(self._steps.end_of_some(first, ROWS_PER_SCAN))).scalar()
            moved = (await connection.execute(self._steps.first_moved(first, last))).scalar()
        if moved is not None:
            self._sweep.found(moved)
            scan.found = True
        else:
            self._sweep.position = last or 0
            scan.advance(first, last)

    async def _position(self, connection: AsyncConnection) -> int:
        """The row after which dates are compared: in the beginning any, so that restarts don't keep it at the first."""
        if self._sweep.position is None:
            newest = (await connection.execute(self._steps.newest_kept())).scalar() or 0
            self._sweep.position = random.randint(0, newest)  # noqa: S311 - no secret
        return self._sweep.position

    async def _compare(self, connection: AsyncConnection, now: datetime) -> tuple[list[Found], Compared]:
        """Compare the dates of the next rows with the ledger's, from the beginning again after the end."""
        first, most = await self._position(connection), self._sweep.rows
        last = (await connection.execute(self._steps.end_of_some(first, most))).scalar()
        stretches = [(first, last)]
        wrapped, whole = last is None, last is None and not first
        if wrapped and first:
            end = (await connection.execute(self._steps.end_of_some(0, most))).scalar()
            whole = end is None or end >= first
            last = first if whole else end
            stretches.append((0, last))
        before = now if self._sweep.phase is Phase.OVERDUE else None
        rows = [row for each in stretches for row in await self._rows(connection, self._steps.moved(*each, before))]
        moved = bool(rows)
        if before is not None and not moved:
            moved = any([(await connection.execute(self._steps.first_moved(*each))).first() for each in stretches])
        return rows, Compared(first=first, last=last or 0, wrapped=wrapped, whole=whole, moved=moved)

    async def _rows(self, connection: AsyncConnection, query: Select[Any]) -> list[Found]:
        rows: Sequence[Any] = (await connection.execute(query)).all()
        return [Found(*row) for row in rows]


def _place(due: Found) -> tuple[datetime, int] | None:
    return None if due.kept is None or due.timeout_id is None else (due.kept, due.timeout_id)
