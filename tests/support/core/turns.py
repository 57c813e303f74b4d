"""Turns for tests without an event loop."""

from __future__ import annotations

from genie.server.turns import IterationTurns


class TurnsWithoutLoop(IterationTurns):
    """The test ends each iteration."""

    def spend(self, seconds: float) -> None:
        self._is_end_scheduled = True
        super().spend(seconds)
