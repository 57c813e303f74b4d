"""The parts in which a checkpoint is written: Redis serves no other client while it writes one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import structlog

from genie.storage.redis.checkpoint import PART_BYTES, PART_SIZE, Checkpointer, _split_into_parts
from genie.storage.redis.keyspace import Checkpoint
from genie.storage.store import Batch


def test_a_part_has_a_bounded_number_of_records_and_of_bytes() -> None:
    assert [*_split_into_parts([])] == [[]], "the last part moves the checkpoint"
    small = [b"%d" % number for number in range(2 * PART_SIZE + 1)]
    assert [len(part) for part in _split_into_parts(small)] == [PART_SIZE, PART_SIZE, 1]
    large = [b"x" * (PART_BYTES * 9 // 10)] * 5 + small[:10]
    parts = [*_split_into_parts(large)]
    assert [line for part in parts for line in part] == large
    assert max(sum(map(len, part[:-1])) for part in parts) < PART_BYTES
    assert len(parts) == 3


async def test_the_lines_of_a_part_are_split_after_the_previous_part_is_sent() -> None:
    """100,000 changes at once would take the time in which the leader serves clients."""
    read: list[bytes] = []

    def lines() -> Iterator[bytes]:
        for number in range(5 * PART_SIZE):
            read.append(b"%d" % number)
            yield read[-1]

    writes: list[tuple[int, int, bool]] = []

    async def write(*_: Any, deleted: list[bytes], written: dict[bytes, bytes], is_last_part: bool) -> bytes:
        writes.append((len(read), len(deleted) + len(written), is_last_part))
        return b"ok"

    keyspace: Any = SimpleNamespace(write_checkpoint=write)
    checkpointer = Checkpointer(keyspace, Batch(), lambda **_: None, structlog.get_logger())
    assert await checkpointer._write_parts(lines(), (1, 0), Checkpoint((1, 1), Batch()))
    assert [(size, is_last) for _, size, is_last in writes] == [(PART_SIZE, False)] * 4 + [(PART_SIZE, True)]
    assert [count // PART_SIZE for count, *_ in writes] == [2, 3, 4, 5, 5]
