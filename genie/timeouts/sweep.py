"""Comparing the dates of `transferTimeout` with those of the ledger: which rows come next, and how
many at a time.

Only this comparison finds dates that were moved in the ledger. Each run compares `ROWS_PER_RUN`
rows, which takes a few milliseconds whatever the size of the table; at the end of the table it
continues with as many at its beginning. Between its runs `TimeoutHandler.run` compares slices of
`ROWS_PER_SLICE` rows, and starts a run when it finds a moved date.

Dates are usually moved in bulk. After a moved date the following runs therefore compare a whole
batch each, without a pause, until a batch has no moved date or all rows were compared: first they
only take the transfers that are overdue by their new date, which matter most, and then all others
from where they began.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

ROWS_PER_RUN = 1_000
"""Rows whose dates a run compares when no moved date is known."""

ROWS_PER_SLICE = 10_000
"""Rows whose dates one slice between two runs compares."""

SLICE_INTERVAL_S = 0.3
"""Seconds from one slice to the next: 1,000,000 rows take 30 s."""


class Phase(Enum):
    """What a run compares."""

    SAMPLE = auto()
    """`ROWS_PER_RUN` rows: no moved date is known."""
    OVERDUE = auto()
    """A batch, of which the overdue rows are taken."""
    COPY = auto()
    """A batch, of which all rows with a moved date are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The rows that were compared: those after `first` and up to `last` (numbers of rows of
    `transferTimeout`).

    `wrapped`: the end of the table was reached, and its beginning compared too. `whole`: these were
    all rows of the table. `moved`: one of them has a moved date.
    """

    first: int
    last: int
    wrapped: bool
    whole: bool
    moved: bool


@dataclass(slots=True)
class IdleSweep:
    """The slices between two runs. They end where they began."""

    begin: int | None
    """The row after which the first slice begins; None until it is known."""
    complete: bool = False
    """Whether all rows were compared."""
    wrapped: bool = False
    """Whether the end of the table was reached."""
    found: bool = False
    """Whether a moved date was found."""

    def advance(self, first: int, last: int | None) -> None:
        """Continue after a slice of the rows after `first` and up to `last`; None: to the end of
        the table.
        """
        if self.begin is None:
            self.begin = first
        if last is None:
            self.complete = self.wrapped or not self.begin
            self.wrapped = True
        else:
            self.complete = self.wrapped and last >= self.begin


@dataclass(slots=True)
class Sweep:
    """The position of the comparison in the table. Pure: no database, no clock."""

    batch: int
    """Rows that a run compares after a moved date was found."""
    position: int | None = None
    """The last row that was compared; None before the first."""
    phase: Phase = Phase.SAMPLE
    begin: int = 0
    """The row after which the phases OVERDUE and COPY begin."""
    wrapped: bool = False
    """Whether this phase has reached the end of the table."""

    @property
    def rows(self) -> int:
        """How many rows the next run compares."""
        return ROWS_PER_RUN if self.phase is Phase.SAMPLE else max(self.batch, ROWS_PER_RUN)

    def advance(self, compared: Compared) -> None:
        """Continue after a run that has compared these rows, and whose results are written."""
        self.position = compared.last
        self.wrapped = self.wrapped or compared.wrapped
        round_complete = compared.whole or (self.wrapped and compared.last >= self.begin)
        match self.phase:
            case Phase.SAMPLE if compared.moved and not compared.whole:
                self._start(Phase.OVERDUE, compared.last)
            case Phase.OVERDUE if round_complete or not compared.moved:
                self._start(Phase.COPY, self.begin)
            case Phase.COPY if round_complete or not compared.moved:
                self.phase = Phase.SAMPLE

    def found(self, row: int) -> None:
        """Let the next run begin with this row, whose date was moved."""
        self._start(Phase.OVERDUE, row - 1)

    def _start(self, phase: Phase, begin: int) -> None:
        self.phase, self.position, self.begin, self.wrapped = phase, begin, begin, False
