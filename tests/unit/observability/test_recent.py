from __future__ import annotations

from genie.observability.histogram import BOUNDS_MS, KEPT, Recent, Sample, Speed

NONE = (0,) * (len(BOUNDS_MS) + 1)


def waited(bucket: int, many: int) -> tuple[int, ...]:
    return tuple(many if number == bucket else 0 for number in range(len(NONE)))


def test_nothing_is_told_of_less_than_a_second() -> None:
    recent = Recent()
    assert recent.speed() == Speed()
    assert recent.wait_quantile(0.5) is None
    recent.add(Sample(5_000, 7, waited=NONE))
    assert recent.speed() == Speed()
    recent.add(Sample(5_999, 9, waited=NONE))
    assert recent.speed() == Speed()


def test_a_sample_is_due_each_second() -> None:
    recent = Recent()
    assert recent.due(0)
    recent.add(Sample(100))
    assert not recent.due(1_099)
    assert recent.due(1_100)


def test_rates_are_of_the_last_ten_seconds() -> None:
    recent = Recent()
    for second in range(21):
        grants = second * 100 if second <= 10 else 1_000 + (second - 10) * 10
        recent.add(Sample(second * 1000, grants, releases=second, errors=5, waited=NONE))
    assert recent.speed() == Speed(grants=10, releases=1)


def test_rates_of_a_young_server_are_of_its_life() -> None:
    recent = Recent()
    recent.add(Sample(1_000, waited=NONE))
    recent.add(Sample(3_000, 10, 8, 6, 4, 2, 1, NONE))
    assert recent.speed() == Speed(5, 4, 3, 2, 1, 0.5)


def test_a_server_that_stood_still_divides_by_the_time_that_passed() -> None:
    recent = Recent()
    recent.add(Sample(0, waited=NONE))
    recent.add(Sample(8_000, 80, waited=NONE))
    assert recent.speed().grants == 10
    recent.add(Sample(40_000, 90, waited=NONE))
    assert recent.speed() == Speed(), "what was before is too old, and there is nothing since"


def test_quantiles_are_of_the_last_minute() -> None:
    recent = Recent()
    for second in range(100):
        recent.add(Sample(second * 1000, waited=waited(3, 1_000 if second > 20 else 0)))
    assert recent.wait_quantile(0.5) is None, "they were granted more than a minute ago"
    recent.add(Sample(100_000, waited=tuple(map(sum, zip(waited(3, 1_000), waited(4, 10), strict=True)))))
    assert recent.wait_quantile(1.0) == BOUNDS_MS[4]
    assert BOUNDS_MS[3] < (recent.wait_quantile(0.01) or 0) < BOUNDS_MS[4]


def test_it_keeps_a_minute() -> None:
    recent = Recent()
    for second in range(1_000):
        recent.add(Sample(second * 1000, waited=NONE))
    assert len(recent._samples) == KEPT
