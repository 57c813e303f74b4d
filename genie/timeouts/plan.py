"""Intervals that were looked at not long ago, and in which something may still appear.

A transaction of the ledger takes its numbers when it writes and shows them when it commits: later than others that have
taken greater numbers meanwhile. So an interval is not done with when it was looked at. It is remembered, with how many
state changes it had, for as long as a transaction may be open; and where it has another number of them since, it is
looked at again. Who is open for longer is missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self

from genie.timeouts.ledger import Ledger
from genie.timeouts.sweep import Compared

MAX_WINDOWS = 50
"""Intervals of either age that are counted in a run."""

MAX_YOUNG_CHANGES = 20_000
"""State changes in the young intervals that are counted in a run: each time again, so it must be little."""


@dataclass(frozen=True, slots=True)
class RecheckWindow:
    """State changes above `first`, up to `last`: `changes` of them, when it was looked at last."""

    id: int
    first: int
    last: int
    change_count: int
    scanned_at: datetime


@dataclass(slots=True)
class Recount:
    """What came of counting: which are to be looked at again, with their new counts; and which are forgotten."""

    changed: list[tuple[RecheckWindow, int]] = field(default_factory=list)
    expired_ids: list[int] = field(default_factory=list)


def windows_to_recount(
    kept: Sequence[RecheckWindow], now: datetime, max_transaction_age: timedelta, most: int
) -> list[RecheckWindow]:
    """Those to be counted now: what is to be forgotten, of `most` state changes; and the youngest, if they are small.

    Before an interval is forgotten it is counted a last time. That is sure to find what has come late; that the young
    are counted finds it soon, where a ledger is not being caught up with.
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
    """What follows from the counts."""
    found = Recount()
    for one, changes in counted:
        if changes != one.change_count:
            found.changed.append((one, changes))
        if now - one.scanned_at >= max_transaction_age:
            found.expired_ids.append(one.id)
    return found


# -- What the first half of a run has found, for the second --------


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The row of `segment` for this handler.

    `value`: the state change up to which state changes were read, by this handler or by another implementation of the
    document. `read`: what this handler left there; None where it has not written yet. `fence`: that of the last run
    under a lock of Genie.
    """

    id: int | None = None
    value: int = 0
    fence: int | None = None
    read: int | None = None

    @classmethod
    def of(cls, row: Any) -> Self:
        """From what `Queries.segment` has found."""
        return cls() if row is None else cls(id=row[0], value=row[1], fence=row[2], read=row[3])

    @property
    def start(self) -> int:
        """The state change after which this handler reads on.

        Where another implementation has moved the segment, this is below `value`: in between may be final states of
        transfers that only this handler has a row for.
        """
        return self.value if self.read is None else min(self.value, self.read)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """What a run has found. `last` is where the segment will be.

    `due_until`: the date and the number of the last row that is due, if there may be more than those that were looked at.
    `unchecked`: whether there may be more rows of another implementation. `compared`: whose dates were compared.
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


# -- What a run is going to do, from what it has found. Nothing here asks a database or a clock --------

EXACT = timedelta(seconds=1)
"""What our copy of a date may be off: that of the document has no fractions."""


@dataclass(frozen=True, slots=True)
class ExpiredTransfer:
    """A transfer that is still in processing after its time. `expiration_date` is in UTC."""

    transfer_id: str
    expiration_date: datetime
    state: str


class TransferRow(NamedTuple):
    """A transfer: its date and its last state change in the ledger, and our row for it, if there is one.

    `change`: the number of the last state change; `state`: its state. Of our row: its number `timeout_id`, its copy
    `kept` of the date, `handed_over`, and `known`, the last state change when the row was written (None in rows of
    another implementation). `final`: the last final state change of an interval that was read, if it has one there.
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
        """Whether the ledger's date is not the copy's. After the transfer was handed over only a later one counts."""
        if self.expires is None or self.timeout_id is None:
            return False
        if self.copied_date is None:
            return True
        by = self.expires - self.copied_date
        return by >= EXACT or (by <= -EXACT and self.handed_over is None)

    @property
    def was_final_since(self) -> bool:
        """Whether it was final after the state in which it was handed over."""
        return self.final_change is not None and self.final_change > (self.known_change or 0)


@dataclass(slots=True)
class Plan:
    """What is to be written. Numbers are those of the rows of `transferTimeout`."""

    insert: dict[str, TransferRow] = field(default_factory=dict)
    """By transfer: in processing, and not taken in yet."""
    delete: list[int] = field(default_factory=list)
    """What has become final."""
    refresh: list[int] = field(default_factory=list)
    """Whose date has changed in the ledger."""
    reopen: list[int] = field(default_factory=list)
    """What was handed over and waits again: it was final meanwhile, or its date is a later one."""
    check: list[TransferRow] = field(default_factory=list)
    """Rows of another implementation that stay: they are checked now."""
    expired: dict[str, ExpiredTransfer] = field(default_factory=dict)
    """To be handed over, the longest expired first."""
    rows: dict[str, TransferRow] = field(default_factory=dict)
    """Those that are handed over and have a row already."""

    def __bool__(self) -> bool:
        return bool(self.insert or self.delete or self.refresh or self.reopen or self.check or self.expired)


def make_plan(found: Iterable[TransferRow], now: datetime, ledger: Ledger, most: int) -> Plan:
    """What follows from what was found: `most` transfers are handed over. What was found twice counts as found last."""
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
    """What was found last of each transfer, with the last final state change that any of the queries has found."""
    last: dict[str, TransferRow] = {}
    for one in found:
        before = last.get(one.transfer_id)
        if before is not None and before.final_change is not None:
            one = one._replace(final_change=max(before.final_change, one.final_change or 0))  # noqa: PLW2901 - the same, completed
        last[one.transfer_id] = one
    return last


def _keep(one: TransferRow, made: Plan, *, in_processing: bool) -> bool:
    """Plan the row of a transfer that is not final; returns whether it is to be handed over once its date has passed."""
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
