"""The decisions of a run: which ranges to scan again, and what to write. Pure: no database, no
clock.

Ids of state changes are assigned at insert but become visible at commit, so a lower id can appear
after a higher one. A scanned range is therefore kept as a recheck window, with its number of state
changes, until every transaction that was open at the time of the scan must have ended. If its
number has changed the range is scanned again. Transactions that stay open for longer are missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, NamedTuple, Self

from genie_ledger.sweep import Compared

MAX_WINDOWS = 50
"""Expired windows that a run recounts, and open ones."""

MAX_OPEN_CHANGES = 20_000
"""State changes in the open windows that a run recounts. They are recounted in each run, so they
must be few.
"""


@dataclass(frozen=True, slots=True)
class RecheckWindow:
    """The state changes with ids in (`first`, `last`]: `change_count` of them at the last scan.

    A window is open until it is `max_transaction_age` old, and expired afterwards: no late commit
    can appear in an expired window.
    """

    id: int
    first: int
    last: int
    change_count: int
    scanned_at: datetime


@dataclass(slots=True)
class Recount:
    """The windows whose number of state changes has `changed`, each with its new number: their
    ranges must be scanned again. `expired_ids` are the ids of the windows to remove.
    """

    changed: list[tuple[RecheckWindow, int]] = field(default_factory=list)
    expired_ids: list[int] = field(default_factory=list)


def windows_to_recount(
    windows: Sequence[RecheckWindow], now: datetime, max_transaction_age: timedelta, max_changes: int
) -> list[RecheckWindow]:
    """Return the windows to recount in this run: the oldest expired windows, and the newest open
    windows.

    A window expires `max_transaction_age` after its scan. An expired window is recounted a last
    time: every late commit is visible by then. Open windows are recounted to find most late commits
    sooner. The expired windows have at most `max_changes` state changes in total, but one expired
    window is always returned. The open windows have at most `MAX_OPEN_CHANGES`.
    """
    expired = [window for window in windows if now - window.scanned_at >= max_transaction_age]
    unexpired = [window for window in windows if now - window.scanned_at < max_transaction_age]
    expired.sort(key=lambda window: (window.scanned_at, window.id))
    unexpired.sort(key=lambda window: (window.scanned_at, window.id), reverse=True)
    max_expired_changes = max(max_changes, expired[0].change_count) if expired else 0
    return [*_take_up_to(max_expired_changes, expired), *_take_up_to(MAX_OPEN_CHANGES, unexpired)]


def _take_up_to(max_changes: int, windows: Iterable[RecheckWindow]) -> list[RecheckWindow]:
    """Return the first windows, at most `MAX_WINDOWS`, that have at most `max_changes` state
    changes in total.
    """
    taken: list[RecheckWindow] = []
    remaining = max_changes
    for window in windows:
        remaining -= window.change_count
        if remaining < 0 or len(taken) == MAX_WINDOWS:
            break
        taken.append(window)
    return taken


def compare_counts(
    counts: Iterable[tuple[RecheckWindow, int]], now: datetime, max_transaction_age: timedelta
) -> Recount:
    """Compare windows with their current numbers of state changes. Return the windows whose number
    has changed, and the ids of the windows that have expired.
    """
    recount = Recount()
    for window, change_count in counts:
        if change_count != window.change_count:
            recount.changed.append((window, change_count))
        if now - window.scanned_at >= max_transaction_age:
            recount.expired_ids.append(window.id)
    return recount


# -- results of the scan ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The handler's row of the table `segment`, the high-water mark of the scan.

    `value` is the id of the last state change that was read, by this handler or another
    implementation of the reference design. `own_value` is the value that this handler has written last;
    None before its first write. `fence` is the fencing token of the last run under a lock of Genie.
    """

    id: int | None = None
    value: int = 0
    fence: int | None = None
    own_value: int | None = None

    @classmethod
    def from_row(cls, row: Any) -> Self:
        """Create the segment from the row that `Queries.segment` has selected. Without a row (None)
        the `id` of the segment is None.
        """
        if row is None:
            return cls()
        id, value, fence, own_value = row
        return cls(id=id, value=value, fence=fence, own_value=own_value)

    @property
    def start(self) -> int:
        """The id of the state change after which this handler continues to read.

        If another implementation has moved the segment further, the handler also reads the state
        changes in between, because they may finish transfers that only this handler tracks.
        """
        return self.value if self.own_value is None else min(self.value, self.own_value)


