"""How long things took, in buckets that Prometheus understands: a fixed amount of memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from operator import sub
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


# -- How fast things go now, and how long they take now: the counters as they were in each second of the last minute --------

SECOND_MS: Final = 1_000
KEPT: Final = 61
"""Samples: both ends of the last 60 seconds."""
RATES_MS: Final = 10_000
"""Rates are told over so long."""
LEAST_MS: Final = 1_000
"""Nothing is told of a shorter time."""


@dataclass(slots=True, frozen=True)
class Sample:
    """Counters at one moment. `at_ms` is of any clock that goes on."""

    at_ms: float = 0.0
    grants: int = 0
    releases: int = 0
    waits: int = 0
    timeouts: int = 0
    deadlocks: int = 0
    errors: int = 0
    waited: tuple[int, ...] = ()
    """Of those that had to wait and were granted: how many by bucket of the usual bounds."""


@dataclass(slots=True, frozen=True)
class Speed:
    """A second, lately: what `Sample` counts."""

    grants: float = 0.0
    releases: float = 0.0
    waits: float = 0.0
    timeouts: float = 0.0
    deadlocks: float = 0.0
    errors: float = 0.0


class Recent:
    """The samples of the last minute."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT)

    def due(self, now: float) -> bool:
        """Whether a second has passed since the last sample (`now` in ms)."""
        return not self._samples or now - self._samples[-1].at_ms >= SECOND_MS

    def add(self, sample: Sample) -> None:
        """Keep one, for a minute."""
        self._samples.append(sample)

    def speed(self) -> Speed:
        """Over the last ten seconds, or as long as there are samples."""
        new, old = self._ends(RATES_MS)
        lasted_ms = new.at_ms - old.at_ms
        if lasted_ms < LEAST_MS:
            return Speed()
        each = 1000 / lasted_ms
        return Speed(
            grants=(new.grants - old.grants) * each,
            releases=(new.releases - old.releases) * each,
            waits=(new.waits - old.waits) * each,
            timeouts=(new.timeouts - old.timeouts) * each,
            deadlocks=(new.deadlocks - old.deadlocks) * each,
            errors=(new.errors - old.errors) * each,
        )

    def wait_quantile(self, share: float) -> float | None:
        """How long so large a share (0 to 1) of those waited at most that were granted in the last minute (ms)."""
        new, old = self._ends((KEPT - 1) * SECOND_MS)
        return quantile(BOUNDS_MS, list(map(sub, new.waited, old.waited)), share)

    def _ends(self, lasting_ms: float) -> tuple[Sample, Sample]:
        """The last sample, and the first that is at most so much older (half a second more, for a late one)."""
        if not self._samples:
            return Sample(), Sample()
        new = self._samples[-1]
        since = new.at_ms - lasting_ms - SECOND_MS / 2
        return new, next(sample for sample in self._samples if sample.at_ms >= since)
