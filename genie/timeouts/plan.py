"""Decisions of a run, without a database or a clock: which ranges to scan again, and what to write.

Ids of state changes are assigned at insert but become visible at commit, so a lower id can appear
after a higher one. A scanned range is therefore kept as a recheck window, with its number of state
changes, until every transaction that was open at the time of the scan must have ended. If its
number has changed the range is scanned again. Transactions that stay open for longer are missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self

from genie.timeouts.ledger import Ledger
from genie.timeouts.sweep import Compared

MAX_WINDOWS = 50
"""Windows of either age that are recounted in a run."""

MAX_YOUNG_CHANGES = 20_000
"""State changes in the young windows that a run recounts. They are recounted in each run, so they
must be few.
"""


@dataclass(frozen=True, slots=True)
class RecheckWindow:
    """The state changes above `first` and up to `last`: `change_count` of them at the last scan."""

    id: int
    first: int
    last: int
    change_count: int
    scanned_at: datetime


@dataclass(slots=True)
class Recount:
    """The windows that must be scanned again, with their new counts, and the ids of those that have
    expired.
    """

    changed: list[tuple[RecheckWindow, int]] = field(default_factory=list)
    expired_ids: list[int] = field(default_factory=list)


def windows_to_recount(
    kept: Sequence[RecheckWindow], now: datetime, max_transaction_age: timedelta, most: int
) -> list[RecheckWindow]:
    """Return the windows to recount now: expired ones, up to `most` state changes; and the
    youngest, if they are small.

    A window is recounted a last time before it is removed, which finds every late commit.
    Recounting the young ones finds it soon, unless the handler is lagging.
    """
    ended = [one for one in kept if now - one.scanned_at >= max_transaction_age]
    young = [one for one in kept if now - one.scanned_at < max_transaction_age]
    ended.sort(key=lambda one: (one.scanned_at, one.id))
    young.sort(key=lambda one: (one.scanned_at, one.id), reverse=True)
    return [*_up_to(ended, max(most, ended[0].change_count) if ended else 0), *_up_to(young, MAX_YOUNG_CHANGES)]


def _up_to(intervals: Iterable[RecheckWindow], most: int) -> list[RecheckWindow]:
    found: list[RecheckWindow] = []
    for one in intervals:
        most -= one.change_count
        if most < 0 or len(found) == MAX_WINDOWS:
            break
        found.append(one)
    return found


def recount(counted: Iterable[tuple[RecheckWindow, int]], now: datetime, max_transaction_age: timedelta) -> Recount:
    """Compare the counts of the windows."""
    found = Recount()
    for one, changes in counted:
        if changes != one.change_count:
            found.changed.append((one, changes))
        if now - one.scanned_at >= max_transaction_age:
            found.expired_ids.append(one.id)
    return found


# -- results of the scan ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The row of `segment` for this handler.

    `value`: the state change up to which state changes were read, by this handler or another
    implementation of the document. `read`: the value that this handler has written last; None
    before its first write. `fence`: the fencing token of the last run under a lock of Genie.
    """

    id: int | None = None
    value: int = 0
    fence: int | None = None
    read: int | None = None

    @classmethod
    def of(cls, row: Any) -> Self:
        """Create it from the row of `Queries.segment`."""
        return cls() if row is None else cls(id=row[0], value=row[1], fence=row[2], read=row[3])

    @property
    def start(self) -> int:
        """The state change after which this handler continues to read.

        It is below `value` if another implementation has moved the segment: final states in between
        may concern transfers that only this handler tracks.
        """
        return self.value if self.read is None else min(self.value, self.read)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """What a scan has found. `last` is the new value of the segment.

    `due_until`: date and number of the last due row, if there may be more than those that were
    read. `more_unchecked`: there may be more rows of another implementation. `compared`: the rows
    whose dates were compared.
    """

    now: datetime
    segment: Segment
    last: int
    change_count: int
    due_until: tuple[datetime, int] | None
    more_unchecked: bool
    compared: Compared
    recounted: Recount
    plan: Plan

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        recounted = self.recounted.changed or self.recounted.expired_ids
        return self.last == self.segment.start and not recounted and not self.plan


# -- the plan ----------------------------------------------------------------------------------------------

EXACT = timedelta(seconds=1)
"""Tolerance of our copies of dates: those of the document have no fractions of a second."""


