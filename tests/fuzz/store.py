"""A store for fuzzing: keeps the records of encoded batches in memory, and can be slow, unavailable, or survive its server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from genie.storage.memory import MemoryStore
from genie.storage.redis.records import (
    RecordDecoder,
    decode_counters,
    decode_records,
    encode_batch,
    encode_changes,
    split_batch,
)
from genie.storage.store import Batch, StateMachine

Done = Callable[[BaseException | None], None]


class FuzzStore(MemoryStore):
    """`delay_s` is the duration of a commit. While the store is `unavailable`, no commit is acknowledged."""

    durable = True
    full = False

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[int, bytes] = {}
        self.last = Batch()
        self.delay_s = 0.0
        self.unavailable = False
        self.pending: tuple[Batch, Done] | None = None
        self.commits = 0

    def commit(self, batch: Batch, done: Done) -> None:
        """Store a batch after the delay."""
        self.commits += 1
        self.pending = (batch, done)
        if self.unavailable:
            return
        if self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, self.acknowledge, batch)
        else:
            self.acknowledge(batch)

    def acknowledge(self, batch: Batch | None = None) -> None:
        """Store and acknowledge the pending batch; with `batch` only if it is that one."""
        if self.pending is not None and not self.unavailable and batch in (None, self.pending[0]):
            done = self.pending[1]
            self.apply_pending()
            done(None)

    def apply_pending(self) -> None:
        """Store the pending batch without an acknowledgement."""
        if self.pending is not None:
            batch = self.pending[0]
            self.pending = None
            encoded_counters, records = split_batch(encode_batch(batch, encode_changes(batch.changes)))
            for id_, record in records.items():
                if record:
                    self.records[int(id_)] = record
                else:
                    self.records.pop(int(id_), None)
            self.last = decode_counters(encoded_counters)

    def state_machine(self) -> StateMachine:
        """Return the state for the next server."""
        self.pending, self.unavailable = None, False
        replica = StateMachine()
        stored = {b"%d" % id_: record for id_, record in self.records.items()}
        replica.apply(replace(self.last, changes=decode_records(stored, RecordDecoder())))
        return replica
