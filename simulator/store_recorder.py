"""The recorder of a single Redis: it reads the stored records of one namespace without the server code that wrote them."""

from __future__ import annotations

import json
from typing import NamedTuple

from genie.testing.simulation.history import Message
from genie.testing.simulation.redis.keyspace import Keyspace, Undo
from genie.testing.simulation.redis.server import SimRedis
from simulator.history import STORE, Change, ClusterHistory

Position = tuple[int, int]
"""The epoch, and the index of the log entry within it."""


class Recovered(NamedTuple):
    """What a new leader would read from a Redis: the state of the last checkpoint with the log after it."""

    position: Position
    counters: tuple[float, int, int]
    """The clock, the next request id and the next fencing token."""
    records: dict[int, Message]
    """All records by request id."""


class Unrecoverable(Exception):
    """The log does not continue at the checkpoint, or has a gap."""


class StoredNamespace:
    """Reads a namespace from the keys of a simulated Redis, without the server code that wrote them."""

    def __init__(self, namespace: str = "genie") -> None:
        self.meta_key = f"{{{namespace}}}:meta".encode()
        self.log_key = f"{{{namespace}}}:log".encode()

    def meta(self, keys: Keyspace) -> dict[bytes, bytes]:
        """Return the metadata; empty if the namespace does not exist."""
        return keys.hash(self.meta_key)

    def last_entry(self, keys: Keyspace) -> tuple[Position, dict[bytes, bytes]]:
        """Return the position and the fields of the last log entry; (0, 0) without fields if there is none."""
        stream = keys.stream(self.log_key)
        if stream is None or not stream.entries:
            return (0, 0), {}
        position, fields = stream.entries[-1]
        return position, dict(zip(fields[::2], fields[1::2], strict=True))

    def recover(self, keys: Keyspace) -> Recovered:
        """Return what a new leader would read. Raises Unrecoverable if entries of the log are missing."""
        meta = self.meta(keys)
        if not meta:
            return Recovered((0, 0), (0.0, 1, 1), {})
        encoded_position, _, encoded_counters = meta[b"checkpoint"].partition(b" ")
        position, counters = _decode_position(encoded_position), _decode_counters(encoded_counters)
        records = {int(id_): json.loads(record) for id_, record in keys.hash(meta[b"state"]).items() if id_ != b"0"}
        stream = keys.stream(self.log_key)
        for id_, parts in () if stream is None else stream.entries:
            if id_ <= position:
                continue
            fields = dict(zip(parts[::2], parts[1::2], strict=True))
            if b"base" in fields:
                follows = _decode_position(fields[b"base"]) == position
            else:
                follows = id_ == (position[0], position[1] + 1)
                counters = apply_batch(fields[b"batch"], records)
            if not follows:
                raise Unrecoverable(f"log entry {id_[0]}-{id_[1]} does not follow {position[0]}-{position[1]}")
            position = id_
        return Recovered(position, counters, records)


def apply_batch(batch: bytes, records: dict[int, Message]) -> tuple[float, int, int]:
    """Apply an encoded batch to records, and return its counters."""
    first, *changes = batch.split(b"\n")
    for change in changes:
        id_, _, record = change.partition(b" ")
        if record:
            records[int(id_)] = json.loads(record)
        else:
            records.pop(int(id_), None)
    return _decode_counters(first)


def _decode_position(encoded: bytes) -> Position:
    epoch, _, index = encoded.partition(b"-")
    return int(epoch or 0), int(index or 0)


def _decode_counters(encoded: bytes) -> tuple[float, int, int]:
    clock_ms, next_id, next_fence = encoded.split()
    return float(clock_ms), int(next_id), int(next_fence)


# -- The recorder of a single Redis, which may lose writes --------