@dataclass(frozen=True, slots=True)
class ExpiredTransfer:
    """A transfer that is still in processing after its time. `expiration_date` is in UTC."""

    transfer_id: str
    expiration_date: datetime
    state: str


class TransferRow(NamedTuple):
    """A transfer with its date and last state change in the ledger, and our row for it, if there is
    one.

    `change` is the number of the last state change, `state` its state. Of our row: its number
    `timeout_id`, its copy of the date, when it was `handed_over` (delivered), and `known_change`,
    the last state change when the row was written (None in rows of another implementation).
    `final_change`: the last final state change in the scanned range, if any.
    """

    transfer_id: str
    expires: datetime | None
    state: str
    change: int
    timeout_id: int | None
    copied_date: datetime | None
    handed_over: datetime | None
    known_change: int | None
    final_change: int | None

    @property
    def moved(self) -> bool:
        """Whether the ledger's date differs from our copy. After a delivery only a later date
        counts.
        """
        if self.expires is None or self.timeout_id is None:
            return False
        if self.copied_date is None:
            return True
        by = self.expires - self.copied_date
        return by >= EXACT or (by <= -EXACT and self.handed_over is None)

    @property
    def was_final_since(self) -> bool:
        """Whether it was final after the state in which it was delivered."""
        return self.final_change is not None and self.final_change > (self.known_change or 0)


@dataclass(slots=True)
class Plan:
    """What a run will write. Numbers are those of rows of `transferTimeout`."""

    insert: dict[str, TransferRow] = field(default_factory=dict)
    """By id: transfers in processing that are not tracked yet."""
    delete: list[int] = field(default_factory=list)
    """Rows whose transfers have become final."""
    refresh: list[int] = field(default_factory=list)
    """Rows whose date has changed in the ledger."""
    reopen: list[int] = field(default_factory=list)
    """Delivered rows that are due again: they were final since, or their date is later."""
    check: list[TransferRow] = field(default_factory=list)
    """Rows of another implementation that stay: they count as checked from now on."""
    expired: dict[str, ExpiredTransfer] = field(default_factory=dict)
    """The transfers to deliver, the longest expired first."""
    rows: dict[str, TransferRow] = field(default_factory=dict)
    """Those to deliver that have a row already."""

    def __bool__(self) -> bool:
        return bool(self.insert or self.delete or self.refresh or self.reopen or self.check or self.expired)


def make_plan(found: Iterable[TransferRow], now: datetime, ledger: Ledger, most: int) -> Plan:
    """Decide what to write, and which transfers (`most` at most) to deliver. Of duplicates the last
    row counts.
    """
    made = Plan()
    expired: list[tuple[datetime, TransferRow]] = []
    for one in _by_transfer(found).values():
        if one.state not in ledger.final_states:
            waits = _keep(one, made, in_processing=one.state in ledger.processing_states)
            if waits and one.expires is not None and one.expires < now:
                expired.append((one.expires, one))
        elif one.timeout_id is not None:
            made.delete.append(one.timeout_id)
    expired.sort(key=lambda each: (each[0], each[1].transfer_id))
    for expires, one in expired[:most]:
        made.expired[one.transfer_id] = ExpiredTransfer(one.transfer_id, expires, one.state)
        if one.timeout_id is not None:
            made.rows[one.transfer_id] = one
    return made


def _by_transfer(found: Iterable[TransferRow]) -> dict[str, TransferRow]:
    """Return the last row of each transfer, with the last final state change of all its rows."""
    last: dict[str, TransferRow] = {}
    for one in found:
        before = last.get(one.transfer_id)
        if before is not None and before.final_change is not None:
            one = one._replace(final_change=max(before.final_change, one.final_change or 0))  # noqa: PLW2901 - the same, completed
        last[one.transfer_id] = one
    return last


def _keep(one: TransferRow, made: Plan, *, in_processing: bool) -> bool:
    """Plan the row of a transfer that is not final; return whether it is to be delivered once its
    date has passed.
    """
    if one.timeout_id is None:
        if in_processing and one.expires is not None:
            made.insert[one.transfer_id] = one
        return in_processing
    if one.known_change is None:
        made.check.append(one)
    reopened = one.handed_over is not None and (one.was_final_since or one.moved)
    if reopened:
        made.reopen.append(one.timeout_id)
    if one.moved:
        made.refresh.append(one.timeout_id)
    return in_processing and (one.handed_over is None or reopened)
