"""Exponential backoff with jitter: the delays between retries."""

from __future__ import annotations

import random

__all__ = ["Backoff"]


class Backoff:
    """Delays that double from `first_s` to `max_s` (seconds). Each delay is reduced at random, by at most half.

    The jitter prevents that many clients of a failed server retry at the same moment.
    """

    __slots__ = ("_first_s", "_max_s", "_next_s")

    def __init__(self, first_s: float = 0.025, max_s: float = 2.0) -> None:
        self._first_s = self._next_s = first_s
        self._max_s = max_s

    def next_delay(self) -> float:
        """Return the seconds to wait before the next attempt, and double the delay for the attempt after that."""
        delay = self._next_s * random.uniform(0.5, 1)  # noqa: S311 - not a secret
        self._next_s = min(2 * self._next_s, self._max_s)
        return delay

    def reset(self) -> None:
        """Make the next delay the first one again. Called after a successful attempt."""
        self._next_s = self._first_s
