"""The first half of a run: what there is to do. It only reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.timeouts.databases.database import Database
from genie.timeouts.intervals import Interval, Recount, recount, to_count
from genie.timeouts.ledger import Ledger
from genie.timeouts.look import Look, Segment
from genie.timeouts.plan import Found, plan
from genie.timeouts.steps import Steps

COMPARED = 1_000
"""Rows whose dates are compared with the ledger's in a run. (A date that was moved back is noticed by that alone.)"""


class Reading:
    """For one ledger in one database."""

    def __init__(self, ledger: Ledger, database: Database, *, batch: int, open_for: timedelta) -> None:
        self._ledger, self._database = ledger, database
        self._steps = Steps(ledger, database)
        self._batch, self._open_for = batch, open_for
        self._compared: int | None = None
        self._due_behind: tuple[datetime, int] | None = None

    def go_on(self, look: Look, refused: bool) -> None:
        """What was found is dealt with, but for what was refused: that does not keep the rest from its turn.

        If more may be due, the next look for it begins behind what this one has found, and so on to the last of it.
        """
        again = refused or not look.plan or self._due_behind is not None
        self._due_behind = look.due_to if again else None

    async def look(self) -> Look:
        """See what is new, what is due, and what has changed."""
        async with self._database.reading() as connection:
            segment = Segment.of((await connection.execute(self._steps.segment())).first())
            found = await connection.execute(self._steps.new_changes(segment.value, self._batch))
            changes, last = found.one()
            # Asked behind that: what may still appear among those changes belongs to transactions that are open now.
            now = (await connection.execute(self._steps.now())).scalar_one()
            recounted = await self._recount(connection, now)
            rows = await self._rows(connection, self._steps.due(now, self._batch, self._due_behind))
            due_to = _place(rows[-1]) if len(rows) == self._batch else None
            rows += await self._moved(connection)
            stretches = [(one.first, one.last) for one, _ in recounted.again]
            if changes:
                stretches.append((segment.value, last))
            for stretch in stretches:
                rows += await self._rows(connection, self._steps.done(*stretch))
                rows += await self._rows(connection, self._steps.new(*stretch, now))
        return Look(
            now=now,
            segment=segment,
            last=last if changes else segment.value,
            changes=changes,
            due_to=due_to,
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

    async def _moved(self, connection: AsyncConnection) -> list[Found]:
        """Compare some dates with the ledger's: the next ones each time, around and around, from anywhere."""
        if self._compared is None:
            newest = (await connection.execute(self._steps.newest_kept())).scalar() or 0
            self._compared = random.randint(0, newest)  # noqa: S311 - no secret
        first = self._compared
        last = (await connection.execute(self._steps.end_of_some(first, COMPARED))).scalar()
        rows = await self._rows(connection, self._steps.moved(first, last))
        if last is None and first:
            last = (await connection.execute(self._steps.end_of_some(0, COMPARED))).scalar()
            last = first if last is None else min(first, last)
            rows += await self._rows(connection, self._steps.moved(0, last))
        self._compared = last or 0
        return rows

    async def _rows(self, connection: AsyncConnection, query: Select[Any]) -> list[Found]:
        rows: Sequence[Any] = (await connection.execute(query)).all()
        return [Found(*row) for row in rows]


def _place(due: Found) -> tuple[datetime, int] | None:
    return None if due.kept is None or due.timeout_id is None else (due.kept, due.timeout_id)
