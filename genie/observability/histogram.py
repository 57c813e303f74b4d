"""Histograms with fixed buckets, as in Prometheus, and rates over a sliding window. Both have bounded memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from operator import sub
from typing import Final

BOUNDS_MS: Final[tuple[float, ...]] = (
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
    *(1_000.0, 2_500.0, 5_000.0, 10_000.0, 30_000.0, 60_000.0, 300_000.0, 1_800_000.0),
)
"""Upper bounds of the buckets. One more bucket counts the greater values."""


class Histogram:
    """Counts values by bucket. Values have the unit of `bounds`: ms by default."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_MS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of values in each bucket, not cumulative."""
        self.total = 0.0
        """Sum of all values."""

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)


def quantile(bounds: tuple[float, ...], counts: list[int], share: float) -> float | None:
    """Estimate the quantile `share` (0 to 1) of the values in a histogram. Return None if the histogram is empty.

    Interpolates linearly inside a bucket, like Prometheus' `histogram_quantile`. A value in the last
    bucket, which has no upper bound, counts as the greatest bound.
    """
    remaining_rank = share * sum(counts)
    if not remaining_rank:
        return None
    lower_bound = 0.0
    for upper_bound, count in zip(bounds, counts, strict=False):  # without the last bucket
        if remaining_rank <= count:
            return lower_bound + (upper_bound - lower_bound) * remaining_rank / count
        remaining_rank -= count
        lower_bound = upper_bound
    return bounds[-1]


# -- Rate window: the counters sampled once a second, for the last minute --------

SECOND_MS: Final = 1_000
MAX_SAMPLES: Final = 61
"""Number of samples in the window of a minute: 60 intervals of a second have 61 ends."""
RATE_INTERVAL_MS: Final = 10_000
"""Time over which rates are computed."""
MIN_RATE_INTERVAL_MS: Final = 1_000
"""Rates are zero while the samples cover less time than this."""


@dataclass(slots=True, frozen=True)
class Sample:
    """The counters at one time."""

    at_ms: float = 0.0
    """The monotonic time."""
    grants: int = 0
    releases: int = 0
    waits: int = 0
    timeouts: int = 0
    deadlocks: int = 0
    errors: int = 0
    waited: tuple[int, ...] = ()
    """Requests granted after a wait, by bucket of `BOUNDS_MS`."""


@dataclass(slots=True, frozen=True)
class Rates:
    """Events per second over the rate interval."""

    grants: float = 0.0
    releases: float = 0.0
    waits: float = 0.0
    timeouts: float = 0.0
    deadlocks: float = 0.0
    errors: float = 0.0


class RateWindow:
    """Computes rates and wait quantiles of the last minute from one sample per second."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        """The samples of the last minute, oldest first."""

    def should_sample(self, now: float) -> bool:
        """Return whether at least a second has passed since the last sample. `now` is monotonic, in ms."""
        return not self._samples or now - self._samples[-1].at_ms >= SECOND_MS

    def add(self, sample: Sample) -> None:
        """Add a sample. Samples older than a minute are dropped."""
        self._samples.append(sample)

    def rates(self) -> Rates:
        """Return the rates over the last ten seconds, or over the time that the samples cover."""
        new, old = self._ends(RATE_INTERVAL_MS)
        interval_ms = new.at_ms - old.at_ms
        if interval_ms < MIN_RATE_INTERVAL_MS:
            return Rates()
        per_s = 1000 / interval_ms
        return Rates(
            grants=(new.grants - old.grants) * per_s,
            releases=(new.releases - old.releases) * per_s,
            waits=(new.waits - old.waits) * per_s,
            timeouts=(new.timeouts - old.timeouts) * per_s,
            deadlocks=(new.deadlocks - old.deadlocks) * per_s,
            errors=(new.errors - old.errors) * per_s,
        )

    def wait_quantile(self, share: float) -> float | None:
        """Estimate the quantile `share` (0 to 1) of the wait times, in ms, over the last minute.

        Only requests that were granted after a wait count. Returns None if there were none.
        """
        new, old = self._ends((MAX_SAMPLES - 1) * SECOND_MS)
        counts_of_last_minute = list(map(sub, new.waited, old.waited))
        return quantile(BOUNDS_MS, counts_of_last_minute, share)

    def _ends(self, interval_ms: float) -> tuple[Sample, Sample]:
        """Return the last sample, and the oldest sample of the interval of this length before it."""
        if not self._samples:
            return Sample(), Sample()
        new = self._samples[-1]
        tolerance_ms = SECOND_MS / 2  # the last sample may have been taken late
        since = new.at_ms - interval_ms - tolerance_ms
        old = next(sample for sample in self._samples if sample.at_ms >= since)
        return new, old
