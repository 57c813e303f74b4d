from __future__ import annotations

from genie.storage.redis.log import MAX_LOG_BYTES, MAX_LOG_ENTRIES, LogRetention

INTERVAL = 100
"""A trim point is added for every hundredth entry."""


def retention_of(size: int, count: int) -> LogRetention:
    """Return the retention after `count` entries of the same size, the first with the index 1."""
    retention = LogRetention()
    for index in range(INTERVAL, count + 1, INTERVAL):
        retention.add_trim_point(index, (index - 1) * size)
    return retention


def test_entries_of_an_earlier_leader_are_retained_at_first() -> None:
    assert retention_of(100, 10 * INTERVAL).first_retained == 0
    assert retention_of(MAX_LOG_BYTES // (4 * INTERVAL), 5 * INTERVAL).first_retained == 0


def test_the_log_is_bounded_in_bytes() -> None:
    """At every moment about the last `MAX_LOG_BYTES` bytes are retained, to within an interval."""
    size = MAX_LOG_BYTES // (4 * INTERVAL)
    retention = LogRetention()
    for index in range(INTERVAL, 20 * INTERVAL + 1, INTERVAL):
        retention.add_trim_point(index, (index - 1) * size)
        retained_bytes = (index - max(retention.first_retained, 1)) * size
        assert retained_bytes <= MAX_LOG_BYTES + INTERVAL * size
        if retention.first_retained:
            assert retained_bytes > MAX_LOG_BYTES - INTERVAL * size
    assert retention.first_retained > 14 * INTERVAL


def test_the_entries_since_the_last_trim_point_are_retained_however_large() -> None:
    assert retention_of(2 * MAX_LOG_BYTES, 3 * INTERVAL).first_retained == 3 * INTERVAL


def test_the_log_is_bounded_in_entries() -> None:
    assert retention_of(0, MAX_LOG_ENTRIES).first_retained == 0
    count = MAX_LOG_ENTRIES + 10 * INTERVAL
    retained = count - retention_of(0, count).first_retained
    assert MAX_LOG_ENTRIES - INTERVAL < retained <= MAX_LOG_ENTRIES + INTERVAL


def test_there_are_trim_points_only_for_the_retained_entries() -> None:
    assert len(retention_of(0, 3 * MAX_LOG_ENTRIES)._trim_points) <= MAX_LOG_ENTRIES // INTERVAL + 2