class StoreRecorder:
    """Records every change of a namespace on a single Redis, including the writes that Redis loses."""

    def __init__(self, redis: SimRedis, history: ClusterHistory, namespace: str = "genie") -> None:
        self._keys = redis.keys
        self._history = history
        self._namespace = StoredNamespace(namespace)
        self._state_key = b""
        """The key of the checkpointed state, after the last write."""
        self._nonce = b""
        """The nonce of the leader's epoch, after the last write."""
        self._position: Position = (0, 0)
        """The position of the last log entry."""
        self._last_writer = ""
        """The name of the node that made the last write."""
        self._writer_has_committed = False
        """True if the last writer has committed a batch since it took over."""
        self._has_lost_writes = False
        """True if the store has lost writes that were not restored yet."""
        self._records: dict[int, Message] = {}
        """The records after the last write, including records that the store has lost since."""
        redis.on_write = self._on_write

    def detect_lost_writes(self) -> None:
        """Detect whether the store has lost writes. The leader is expected to restore them from its memory."""
        position, _ = self._namespace.last_entry(self._keys)
        if position != self._position or self._namespace.meta(self._keys).get(b"state", b"") != self._state_key:
            self._has_lost_writes = True

    def stored_records(self) -> dict[int, Message]:
        """Return the records that the store holds now, by request id."""
        try:
            return self._namespace.recover(self._keys).records
        except Unrecoverable as error:
            self._history.violations.append((self._history.clock(), str(error)))
            return {}

    def _on_write(self, undo: list[Undo], sender: str) -> None:
        """Record an atomic write. Every batch, takeover and restored snapshot is a log entry; other writes change nothing.

        `undo` lists the changed keys and fields. `sender` is the name of the node that sent the write.
        """
        changed_keys = {key for key, _, _ in undo}
        meta = self._namespace.meta(self._keys)
        if self._namespace.log_key not in changed_keys:
            if meta.get(b"state") in changed_keys and not self._has_lost_writes:
                self._check_checkpoint()
            return
        state_key, nonce = meta[b"state"], meta[b"nonce"]
        position, fields = self._namespace.last_entry(self._keys)
        if self._has_lost_writes and fields.get(b"base"):
            return  # a server took over from the remaining writes, and may still restore a later state
        # A writer that has committed must restore the lost writes, even if it has stepped down meanwhile. No other server can
        # restore the lost writes, because no other server knows them.
        unrecoverable = self._has_lost_writes and (sender != self._last_writer or not self._writer_has_committed)
        is_snapshot = self._has_lost_writes or state_key != self._state_key or nonce != self._nonce
        old_records, self._records = self._records, dict(self._records)
        try:
            recovered = self._namespace.recover(self._keys) if is_snapshot else None
        except Unrecoverable as error:
            self._history.violations.append((self._history.clock(), f"{sender}: {error}"))
            return
        if recovered is not None:
            _, counters, self._records = recovered
        else:
            counters = apply_batch(fields[b"batch"], self._records)
        self._has_lost_writes = False
        # A server that has taken over but has not committed yet may not know the records.
        self._writer_has_committed = position[1] > 0 or (
            self._writer_has_committed and sender == self._last_writer and not unrecoverable
        )
        self._state_key, self._nonce, self._position, self._last_writer = state_key, nonce, position, sender
        written, removed = difference(old_records, self._records)
        change = Change(
            written=written,
            removed=removed,
            epoch=position[0],
            counters=(position[1], *counters),
            is_snapshot=is_snapshot,
            unrecoverable=unrecoverable,
        )
        self._history.append(STORE, sender, change)

    def _check_checkpoint(self) -> None:
        """Check that a write to the checkpointed state has not changed what a new leader would read."""
        violation = checkpoint_violation(self._namespace, self._keys, self._records)
        if violation:
            self._history.violations.append((self._history.clock(), violation))


def difference(old: dict[int, Message], new: dict[int, Message]) -> tuple[dict[int, Message], dict[int, Message]]:
    """Return the fields `written` and `removed` of the `Change` that leads from the records `old` to `new`."""
    written = {id_: record for id_, record in new.items() if old.get(id_) != record}
    return written, {id_: record for id_, record in old.items() if id_ not in new}


def checkpoint_violation(namespace: StoredNamespace, keys: Keyspace, records: dict[int, Message]) -> str:
    """Describe how a new leader would read other records than `records` after a write of a checkpoint; "" if it would not."""
    try:
        recovered = namespace.recover(keys).records
    except Unrecoverable as error:
        return f"after a checkpoint, {error}"
    different = sorted(id_ for id_ in {*recovered, *records} if recovered.get(id_) != records.get(id_))
    return f"a checkpoint has changed the records of {different}" if different else ""
