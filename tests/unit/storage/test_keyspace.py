"""What a takeover stores, and how metadata and records are read."""

from __future__ import annotations

import asyncio

import pytest

from genie.storage.redis.connection import UNKNOWN_RUN
from genie.storage.redis.keyspace import CHUNK, CHUNK_BYTES, Checkpoint, Keyspace, LeaderEpoch, Meta
from genie.storage.redis.log import MAX_EPOCHS
from genie.storage.store import Batch, Node, RetainedReply, StoredOrigin, UnknownFormat


class RecordingPrimary:
    """Stands in for the primary: every script succeeds."""

    run = UNKNOWN_RUN

    def __init__(self) -> None:
        self.arguments: tuple[object, ...] = ()
        """The arguments of the last script."""
        self.writes: list[tuple[object, ...]] = []
        """The fields and values of each `HSET`."""

    async def eval(self, script: bytes, keys: list[str], *arguments: object) -> bytes:
        del script, keys
        self.arguments = arguments
        return b"ok"

    async def write(self, command: str, key: str, *fields: object) -> None:
        assert (command, key) == ("HSET", "{n}:state:7")
        self.writes.append(fields)


async def test_a_takeover_stores_the_last_epochs_only() -> None:
    primary = RecordingPrimary()
    keyspace = Keyspace(primary, "n")  # type: ignore[arg-type]
    before = tuple((epoch, 3) for epoch in range(1, 2 * MAX_EPOCHS))
    last = LeaderEpoch(2 * MAX_EPOCHS, "nonce", "{n}:state:1")
    meta = Meta(last, None, (last.number, 7), Checkpoint((1, 0), Batch()), before)
    assert await keyspace.acquire_leadership(Node(), meta)
    (history,) = [part for part in primary.arguments if isinstance(part, str) and part.endswith(f" {last.number}-7")]
    assert len(history.split()) == MAX_EPOCHS
    assert len(keyspace.history.ends) == MAX_EPOCHS + 1


class DamagedPrimary:
    """Stands in for the primary: `meta` has lost all fields but these."""

    asking = False

    def __init__(self, *further_fields: bytes) -> None:
        self._further_fields = further_fields

    async def call(self, *command: object) -> object:
        del command
        fields = [b"version", b"1", b"epoch", b"7", b"nonce", b"n", b"node", b"", b"history", b"0-0"]
        return [*fields, *self._further_fields], b"7-3"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((), "lacks checkpoint, state: restore it from a backup"),
        ((b"state", b"s", b"checkpoint", b"7-x 1 1 1"), ": a field is invalid: .*; restore it from a backup"),
    ],
)
async def test_metadata_with_a_missing_or_invalid_field_is_an_unknown_format(
    fields: tuple[bytes, ...], message: str
) -> None:
    keyspace = Keyspace(DamagedPrimary(*fields), "n")  # type: ignore[arg-type]
    with pytest.raises(UnknownFormat, match=r"\{n\}:meta ?" + message):
        await keyspace.read()


async def test_metadata_without_an_epoch_is_an_unknown_format() -> None:
    """It is not that of an empty namespace, for whose leadership a node would compete forever without success."""

    class WithoutEpoch(DamagedPrimary):
        async def call(self, *command: object) -> object:
            del command
            return [b"version", b"1", b"nonce", b"n", b"node", b"", b"history", b"0-0", b"state", b"s"], b"7-3"

    keyspace = Keyspace(WithoutEpoch(), "n")  # type: ignore[arg-type]
    with pytest.raises(UnknownFormat, match=r"\{n\}:meta lacks checkpoint, epoch: restore it from a backup"):
        await keyspace.read()


@pytest.mark.parametrize(("ref_bytes", "max_records"), [(1, CHUNK), (100 << 10, CHUNK_BYTES // (100 << 10) + 1)])
async def test_a_snapshot_is_written_in_chunks_of_bounded_size(ref_bytes: int, max_records: int) -> None:
    """The server serves no client while it encodes a chunk, and Redis while it receives one."""
    origin = StoredOrigin("key", 1_000)
    state = Batch({id_: RetainedReply(id_, "x" * ref_bytes, origin, 0.0, b"") for id_ in range(1, 2_502)})
    state.changes[2_502] = None
    primary = RecordingPrimary()
    keyspace = Keyspace(primary, "n")  # type: ignore[arg-type]
    assert await keyspace._write_records("{n}:state:7", state) == 2_501
    assert [id_ for fields in primary.writes for id_ in fields[::2]] == [*range(1, 2_502)]
    assert max(len(fields) // 2 for fields in primary.writes) <= max_records
    assert await keyspace._write_records("{n}:state:7", Batch()) == 0


class SlowPrimary:
    """Stands in for the primary: it has a state of two chunks, and never sends the second."""

    asking = False

    def __init__(self) -> None:
        self.cursors: list[object] = []
        """The cursors of all scans."""
        self.is_cancelled = False

    async def call(self, *command: object) -> object:
        del command
        meta = {b"version": b"1", b"epoch": b"7", b"nonce": b"n", b"node": b"", b"history": b"0-0"}
        meta |= {b"state": b"{n}:state:7", b"checkpoint": b"7-0 0 1 1"}
        return [part for item in meta.items() for part in item], b"7-3"

    async def read(self, keys: list[str], command: str, cursor: object, *arguments: object) -> object:
        del keys, command, arguments
        self.cursors.append(cursor)
        if cursor == b"0":
            return b"17", [b"0", b"", b"5", b"record"]
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelled = True


async def test_the_next_chunk_is_read_while_the_caller_decodes_one() -> None:
    primary = SlowPrimary()
    scan = Keyspace(primary, "n").scan_records()  # type: ignore[arg-type]
    assert await anext(scan) == {b"5": b"record"}
    assert primary.cursors == [b"0", b"17"]
    await scan.aclose()  # type: ignore[attr-defined]
    assert primary.is_cancelled


class ScannedPrimary(SlowPrimary):
    """A primary whose state has records of these sizes. The second call of a scan returns none of them."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.counts: list[int] = []
        """How many records each call has asked for."""

    async def read(self, keys: list[str], command: str, cursor: object, *arguments: object) -> object:
        assert (len(keys), command, arguments[0]) == (3, "HSCAN", "COUNT")
        self.counts.append(int(str(arguments[1])))
        if len(self.counts) == 2:
            return cursor, []
        first = int(cursor)  # type: ignore[call-overload]
        end = first + self.counts[-1]
        ids = range(first, min(end, len(self.sizes)))
        fields = [part for id_ in ids for part in (b"%d" % id_, bytes(self.sizes[id_]))]
        return b"%d" % (end if end < len(self.sizes) else 0), fields


async def test_the_calls_of_a_scan_read_fewer_records_if_they_are_large() -> None:
    """1,000 records of 1 MiB would occupy Redis for a long time."""
    small, large = 200, 1 << 20
    primary = ScannedPrimary(*[small] * 3_000, *[large] * 1_500, *[small, large] * 20)
    chunks = [len(records) async for records in Keyspace(primary, "n").scan_records()]  # type: ignore[arg-type]
    assert sum(chunks) == 3_000 + 1_500 + 40 - 1, "all but the field 0"
    assert primary.counts[:9] == [16, 32, 64, 128, 256, 512, 1_000, 1_000, 1_000]
    assert max(primary.counts[9:]) == 2
