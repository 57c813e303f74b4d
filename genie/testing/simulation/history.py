"""The recorded history of a simulation: messages sent and received, changes of the store, faults and logs.

The recorder of a single Redis is in this module, too. A recorder reads the stored records of one namespace directly, without
the server code that wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from genie.testing.simulation.network import Connection, SimTransport
from genie.testing.simulation.redis.keyspace import Keyspace, Undo
from genie.testing.simulation.redis.server import SimRedis

Message = dict[str, Any]

CLIENT_SENT = "client sent"
SERVER_SENT = "server sent"
CLIENT_RECEIVED = "client received"
CONNECTED = "connected"
DISCONNECTED = "disconnected"
STORE = "store"
"""A server changed the store."""
FAULT = "fault"
"""The nemesis broke or healed something."""
LOG = "log"
"""A server logged a line."""
BELIEF = "belief"
"""A library client considers a lock held, or no longer does."""
NOTE = "note"
"""A program of the simulation recorded a remark."""


@dataclass(slots=True, frozen=True)
class Entry:
    """One event of a simulation.

    `node` is the name of a simulated process. `connection` is the number of a connection, or 0 if the event concerns none.
    """

    at: float
    """The virtual time in seconds."""
    kind: str
    node: str
    data: Any
    """The decoded JSON of a message, a `Change` if the kind is `STORE`, a `Belief` if it is `BELIEF`, otherwise a text."""
    connection: int = 0

    def __str__(self) -> str:
        data = self.data
        if isinstance(data, dict):
            data = json.dumps(data, default=str)
        connection = f" #{self.connection}" if self.connection else ""
        return f"{self.at:12.6f} {self.node}{connection} {self.kind} {data}"


@dataclass(slots=True)
class Change:
    """A change of the store by one atomic write."""

    written: dict[int, Message]
    """The new records by request id."""
    removed: dict[int, Message]
    """The last values of the removed records by request id."""
    epoch: int
    counters: tuple[int, float, int, int]
    """The batch index, the clock, the next request id and the next fencing token of the namespace."""
    is_snapshot: bool = False
    """Whether the write was not a batch, so that the change was found by comparing all records before and after."""
    unrecoverable: bool = False
    """Whether the store had lost acknowledged writes that no running server knew, so that they cannot be restored."""
    state: StoreState | None = field(default=None, repr=False)
    """The state after the change, if there are several Redis servers."""


@dataclass(slots=True, eq=False)
class StoreState:
    """A state of the namespace on one Redis: after a batch, or after a server acquired leadership.

    States form a tree. `parent` is the state from which the writer continued. `replaced` is the state that the Redis had
    before the write. The two differ if a server wrote its snapshot to a Redis that had rolled back. `known_to_writer` is the
    latest state that the writer demonstrably knew.
    """

    number: int
    """States are numbered in the order in which they were written."""
    at: float
    writer: str
    """The name of the server process that wrote the state."""
    host: str
    """The host of the Redis."""
    position: tuple[int, int]
    """The epoch, and the index of the batch within it."""
    state_key: bytes
    parent: StoreState | None
    replaced: StoreState | None
    known_to_writer: StoreState | None
    is_snapshot: bool
    """Whether the writer wrote its whole state, not a batch."""
    records: dict[int, Message]
    """All records by request id."""
    is_late: bool = False
    """Whether the writer had already stored a later state: the write came late, from a connection that was replaced."""
    acknowledged_at: float | None = None
    """When enough replicas had the state; None before that."""
    observed: bool = False
    """Whether a server has sent a message that depends on the state."""

    def __str__(self) -> str:
        return f"{self.position[0]}-{self.position[1]} by {self.writer} on {self.host}"

    def descends_from(self, other: StoreState) -> bool:
        """Return whether this state is `other` or a descendant of `other`."""
        state: StoreState | None = self
        while state is not None and state is not other:
            state = None if state.number < other.number else state.parent  # a parent has a lower number
        return state is other

    def mark_observed(self) -> None:
        """Mark this state and its ancestors as observed, because a server sends a message that depends on them."""
        state: StoreState | None = self
        while state is not None and not state.observed:  # the ancestors of an observed state are marked already
            state.observed, state = True, state.parent

    @property
    def acquires_leadership(self) -> bool:
        """Whether the writer becomes the leader by this write."""
        if self.is_batch:
            return False
        if not self.is_snapshot:
            return True
        # A snapshot that directly follows a takeover by the same server belongs to this takeover.
        replaced = self.replaced
        return (
            replaced is not None
            and replaced.writer == self.writer
            and not replaced.is_batch
            and not replaced.is_snapshot
        )

    @property
    def is_batch(self) -> bool:
        """Whether the write was a batch: batches have indexes from 1 within an epoch, takeovers and snapshots have 0."""
        return self.position[1] > 0


@dataclass
class History:
    """Collects the entries of a simulation, as the observer of the network.

    `clock` returns the virtual time in seconds.
    """

    clock: Callable[[], float]
    server_port: int = 7077
    final: StoreState | None = None
    """The last state of the primary, if there are several Redis servers."""
    impaired: dict[str, list[float]] = field(default_factory=dict)
    """The times at which each host was observed to be down, stopped or partitioned, by host name."""
    lifetimes: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The times at which each server process started and ended, by process name."""
    entries: list[Entry] = field(default_factory=list)
    violations: list[tuple[float, str]] = field(default_factory=list)
    """The times and the descriptions of violations that the recorders of the store have found."""
    before_change: Callable[[], None] = lambda: None
    """Called before a change of the store is recorded."""
    after_input: Callable[[], None] = lambda: None
    """Called before a client process receives bytes, to schedule a check of what the process made of them."""
    _partial_lines: dict[tuple[SimTransport, str], bytes] = field(default_factory=dict)
    """The bytes of an incomplete line, by one side of a connection and the kind of the entry."""

    def append(self, kind: str, node: str, data: Any, connection: int = 0) -> None:
        """Append an entry with the current time."""
        if kind is STORE:
            self.before_change()
        self.entries.append(Entry(self.clock(), kind, node, data, connection))

    def digest(self) -> str:
        """Return a hash of all entries. Two runs of the same seed must give equal hashes."""
        return sha256("\n".join(map(str, self.entries)).encode()).hexdigest()

    def tail(self, count: int = 60, about: int | None = None) -> str:
        """Return the last `count` entries as text.

        With the request id `about`, only the faults and the entries that mention this id are counted and returned.
        """
        matching = [entry for entry in self.entries if about is None or entry.kind == FAULT or str(about) in str(entry)]
        return "\n".join(map(str, matching[max(0, len(matching) - count) :]))

    # -- network.Observer ---------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """Record a connection to a server."""
        if connection.address[1] == self.server_port:
            self.append(CONNECTED, connection.client.node.name, connection.server.node.name, connection.number)

    def sent(self, transport: SimTransport, data: bytes) -> None:
        """Record the messages that a client or a server has written."""
        connection = transport.connection
        if connection.address[1] == self.server_port:
            self._record_lines(transport, CLIENT_SENT if transport is connection.client else SERVER_SENT, data)

    def received(self, transport: SimTransport, data: bytes) -> None:
        """Record the messages that a client process is about to receive."""
        connection = transport.connection
        if connection.address[1] == self.server_port and transport is connection.client:
            self._record_lines(transport, CLIENT_RECEIVED, data)
            self.after_input()

    def closed(self, transport: SimTransport, how: str) -> None:
        """Record that one side of a connection has ended, and how."""
        connection = transport.connection
        if connection.address[1] == self.server_port:
            side = "client" if transport is connection.client else "server"
            self.append(DISCONNECTED, transport.node.name, f"{side} {how}", connection.number)

    def _record_lines(self, transport: SimTransport, kind: str, data: bytes) -> None:
        """Record each complete line as a message. An incomplete line is kept until the rest of the line arrives."""
        key = transport, kind
        *complete_lines, partial_line = (self._partial_lines.pop(key, b"") + data).split(b"\n")
        if partial_line:
            self._partial_lines[key] = partial_line
        node, number = transport.node.name, transport.connection.number
        for line in complete_lines:
            if not line.strip():
                continue
            try:
                message = json.loads(line)
            except ValueError:
                message = {"command": "garbage", "payload": {"line": repr(line)}}  # the line is not JSON
            self.append(kind, node, message, number)


# -- Reading the store --------

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

    def __init__(self, redis: SimRedis, history: History, namespace: str = "genie") -> None:
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
        """Whether the last writer has committed a batch since it took over."""
        self._has_lost_writes = False
        """Whether the store has lost writes that were not restored yet."""
        self._records: dict[int, Message] = {}
        """The records after the last write, including those that the store has lost since."""
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
