"""What the first half of a run has found, for the second."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from genie.timeouts.intervals import Recount
from genie.timeouts.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """How far the handler has come: up to the state change `value`; `fence` is that of the last run under a lock."""

    id: int | None = None
    value: int = 0
    fence: int | None = None

    @classmethod
    def of(cls, row: Any) -> Self:
        """From what `Steps.segment` has found."""
        return cls() if row is None else cls(id=row[0], value=row[1], fence=row[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a run has found. `last` is where the segment will be.

    `due_to`: the date and the number of the last row that is due, if there may be more than those that were looked at.
    """

    now: datetime
    segment: Segment
    last: int
    changes: int
    due_to: tuple[datetime, int] | None
    recounted: Recount
    plan: Plan

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to write."""
        recounted = self.recounted.again or self.recounted.forgotten
        return self.last == self.segment.value and not recounted and not self.plan
