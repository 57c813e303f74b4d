"""The recorded history of a simulation: messages sent and received, changes of the store, faults and logs.

The recorders of the store are in this module, too. A recorder reads the stored records of one namespace directly, without
the server code that wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from genie.storage.redis.log import EpochHistory, decode_ends
from genie.testing.simulation.network import Connection, SimTransport
from genie.testing.simulation.redis.commands import StreamRead
from genie.testing.simulation.redis.keyspace import Keyspace, Undo
from genie.testing.simulation.redis.replication import ReplicatedRedis, Write
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


@dataclass(slots=True, frozen=True)
class Belief:
    """Whether the application of a library client considers a lock held."""

    id: int
    held: bool
    """Whether `lock.held` is true."""
    in_block: bool
    """Whether the block of the lock's `async with` statement is running, and was not cancelled."""


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


def skip_takeovers(state: StoreState | None, node: str | None = None) -> StoreState | None:
    """Return the latest state, up to `state`, that a client may have observed.

    Late writes and takeovers are skipped, because no client can have observed the state directly after such a write. If
    `node` is given, takeovers by other servers are not skipped.
    """
    while state is not None and (
        state.is_late or (node in (None, state.writer) and not state.is_batch and not state.is_snapshot)
    ):
        state = state.replaced
    return state


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
        written, removed = _difference(old_records, self._records)
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
        violation = _checkpoint_violation(self._namespace, self._keys, self._records)
        if violation:
            self._history.violations.append((self._history.clock(), violation))


def _difference(old: dict[int, Message], new: dict[int, Message]) -> tuple[dict[int, Message], dict[int, Message]]:
    """Return the fields `written` and `removed` of the `Change` that leads from the records `old` to `new`."""
    written = {id_: record for id_, record in new.items() if old.get(id_) != record}
    return written, {id_: record for id_, record in old.items() if id_ not in new}


def _checkpoint_violation(namespace: StoredNamespace, keys: Keyspace, records: dict[int, Message]) -> str:
    """Describe how a new leader would read other records than `records` after a write of a checkpoint; "" if it would not."""
    try:
        recovered = namespace.recover(keys).records
    except Unrecoverable as error:
        return f"after a checkpoint, {error}"
    different = sorted(id_ for id_ in {*recovered, *records} if recovered.get(id_) != records.get(id_))
    return f"a checkpoint has changed the records of {different}" if different else ""


# -- The recorder of several Redis servers, which may roll back or diverge --------


