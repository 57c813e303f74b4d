"""A monotonic clock that can stand still. Import this module before any other that imports `time.monotonic`."""

from __future__ import annotations

import time

real_monotonic = time.monotonic


class Clock:
    """The current time of this process, in seconds."""

    frozen_at: float | None = None
    """Where time stands still; None: time passes."""

    @classmethod
    def monotonic(cls) -> float:
        """Replaces `time.monotonic`."""
        return real_monotonic() if cls.frozen_at is None else cls.frozen_at

    @classmethod
    def freeze(cls) -> None:
        """Make time stand still."""
        cls.frozen_at = real_monotonic()

    @classmethod
    def thaw(cls) -> None:
        """Let time pass again."""
        cls.frozen_at = None


time.monotonic = Clock.monotonic
