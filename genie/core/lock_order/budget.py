"""The limits of the work for the analysis of a request."""

from __future__ import annotations


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
        """Approximate number of names, held requests and edges that were read. Only the analysis of grants has a limit: a
        single request reads few."""
