from __future__ import annotations

from genie.storage.redis.log import MARK_INTERVAL, MAX_LOG_BYTES, MAX_LOG_ENTRIES, LogRetention


def retention_of(sizes: list[int]) -> LogRetention:
    """Return the retention after entries of the given sizes, the first with the index 1."""
    retention = LogRetention()
    for index, size in enumerate(sizes, start=1):
        retention.add(index, size)
    return retention


def test_entries_of_an_earlier_leader_are_retained_at_first() -> None:
    assert retention_of([100] * 10 * MARK_INTERVAL).first_retained == 0
    assert retention_of([MAX_LOG_BYTES // (4 * MARK_INTERVAL)] * 4 * MARK_INTERVAL).first_retained == 0


def test_the_log_is_bounded_in_bytes() -> None:
    """At every moment about the last `MAX_LOG_BYTES` bytes are retained, never fewer, to within two mark intervals."""
    size = MAX_LOG_BYTES // (4 * MARK_INTERVAL)
    retention = LogRetention()
    for index in range(1, 20 * MARK_INTERVAL + 1):
        retention.add(index, size)
        retained_bytes = (index - max(retention.first_retained, 1) + 1) * size
        assert retained_bytes <= MAX_LOG_BYTES + 2 * MARK_INTERVAL * size
        if retention.first_retained:
            assert retained_bytes > MAX_LOG_BYTES - 2 * MARK_INTERVAL * size
    assert retention.first_retained > 14 * MARK_INTERVAL


def test_the_last_batches_are_retained_however_large() -> None:
    sizes = [2 * MAX_LOG_BYTES] * 3 * MARK_INTERVAL
    assert retention_of(sizes).first_retained == 3 * MARK_INTERVAL
    assert retention_of([*sizes, 1]).first_retained <= len(sizes) + 1


def test_the_log_is_bounded_in_entries() -> None:
    assert retention_of([0] * MAX_LOG_ENTRIES).first_retained == 0
    count = MAX_LOG_ENTRIES + 10 * MARK_INTERVAL
    retained = count - retention_of([0] * count).first_retained
    assert MAX_LOG_ENTRIES - MARK_INTERVAL < retained <= MAX_LOG_ENTRIES + MARK_INTERVAL


def test_a_mark_costs_constant_memory_once_a_limit_is_exceeded() -> None:
    retention = retention_of([0] * 3 * MAX_LOG_ENTRIES)
    assert len(retention._marks) <= MAX_LOG_ENTRIES // MARK_INTERVAL + 2
