"""Comparing the dates of `transferTimeout` with those of the ledger: which rows come next, and how many at a time.

A date that was moved in the ledger is found by nothing but this comparison. Each run compares `ROWS_PER_RUN` rows, which
takes a few milliseconds however large the table is. When one of them has another date, the following runs compare a
whole batch each, one at once after the other, until a batch has no moved date: dates are usually moved in bulk. Between
its runs, `TimeoutHandler.run` reads on in slices of `ROWS_PER_SCAN` rows and starts a run when it finds a moved date.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS_PER_RUN = 1_000
"""Rows whose dates a run compares when no moved date is known."""

ROWS_PER_SCAN = 10_000
"""Rows whose dates are compared by one slice between two runs."""

SCAN_INTERVAL_S = 0.3
"""Seconds from one slice to the next: 1,000,000 rows take 30 s."""

MAX_ROUNDS = 2
"""How often runs go through the whole table in batches, one at once after the other, while they find moved dates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What was compared: the rows after `first`, up to `last` (both are numbers of rows of `transferTimeout`).

    `wrapped`: the end of the table was reached, and its beginning compared, too. `whole`: these were all rows there are.
    `moved`: how many have another date than the ledger.
    """

    first: int
    last: int
    wrapped: bool
    whole: bool
    moved: int


@dataclass(slots=True)
class Scan:
    """The slices between two runs: they end where they have begun."""

    begin: int | None
    """The row after which the first slice begins; None, where that is not known yet."""
    complete: bool = False
    """Whether all rows were compared."""
    wrapped: bool = False
    """Whether the end of the table was reached."""
    found: bool = False
    """Whether a moved date was found."""

    def advance(self, first: int, last: int | None) -> None:
        """Go on after a slice of the rows after `first`, up to `last`; None: to the end of the table."""
        if self.begin is None:
            self.begin = first
        if last is None:
            self.complete = self.wrapped or not self.begin
            self.wrapped = True
        else:
            self.complete = self.wrapped and last >= self.begin


@dataclass(slots=True)
class Sweep:
    """Where the comparison is in the table. Nothing here asks a database or a clock."""

    batch: int
    """Rows that a run compares after a moved date was found."""
    position: int | None = None
    """The last row that was compared; None before the first."""
    catching_up: bool = False
    """Whether moved dates were found by the last comparison, so that more are likely."""
    rounds: int = 0
    """How often the end of the table was reached while catching up."""

    @property
    def rows(self) -> int:
        """How many rows the next run compares."""
        return max(self.batch, ROWS_PER_RUN) if self.catching_up else ROWS_PER_RUN

    def advance(self, compared: Compared) -> None:
        """Go on after a run that has compared these rows, and whose results are written."""
        self.position = compared.last
        self.rounds += compared.wrapped
        self.catching_up = compared.moved > 0 and not compared.whole and self.rounds < MAX_ROUNDS
        if not self.catching_up:
            self.rounds = 0

    def found(self, row: int) -> None:
        """Let the next run begin with this row, whose date was moved."""
        self.position, self.catching_up = row - 1, True
