"""The parts in which a checkpoint is written: Redis serves no other client while it writes one."""

from __future__ import annotations

from genie.storage.redis.checkpoint import PART_BYTES, PART_SIZE, _split_into_parts


def test_a_part_has_a_bounded_number_of_records_and_of_bytes() -> None:
    assert _split_into_parts([]) == [[]], "the last part moves the checkpoint"
    small = [b"%d" % number for number in range(2 * PART_SIZE + 1)]
    assert [len(part) for part in _split_into_parts(small)] == [PART_SIZE, PART_SIZE, 1]
    large = [b"x" * (PART_BYTES * 9 // 10)] * 5 + small[:10]
    parts = _split_into_parts(large)
    assert [line for part in parts for line in part] == large
    assert max(sum(map(len, part[:-1])) for part in parts) < PART_BYTES
    assert len(parts) == 3
