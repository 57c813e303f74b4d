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

MOST = 50
"""Intervals of either age that are counted in a run."""

MOST_YOUNG = 20_000
"""State changes in the young intervals that are counted in a run: each time again, so it must be little."""


@dataclass(frozen=True, slots=True)
class Interval:
    """State changes above `first`, up to `last`: `changes` of them, when it was looked at last."""

    id: int
    first: int
    last: int
    changes: int
    looked: datetime


@dataclass(slots=True)
class Recount:
    """What came of counting: which are to be looked at again, with their new counts; and which are forgotten."""

    again: list[tuple[Interval, int]] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)


def to_count(kept: Sequence[Interval], now: datetime, open_for: timedelta, most: int) -> list[Interval]:
    """Those to be counted now: what is to be forgotten, of `most` state changes; and the youngest, if they are small.

    Before an interval is forgotten it is counted a last time. That is sure to find what has come late; that the young
    are counted finds it soon, where a ledger is not being caught up with.
    """
    ended = [one for one in kept if now - one.looked >= open_for]
    young = [one for one in kept if now - one.looked < open_for]
    ended.sort(key=lambda one: (one.looked, one.id))
    young.sort(key=lambda one: (one.looked, one.id), reverse=True)
    return [*_up_to(ended, max(most, ended[0].changes) if ended else 0), *_up_to(young, MOST_YOUNG)]


def _up_to(intervals: Iterable[Interval], most: int) -> list[Interval]:
    found: list[Interval] = []
    for one in intervals:
        most -= one.changes
        if most < 0 or len(found) == MOST:
            break
        found.append(one)
    return found


def recount(counted: Iterable[tuple[Interval, int]], now: datetime, open_for: timedelta) -> Recount:
    """What follows from the counts."""
    found = Recount()
    for one, changes in counted:
        if changes != one.changes:
            found.again.append((one, changes))
        if now - one.looked >= open_for:
            found.forgotten.append(one.id)
    return found
