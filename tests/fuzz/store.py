"""A store for fuzzing: keeps encoded records in memory, and can be slow, unavailable, or survive its server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from genie.storage.memory import MemoryStore
from genie.storage.redis.records import RecordDecoder, encode
from genie.storage.store import Batch, Change, RetainedReply, StateMachine

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
            for id_, change in batch.changes.items():
                record = encode_change(change)
                if record is None:
                    self.records.pop(id_, None)
                else:
                    self.records[id_] = record
            self.last = batch

    def state_machine(self) -> StateMachine:
        """Return the state for the next server."""
        self.pending, self.unavailable = None, False
        decoder, replica = RecordDecoder(), StateMachine()
        changes: dict[int, Change] = {id_: decoder.decode(id_, record) for id_, record in self.records.items()}
        replica.apply(Batch(changes, self.last.next_id, self.last.next_fence, self.last.clock_ms))
        return replica


def encode_change(change: Change) -> bytes | None:
    """Return the record of a change; None if it is deleted."""
    if change is None or (not isinstance(change, RetainedReply) and change.state.name == "ENDED"):
        return None
    return encode(change)
