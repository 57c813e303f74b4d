from __future__ import annotations

from genie.observability.histogram import BOUNDS_MS, MAX_SAMPLES, Rates, RateWindow, Sample

NONE = (0,) * (len(BOUNDS_MS) + 1)


def waits_in_bucket(bucket: int, count: int) -> tuple[int, ...]:
    return tuple(count if number == bucket else 0 for number in range(len(NONE)))


def test_rates_are_zero_for_less_than_a_second() -> None:
    window = RateWindow()
    assert window.rates() == Rates()
    assert window.wait_quantile(0.5) is None
    window.add(Sample(5_000, 7, waited=NONE))
    assert window.rates() == Rates()
    window.add(Sample(5_999, 9, waited=NONE))
    assert window.rates() == Rates()


def test_a_sample_is_taken_each_second() -> None:
    window = RateWindow()
    assert window.should_sample(0)
    window.add(Sample(100))
    assert not window.should_sample(1_099)
    assert window.should_sample(1_100)


def test_rates_are_of_the_last_ten_seconds() -> None:
    window = RateWindow()
    for second in range(21):
        grants = second * 100 if second <= 10 else 1_000 + (second - 10) * 10
        window.add(Sample(second * 1000, grants, releases=second, errors=5, waited=NONE))
    assert window.rates() == Rates(grants=10, releases=1)


def test_rates_of_a_new_server_cover_its_uptime() -> None:
    window = RateWindow()
    window.add(Sample(1_000, waited=NONE))
    window.add(Sample(3_000, 10, 8, 6, 4, 2, 1, NONE))
    assert window.rates() == Rates(5, 4, 3, 2, 1, 0.5)


def test_rates_use_the_elapsed_time_after_a_pause() -> None:
    window = RateWindow()
    window.add(Sample(0, waited=NONE))
    window.add(Sample(8_000, 80, waited=NONE))
    assert window.rates().grants == 10
    window.add(Sample(40_000, 90, waited=NONE))
    assert window.rates() == Rates(), "older samples are out of the interval"


def test_quantiles_are_of_the_last_minute() -> None:
    window = RateWindow()
    for second in range(100):
        window.add(Sample(second * 1000, waited=waits_in_bucket(3, 1_000 if second > 20 else 0)))
    assert window.wait_quantile(0.5) is None, "they were granted more than a minute ago"
    window.add(
        Sample(100_000, waited=tuple(map(sum, zip(waits_in_bucket(3, 1_000), waits_in_bucket(4, 10), strict=True))))
    )
    assert window.wait_quantile(1.0) == BOUNDS_MS[4]
    assert BOUNDS_MS[3] < (window.wait_quantile(0.01) or 0) < BOUNDS_MS[4]


def test_samples_of_one_minute_are_kept() -> None:
    window = RateWindow()
    for second in range(1_000):
        window.add(Sample(second * 1000, waited=NONE))
    assert len(window._samples) == MAX_SAMPLES
