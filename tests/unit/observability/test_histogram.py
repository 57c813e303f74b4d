from __future__ import annotations

import pytest

from genie.observability.histogram import BOUNDS_MS, Histogram, quantile


def test_a_value_is_counted_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram((1.0, 5.0))
    for value in (0.0, 1.0, 1.001, 5.0, 5.1, 1e9):
        histogram.add(value)
    assert histogram.counts == [2, 2, 2]
    assert histogram.count == 6
    assert histogram.total == pytest.approx(1e9 + 12.101)


def test_memory_does_not_grow_with_the_number_of_values() -> None:
    histogram = Histogram()
    for value in range(10_000):
        histogram.add(float(value))
    assert len(histogram.counts) == len(BOUNDS_MS) + 1


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0], 0.5, None),
        ([2, 0, 0], 0.5, 5.0),
        ([2, 0, 0], 1.0, 10.0),
        ([1, 1, 0], 0.5, 10.0),
        ([1, 1, 0], 0.75, 15.0),
        ([0, 4, 0], 0.25, 12.5),
        ([1, 0, 1], 0.99, 20.0),
        ([0, 0, 3], 0.1, 20.0),
    ],
)
def test_quantiles_are_as_exact_as_the_buckets(counts: list[int], share: float, expected: float | None) -> None:
    assert quantile((10.0, 20.0), counts, share) == expected
