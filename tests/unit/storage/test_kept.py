from __future__ import annotations

from genie.storage.redis.log import KEPT, KEPT_BYTES, PIECE, LogRetention


def test_what_an_earlier_leader_wrote_is_kept_at_first() -> None:
    kept = LogRetention()
    assert kept.add(100, 1) == KEPT
    assert kept.add(KEPT_BYTES // 2, 1) == KEPT


def test_the_journal_is_bounded_by_its_bytes() -> None:
    kept = LogRetention()
    for _ in range(10):
        kept.add(KEPT_BYTES // 4, 1)
    assert kept.add(KEPT_BYTES // 4, 1) == 4
    assert kept.add(2 * KEPT_BYTES, 1) == 1, "the last batch is always there"


def test_a_large_batch_is_several_entries() -> None:
    kept = LogRetention()
    for _ in range(3):
        kept.add(KEPT_BYTES, 1)
    assert kept.add(KEPT_BYTES // 2, PIECE // 2) == 1
    assert kept.add(KEPT_BYTES // 2, PIECE) == 3


def test_the_journal_is_bounded_by_its_entries() -> None:
    kept = LogRetention()
    assert {kept.add(1, 0) for _ in range(KEPT + 10)} == {KEPT}
