"""How long things took, counted in buckets: a fixed amount of memory, however many there are.

A duration is kept to its first eight binary digits. So a bucket is at most 1/128 of its durations wide, and each power
of two has 128 of them.
"""

from __future__ import annotations

from typing import Final

DIGITS: Final = 8
"""Binary digits that are kept."""
HALF: Final = 1 << (DIGITS - 1)
"""Buckets for each power of two. Below twice as many each number has a bucket of its own."""
PRECISION: Final = 1 / HALF
"""How much more than the real one a quantile may be, as a part of it."""
MAX_DURATION_NS: Final = (1 << 48) - 1
"""Three days. What took longer counts as this."""


class Histogram:
    """Counts durations in nanoseconds, integers from 0 on."""

    __slots__ = ("_buckets", "count", "max_ns")

    def __init__(self) -> None:
        self._buckets = [0] * (_bucket(MAX_DURATION_NS) + 1)
        self.count = 0
        self.max_ns = 0
        """Exact, up to `MAX_DURATION_NS`; 0 where nothing was counted."""

    def add(self, duration_ns: int) -> None:
        """Count one; ValueError for less than nothing."""
        if duration_ns > self.max_ns:
            self.max_ns = duration_ns = min(duration_ns, MAX_DURATION_NS)
        elif duration_ns < 0:
            raise ValueError(f"a duration is 0 ns or more, not {duration_ns}")
        self._buckets[_bucket(duration_ns)] += 1
        self.count += 1

    def quantile_ns(self, per_mille: int) -> int | None:
        """What so many of a thousand durations did not exceed: 500 is the median. None if there are none.

        It is the nearest rank: one of the durations that were counted, or up to `PRECISION` more than it, never less
        and never more than the greatest. ValueError outside of 1 to 1,000.
        """
        if not 1 <= per_mille <= 1000:  # noqa: PLR2004
            raise ValueError(f"a quantile is given in 1 to 1000 thousandths, not {per_mille}")
        rank = -(-self.count * per_mille // 1000)  # rounded up
        if not rank:
            return None
        for bucket, count in enumerate(self._buckets):
            rank -= count
            if rank <= 0:
                return min(_last_of(bucket), self.max_ns)
        raise AssertionError("the buckets hold less than was counted")


def _bucket(duration_ns: int) -> int:
    cut = duration_ns.bit_length() - DIGITS
    return duration_ns if cut <= 0 else (cut * HALF) + (duration_ns >> cut)


def _last_of(bucket: int) -> int:
    """The greatest duration that falls into a bucket, in ns."""
    cut = bucket // HALF - 1
    return bucket if cut <= 0 else ((bucket - cut * HALF + 1) << cut) - 1
