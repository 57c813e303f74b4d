"""Checkpoints: the leader writes the changes of the log to the stored state, so that the log can be trimmed.

A checkpoint is fuzzy: it is written in parts, between commits. The state then contains some changes of the log that are
later than the stored position of the checkpoint. Recovery applies these changes again, which has no effect: a record is
the whole new value of an id. The order makes a crash harmless at any moment: first the records, then the position of
the checkpoint, then the log is trimmed up to that position.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice
from math import inf
from typing import Protocol

from msgspec.structs import replace
from structlog.typing import FilteringBoundLogger

from genie.storage.redis.connection import RedisFailure, describe_failure
from genie.storage.redis.keyspace import Checkpoint, Keyspace
from genie.storage.redis.log import BatchCommitted, LogReader, LogTruncated, Position
from genie.storage.store import Batch, UnknownFormat

CHECK_INTERVAL_S = 1.0
"""How often the leader checks whether a checkpoint is due."""
CHECKPOINT_INTERVAL_S = 5.0
"""A checkpoint is due this long after the last one, if anything has changed since."""
IDLE_CHECKPOINT_INTERVAL_S = 60.0
"""A checkpoint of an idle leader is due this long after the last one. If log entries were lost, it replaces them."""
CHECKPOINT_BYTES = 8 << 20
"""A checkpoint is due after batches of this size in total. A recovery reads little more of the log than this."""
CHECKPOINT_ENTRIES = 20_000
"""A checkpoint is due after this many log entries."""
READ_BYTES = 128 << 10
"""About how many bytes of the log are read at a time. Limited, because the leader serves no client while it decodes
them."""
MAX_FILTERED = 10_000
"""How many changes are filtered at a time, which takes about 3 ms. A checkpoint of 8 MiB may have 80,000."""
PART_SIZE = 1_000
"""How many records one call writes or deletes at most. Limited, because Redis serves no other client during a call."""
PART_BYTES = 1 << 20
"""About how many bytes of records one call writes at most. The last record of a call may exceed this by up to a MiB."""


class OnLoss(Protocol):
    """A callback for the case that Redis seems to have lost data."""

    def __call__(self, *, has_lost_state: bool) -> None:
        """Handle the loss.

        With `has_lost_state`, more than the end of the log is lost: the snapshot must be restored.
        """


class Checkpointer:
    """Writes checkpoints of the namespace that this node leads.

    It collects the changes of the stored batches, so it need not read back this leader's entries of the log. The first
    checkpoint also has the entries of former leaders, which it reads from the log. `counters` is a batch without
    changes, with the counters at the beginning of this leader's epoch.
    """

    def __init__(self, keyspace: Keyspace, counters: Batch, on_loss: OnLoss, log: FilteringBoundLogger) -> None:
        self._keyspace = keyspace
        self._on_loss = on_loss
        """Called if Redis seems to have lost data, so that the next commit compares the log first."""
        self._log = log
        self._stored_index = 0
        """The index of the last stored batch."""
        self._last_batch = counters
        """The last stored batch, which has the counters of a checkpoint."""
        self._changes: dict[int, bytes] = {}
        """The last change of each id since the last checkpoint, as a line of an encoded batch."""
        self._stored_bytes = 0
        """The size of all stored batches."""
        self._checkpointed_index = self._checkpointed_bytes = 0
        """The values of `_stored_index` and `_stored_bytes` at the last checkpoint."""
        self._attempt = 0
        """The number of the last attempt to write a checkpoint."""
        self._last_checkpoint: Position | None = None
        """The position of the last checkpoint. None before the first attempt, and after Redis has lost a checkpoint."""
        self._highest_id = counters.next_id - 1
        """The highest id that any checkpoint, finished or not, may have written to the state."""

    def add(self, batch: Batch, lines: dict[int, bytes], size: int) -> None:
        """Add a stored batch, of `size` encoded bytes, to the next checkpoint.

        `lines` are its changes, encoded, by id.
        """
        self._stored_index += 1
        self._last_batch = batch
        self._changes.update(lines)
        self._stored_bytes += size

    async def run(self) -> None:
        """Write a checkpoint whenever one is due, until cancelled."""
        loop = asyncio.get_running_loop()
        attempted_at = -inf  # the first checkpoint is due at once, because a former leader may have left a long log
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if self._is_due(loop.time() - attempted_at):
                attempted_at = loop.time()
                try:
                    await self.write()
                except (RedisFailure, UnknownFormat) as error:
                    # A rollback or another leader is found and handled by the next commit.
                    self._log.warning("checkpoint failed, retrying", reason=describe_failure(error))

    def _is_due(self, elapsed_s: float) -> bool:
        """Return whether a checkpoint is due `elapsed_s` seconds after the last attempt."""
        is_idle = not self._changes and self._last_checkpoint is not None  # an idle leader commits empty batches
        interval_s = IDLE_CHECKPOINT_INTERVAL_S if is_idle else CHECKPOINT_INTERVAL_S
        return (
            elapsed_s >= interval_s
            or self._stored_bytes - self._checkpointed_bytes >= CHECKPOINT_BYTES
            or self._stored_index - self._checkpointed_index >= CHECKPOINT_ENTRIES
        )

    async def write(self) -> bool:
        """Write a checkpoint of all stored batches. Return False if another node leads or Redis has lost data."""
        self._attempt += 1
        index, stored_bytes = self._stored_index, self._stored_bytes
        new = Checkpoint((self._keyspace.epoch.number, index), replace(self._last_batch, changes={}))
        changes, self._changes = self._changes, {}
        is_written = False
        try:
            if self._last_checkpoint is None:
                self._last_checkpoint, changes = await self._read_changes(new.position)
            if self._last_checkpoint is not None:
                changes = await self._without_unwritten(changes)
                self._highest_id = max(self._highest_id, max(changes, default=0))
                is_written = await self._write_parts(changes.values(), self._last_checkpoint, new)
        finally:
            if not is_written:  # the next attempt writes them, together with the changes since then
                self._changes = changes | self._changes
        if is_written:
            self._last_checkpoint = new.position
            self._checkpointed_index, self._checkpointed_bytes = index, stored_bytes
        return is_written

    async def _without_unwritten(self, changes: dict[int, bytes]) -> dict[int, bytes]:
        """Return the changes without the deletions of requests that no checkpoint has written.

        They began and ended since the last checkpoint. Other tasks run between the parts of the work.
        """
        items, necessary = iter(changes.items()), dict[int, bytes]()
        while part := [*islice(items, MAX_FILTERED)]:
            necessary.update((id_, line) for id_, line in part if id_ <= self._highest_id or not _is_deletion(line))
            if len(part) == MAX_FILTERED:
                await asyncio.sleep(0)
        return necessary

    async def _write_parts(self, lines: Iterable[bytes], last: Position, new: Checkpoint) -> bool:
        """Write changes to the state, then move the checkpoint. Return whether Redis has accepted all parts.

        After a rejected part the position of the last checkpoint is unknown.
        """
        parts = _split_into_parts(lines)
        part: list[bytes] | None = next(parts)
        number = 1
        while part is not None:
            following = next(parts, None)
            status = await self._keyspace.write_checkpoint(
                last,
                new,
                self._attempt,
                number,
                deleted=[line for line in part if _is_deletion(line)],
                written=dict([line.split(b" ", 1) for line in part if not _is_deletion(line)]),
                is_last_part=following is None,
            )
            if status != b"ok":
                self._last_checkpoint = None
                if status in (b"lost", b"no state"):
                    self._on_loss(has_lost_state=status == b"no state")
                return False
            part = following
            number += 1
        return True

    async def _read_changes(self, end: Position) -> tuple[Position | None, dict[int, bytes]]:
        """Return the position of the last checkpoint, and the changes of the log from there up to `end`, as lines by id.

        Returns None and no changes if another node leads or Redis has lost data.
        """
        meta = await self._keyspace.read()
        if meta is None or meta.epoch != self._keyspace.epoch:
            self._on_loss(has_lost_state=False)
            return None, {}
        changes: dict[int, bytes] = {}
        reader = LogReader(self._keyspace.primary, self._keyspace.log, READ_BYTES)
        reader.seek(meta.history.up_to(meta.checkpoint.position))
        try:
            while reader.position < end:
                entries = await reader.read(wait_ms=None)
                if not entries:  # the log does not reach `end`
                    self._on_loss(has_lost_state=False)
                    return None, {}
                split_bytes = 0
                for entry in entries:
                    if isinstance(entry, BatchCommitted) and entry.position <= end:
                        changes.update(_lines_of(entry))
                        split_bytes += len(entry.encoded)
                        if split_bytes > READ_BYTES:  # a read has 32 MiB if large entries follow small ones
                            split_bytes = 0
                            await asyncio.sleep(0)
        except LogTruncated:  # the log lacks an entry that this leader has read or written
            self._on_loss(has_lost_state=True)
            return None, {}
        return meta.checkpoint.position, changes


def _lines_of(batch: BatchCommitted) -> dict[int, bytes]:
    """Return the lines of a batch by id."""
    return {int(id_): b"%b %b" % (id_, record) if record else id_ for id_, record in batch.split()[1].items()}


def _is_deletion(line: bytes) -> bool:
    """Return whether a line of a batch deletes an id. Such a line is the id alone.

    Other lines also have a space and a record.
    """
    return b" " not in line


def _split_into_parts(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield the lines in one or more parts of at most `PART_SIZE` lines and about `PART_BYTES` bytes.

    A part is made only when it is needed, because the leader serves clients while Redis writes the part before.
    """
    part: list[bytes] = []
    part_bytes = 0
    for line in lines:
        if len(part) >= PART_SIZE or part_bytes >= PART_BYTES:
            yield part
            part, part_bytes = [], 0
        part.append(line)
        part_bytes += len(line)
    yield part
