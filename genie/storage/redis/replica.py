"""What this node has replicated of a namespace: the loaded snapshot with the log since, and its state as a former leader."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from structlog.typing import FilteringBoundLogger

from genie.storage.redis.keyspace import Keyspace, decode_counters
from genie.storage.redis.log import BatchCommitted, EpochHistory, LogReader, LogTruncated, Position
from genie.storage.redis.records import RecordDecoder
from genie.storage.store import Batch, Change, StateMachine

MAX_PENDING_IDS = 2_000
"""How many ids may have an undecoded record: applying that many takes a few hundredths of a second."""


class LazyReplica:
    """A state machine, and the undecoded records of the log since then.

    Most locks are released soon, and a lock that is granted and released before the records are applied is never decoded.
    So following costs a small part of leading, and one node can follow many namespaces.
    """

    def __init__(self, state_machine: StateMachine) -> None:
        self._state_machine = state_machine
        self._decoder = RecordDecoder()
        self._pending: dict[bytes, bytes] = {}
        """The last record of each id since then, as stored; empty if the id was deleted."""
        self._counters = b""

    def append(self, entry: BatchCommitted) -> None:
        """Add the records of one batch."""
        self._pending |= entry.records
        self._counters = entry.counters
        if len(self._pending) > MAX_PENDING_IDS:
            self._apply_pending()

    def state_machine(self) -> StateMachine:
        """Apply the undecoded records, and return the state after all batches so far."""
        if self._counters:
            self._apply_pending()
        return self._state_machine

    def _apply_pending(self) -> None:
        """Decode the pending records and apply them as one batch, without deletions of ids that were never applied."""
        pending, self._pending = self._pending, {}
        _, batch = decode_counters(self._counters)
        self._counters = b""
        batch.changes = {
            id_: change
            for id_, change in sorted(decode_records(pending, self._decoder).items())
            if change is not None or id_ in self._state_machine
        }
        self._state_machine.apply(batch)


def decode_records(records: dict[bytes, bytes], decoder: RecordDecoder) -> dict[int, Change]:
    """Decode stored records by id; an empty record is a deletion (None)."""
    return {int(id_): decoder.decode(int(id_), record) if record else None for id_, record in records.items()}


# -- Initial load -------------------------------------------------------------------------------------


async def load_snapshot(keyspace: Keyspace, reader: LogReader, log: FilteringBoundLogger) -> Batch | None:
    """Scan all records while the leader changes them, then apply the log from the start of the scan on.

    Returns the state at the position from which `reader` continues; None if the namespace is empty. Records have absolute
    values, so it does no harm that some of them are newer than the start of the scan.
    """
    while True:
        meta = await keyspace.read()
        if meta is None:
            return None
        state, decoder = meta.state, RecordDecoder()
        loaded: dict[int, Change] = {}
        reader.seek(meta.history)
        async for records in keyspace.scan_records():
            loaded |= decode_records(records, decoder)
        state.changes = loaded
        try:
            if await _catch_up(keyspace, reader, decoder, state):
                state.changes = {id_: state.changes[id_] for id_ in sorted(state.changes)}
                return state
        except LogTruncated:
            log.warning("log truncated during snapshot load, loading again")


async def _catch_up(keyspace: Keyspace, reader: LogReader, decoder: RecordDecoder, state: Batch) -> bool:
    """Apply the log to the loaded records, up to the position that Redis has now.

    Returns False if another snapshot was restored in between: then the loaded records are useless.
    """
    meta = await keyspace.read()
    while meta is not None and reader.position < meta.position:
        entries = await reader.read(None)
        for entry in entries:
            if isinstance(entry, BatchCommitted):
                _, counters = decode_counters(entry.counters)
                state.changes |= decode_records(entry.records, decoder)
                state.next_id, state.next_fence = counters.next_id, counters.next_fence
                state.clock_ms = counters.clock_ms
        if not entries:
            raise LogTruncated
    return meta is not None and reader.position >= meta.position


# -- The replica of this node --------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """The whole state of a namespace, and its lineage."""

    history: EpochHistory
    state: Batch


class PriorLeadership(NamedTuple):
    """The state of a node when it stopped leading, and the last position that it may have acknowledged to clients."""

    snapshot: Snapshot
    acknowledged: Position


class LocalReplica:
    """The latest state that this node has: its replica, or its state as the former leader (`led`), whichever is later.

    `unacknowledged` are positions of batches that this node sent as the leader without acknowledging them to clients: Redis
    may or may not have them.
    """

    def __init__(
        self, reader: LogReader, led: PriorLeadership | None = None, unacknowledged: Collection[Position] = ()
    ) -> None:
        self._reader = reader
        self._led = None if led is None else led.snapshot
        self._acknowledged = None if led is None else led.acknowledged
        self._unacknowledged = unacknowledged
        self.lazy: LazyReplica | None = None
        """The loaded state, to which the log is applied. None before the first load, and after the log was truncated."""

    @property
    def is_loaded(self) -> bool:
        """Whether there is a state to which the log can be applied."""
        return self.lazy is not None

    @property
    def read_history(self) -> EpochHistory:
        """The lineage up to the last batch that was read, whether or not this node still has the state."""
        return self._reader.history

    @property
    def history(self) -> EpochHistory | None:
        """The lineage of the latest state that this node could restore; None if it has no state."""
        if self._led is None or (self.lazy is not None and self._led.history.position < self._reader.position):
            return None if self.lazy is None else self._reader.history
        return self._led.history

    @property
    def has_led_last(self) -> bool:
        """Whether this node was the last leader, according to what it has read."""
        return self._led is not None and self.history is self._led.history

    def snapshot(self) -> Snapshot | None:
        """Return the latest state that this node could restore; None if it has none."""
        if self.has_led_last:
            return self._led
        return None if self.lazy is None else Snapshot(self._reader.history, self.lazy.state_machine().snapshot())

    def has_commits_missing_from(self, other: EpochHistory) -> bool:
        """Return whether this node's state continues `other` by at least one commit."""
        history = self.history
        return history is not None and history.has_commits_beyond(other)

    def missing_from(self, history: EpochHistory) -> Snapshot | None:
        """Return the snapshot to restore where Redis has only `history`; None if Redis has everything acknowledged."""
        stored, own = history.without(self._unacknowledged), self.history
        if own is None or not own.has_commits_beyond(stored):
            return None
        # Redis is at the last batch that this node has acknowledged, and no other node has committed since.
        all_acknowledged = (
            stored.last_committed == self._acknowledged and own.last_committed[0] == stored.last_committed[0]
        )
        return None if all_acknowledged else self.snapshot()

    def replace(self, state_machine: StateMachine) -> None:
        """Replace the replica by a state that was just loaded; keep the state as a former leader only if it is later."""
        if self._led is not None and not self._led.history.extends(self._reader.position):
            self._led = None
        self.lazy = LazyReplica(state_machine)

    def append(self, entry: BatchCommitted) -> None:
        """Add one batch to the loaded state, if there is one."""
        if self.lazy is not None:
            self.lazy.append(entry)

    def unload(self) -> None:
        """Drop the loaded state: the log does not continue it."""
        self.lazy = None

    def discard_own_leadership_state(self) -> None:
        """Drop the state as a former leader: another leader was seen alive, so its state is the valid one."""
        self._led = None

    def discard(self) -> None:
        """Drop all states: the surviving Redis has another lineage."""
        self.lazy = self._led = None

    def keep_only(self, snapshot: Snapshot) -> None:
        """Replace all states by the snapshot that is being restored, so that a failed attempt can be repeated."""
        self._led, self.lazy = snapshot, None
