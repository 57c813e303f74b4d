"""How fast things go now, and how long they take now: the counters as they were in each second of the last minute."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from operator import sub
from typing import Final

from genie.observability.histogram import BOUNDS_MS, quantile

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
