"""A store for fuzzing: keeps encoded records in memory, and can be slow, unavailable, or survive its server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from genie.storage.memory import MemoryStore
from genie.storage.redis.records import RecordDecoder, encode
from genie.storage.store import Batch, Change, RetainedReply, StateMachine

Done = Callable[[BaseException | None], None]


class FuzzStore(MemoryStore):
    """`delay_s` is the duration of a commit. While it is `away` no commit is acknowledged."""

    durable = True
    full = False

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[int, bytes] = {}
        self.last = Batch()
        self.delay_s = 0.0
        self.away = False
        self.waiting: tuple[Batch, Done] | None = None
        self.commits = 0

    def commit(self, batch: Batch, done: Done) -> None:
        """Store a batch after the delay."""
        self.commits += 1
        self.waiting = (batch, done)
        if self.away:
            return
        if self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, self.answer, batch)
        else:
            self.answer(batch)

    def answer(self, batch: Batch | None = None) -> None:
        """Store and acknowledge the pending batch; with `batch` only if it is that one."""
        if self.waiting is not None and not self.away and batch in (None, self.waiting[0]):
            done = self.waiting[1]
            self.store()
            done(None)

    def store(self) -> None:
        """Store the pending batch without an acknowledgement."""
        if self.waiting is not None:
            batch = self.waiting[0]
            self.waiting = None
            for id_, change in batch.changes.items():
                record = recorded(change)
                if record is None:
                    self.records.pop(id_, None)
                else:
                    self.records[id_] = record
            self.last = batch

    def replica(self) -> StateMachine:
        """Return the state for the next server."""
        self.waiting, self.away = None, False
        decoder, replica = RecordDecoder(), StateMachine()
        changes: dict[int, Change] = {id_: decoder.decode(id_, record) for id_, record in self.records.items()}
        replica.apply(Batch(changes, self.last.next_id, self.last.next_fence, self.last.clock_ms))
        return replica


def recorded(change: Change) -> bytes | None:
    """Return the record of a change; None if it is deleted."""
    if change is None or (not isinstance(change, RetainedReply) and change.state.name == "ENDED"):
        return None
    return encode(change)
