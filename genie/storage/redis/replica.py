"""The state of a namespace that this node has in memory: the loaded state plus the log, or its state as a former leader."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from heapq import merge
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace
from structlog.typing import FilteringBoundLogger

from genie.core.tables import clear_in_parts
from genie.storage.redis.keyspace import Keyspace
from genie.storage.redis.log import (
    BatchCommitted,
    EpochHistory,
    LogIncomplete,
    LogReader,
    LogTruncated,
    Position,
    encode_position,
)
from genie.storage.redis.records import RecordDecoder, decode_counters, decode_records
from genie.storage.store import Batch, Change, StateMachine
from genie.tasks import closing, run_in_iterations

MAX_PENDING_IDS = 2_000
"""How many ids may have an undecoded record. Applying 2,000 records takes a few hundredths of a second."""

MAX_PENDING_BYTES = 256 << 10
"""How many bytes of batches may be undecoded. The last batch may exceed this limit. About 25,000 short names have this
size: the records of requests with thousands of names are few, but take long to apply."""

MAX_SORTED_IDS = 5_000
"""How many ids of a loaded state are sorted at a time, because a follower that loads a million would do nothing else
for half a second."""


class LazyReplica:
    """A state machine, and the undecoded records of later log entries.

    Most locks are released soon. If a lock is granted and released before its records are applied, they are never
    decoded. So following takes much less CPU time than leading, and one node can follow many namespaces.
    """

    def __init__(self, state_machine: StateMachine) -> None:
        self._state_machine = state_machine
        self._decoder = RecordDecoder()
        self._pending: dict[bytes, bytes] = {}
        """The last encoded record of each id that is not applied to the state machine yet. An empty record deletes the
        id."""
        self._pending_bytes = 0
        """The size of the batches that are not applied yet. Includes records that later records have replaced in
        `_pending`."""
        self._encoded_counters = b""
        """The encoded counters of the last batch. Empty if all batches are applied, or are being applied."""
        self._applied_parts: Iterator[None] = iter(())
        """Applies the records that were pending, in parts. At its end if none are being applied."""

    def append(self, entry: BatchCommitted) -> Iterator[None]:
        """Add the records of one batch without decoding them.

        If more than `MAX_PENDING_IDS` ids or `MAX_PENDING_BYTES` bytes are pending, all records are decoded and applied:
        the caller must use up the returned iterator, each part of which takes a few hundredths of a second. Otherwise
        the iterator is empty.
        """
        self._encoded_counters, records = entry.split()
        self._pending |= records
        self._pending_bytes += len(entry.encoded)
        if len(self._pending) > MAX_PENDING_IDS or self._pending_bytes > MAX_PENDING_BYTES:
            self._finish_parts()
            self._applied_parts = self._apply_pending()
        return self._applied_parts

    def state_machine(self) -> StateMachine:
        """Apply the undecoded records, and return the state after all batches that were appended."""
        for _ in self.apply():
            pass
        return self._state_machine

    def apply(self) -> Iterator[None]:
        """Decode and apply all records that were appended, in parts: yield after each.

        If the iteration is ended early, a later call continues.
        """
        for _ in self._applied_parts:  # not `yield from`, which would end these parts together with this iterator
            yield
        if self._encoded_counters:
            self._applied_parts = self._apply_pending()
            for _ in self._applied_parts:
                yield

    async def free(self) -> None:
        """Drop the state in parts. Other tasks run between the parts."""
        parts = self._state_machine.free_in_parts()
        self._state_machine, self._applied_parts = StateMachine(), iter(())
        for _ in parts:
            await asyncio.sleep(0)

    def _finish_parts(self) -> None:
        for _ in self._applied_parts:
            pass

    def _apply_pending(self) -> Iterator[None]:
        """Decode the pending records and apply them as one batch, in parts: yield after each."""
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        batch = decode_counters(self._encoded_counters)
        self._encoded_counters = b""
        for id_, change in sorted(decode_records(pending, self._decoder).items()):
            # An id that was added and deleted again while pending is not in the state, and need not be deleted.
            if change is not None or id_ in self._state_machine:
                batch.changes[id_] = change
        yield from self._state_machine.apply_in_parts(batch)


# -- Initial load -------------------------------------------------------------------------------------


async def load_state(keyspace: Keyspace, reader: LogReader, log: FilteringBoundLogger) -> Batch | None:
    """Load the state: scan the records of the last checkpoint, then apply the log from the checkpoint on.

    Returns the state at the new position of `reader`, or None if the namespace is empty. Raises LogIncomplete if the
    log lacks entries that the checkpoint does not contain, because another program has deleted them.

    The leader may commit and write a checkpoint during the scan. Applying a change again is harmless, because a record
    is the whole new value of an id. If the log is trimmed, Redis is rolled back or a snapshot is restored during the
    scan, loading starts again.
    """
    while True:
        meta = await keyspace.read()
        if meta is None:
            return None
        state, decoder = replace(meta.checkpoint.counters), RecordDecoder()
        loaded: dict[int, Change] = {}
        reader.seek(meta.history.up_to(meta.checkpoint.position))
        async with closing(keyspace.scan_records()) as chunks:
            async for records in chunks:
                loaded |= await _decode(records, decoder)
        state.changes = loaded
        try:
            if await _catch_up(keyspace, reader, decoder, state, meta.position):
                state.changes = await _sort_by_id(state.changes)
                return state
        except LogTruncated:
            await _raise_if_incomplete(keyspace, reader)
            log.warning(
                "replication log was trimmed or replaced during load, reloading state",
                position=encode_position(reader.position),
            )


async def _decode(records: dict[bytes, bytes], decoder: RecordDecoder) -> dict[int, Change]:
    """Decode a chunk of records by id. Other tasks run between the parts: a thousand records may have hundreds of MiB."""
    decoded: dict[int, Change] = {}
    part: dict[bytes, bytes] = {}
    part_bytes = 0
    for id_, record in records.items():
        if part_bytes > MAX_PENDING_BYTES:
            decoded |= decode_records(part, decoder)
            part, part_bytes = {}, 0
            await asyncio.sleep(0)
        part[id_] = record
        part_bytes += len(record)
    return decoded | decode_records(part, decoder)


async def _raise_if_incomplete(keyspace: Keyspace, reader: LogReader) -> None:
    """Raise LogIncomplete if the log, which does not continue at the position of `reader`, lacks an entry.

    Otherwise a later checkpoint, a restored snapshot or a rollback explains why the reader cannot continue.
    """
    meta = await keyspace.read()
    if meta is None or not meta.history.contains(reader.position):
        return  # Redis was rolled back, or a snapshot was restored
    if meta.checkpoint.position <= reader.position < meta.position:
        raise LogIncomplete(
            f"{keyspace.log} lacks the entry after {encode_position(reader.position)}, which is later than the "
            f"checkpoint, {encode_position(meta.checkpoint.position)}: wait for the next checkpoint of the leader, "
            f"or stop all servers, delete the keys of the namespace and restore a backup"
        ) from None


async def _sort_by_id(changes: dict[int, Change]) -> dict[int, Change]:
    """Return changes in the order of their ids. Other tasks run between the parts of the work."""
    ids, runs = iter(changes), list[list[int]]()
    while run := sorted(islice(ids, MAX_SORTED_IDS)):
        if runs:
            await asyncio.sleep(0)
        runs.append(run)
    in_order: dict[int, Change] = {}
    merged = merge(*runs)
    while part := [*islice(merged, MAX_SORTED_IDS)]:
        if in_order:
            await asyncio.sleep(0)
        in_order.update([(id_, changes[id_]) for id_ in part])
    return in_order


async def _catch_up(
    keyspace: Keyspace, reader: LogReader, decoder: RecordDecoder, state: Batch, position_before: Position
) -> bool:
    """Apply the log to the loaded records in `state`, up to the position that Redis has at the time of the call.

    `position_before` is the position that Redis had before the records were loaded. Returns False if Redis was rolled
    back since then: the loaded records may be later than the log, and must be discarded. Raises LogTruncated if the log
    does not lead from the checkpoint to its end, for example because a snapshot was restored.
    """
    meta = await keyspace.read()
    if meta is None or not meta.history.contains(position_before):
        return False
    while reader.position < meta.position:
        entries = await reader.read(wait_ms=None)
        decoded_bytes = 0
        for entry in entries:
            if isinstance(entry, BatchCommitted):
                encoded_counters, records = entry.split()
                counters = decode_counters(encoded_counters)
                state.changes |= decode_records(records, decoder)
                state.next_id, state.next_fence = counters.next_id, counters.next_fence
                state.clock_ms = counters.clock_ms
                decoded_bytes += len(entry.encoded)
                if decoded_bytes > MAX_PENDING_BYTES:  # a read has 32 MiB if large entries follow small ones
                    decoded_bytes = 0
                    await asyncio.sleep(0)
        if not entries:
            raise LogTruncated
    return True


# -- The replica of this node --------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """The whole state of a namespace, and its epoch history."""

    history: EpochHistory
    state: Batch


class PriorLeadership(NamedTuple):
    """The state of a node when it stopped leading."""

    snapshot: Snapshot
    acknowledged: Position
    """The position of the last batch that the node acknowledged to clients."""


class LocalReplica:
    """The latest state that this node has in memory: its replica, or its state as a former leader (`prior_leadership`).

    `unacknowledged` are positions of batches that this node sent as the leader without acknowledging them to clients.
    Redis may or may not have these batches.
    """

    def __init__(
        self,
        reader: LogReader,
        prior_leadership: PriorLeadership | None = None,
        unacknowledged: Collection[Position] = (),
    ) -> None:
        self._reader = reader
        self._snapshot_as_leader = None if prior_leadership is None else prior_leadership.snapshot
        """The state as a former leader, until a later state is loaded or another leader was seen alive."""
        self._acknowledged = None if prior_leadership is None else prior_leadership.acknowledged
        """The position of the last batch that this node acknowledged to clients as the leader."""
        self._unacknowledged = unacknowledged
        """Positions of the batches that this node has sent as a leader, and that were acknowledged to no client."""
        self.lazy: LazyReplica | None = None
        """The loaded state, to which the log is applied. None before the first load, and while the state is loaded
        again."""

    @property
    def is_loaded(self) -> bool:
        """True if a state is loaded, to which the log can be applied."""
        return self.lazy is not None

    @property
    def read_history(self) -> EpochHistory:
        """The epoch history up to the last log entry that this node has read, even if the state itself was dropped."""
        return self._reader.history

    @property
    def history(self) -> EpochHistory | None:
        """The epoch history of the latest state that this node could restore, or None if this node has no state."""
        own_snapshot = self._snapshot_as_leader
        if self.lazy is None:
            return None if own_snapshot is None else own_snapshot.history
        if own_snapshot is not None and own_snapshot.history.position >= self._reader.position:
            return own_snapshot.history
        return self._reader.history

    @property
    def has_led_last(self) -> bool:
        """True if this node has led, and has read no commit that is later than its own leadership."""
        return self._snapshot_as_leader is not None and self.history is self._snapshot_as_leader.history

    def snapshot(self) -> Snapshot | None:
        """Return the latest state that this node could restore, with its epoch history, or None without a state."""
        if self.has_led_last:
            return self._snapshot_as_leader
        return None if self.lazy is None else Snapshot(self._reader.history, self.lazy.state_machine().snapshot())

    def has_commits_missing_from(self, other: EpochHistory) -> bool:
        """Return whether this node's state continues the epoch history `other` with at least one more commit.

        Batches of `other` that this node has sent but not acknowledged are not counted.
        """
        history = self.history
        if history is None or other.contains(history.last_committed):
            return False
        return history.has_commits_beyond(other.without(self._unacknowledged))

    def missing_from(self, history: EpochHistory) -> Snapshot | None:
        """Return the snapshot to restore if Redis, with the epoch history `history`, lacks acknowledged commits.

        Otherwise return None.
        """
        own = self.history
        if own is None or not self.has_commits_missing_from(history):
            return None
        stored_end = history.without(self._unacknowledged).last_committed
        is_same_epoch = own.last_committed[0] == stored_end[0]
        if is_same_epoch and stored_end == self._acknowledged:
            return None  # what Redis lacks was acknowledged to no client
        return self.snapshot()

    def replace(self, state_machine: StateMachine) -> None:
        """Use a state that was just loaded as the replica. Keep the state as a former leader only if it is later.

        Epochs without a commit, and batches that this node has not acknowledged, do not make the loaded state later.
        """
        snapshot, loaded = self._snapshot_as_leader, self._reader.history.without(self._unacknowledged)
        if snapshot is not None and not snapshot.history.extends(loaded.last_committed):
            self.discard_own_leadership_state()
        self.lazy = LazyReplica(state_machine)

    def append(self, entry: BatchCommitted) -> Iterator[None]:
        """Add one batch to the loaded state, if there is one.

        The caller must use up the returned parts: see `LazyReplica.append`.
        """
        return iter(()) if self.lazy is None else self.lazy.append(entry)

    async def apply(self) -> None:
        """Decode and apply all records that were read. Other tasks run between the parts.

        Raises UnknownFormat if this version of Genie does not know one.
        """
        for _ in () if self.lazy is None else self.lazy.apply():
            await asyncio.sleep(0)

    def discard_own_leadership_state(self) -> None:
        """Drop the state as a former leader, in parts, if there is one."""
        snapshot, self._snapshot_as_leader = self._snapshot_as_leader, None
        if snapshot is not None:  # it may have the last references to very many requests
            run_in_iterations(clear_in_parts(snapshot.state.changes))

    def discard(self) -> None:
        """Drop the replica and the state as a former leader, because Redis has another epoch history (a fork)."""
        self.lazy = None
        self.discard_own_leadership_state()

    def keep_only(self, snapshot: Snapshot) -> None:
        """Keep only the snapshot that is being restored, so that a failed attempt can be repeated."""
        self._snapshot_as_leader = snapshot
        self.lazy = None
