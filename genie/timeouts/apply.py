"""The write phase of a run: all that it changes, in one transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import delete, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from genie.timeouts.databases.base import Database
from genie.timeouts.errors import RunSuperseded
from genie.timeouts.ledger import Ledger
from genie.timeouts.plan import ScanResult, Segment, TransferRow
from genie.timeouts.queries import SEGMENT, Queries

MAX_VALUES = 5_000
"""Values in one statement."""

T = TypeVar("T")


class Applier:
    """Applies scan results to the tables of one ledger."""

    def __init__(self, ledger: Ledger, database: Database) -> None:
        self._tables, self._database = ledger.tables, database
        self._queries = Queries(ledger, database)

    async def apply(
        self, result: ScanResult, delivered: AbstractSet[str], fence: int | None, check: Callable[[], None]
    ) -> None:
        """Write what was found and which transfers were delivered, and move the segment (steps 3,
        6, 9 and 10).

        RunSuperseded if another run has written since the scan; or what `check` raises, which is
        called last.
        """
        async with self._locked_segment(result, fence) as connection:
            await self._write_timeouts(connection, result, delivered)
            await self._write_windows(connection, result)
            check()

    @asynccontextmanager
    async def _locked_segment(self, result: ScanResult, fence: int | None) -> AsyncIterator[AsyncConnection]:
        """A transaction that locks the segment, checks that it is as it was scanned, and moves it
        at the end.
        """
        segment = self._tables.segment
        async with self._database.writing() as connection:
            found = Segment.of((await connection.execute(self._queries.segment().with_for_update())).first())
            if fence is not None and found.fence is not None and found.fence > fence:
                raise RunSuperseded(f"a run with fencing token {found.fence} has written, this one has {fence}")
            if (found.id, found.value, found.read) != (result.segment.id, result.segment.value, result.segment.read):
                raise RunSuperseded(f"another run has moved the segment from {result.segment.value} to {found.value}")
            yield connection
            values = {
                "value": max(found.value, result.last),
                "changedDate": result.now,
                "fence": found.fence if fence is None else fence,
                "readValue": result.last,
            }
            if found.id is None:
                await connection.execute(insert(segment).values(**SEGMENT, **values))
            else:
                await connection.execute(update(segment).where(segment.c.segmentId == found.id).values(**values))

    async def _write_timeouts(
        self, connection: AsyncConnection, result: ScanResult, delivered: AbstractSet[str]
    ) -> None:
        timeout, plan = self._tables.timeout, result.plan
        id = timeout.c.transferTimeoutId
        delivered_rows = [row for transfer, row in plan.rows.items() if transfer in delivered]
        written = {row.timeout_id for row in delivered_rows}
        for ids in _batches(plan.delete):
            await connection.execute(delete(timeout).where(id.in_(ids)))
        rows = [_row(row, row.expires, result.now) for row in delivered_rows]
        rows += [_row(row, row.copied_date, row.handed_over) for row in plan.check if row.timeout_id not in written]
        await self._database.update_rows(
            connection, timeout, rows, ("expirationDate", "handedOverDate", "stateChangeId")
        )
        for ids in _batches([row for row in plan.refresh if row not in written]):
            await connection.execute(self._queries.refresh_dates(ids))
        for ids in _batches([row for row in plan.reopen if row not in written]):
            await connection.execute(update(timeout).where(id.in_(ids)).values(handedOverDate=None))
        if plan.insert:
            await self._database.insert_rows(connection, timeout, list(_rows(result, delivered)))

    async def _write_windows(self, connection: AsyncConnection, result: ScanResult) -> None:
        if self._database.commits_in_order:
            return
        interval, recounted = self._tables.interval, result.recounted
        id = interval.c.timeoutIntervalId
        for one, changes in recounted.changed:
            await connection.execute(update(interval).where(id == one.id).values(changes=changes))
        for ids in _batches(recounted.expired_ids):
            await connection.execute(delete(interval).where(id.in_(ids)))
        if result.change_count:
            window = {
                "first": result.segment.start,
                "last": result.last,
                "changes": result.change_count,
                "lookedDate": result.now,
            }
            await connection.execute(insert(interval).values(**window))


def _rows(result: ScanResult, delivered: AbstractSet[str]) -> Iterable[dict[str, Any]]:
    for transfer, found in result.plan.insert.items():
        yield {
            "transferId": transfer,
            "expirationDate": found.expires,
            "createdDate": result.now,
            "handedOverDate": result.now if transfer in delivered else None,
            "stateChangeId": found.change,
        }


def _row(found: TransferRow, expires: datetime | None, handed_over: datetime | None) -> dict[str, Any]:
    """Return our row of a transfer, with its last state change as of the scan.

    Not its present one: since its delivery the transfer may have become final, and its date may
    have moved.
    """
    return {
        "transferTimeoutId": found.timeout_id,
        "transferId": found.transfer_id,
        "expirationDate": expires,
        "handedOverDate": handed_over,
        "stateChangeId": found.change,
    }


def _batches(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[start : start + MAX_VALUES] for start in range(0, len(values), MAX_VALUES))