class LineageRecorder:
    """Records every change of a namespace on each of several Redis servers, as a tree of states.

    A state is acknowledged when the primary and `min_replicas` replicas have it.
    """

    def __init__(
        self, redises: list[ReplicatedRedis], history: History, min_replicas: int, namespace: str = "genie"
    ) -> None:
        self._history = history
        self._min_replicas = min_replicas
        self._namespace = StoredNamespace(namespace)
        self._known_states: dict[str, StoreState] = {}
        """The latest state that each server demonstrably knows, by server; later states on other lineages do not count."""
        self._last_stored_states: dict[str, StoreState] = {}
        """The state that each server has stored last, by server, whether or not the server got the reply."""
        self._states: dict[tuple[tuple[int, int], str], StoreState] = {}
        """All states, by position and writer."""
        self._state_count = 0
        for redis in redises:
            redis.on_write = self._write_observer(redis)
            redis.on_blocking_read = self._read_observer(redis)
            redis.on_replicated = self._check_acknowledged

    def head(self, redis: ReplicatedRedis) -> StoreState | None:
        """Return the current state of a Redis, or None if no server has written to it."""
        for write in reversed(redis.log):
            if write.state is not None:
                return write.state  # type: ignore[no-any-return]
        return None

    def stored_records(self, redis: ReplicatedRedis) -> dict[int, Message]:
        """Return the records that a Redis holds now, by request id."""
        try:
            return self._namespace.recover(redis.keys).records
        except Unrecoverable as error:
            self._history.violations.append((self._history.clock(), str(error)))
            return {}

    def _write_observer(self, redis: ReplicatedRedis) -> Callable[[list[Undo], str], None]:
        """Return a callback for `on_write` of a Redis, which records the log entries, and checks the checkpoints."""

        def on_write(undo: list[Undo], sender: str) -> None:
            changed_keys = {key for key, _, _ in undo}
            if self._namespace.log_key in changed_keys:
                self._on_write(redis, redis.log[-1], sender)
            elif self._namespace.meta(redis.keys).get(b"state") in changed_keys:
                head = self.head(redis)
                violation = _checkpoint_violation(self._namespace, redis.keys, {} if head is None else head.records)
                if violation:
                    self._history.violations.append((self._history.clock(), f"{sender}: {violation}"))

        return on_write

    def _read_observer(self, redis: ReplicatedRedis) -> Callable[[str, StreamRead], None]:
        """Return a callback for `on_blocking_read` of a Redis, which records the state that the reader knows.

        The id after which the reader reads the log shows the latest batch that the reader has applied.
        """

        def on_blocking_read(reader: str, read: StreamRead) -> None:
            """Record the state that `reader` knows, unless the reader demonstrably knows a later state."""
            position = read.after.get(self._namespace.log_key, (0, 0))
            state = self.head(redis)
            while state is not None and state.position > position:
                state = state.parent
            latest_known = self._known_states.get(reader)
            if state is None or state.position != position:
                return
            # If the reader already knows a descendant of the state, only Redis has rolled back.
            if latest_known is None or not latest_known.descends_from(state):
                self._known_states[reader] = state

        return on_blocking_read

    def _check_acknowledged(self, write: Write) -> None:
        """Mark the state of a write as acknowledged once the primary and `min_replicas` replicas have the write."""
        state: StoreState | None = write.state
        if state is not None and state.acknowledged_at is None and len(write.hosts) > self._min_replicas:
            state.acknowledged_at = self._history.clock()

    def _on_write(self, redis: ReplicatedRedis, write: Write, sender: str) -> None:
        """Record the state after a new log entry as a node of the tree, and the change relative to the parent state.

        A repeated batch gets the earlier state, and is not recorded again. `sender` is the name of the node that sent the write.
        """
        meta, replaced = self._namespace.meta(redis.keys), self.head(redis)
        position, fields = self._namespace.last_entry(redis.keys)
        state_key = meta[b"state"]
        if (
            position[1]
            and replaced is not None
            and (replaced.state_key, replaced.position) == (state_key, (position[0], position[1] - 1))
        ):
            records = dict(replaced.records)
            counters = apply_batch(fields[b"batch"], records)
        else:
            try:
                _, counters, records = self._namespace.recover(redis.keys)
            except Unrecoverable as error:
                self._history.violations.append((self._history.clock(), f"{sender}: {error}"))
                return
        earlier = self._states.get((position, sender))
        if earlier is not None and replaced in (earlier, earlier.parent) and earlier.records == records:
            write.state = earlier  # the server has repeated a batch
            return
        is_snapshot = fields.get(b"base") == b""  # a takeover without a snapshot has a base
        latest_known = self._known_states.get(sender)
        epochs = EpochHistory(decode_ends(meta.get(b"history", b"")))
        parent = (
            self._snapshot_source(sender, latest_known=latest_known, replaced=replaced, records=records, epochs=epochs)
            if is_snapshot
            else replaced
        )
        self._state_count += 1
        state = StoreState(
            number=self._state_count,
            at=self._history.clock(),
            writer=sender,
            host=redis.host,
            position=position,
            state_key=state_key,
            parent=parent,
            replaced=replaced,
            known_to_writer=latest_known,
            is_snapshot=is_snapshot,
            records=records,
        )
        write.state = self._states[position, sender] = state
        self._check_acknowledged(write)
        self._update_known(state)
        old_records = {} if parent is None else parent.records
        written, removed = _difference(old_records, records)
        change = Change(
            written=written,
            removed=removed,
            epoch=position[0],
            counters=(position[1], *counters),
            is_snapshot=is_snapshot,
            state=state,
        )
        self._history.append(STORE, sender, change)

    def _update_known(self, state: StoreState) -> None:
        """Update which state the writer of a new state demonstrably knows.

        If the writer has already stored a later state, the new state is only marked as late.
        """
        writer, replaced, latest_known = state.writer, state.replaced, state.known_to_writer
        last_stored = self._last_stored_states.get(writer)
        if last_stored is not None and state.position < last_stored.position:
            state.is_late = True
            return
        if state.is_batch and replaced is not None:
            # Until the writer gets the reply, it knows only that its previous batch is stored.
            self._known_states[writer] = replaced if replaced.writer == writer else state
        elif (
            state.is_snapshot
            or latest_known is None
            or replaced is None
            or not latest_known.descends_from(skip_takeovers(replaced, writer) or replaced)
        ):
            # The write is a snapshot, or a takeover from a state that is not older than the state that the writer knew.
            self._known_states[writer] = state
        if state.is_batch or state.is_snapshot:
            self._last_stored_states[writer] = state

    def _snapshot_source(
        self,
        writer: str,
        latest_known: StoreState | None,
        replaced: StoreState | None,
        records: dict[int, Message],
        epochs: EpochHistory,
    ) -> StoreState | None:
        """Return the state that a restored snapshot continues: the latest state with `records` that the writer may know.

        `latest_known` is the latest state that the writer demonstrably knows. `replaced` is the state of the Redis before the
        snapshot. `epochs` is the lineage of the snapshot. If the last batch of the writer is on too few replicas, no client
        got an acknowledgement, so the writer may omit the batch; `epochs` tells whether the snapshot includes this batch.
        """
        base, last_stored = skip_takeovers(replaced, writer), self._last_stored_states.get(writer)
        if latest_known is not None and last_stored is not None and last_stored.descends_from(latest_known):
            includes_last = last_stored.acknowledged_at is not None or epochs.contains(last_stored.position)
            latest_known = last_stored if includes_last else latest_known
        if latest_known is not None and latest_known.records == records:
            return latest_known
        if (
            base is not None
            and last_stored is not None
            and epochs.contains(last_stored.position)
            and not epochs.contains(base.position)
        ):
            # It took over from an abandoned batch that no client was notified of, and then restored what it had in memory,
            # which may include a batch that no Redis has.
            return last_stored
        continues_base = latest_known is None or (base is not None and base.descends_from(latest_known))
        earliest = base if continues_base else skip_takeovers(latest_known, writer)
        if earliest is None or earliest.records == records:
            return earliest
        matching = [
            state for state in self._states.values() if state.records == records and state.descends_from(earliest)
        ]
        return max(matching, key=lambda state: state.number, default=earliest)
