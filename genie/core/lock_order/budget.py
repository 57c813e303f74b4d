"""How completely one request is analysed."""

from __future__ import annotations


class Budget:
    """What the analysis of the current request has used of its limits. All parts of the analysis of a namespace share one."""

    __slots__ = ("is_exceeded", "search_steps")

    def __init__(self) -> None:
        self.is_exceeded = False
        """A limit kept the analysis from being complete."""
        self.search_steps = 0
        """How many edges the searches for inversions have followed."""
