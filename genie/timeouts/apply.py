"""The second half of a run: all that it changes, in one transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import delete, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.timeouts.databases.base import Database
from genie.timeouts.errors import TurnLost
from genie.timeouts.ledger import Ledger
from genie.timeouts.plan import Found, Look, Segment
from genie.timeouts.queries import SEGMENT, Steps

MOST = 5_000
"""Values of one statement."""

T = TypeVar("T")


class Writing:
    """For one ledger in one database."""

    def __init__(self, ledger: Ledger, database: Database) -> None:
        self._tables, self._database = ledger.tables, database
        self._steps = Steps(ledger, database)

    async def write(
        self, look: Look, dealt_with: AbstractSet[str], fence: int | None, check: Callable[[], None]
    ) -> None:
        """Keep what was found, and that some transfers are dealt with; move the segment (steps 3, 6, 9 and 10).

        TurnLost, where another run has written meanwhile; or what `check` raises, which is called at the very end.
        """
        async with self._segment(look, fence) as connection:
            await self._timeouts(connection, look, dealt_with)
            await self._intervals(connection, look)
            check()

    @asynccontextmanager
    async def _segment(self, look: Look, fence: int | None) -> AsyncIterator[AsyncConnection]:
        """A transaction in which the segment is locked, as it was when it was looked at; and moved at the end."""
        segment = self._tables.segment
        async with self._database.writing() as connection:
            found = Segment.of((await connection.execute(self._steps.segment().with_for_update())).first())
            if fence is not None and found.fence is not None and found.fence > fence:
                raise TurnLost(f"a run with fence {found.fence} has been here, and this one has {fence}")
            if (found.id, found.value, found.read) != (look.segment.id, look.segment.value, look.segment.read):
                raise TurnLost(f"another run has moved the segment from {look.segment.value} to {found.value}")
            yield connection
            values = {
                "value": max(found.value, look.last),
                "changedDate": look.now,
                "fence": found.fence if fence is None else fence,
                "readValue": look.last,
            }
            if found.id is None:
                await connection.execute(insert(segment).values(**SEGMENT, **values))
            else:
                await connection.execute(update(segment).where(segment.c.segmentId == found.id).values(**values))

    async def _timeouts(self, connection: AsyncConnection, look: Look, dealt_with: AbstractSet[str]) -> None:
        timeout, plan = self._tables.timeout, look.plan
        id = timeout.c.transferTimeoutId
        handed = [row for transfer, row in plan.rows.items() if transfer in dealt_with]
        written = {row.timeout_id for row in handed}
        for ids in _parts(plan.delete):
            await connection.execute(delete(timeout).where(id.in_(ids)))
        rows = [_row(row, row.expires, look.now) for row in handed]
        rows += [_row(row, row.kept, row.handed_over) for row in plan.check if row.timeout_id not in written]
        await self._database.change(connection, timeout, rows, ("expirationDate", "handedOverDate", "stateChangeId"))
        for ids in _parts([row for row in plan.refresh if row not in written]):
            await connection.execute(self._steps.refresh(ids))
        for ids in _parts([row for row in plan.reopen if row not in written]):
            await connection.execute(update(timeout).where(id.in_(ids)).values(handedOverDate=None))
        if plan.insert:
            await self._database.add(connection, timeout, list(_rows(look, dealt_with)))

    async def _intervals(self, connection: AsyncConnection, look: Look) -> None:
        if self._database.commits_in_order:
            return
        interval, recounted = self._tables.interval, look.recounted
        id = interval.c.timeoutIntervalId
        for one, changes in recounted.again:
            await connection.execute(update(interval).where(id == one.id).values(changes=changes))
        for ids in _parts(recounted.forgotten):
            await connection.execute(delete(interval).where(id.in_(ids)))
        if look.changes:
            looked = {"first": look.segment.start, "last": look.last, "changes": look.changes, "lookedDate": look.now}
            await connection.execute(insert(interval).values(**looked))


def _rows(look: Look, dealt_with: AbstractSet[str]) -> Iterable[dict[str, Any]]:
    for transfer, found in look.plan.insert.items():
        yield {
            "transferId": transfer,
            "expirationDate": found.expires,
            "createdDate": look.now,
            "handedOverDate": look.now if transfer in dealt_with else None,
            "stateChangeId": found.change,
        }


def _row(found: Found, expires: datetime | None, handed_over: datetime | None) -> dict[str, Any]:
    """Our row of a transfer, with its last state change as the run has found it.

    Not as it is now: the transfer may have become final, and its date may have been moved, since it was handed over.
    """
    return {
        "transferTimeoutId": found.timeout_id,
        "transferId": found.transfer_id,
        "expirationDate": expires,
        "handedOverDate": handed_over,
        "stateChangeId": found.change,
    }


def _parts(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[start : start + MOST] for start in range(0, len(values), MOST))
