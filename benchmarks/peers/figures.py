"""The results of one measurement, and the summary of several."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LOAD_BOUND = 0.95
"""If the load uses more than this share of its processor, it may have limited the rate."""


@dataclass(frozen=True)
class Sample:
    """The result of one peer under one load in one round."""

    cycles: int
    seconds: float
    p50_us: float
    p99_us: float
    errors: int
    refused: int
    """Rejected attempts, after which the load retries; those within a client library are not
    counted.
    """
    handed_over: int
    """Cycles that follow a cycle of another connection."""
    least: int
    """Cycles of the connection with the fewest."""
    most: int
    server_s: float
    """CPU seconds of the servers."""
    load_s: float
    """CPU seconds of the load."""
    others_s: float
    """CPU seconds of everything else on the machine."""


@dataclass(frozen=True)
class Summary:
    """The medians of the rounds; errors are summed up."""

    rounds: int
    rate: float
    """Cycles a second."""
    rate_least: float
    rate_most: float
    p50_us: float
    p99_us: float
    errors: int
    handed_over: float
    """The share of all cycles."""
    evenness: float
    """The ratio of the fewest cycles of a connection to the most."""
    server_us: float
    """CPU time of a cycle."""
    server_share: float
    """As a share of one processor."""
    load_share: float
    others_share: float
    """As a share of one processor, by unrelated processes."""

    @property
    def load_bound(self) -> bool:
        """True if the load, not the server, may have limited the rate."""
        return self.load_share >= LOAD_BOUND


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of values in ascending order; 0 if there are none."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarize(samples: Sequence[Sample]) -> Summary:
    """Summarize the rounds of one peer under one load."""
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
