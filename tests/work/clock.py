"""A clock that can stand still. Import this module before any other that imports `time.monotonic`."""

from __future__ import annotations

import math
import time

real_monotonic = time.monotonic

OFFSET = 1e5 - real_monotonic()
"""Added to the time, which else had more digits on a machine that runs for longer. Records in Redis contain times."""


class Clock:
    """The current time of this process, in seconds. It begins at 100,000."""

    frozen_at: float | None = None
    """Where time stands still; None: time passes."""

    @classmethod
    def monotonic(cls) -> float:
        """Replaces `time.monotonic`."""
        return real_monotonic() + OFFSET if cls.frozen_at is None else cls.frozen_at

    @classmethod
    def freeze(cls) -> None:
        """Make time stand still, at a whole number of milliseconds."""
        cls.frozen_at = math.floor(cls.monotonic() * 8) / 8

    @classmethod
    def thaw(cls) -> None:
        """Let time pass again."""
        cls.frozen_at = None


time.monotonic = Clock.monotonic

from genie.client import clock  # noqa: E402 - after the clock is replaced

clock.now = Clock.monotonic
