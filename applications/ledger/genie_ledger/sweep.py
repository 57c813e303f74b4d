"""The sweep over `transferTimeout` that compares its dates with the ledger's: which rows are next,
and how many at a time.

Only the sweep finds dates that were moved in the ledger. Each run compares `ROWS_PER_RUN` rows,
which takes a few milliseconds whatever the size of the table; after the last row it continues with
the first. Between two runs `TimeoutHandler.run` compares slices of `ROWS_PER_SLICE` rows, and
starts a run when it finds a moved date.

Dates are usually moved in bulk. After a moved date the next runs therefore follow without a pause
and compare a whole batch each, until a batch has no moved date or all rows were compared. They do
so twice from the same row: first they process only transfers that are overdue by their new date,
which are urgent, then all moved dates.
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
    """How many rows a run compares, and which of the moved dates it processes."""

    SAMPLE = auto()
    """`ROWS_PER_RUN` rows: no moved date is known."""
    OVERDUE = auto()
    """A batch. Only moved dates that have passed are processed."""
    COPY = auto()
    """A batch. All moved dates are processed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The rows of `transferTimeout` that a run has compared: the rows with ids in (`first`,
    `last`].

    `wrapped` is True if the end of the table was reached, and the comparison continued with the
    first rows. `covers_table` is True if all rows of the table were compared. `found_rescheduled` is True
    if one of the rows has a moved date.
    """

    first: int
    last: int
    wrapped: bool
    covers_table: bool
    found_rescheduled: bool


@dataclass(slots=True)
class IdleSweep:
    """The progress of comparing all rows once, in slices, between two runs."""

    begin: int | None
    """The id of the row after which the first slice begins; None until it is known."""
    complete: bool = False
    """True if all rows were compared."""
    wrapped: bool = False
    """True if the end of the table was reached."""
    found_rescheduled: bool = False
    """True if a moved date was found."""

    def advance(self, first: int, last: int | None) -> None:
        """Record that the rows with ids in (`first`, `last`] were compared. `last` is None if the
        slice has reached the end of the table.

        The sweep is complete once the slices have continued at the start of the table, and have
        reached the row where the first slice began.
        """
        if self.begin is None:
            self.begin = first
        if last is None:
            # The sweep is complete if the first slice began with the first row of the table (`begin` is 0).
            self.complete = self.wrapped or self.begin == 0
            self.wrapped = True
        else:
            self.complete = self.wrapped and last >= self.begin


@dataclass(slots=True)
class Sweep:
    """The state of the sweep between runs: its position in the table, and its phase. Pure: no
    database, no clock.
    """

    batch_size: int
    """Rows that a run compares after a moved date was found."""
    position: int | None = None
    """The id of the last row that was compared; None before the first."""
    phase: Phase = Phase.SAMPLE
    begin: int = 0
    """The id of the row after which the phases OVERDUE and COPY begin."""
    wrapped: bool = False
    """True if this phase has reached the end of the table."""

    @property
    def row_count(self) -> int:
        """The number of rows that the next run compares."""
        return ROWS_PER_RUN if self.phase is Phase.SAMPLE else max(self.batch_size, ROWS_PER_RUN)

    def advance(self, compared: Compared) -> None:
        """Record the rows that a run has compared, and change the phase if necessary. Called after
        the results of the run were written.

        The phase SAMPLE changes to OVERDUE when a moved date is found. The phases OVERDUE and COPY
        end when a batch has no moved date, or when all rows were compared since the phase began.
        """
        self.position = compared.last
        self.wrapped = self.wrapped or compared.wrapped
        round_complete = compared.covers_table or (self.wrapped and compared.last >= self.begin)
        match self.phase:
            case Phase.SAMPLE if compared.found_rescheduled and not compared.covers_table:
                self._start(Phase.OVERDUE, compared.last)
            case Phase.OVERDUE if round_complete or not compared.found_rescheduled:
                self._start(Phase.COPY, self.begin)
            case Phase.COPY if round_complete or not compared.found_rescheduled:
                self.phase = Phase.SAMPLE

    def start_at(self, row_id: int) -> None:
        """Let the next run begin with the row with the id `row_id`, which has a moved date."""
        self._start(Phase.OVERDUE, row_id - 1)

    def _start(self, phase: Phase, begin: int) -> None:
        self.phase = phase
        self.position = self.begin = begin
        self.wrapped = False
