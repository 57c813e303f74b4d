"""The parts in which a checkpoint is written: Redis serves no other client while it writes one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from genie.storage.redis import log as log_module
from genie.storage.redis.checkpoint import (
    MAX_FILTERED,
    PART_BYTES,
    PART_SIZE,
    READ_BYTES,
    Checkpointer,
    _split_into_parts,
)
from genie.storage.redis.keyspace import Checkpoint, LeaderEpoch, Meta
from genie.storage.redis.records import split_batch
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


async def test_large_entries_of_one_read_are_split_in_several_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new leader reads the log of the leader before it, while it leads other namespaces."""
    split_bytes = [0]

    def split(encoded: bytes) -> tuple[bytes, dict[bytes, bytes]]:
        split_bytes[-1] += len(encoded)
        return split_batch(encoded)

    monkeypatch.setattr(log_module, "split_batch", split)
    epoch, entry_bytes = LeaderEpoch(7, "nonce", "state"), READ_BYTES // 2
    entries = [(b"7-%d" % index, [b"batch", (b"0 1 1\n%d " % index).ljust(entry_bytes)]) for index in range(1, 17)]

    async def read() -> Meta:
        return Meta(epoch, None, (7, 16), Checkpoint((7, 0), Batch()), ())

    async def call(*_: Any, **__: Any) -> Any:
        return [(b"log", entries)]

    keyspace: Any = SimpleNamespace(read=read, epoch=epoch, log="log", primary=SimpleNamespace(call=call))
    checkpointer = Checkpointer(keyspace, Batch(), lambda **_: None, structlog.get_logger())
    reading = asyncio.create_task(checkpointer._read_changes((7, 16)))
    while not reading.done():
        await asyncio.sleep(0)
        split_bytes.append(0)
    position, changes = await reading
    assert (position, [*changes]) == ((7, 0), [*range(1, 17)])
    assert sum(split_bytes) == 16 * entry_bytes
    assert max(split_bytes) <= READ_BYTES + entry_bytes


async def test_the_changes_of_a_checkpoint_are_filtered_in_several_iterations() -> None:
    """After seconds of a high load, most of them are deletions of requests that no checkpoint has written."""
    keyspace: Any = None
    checkpointer = Checkpointer(keyspace, Batch(next_id=11), lambda **_: None, structlog.get_logger())
    count = 3 * MAX_FILTERED
    changes = {id_: b"%d" % id_ for id_ in range(1, count)} | {count: b"%d record" % count}
    filtering = asyncio.create_task(checkpointer._without_unwritten(changes))
    iterations = 0
    while not filtering.done():
        await asyncio.sleep(0)
        iterations += 1
    assert [*await filtering] == [*range(1, 11), count]
    assert iterations > 3
