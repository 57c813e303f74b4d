"""How long things took, in buckets that Prometheus understands: a fixed amount of memory."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS_MS: Final = (
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
    *(1_000.0, 2_500.0, 5_000.0, 10_000.0, 30_000.0, 60_000.0, 300_000.0, 1_800_000.0),
)
"""The greatest duration of each bucket but the last, which has none."""


class Histogram:
    """Counts durations in ms, or sizes: what `bounds` say is up to whoever makes it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_MS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket; not cumulative."""
        self.total = 0.0
        """The sum of all that was counted."""

    def add(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many were counted."""
        return sum(self.counts)


def quantile(bounds: tuple[float, ...], counts: list[int], share: float) -> float | None:
    """What so large a share (0 to 1) of the counted values did not exceed, as near as the buckets tell; None of none.

    Inside its bucket a value is taken to lie as far as its rank says, as Prometheus does it. What is in the last bucket
    counts as the greatest bound.
    """
    rank = share * sum(counts)
    if not rank:
        return None
    below = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if rank <= count:
            return below + (bound - below) * rank / count
        rank -= count
        below = bound
    return bounds[-1]
