"""Checkpoints: in the background, the leader writes the changes of the log to the stored state, so that the log can be trimmed.

A checkpoint is fuzzy: it is written in parts, between commits. The state then contains some changes of the log that are later
than the stored position of the checkpoint. Recovery applies them again, which changes nothing because records are absolute.
The order makes a crash harmless at any moment: first the records, then the position of the checkpoint, then the log is
trimmed up to that position.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from structlog.typing import FilteringBoundLogger

from genie.storage.redis.connection import RedisFailure
from genie.storage.redis.keyspace import Checkpoint, Keyspace, Meta
from genie.storage.redis.log import BatchCommitted, LogReader, LogTruncated, Position
from genie.storage.redis.primary import Primary
from genie.storage.redis.records import decode_counters
from genie.storage.store import UnknownFormat

CHECK_INTERVAL_S = 1.0
"""How often the leader checks whether a checkpoint is due."""
CHECKPOINT_INTERVAL_S = 5.0
"""A checkpoint is due this long after the last one, if anything was committed since."""
CHECKPOINT_BYTES = 8 << 20
"""A checkpoint is due after batches of this size in total. A recovery reads little more of the log than this."""
CHECKPOINT_ENTRIES = 20_000
"""A checkpoint is due after this many log entries."""
EMPTY_BATCH_BYTES = 50
"""An encoded batch without changes is at most this long."""
READ_BYTES = 128 << 10
"""About how many bytes of the log are read at a time. Limited, because the leader serves no client while it decodes them."""
PART_SIZE = 1_000
"""How many records one call writes or deletes. Limited, because Redis serves no other client during a call."""


class Checkpointer:
    """Writes checkpoints of the namespace that this node leads.

    The changes are read from the log, so they are stored, and a commit costs nothing for its checkpoint. `progress` returns
    how many batches this leader has committed, and their size in bytes. `on_loss` is called if Redis seems to have lost data; with
    True if it has lost the state, which the log alone does not show.
    """

    def __init__(
        self,
        primary: Primary,
        keyspace: Keyspace,
        progress: Callable[[], tuple[int, int]],
        on_loss: Callable[[bool], None],
        log: FilteringBoundLogger,
    ) -> None:
        self._primary = primary
        self._keyspace = keyspace
        self._progress = progress
        self._on_loss = on_loss
        self._log = log
        self.position: Position = (0, 0)
        """The position of the last checkpoint: up to this position the log can be trimmed; (0, 0) if it is not known yet."""
        self._last_progress = 0, 0
        """The result of `progress` at the last checkpoint."""
        self._attempt = 0
        """The number of the last attempt to write a checkpoint."""
        self._highest_id: int | None = None
        """The state contains no higher id; None if the last checkpoint was interrupted, perhaps by a crash of a former leader."""

    async def run(self) -> None:
        """Write a checkpoint whenever one is due, until cancelled."""
        loop = asyncio.get_running_loop()
        last_at = -inf  # the first checkpoint is due at once, because a former leader may have left much of the log
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if self._is_due(loop.time() - last_at):
                last_at = loop.time()
                try:
                    await self.write()
                except (RedisFailure, LogTruncated, UnknownFormat) as error:
                    # A rollback or another leader is found and handled by the next commit.
                    self._log.warning("checkpoint failed, it is repeated", error=str(error) or type(error).__name__)

    def _is_due(self, elapsed_s: float) -> bool:
        """Return whether a checkpoint is due `elapsed_s` seconds after the last attempt."""
        entries, size = (now - last for now, last in zip(self._progress(), self._last_progress, strict=True))
        # An idle leader commits empty batches.
        is_idle = size <= EMPTY_BATCH_BYTES * entries and self.position != (0, 0)
        is_overdue = elapsed_s >= CHECKPOINT_INTERVAL_S and not is_idle
        return is_overdue or size >= CHECKPOINT_BYTES or entries >= CHECKPOINT_ENTRIES

    async def write(self) -> bool:
        """Write a checkpoint of the present end of the log; return False if another node leads or Redis was rolled back."""
        progress = self._progress()
        self._attempt += 1
        highest_known, self._highest_id = self._highest_id, None
        meta = await self._keyspace.read()
        if meta is None or meta.epoch != self._keyspace.epoch:
            self._on_loss(False)
            return False
        changes, checkpoint = await self._read_log(meta)
        deleted: list[bytes] = []
        written: dict[bytes, bytes] = {}
        for id_, record in changes.items():
            if record:
                written[id_] = record
            elif highest_known is None or int(id_) <= highest_known:  # otherwise the state never had the id
                deleted.append(id_)
            if max(len(deleted), len(written)) == PART_SIZE:
                if not await self._write_part(checkpoint.position, deleted, written):
                    return False
                deleted, written = [], {}
        if not await self._write_part(checkpoint.position, deleted, written, checkpoint):
            return False
        if highest_known is None:
            highest_known = meta.checkpoint.counters.next_id - 1  # the highest id of a record before this checkpoint
        self.position, self._highest_id = checkpoint.position, max(highest_known, max(map(int, changes), default=0))
        self._last_progress = progress
        return True

    async def _write_part(
        self,
        position: Position,
        deleted: list[bytes],
        written: dict[bytes, bytes],
        checkpoint: Checkpoint | None = None,
    ) -> bool:
        """Write a part of this attempt, see `Keyspace.write_checkpoint`; return whether Redis has accepted it."""
        status = await self._keyspace.write_checkpoint(self._attempt, position, deleted, written, checkpoint)
        if status in (b"lost", b"no state"):
            self._on_loss(status == b"no state")
        return status == b"ok"

    async def _read_log(self, meta: Meta) -> tuple[dict[bytes, bytes], Checkpoint]:
        """Read the log from the last checkpoint to the end that `meta` has.

        Returns the last record of each changed id (empty: deleted), and the checkpoint at the end.
        """
        changes: dict[bytes, bytes] = {}
        counters = b""
        reader = LogReader(self._primary, self._keyspace.log, READ_BYTES)
        reader.seek(meta.history.up_to(meta.checkpoint.position))
        while reader.position < meta.position:
            entries = await reader.read(None)
            if not entries:
                raise LogTruncated
            for entry in entries:
                if isinstance(entry, BatchCommitted):
                    changes |= entry.records
                    counters = entry.counters
        state = decode_counters(counters) if counters else meta.checkpoint.counters
        return changes, Checkpoint(reader.position, state)
