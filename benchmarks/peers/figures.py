"""What one measurement says, and what several say together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LOAD_BOUND = 0.95
"""From this share of its processor on the load may be what was measured."""


@dataclass(frozen=True)
class Sample:
    """One peer under one load in one round."""

    cycles: int
    seconds: float
    p50_us: float
    p99_us: float
    errors: int
    refused: int
    """Answers that somebody else holds the lock, after which the load asks again; a library's own are not seen."""
    handed_over: int
    """Cycles behind a cycle of another connection."""
    least: int
    """Cycles of the connection that had the fewest."""
    most: int
    server_s: float
    """CPU of the servers."""
    load_s: float
    """CPU of the load."""
    others_s: float
    """CPU of everything else on the machine."""


@dataclass(frozen=True)
class Summary:
    """Medians of the rounds; errors are added up."""

    rounds: int
    rate: float
    """Cycles a second."""
    rate_least: float
    rate_most: float
    p50_us: float
    p99_us: float
    errors: int
    handed_over: float
    """Share of all cycles."""
    evenness: float
    """Cycles of the connection that had the fewest, for each of the one that had the most."""
    server_us: float
    """CPU for each cycle."""
    server_share: float
    """Of one processor."""
    load_share: float
    others_share: float
    """Of one processor, by what has nothing to do with it."""

    @property
    def load_bound(self) -> bool:
        """Is the rate rather the load's than the server's?"""
        return self.load_share >= LOAD_BOUND


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least value that at least this share of all is not above. `ordered` goes upwards; 0 of none."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarize(samples: Sequence[Sample]) -> Summary:
    """The rounds of one peer under one load."""
    rates = [sample.cycles / sample.seconds for sample in samples]
    return Summary(
        rounds=len(samples),
        rate=statistics.median(rates),
        rate_least=min(rates),
        rate_most=max(rates),
        p50_us=statistics.median(sample.p50_us for sample in samples),
        p99_us=statistics.median(sample.p99_us for sample in samples),
        errors=sum(sample.errors for sample in samples),
        handed_over=statistics.median(_of(sample.handed_over, sample.cycles) for sample in samples),
        evenness=statistics.median(_of(sample.least, sample.most) for sample in samples),
        server_us=statistics.median(_of(sample.server_s, sample.cycles) * 1e6 for sample in samples),
        server_share=statistics.median(sample.server_s / sample.seconds for sample in samples),
        load_share=statistics.median(sample.load_s / sample.seconds for sample in samples),
        others_share=statistics.median(sample.others_s / sample.seconds for sample in samples),
    )


def _of(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
