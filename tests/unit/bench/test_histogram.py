from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.bench.histogram import MAX_DURATION_NS, PRECISION, Histogram

DURATIONS = st.lists(st.integers(0, 300) | st.integers(0, 10**9) | st.integers(0, MAX_DURATION_NS), min_size=1)


def histogram(durations: list[int]) -> Histogram:
    result = Histogram()
    for duration in durations:
        result.add(duration)
    return result


@given(DURATIONS, st.integers(1, 1000))
def test_a_quantile_is_exact_up_to_the_precision(durations: list[int], per_mille: int) -> None:
    rank = (len(durations) * per_mille + 999) // 1000
    exact = sorted(durations)[rank - 1]
    quantile = histogram(durations).quantile_ns(per_mille)
    assert quantile is not None
    assert exact <= quantile <= exact * (1 + PRECISION)
    assert quantile <= max(durations)


@given(DURATIONS)
def test_count_and_maximum_are_exact(durations: list[int]) -> None:
    counted = histogram(durations)
    assert (counted.count, counted.max_ns) == (len(durations), max(durations))
    assert counted.quantile_ns(1000) == max(durations)


@given(st.integers(0, 255))
def test_small_durations_are_exact(duration: int) -> None:
    assert histogram([duration, 1 << 30]).quantile_ns(500) == duration


@given(DURATIONS, st.integers(1, 999))
def test_quantiles_are_monotonic(durations: list[int], per_mille: int) -> None:
    counted = histogram(durations)
    low, high = counted.quantile_ns(per_mille), counted.quantile_ns(per_mille + 1)
    assert low is not None
    assert high is not None
    assert low <= high


def test_the_number_of_buckets_is_fixed() -> None:
    counted = histogram([1 << shift for shift in range(47)])
    buckets = counted._buckets
    before = len(buckets)
    for duration in (0, 7, MAX_DURATION_NS, MAX_DURATION_NS + 1, 1 << 100):
        counted.add(duration)
    assert counted._buckets is buckets
    assert len(buckets) == before < 6_000
    assert sum(buckets) == counted.count


def test_longer_durations_are_counted_as_the_maximum_duration() -> None:
    counted = histogram([MAX_DURATION_NS + 5, 1 << 90])
    assert (counted.count, counted.max_ns, counted.quantile_ns(500)) == (2, MAX_DURATION_NS, MAX_DURATION_NS)


def test_an_empty_countedhas_no_quantiles() -> None:
    assert (Histogram().quantile_ns(500), Histogram().max_ns) == (None, 0)


@pytest.mark.parametrize("per_mille", [0, 1001, -5])
def test_a_quantile_out_of_range_is_an_error(per_mille: int) -> None:
    with pytest.raises(ValueError, match="1 to 1000 thousandths"):
        histogram([1]).quantile_ns(per_mille)


def test_a_negative_duration_is_an_error() -> None:
    counted = Histogram()
    with pytest.raises(ValueError, match="0 ns or more"):
        counted.add(-1)
    assert counted.count == 0
