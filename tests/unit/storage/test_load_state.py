"""Loading the state while Redis changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import structlog

from genie.storage.redis import log as log_module
from genie.storage.redis import replica as replica_module
from genie.storage.redis.keyspace import Checkpoint, Keyspace, LeaderEpoch, Meta
from genie.storage.redis.log import LogIncomplete, LogReader, Position, decode_position
from genie.storage.redis.primary import Primary
from genie.storage.redis.records import decode_records, encode, split_batch
from genie.storage.redis.replica import MAX_PENDING_BYTES, load_state
from genie.storage.store import Batch, RetainedReply, StoredOrigin

RECORD = encode(RetainedReply(1, None, StoredOrigin("key", 1_000), 0.0, b"", request=None))


class ScriptedRedis:
    """A Redis that changes after its state was scanned: `versions` are the metadata, the state and the log, one after the other."""

    log = "{n}:log"

    def __init__(self, *versions: tuple[Meta, dict[bytes, bytes], dict[Position, bytes]]) -> None:
        self._versions = list(versions)
        self.scans = 0

    async def read(self) -> Meta:
        return self._versions[0][0]

    async def scan_records(self) -> AsyncIterator[dict[bytes, bytes]]:
        self.scans += 1
        yield self._versions[0][1]
        if len(self._versions) > 1:
            del self._versions[0]

    async def call(self, *command: Any, wait_s: float) -> list[Any]:
        assert (command[0], wait_s) == ("XREAD", 0)
        after = decode_position(command[-1].encode())
        entries = [
            (b"%d-%d" % position, [b"batch", batch])
            for position, batch in sorted(self._versions[0][2].items())
            if position > after
        ]
        return [(b"log", entries)] if entries else []


async def load(redis: ScriptedRedis) -> tuple[Position, set[int]]:
    """Load the state; return its position, and the ids of its records."""
    reader = LogReader(cast("Primary", redis), "log")
    state = await load_state(cast("Keyspace", redis), reader, structlog.get_logger())
    assert state is not None
    return reader.position, {id_ for id_, change in state.changes.items() if change is not None}


def meta_at(index: int, checkpoint: int) -> Meta:
    epoch = LeaderEpoch(7, "nonce", "state")
    return Meta(epoch, None, (7, index), Checkpoint((7, checkpoint), Batch()), ((3, 50),))


def log_of(*indexes: int) -> dict[Position, bytes]:
    """Return log entries, each of which adds a record with its index as the id."""
    return {(7, index): b"0 99 99\n%d %b" % (index, RECORD) for index in indexes}


def state_of(*ids: int) -> dict[bytes, bytes]:
    return {b"%d" % id_: RECORD for id_ in ids}


@pytest.mark.parametrize("index", [6, 4])
async def test_a_rollback_during_the_scan_begins_it_again(index: int) -> None:
    """The records that were read may be later than the log: the leader was writing a checkpoint."""
    redis = ScriptedRedis(
        (meta_at(8, checkpoint=5), state_of(1, 8), log_of(6, 7, 8)),
        (meta_at(index, checkpoint=2), state_of(1), log_of(*range(3, index + 1))),
    )
    assert await load(redis) == ((7, index), {1, *range(3, index + 1)})
    assert redis.scans == 2


async def test_commits_during_the_scan_are_applied() -> None:
    redis = ScriptedRedis(
        (meta_at(6, checkpoint=5), state_of(1), log_of(6)), (meta_at(8, checkpoint=5), state_of(1), log_of(6, 7, 8))
    )
    assert await load(redis) == ((7, 8), {1, 6, 7, 8})
    assert redis.scans == 1


async def test_a_log_that_is_trimmed_after_a_checkpoint_is_loaded_again() -> None:
    redis = ScriptedRedis(
        (meta_at(6, checkpoint=5), state_of(1), log_of(6)), (meta_at(8, checkpoint=7), state_of(1, 6, 7), log_of(8))
    )
    assert await load(redis) == ((7, 8), {1, 6, 7, 8})
    assert redis.scans == 2


@pytest.mark.parametrize(("indexes", "last"), [((7, 8), 5), ((5, 6, 8), 6), ((4, 5, 6), 6), ((), 5)])
async def test_a_log_that_lacks_entries_after_the_checkpoint_is_not_loaded(indexes: tuple[int, ...], last: int) -> None:
    """Loading it again would not help, until the leader writes a checkpoint."""
    redis = ScriptedRedis((meta_at(8, checkpoint=5), state_of(1), log_of(*indexes)))
    with pytest.raises(LogIncomplete, match=rf"^\{{n\}}:log lacks the entry after 7-{last}, .* checkpoint, 7-5: "):
        await load(redis)
    assert redis.scans == 1


LONG_RECORD = encode(RetainedReply(1, "x" * (100 << 10), StoredOrigin("key", 1_000), 0.0, b"", request=None))


@pytest.mark.parametrize("place", ["state", "log"])
async def test_long_records_of_one_call_are_decoded_in_several_iterations(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that loads a namespace may lead others. A call returns 1,000 records, or 200 entries of the log."""
    decoded_bytes, split_bytes = [0], [0]

    def split(encoded: bytes) -> tuple[bytes, dict[bytes, bytes]]:
        split_bytes[-1] += len(encoded)
        return split_batch(encoded)

    def decode(records: dict[bytes, bytes], *arguments: Any) -> Any:
        decoded_bytes[-1] += sum(map(len, records.values()))
        return decode_records(records, *arguments)

    monkeypatch.setattr(replica_module, "decode_records", decode)
    monkeypatch.setattr(log_module, "split_batch", split)
    state, entries = dict[bytes, bytes](), dict[Position, bytes]()
    if place == "state":
        state = {b"%d" % id_: LONG_RECORD for id_ in range(1, 41)}
    else:
        entries = {(7, index): b"0 99 99\n%d %b" % (index, LONG_RECORD) for index in range(1, 41)}
    loading = asyncio.create_task(load(ScriptedRedis((meta_at(len(entries), checkpoint=0), state, entries))))
    while not loading.done():
        await asyncio.sleep(0)
        decoded_bytes.append(0)
        split_bytes.append(0)
    assert await loading == ((7, len(entries)), {*range(1, 41)})
    assert sum(decoded_bytes) == 40 * len(LONG_RECORD)
    assert max(decoded_bytes) <= MAX_PENDING_BYTES + len(LONG_RECORD)
    assert max(split_bytes) <= MAX_PENDING_BYTES + 2 * len(LONG_RECORD)
