"""The limits of the work for the analysis of a request."""

from __future__ import annotations

from typing import Final

MAX_STEPS: Final = 4_096
"""Steps of the analysis of one request, or of all grants of one time, after which the rest is not analysed: one release can
grant a thousand locks, each to a transaction with 32 waiting requests of 32 names."""

CHARS_PER_STEP: Final = 32
"""Characters of a name that are compared in one more step."""

CLASSIFIED_CHARS_PER_STEP: Final = 8
"""Characters of a name whose class is not cached that are read in one more step."""

SEARCHED_NAMES_PER_STEP: Final = 64
"""Names of held requests among which one step searches for a name."""


class Budget:
    """Counts the work for the analysis of a new request, or of all grants of one time.

    All parts of the analysis of a namespace share one budget.
    """

    __slots__ = ("is_exceeded", "search_steps", "steps")

    def __init__(self) -> None:
        self.is_exceeded = False
        """True if the analysis is incomplete, because it exceeded a limit."""
        self.search_steps = 0
        """Number of edges that the searches for inversions have followed."""
        self.steps = 0
        """Approximate number of names, held requests and edges that were read. At most about `MAX_STEPS`."""
