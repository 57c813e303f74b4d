"""What the first half of a run has found, for the second."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from genie.timeouts.intervals import Recount
from genie.timeouts.plan import Plan
from genie.timeouts.sweep import Compared


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
        """From what `Steps.segment` has found."""
        return cls() if row is None else cls(id=row[0], value=row[1], fence=row[2], read=row[3])

    @property
    def start(self) -> int:
        """The state change after which this handler reads on.

        Where another implementation has moved the segment, this is below `value`: in between may be final states of
        transfers that only this handler has a row for.
        """
        return self.value if self.read is None else min(self.value, self.read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a run has found. `last` is where the segment will be.

    `due_to`: the date and the number of the last row that is due, if there may be more than those that were looked at.
    `unchecked`: whether there may be more rows of another implementation. `compared`: whose dates were compared.
    """

    now: datetime
    segment: Segment
    last: int
    changes: int
    due_to: tuple[datetime, int] | None
    unchecked: bool
    compared: Compared
    recounted: Recount
    plan: Plan

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to write."""
        recounted = self.recounted.again or self.recounted.forgotten
        return self.last == self.segment.start and not recounted and not self.plan
