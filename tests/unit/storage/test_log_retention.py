from __future__ import annotations

from genie.storage.redis.log import MAX_ENTRY_FIELDS, MAX_LOG_BYTES, MAX_LOG_ENTRIES, LogRetention


def test_entries_of_an_earlier_leader_are_retained_at_first() -> None:
    retention = LogRetention()
    assert retention.add(100, 1) == MAX_LOG_ENTRIES
    assert retention.add(MAX_LOG_BYTES // 2, 1) == MAX_LOG_ENTRIES


def test_the_log_is_bounded_in_bytes() -> None:
    retention = LogRetention()
    for _ in range(10):
        retention.add(MAX_LOG_BYTES // 4, 1)
    assert retention.add(MAX_LOG_BYTES // 4, 1) == 4
    assert retention.add(2 * MAX_LOG_BYTES, 1) == 1, "the last batch is always retained"


def test_a_large_batch_is_several_entries() -> None:
    retention = LogRetention()
    for _ in range(3):
        retention.add(MAX_LOG_BYTES, 1)
    assert retention.add(MAX_LOG_BYTES // 2, MAX_ENTRY_FIELDS // 2) == 1
    assert retention.add(MAX_LOG_BYTES // 2, MAX_ENTRY_FIELDS) == 3


def test_the_log_is_bounded_in_entries() -> None:
    retention = LogRetention()
    assert {retention.add(1, 0) for _ in range(MAX_LOG_ENTRIES + 10)} == {MAX_LOG_ENTRIES}
