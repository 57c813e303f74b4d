"""The apply phase of a run: all that it changes, in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import delete, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from genie_ledger.databases.base import Database
from genie_ledger.errors import RunSuperseded
from genie_ledger.ledger import Ledger
from genie_ledger.plan import ScanResult, Segment, TransferRow
from genie_ledger.queries import SEGMENT, Queries

MAX_VALUES = 5_000
"""Ids in the IN clause of one statement."""

T = TypeVar("T")


class Applier:
    """Writes scan results to the handler's tables of one ledger."""

    def __init__(self, ledger: Ledger, database: Database) -> None:
        self._tables = ledger.tables
        self._database = database
        self._queries = Queries(ledger, database)

    async def apply(
        self,
        result: ScanResult,
        *,
        delivered: AbstractSet[str],
        fence: int | None,
        before_commit: Callable[[], None],
    ) -> None:
        """Write the result of a scan in one transaction (steps 3, 6, 9 and 10 of the reference
        design).

        `delivered` are the ids of the transfers to mark as delivered. `fence` is the fencing token
        of this run, or None. `before_commit` is called at the end of the transaction. Raises
        RunSuperseded if another run has written since the scan, or had a greater fencing token. The
        transaction is rolled back after RunSuperseded, and after an exception of `before_commit`.
        """
        async with self._database.writing() as connection:
            current = await self._lock_segment(connection, result.segment, fence)
            await self._write_timeouts(connection, result, delivered)
            await self._write_windows(connection, result)
            await self._write_segment(connection, current, result, fence)
            before_commit()

    async def _lock_segment(self, connection: AsyncConnection, scanned: Segment, fence: int | None) -> Segment:
        """Lock the handler's row of the table `segment`, and return it. Raises RunSuperseded if another
        run has changed the row since the scan, or had a greater fencing token.
        """
        current = Segment.from_row((await connection.execute(self._queries.segment().with_for_update())).first())
        if fence is not None and current.fence is not None and current.fence > fence:
            raise RunSuperseded(f"a run with fencing token {current.fence} has written, this one has {fence}")
        if (current.id, current.value, current.own_value) != (scanned.id, scanned.value, scanned.own_value):
            raise RunSuperseded(f"another run has moved the segment from {scanned.value} to {current.value}")
        return current

    async def _write_segment(
        self, connection: AsyncConnection, current: Segment, result: ScanResult, fence: int | None
    ) -> None:
        """Record the last state change that the scan has read, in the handler's row of `segment`."""
        table = self._tables.segment
        values = {
            "value": max(current.value, result.last_change_id),  # another implementation may have read further
            "changedDate": result.now,
            "fence": current.fence if fence is None else fence,
            "readValue": result.last_change_id,
        }
        if current.id is None:
            await connection.execute(insert(table).values(**SEGMENT, **values))
        else:
            await connection.execute(update(table).where(table.c.segmentId == current.id).values(**values))

    async def _write_timeouts(
        self, connection: AsyncConnection, result: ScanResult, delivered: AbstractSet[str]
    ) -> None:
        """Delete, update and insert rows of `transferTimeout`, as the plan of the scan says."""
        timeout, plan = self._tables.timeout, result.plan
        row_id = timeout.c.transferTimeoutId
        delivered_rows = [row for transfer_id, row in plan.expired_rows.items() if transfer_id in delivered]
        delivered_ids = {row.timeout_id for row in delivered_rows}
        for ids in _batches(plan.ids_to_delete):
            await connection.execute(delete(timeout).where(row_id.in_(ids)))
        updates = [_updated_values(row, row.expires, result.now) for row in delivered_rows]
        updates += [
            _updated_values(row, row.copied_date, row.delivered_at)
            for row in plan.to_mark_checked
            if row.timeout_id not in delivered_ids
        ]
        await self._database.update_rows(
            connection, timeout, updates, ("expirationDate", "deliveredDate", "stateChangeId")
        )
        # The updates above have set all columns of the delivered rows.
        for ids in _batches([id for id in plan.ids_to_refresh if id not in delivered_ids]):
            await connection.execute(self._queries.refresh_dates(ids))
        for ids in _batches([id for id in plan.ids_to_reopen if id not in delivered_ids]):
            await connection.execute(update(timeout).where(row_id.in_(ids)).values(deliveredDate=None))
        if plan.to_insert:
            await self._database.insert_rows(connection, timeout, list(_inserted_values(result, delivered)))

    async def _write_windows(self, connection: AsyncConnection, result: ScanResult) -> None:
        """Update and delete recheck windows, and insert a window for the range that was scanned.
        Has no effect in a database that commits ids in order, because no change can appear late
        there.
        """
        if self._database.commits_in_order:
            return
        interval, recount = self._tables.interval, result.recount
        window_id = interval.c.timeoutIntervalId
        for window, change_count in recount.changed:
            await connection.execute(update(interval).where(window_id == window.id).values(changes=change_count))
        for ids in _batches(recount.expired_ids):
            await connection.execute(delete(interval).where(window_id.in_(ids)))
        if result.change_count:
            values = {
                "first": result.segment.start,
                "last": result.last_change_id,
                "changes": result.change_count,
                "lookedDate": result.now,
            }
            await connection.execute(insert(interval).values(**values))


def _inserted_values(result: ScanResult, delivered: AbstractSet[str]) -> Iterable[dict[str, Any]]:
    """Return the values of the new rows of `transferTimeout`, one for each newly tracked transfer."""
    for transfer_id, row in result.plan.to_insert.items():
        yield {
            "transferId": transfer_id,
            "expirationDate": row.expires,
            "createdDate": result.now,
            "deliveredDate": result.now if transfer_id in delivered else None,
            "stateChangeId": row.last_change_id,
        }


def _updated_values(row: TransferRow, expires: datetime | None, delivered_at: datetime | None) -> dict[str, Any]:
    """Return the new values of a transfer's row of `transferTimeout`.

    `stateChangeId` is the last state change at the time of the scan. If the transfer has become
    final since, the next run finds the newer state change.
    """
    return {
        "transferTimeoutId": row.timeout_id,
        "transferId": row.transfer_id,
        "expirationDate": expires,
        "deliveredDate": delivered_at,
        "stateChangeId": row.last_change_id,
    }


def _batches(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[start : start + MAX_VALUES] for start in range(0, len(values), MAX_VALUES))
