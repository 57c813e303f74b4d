"""Checkpoints: in the background, the leader writes the changes of the log to the stored state, so that the log can be
trimmed.

A checkpoint is fuzzy: it is written in parts, between commits. The state then contains some changes of the log that are later
than the stored position of the checkpoint. Recovery applies them again, which changes nothing because records are absolute.
The order makes a crash harmless at any moment: first the records, then the position of the checkpoint, then the log is
trimmed up to that position.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from math import inf

from structlog.typing import FilteringBoundLogger

from genie.storage.redis.connection import RedisFailure
from genie.storage.redis.keyspace import Checkpoint, Keyspace
from genie.storage.redis.log import BatchCommitted, LogReader, LogTruncated, Position
from genie.storage.store import Batch, UnknownFormat

CHECK_INTERVAL_S = 1.0
"""How often the leader checks whether a checkpoint is due."""
CHECKPOINT_INTERVAL_S = 5.0
"""A checkpoint is due this long after the last one, if anything has changed since."""
IDLE_CHECKPOINT_INTERVAL_S = 60.0
"""A checkpoint of an idle leader is due this long after the last one. It bounds how long a damaged log matters."""
CHECKPOINT_BYTES = 8 << 20
"""A checkpoint is due after batches of this size in total. A recovery reads little more of the log than this."""
CHECKPOINT_ENTRIES = 20_000
"""A checkpoint is due after this many log entries."""
READ_BYTES = 128 << 10
"""About how many bytes of the log are read at a time. Limited, because the leader serves no client while it decodes them."""
PART_SIZE = 1_000
"""How many records one call writes or deletes. Limited, because Redis serves no other client during a call."""
PART_BYTES = 1 << 20
"""How many bytes of records one call writes. The last record of a call may exceed this limit, by up to about a MiB."""


class Checkpointer:
    """Writes checkpoints of the namespace that this node leads.

    It collects the changes of the stored batches, so it need not read back this leader's entries of the log. The first
    checkpoint also has the entries of former leaders, which it reads from the log. `counters` is a batch with the counters at
    the beginning of this leader's epoch. `on_loss` is called if Redis seems to have lost data. Its argument is True if Redis
    has lost more than the end of the log, so that the snapshot must be restored.
    """

    def __init__(
        self, keyspace: Keyspace, counters: Batch, on_loss: Callable[[bool], None], log: FilteringBoundLogger
    ) -> None:
        self._keyspace = keyspace
        self._on_loss = on_loss
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
        """Add a stored batch to the next checkpoint: its changes as `lines`, and its encoded size in bytes."""
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
                    self._log.warning("checkpoint failed, retrying", reason=str(error) or type(error).__name__)

    def _is_due(self, elapsed_s: float) -> bool:
        """Return whether a checkpoint is due `elapsed_s` seconds after the last attempt."""
        is_idle = not self._changes and self._last_checkpoint is not None  # an idle leader commits empty batches
        return (
            elapsed_s >= (IDLE_CHECKPOINT_INTERVAL_S if is_idle else CHECKPOINT_INTERVAL_S)
            or self._stored_bytes - self._checkpointed_bytes >= CHECKPOINT_BYTES
            or self._stored_index - self._checkpointed_index >= CHECKPOINT_ENTRIES
        )

    async def write(self) -> bool:
        """Write a checkpoint of all stored batches. Return False if another node leads or Redis has lost data."""
        self._attempt += 1
        index, size = self._stored_index, self._stored_bytes
        new = Checkpoint((self._keyspace.epoch.number, index), replace(self._last_batch, changes={}))
        changes, self._changes = self._changes, {}
        is_written = False
        try:
            if self._last_checkpoint is None:
                self._last_checkpoint, changes = await self._read_changes(new.position)
            if self._last_checkpoint is not None:
                # The deletion of a request that came and went since the last checkpoint is not needed.
                changes = {id_: line for id_, line in changes.items() if id_ <= self._highest_id or b" " in line}
                self._highest_id = max(self._highest_id, max(changes, default=0))
                is_written = await self._write_parts([*changes.values()], self._last_checkpoint, new)
        finally:
            if not is_written:
                self._changes = changes | self._changes
        if is_written:
            self._last_checkpoint = new.position
            self._checkpointed_index, self._checkpointed_bytes = index, size
        return is_written

    async def _write_parts(self, lines: list[bytes], last: Position, new: Checkpoint) -> bool:
        """Write changes to the state, then move the checkpoint. Return whether Redis has accepted all parts.

        After a rejected part the position of the last checkpoint is unknown.
        """
        parts = _split_into_parts(lines)
        for number, part in enumerate(parts, 1):
            status = await self._keyspace.write_checkpoint(
                last,
                new,
                self._attempt,
                number,
                [line for line in part if b" " not in line],
                dict([line.split(b" ", 1) for line in part if b" " in line]),
                is_last_part=number == len(parts),
            )
            if status != b"ok":
                self._last_checkpoint = None
                if status in (b"lost", b"no state"):
                    self._on_loss(status == b"no state")
                return False
        return True

    async def _read_changes(self, end: Position) -> tuple[Position | None, dict[int, bytes]]:
        """Return the position of the last checkpoint, and the changes of the log from there up to `end`, as lines by id.

        Returns None and no changes if another node leads or Redis has lost data.
        """
        meta = await self._keyspace.read()
        if meta is None or meta.epoch != self._keyspace.epoch:
            self._on_loss(False)
            return None, {}
        changes: dict[int, bytes] = {}
        reader = LogReader(self._keyspace.primary, self._keyspace.log, READ_BYTES)
        reader.seek(meta.history.up_to(meta.checkpoint.position))
        try:
            while reader.position < end:
                entries = await reader.read(None)
                if not entries:  # the log ends before
                    self._on_loss(False)
                    return None, {}
                for entry in entries:
                    if isinstance(entry, BatchCommitted) and entry.position <= end:
                        for id_, record in entry.records.items():
                            changes[int(id_)] = b"%b %b" % (id_, record) if record else id_
        except LogTruncated:  # an entry is missing that this leader has read or written
            self._on_loss(True)
            return None, {}
        return meta.checkpoint.position, changes


def _split_into_parts(lines: list[bytes]) -> list[list[bytes]]:
    """Return the lines in parts, at least one, of at most `PART_SIZE` lines and about `PART_BYTES` bytes."""
    parts: list[list[bytes]] = [[]]
    size = 0
    for line in lines:
        if len(parts[-1]) >= PART_SIZE or size >= PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(line)
        size += len(line)
    return parts