class DuePosition(NamedTuple):
    """The position of a row of `transferTimeout` in the order in which due rows are read."""

    expiration_date: datetime
    timeout_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """The result of the scan phase. `last_change_id` is the id of the last state change that was
    read, the new value of the segment. `change_count` is the number of new state changes.

    `due_until` is the position of the last due row that was read, if there may be further due rows.
    `more_unchecked` is True if there may be further rows of another implementation. `unlisted`
    counts the new state changes to unlisted states, by state.
    `compared` says which rows had their dates compared.
    """

    now: datetime
    segment: Segment
    last_change_id: int
    change_count: int
    due_until: DuePosition | None
    more_unchecked: bool
    unlisted: Mapping[str, int]
    compared: Compared
    recount: Recount
    plan: Plan

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to write."""
        has_changed_windows = bool(self.recount.changed or self.recount.expired_ids)
        return self.last_change_id == self.segment.start and not has_changed_windows and not self.plan


# -- the plan ----------------------------------------------------------------------------------------------

DATE_TOLERANCE = timedelta(seconds=1)
"""A copied date that differs by less is unchanged: copies made by other implementations
have no fractions of a second.
"""


@dataclass(frozen=True, slots=True)
class ExpiredTransfer:
    """A transfer that is still in processing after its time. `expiration_date` is in UTC."""

    transfer_id: str
    expiration_date: datetime
    state: str


class StateKind(IntEnum):
    """The meaning of a state, as the database finds it: its collation decides which states are equal."""

    UNLISTED = 0
    PROCESSING = 1
    FINAL = 2


class TransferRow(NamedTuple):
    """A transfer with its date and last state change in the ledger, and with its row of
    `transferTimeout`, if it has one (is tracked).

    `last_change_id` is the id of the last state change, `state` its state, and `state_kind` the
    meaning of the state (a `StateKind`). From the row of
    `transferTimeout`: its id `timeout_id`, `copied_date`, when it was delivered (`delivered_at`),
    and `known_change_id`, the last state change when the row was written (None in rows of another
    implementation). `final_change_id` is the last final state change in the scanned range, if any.
    """

    transfer_id: str
    expires: datetime | None
    state: str
    state_kind: int
    last_change_id: int
    timeout_id: int | None
    copied_date: datetime | None
    delivered_at: datetime | None
    known_change_id: int | None
    final_change_id: int | None

    @property
    def is_rescheduled(self) -> bool:
        """True if the ledger's date differs from the handler's copy by at least `DATE_TOLERANCE`.
        After a delivery only a later date counts.
        """
        if self.expires is None or self.timeout_id is None:
            return False
        if self.copied_date is None:
            return True
        difference = self.expires - self.copied_date
        return difference >= DATE_TOLERANCE or (difference <= -DATE_TOLERANCE and self.delivered_at is None)

    @property
    def was_final_since(self) -> bool:
        """True if the transfer was in a final state after the state in which it was delivered."""
        return self.final_change_id is not None and self.final_change_id > (self.known_change_id or 0)


@dataclass(slots=True)
class Plan:
    """What a run will deliver and write. The ids are those of rows of `transferTimeout`."""

    to_insert: dict[str, TransferRow] = field(default_factory=dict)
    """By transfer id: transfers in processing that are not tracked yet."""
    ids_to_delete: list[int] = field(default_factory=list)
    """Rows whose transfers have become final."""
    ids_to_refresh: list[int] = field(default_factory=list)
    """Rows whose date has changed in the ledger."""
    ids_to_reopen: list[int] = field(default_factory=list)
    """Delivered rows that can become due again: they were final since, or their date is later."""
    to_mark_checked: list[TransferRow] = field(default_factory=list)
    """Rows of another implementation that stay."""
    expired: dict[str, ExpiredTransfer] = field(default_factory=dict)
    """By transfer id: the transfers to deliver, the longest expired first."""
    expired_rows: dict[str, TransferRow] = field(default_factory=dict)
    """By transfer id: those of them that are tracked already."""

    def __bool__(self) -> bool:
        return any(
            (
                self.to_insert,
                self.ids_to_delete,
                self.ids_to_refresh,
                self.ids_to_reopen,
                self.to_mark_checked,
                self.expired,
            )
        )


def make_plan(rows: Iterable[TransferRow], now: datetime, limit: int) -> Plan:
    """Decide what to write, and which expired transfers to deliver.

    At most `limit` transfers are delivered, the longest expired first. If several rows belong to
    the same transfer, the last row counts.
    """
    plan = Plan()
    expired: list[ExpiredTransfer] = []
    last_rows = _deduplicate(rows)
    for row in last_rows.values():
        if row.state_kind != StateKind.FINAL:
            can_expire = _plan_unfinished(row, plan, in_processing=row.state_kind == StateKind.PROCESSING)
            if can_expire and row.expires is not None and row.expires < now:
                expired.append(ExpiredTransfer(row.transfer_id, row.expires, row.state))
        elif row.timeout_id is not None:
            plan.ids_to_delete.append(row.timeout_id)
    expired.sort(key=lambda transfer: (transfer.expiration_date, transfer.transfer_id))
    for transfer in expired[:limit]:
        plan.expired[transfer.transfer_id] = transfer
        row = last_rows[transfer.transfer_id]
        if row.timeout_id is not None:
            plan.expired_rows[transfer.transfer_id] = row
    return plan


def _deduplicate(rows: Iterable[TransferRow]) -> dict[str, TransferRow]:
    """Return the last row of each transfer, by transfer id.

    Only some rows of a transfer have a `final_change_id`. The returned row gets the greatest
    `final_change_id` of the transfer's rows.
    """
    last_rows: dict[str, TransferRow] = {}
    for row in rows:
        previous = last_rows.get(row.transfer_id)
        if previous is not None and previous.final_change_id is not None:
            last_rows[row.transfer_id] = row._replace(
                final_change_id=max(previous.final_change_id, row.final_change_id or 0)
            )
        else:
            last_rows[row.transfer_id] = row
    return last_rows


def _plan_unfinished(row: TransferRow, plan: Plan, *, in_processing: bool) -> bool:
    """Add the writes for a transfer that is not final to the plan.

    Returns whether the transfer must be delivered once its date has passed. That is so if it is in
    processing, and was either not delivered or reopened after its delivery.
    """
    if row.timeout_id is None:
        if in_processing and row.expires is not None:
            plan.to_insert[row.transfer_id] = row
        return in_processing
    if row.known_change_id is None:  # another implementation has written the row
        plan.to_mark_checked.append(row)
    reopened = row.delivered_at is not None and (row.was_final_since or row.is_rescheduled)
    if reopened:
        plan.ids_to_reopen.append(row.timeout_id)
    if row.is_rescheduled:
        plan.ids_to_refresh.append(row.timeout_id)
    return in_processing and (row.delivered_at is None or reopened)
