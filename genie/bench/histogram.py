"""An HDR histogram: counts durations with a bounded relative error in a fixed amount of memory.

Only the eight most significant bits of a duration are stored. So each power of two is divided into 128 buckets of equal
width, and the width of a bucket is at most 1/128 of the durations in the bucket.
"""

from __future__ import annotations

from typing import Final

SIGNIFICANT_BITS: Final = 8
BUCKETS_PER_POWER: Final = 1 << (SIGNIFICANT_BITS - 1)
"""Number of buckets for each power of two. Each duration below twice this number (in ns) has a bucket of its own."""
PRECISION: Final = 1 / BUCKETS_PER_POWER
"""Maximum relative error of a quantile."""
MAX_DURATION_NS: Final = (1 << 48) - 1
"""About three days. A longer duration is counted as this duration."""


class Histogram:
    """Counts non-negative integer durations in nanoseconds."""

    __slots__ = ("_buckets", "count", "max_ns")

    def __init__(self) -> None:
        self._buckets = [0] * (_bucket(MAX_DURATION_NS) + 1)
        self.count = 0
        self.max_ns = 0
        """The longest counted duration, at most `MAX_DURATION_NS`. 0 if nothing was counted."""

    def add(self, duration_ns: int) -> None:
        """Count a duration. Raises ValueError if the duration is negative."""
        if duration_ns > self.max_ns:
            self.max_ns = duration_ns = min(duration_ns, MAX_DURATION_NS)
        elif duration_ns < 0:
            raise ValueError(f"a duration must be 0 ns or more, not {duration_ns}")
        self._buckets[_bucket(duration_ns)] += 1
        self.count += 1

    def quantile_ns(self, per_mille: int) -> int | None:
        """Return a quantile of the counted durations in ns, or None if nothing was counted.

        `per_mille` selects the quantile in thousandths, from 1 to 1,000: 500 is the median. The duration with the
        nearest rank is rounded up to the upper bound of its bucket, but not above the maximum. So the result is never
        too low, and at most `PRECISION` (relative) too high.
        """
        if not 1 <= per_mille <= 1000:  # noqa: PLR2004
            raise ValueError(f"a quantile must be given in 1 to 1000 thousandths, not {per_mille}")
        remaining = -(-self.count * per_mille // 1000)  # the rank of the quantile, rounded up
        if not remaining:
            return None
        for bucket, count in enumerate(self._buckets):
            remaining -= count
            if remaining <= 0:
                return min(_upper_bound(bucket), self.max_ns)
        raise AssertionError("the buckets contain fewer durations than were counted")


def _bucket(duration_ns: int) -> int:
    """Return the index of the bucket that counts a duration."""
    dropped_bits = duration_ns.bit_length() - SIGNIFICANT_BITS
    return duration_ns if dropped_bits <= 0 else dropped_bits * BUCKETS_PER_POWER + (duration_ns >> dropped_bits)


def _upper_bound(bucket: int) -> int:
    """Return the longest duration that falls into a bucket, in ns.

    A bucket ignores the lowest bits of a duration, one more for each further power of two.
    """
    dropped_bits = bucket // BUCKETS_PER_POWER - 1
    if dropped_bits <= 0:
        return bucket
    return ((bucket - dropped_bits * BUCKETS_PER_POWER + 1) << dropped_bits) - 1
