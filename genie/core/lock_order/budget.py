"""How completely requests are analysed."""

from __future__ import annotations


class Budget:
    """What the analysis of a new request, or of all grants of one time, has used of its limits.

    All parts of the analysis of a namespace share one.
    """

    __slots__ = ("is_exceeded", "search_steps", "steps")

    def __init__(self) -> None:
        self.is_exceeded = False
        """A limit kept the analysis from being complete."""
        self.search_steps = 0
        """How many edges the searches for inversions have followed."""
        self.steps = 0
        """About how many names, held requests and edges were read. Grants end at a limit; a request has few."""
