"""The recorded history of a simulation: messages sent and received, changes of the store, faults and logs.

The recorders of the store are in this module, too. A recorder reads the stored records of one namespace directly, without
the server code that wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from genie.storage.redis.log import EpochHistory, decode_ends
from genie.testing.simulation.network import Connection, SimTransport
from genie.testing.simulation.redis.commands import StreamRead
from genie.testing.simulation.redis.keyspace import Undo
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
    """The decoded JSON of a message, a `Change` if the kind is `STORE`, otherwise a text."""
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
    records_key: bytes
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
    _partial_lines: dict[tuple[SimTransport, str], bytes] = field(default_factory=dict)
    """The bytes of an incomplete line, by one side of a connection and the kind of the entry."""

    def append(self, kind: str, node: str, data: Any, connection: int = 0) -> None:
        """Append an entry with the current time."""
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


# -- The recorder of a single Redis, which may lose writes --------


class StoreRecorder:
    """Records every change of a namespace on a single Redis, including the writes that Redis loses."""

    def __init__(self, redis: SimRedis, history: History, namespace: str = "genie") -> None:
        self._keys = redis.keys
        self._history = history
        self._meta_key = f"{{{namespace}}}:meta".encode()
        self._records_key = b""
        """The key of the hash with the records, after the last write."""
        self._nonce = b""
        """The nonce of the leader's epoch, after the last write."""
        self._encoded_counters = b""
        """The field `counters` of the key `meta`, after the last write."""
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
        meta = self._keys.hash(self._meta_key)
        if meta.get(b"counters", b"") != self._encoded_counters or meta.get(b"records", b"") != self._records_key:
            self._has_lost_writes = True

    def stored_records(self) -> dict[int, Message]:
        """Return the records that the store holds now, by request id."""
        records = self._keys.hash(self._keys.hash(self._meta_key).get(b"records", b""))
        return {int(field): json.loads(record) for field, record in records.items() if record}

    def _on_write(self, undo: list[Undo], sender: str) -> None:
        """Record an atomic write. Every batch, takeover and restored snapshot changes the key `meta`; other writes are ignored.

        `undo` lists the changed keys and fields. `sender` is the name of the node that sent the write.
        """
        meta = self._keys.hash(self._meta_key)
        if not meta or all(key != self._meta_key for key, _, _ in undo):
            return
        records_key, nonce, counters = meta.get(b"records", b""), meta.get(b"nonce", b""), meta[b"counters"]
        index, clock, next_id, next_fence = counters.split()[:4]
        if self._has_lost_writes and int(index) == 0 and meta.get(b"base", b""):
            return  # a server took over from the remaining writes, and may still restore a later state
        # A writer that has committed must restore the lost writes, even if it has stepped down meanwhile. No other server can
        # restore the lost writes, because no other server knows them.
        unrecoverable = self._has_lost_writes and (sender != self._last_writer or not self._writer_has_committed)
        is_snapshot = self._has_lost_writes or records_key != self._records_key or nonce != self._nonce
        written, removed = self._diff_with_store() if is_snapshot else self._apply_batch(undo, records_key)
        self._has_lost_writes = False
        # A server that has taken over but has not committed yet may not know the records.
        self._writer_has_committed = int(index) > 0 or (
            self._writer_has_committed and sender == self._last_writer and not unrecoverable
        )
        self._records_key, self._nonce, self._encoded_counters, self._last_writer = records_key, nonce, counters, sender
        change = Change(
            written=written,
            removed=removed,
            epoch=int(meta.get(b"epoch", b"0")),
            counters=(int(index), float(clock), int(next_id), int(next_fence)),
            is_snapshot=is_snapshot,
            unrecoverable=unrecoverable,
        )
        self._history.append(STORE, sender, change)

    def _diff_with_store(self) -> tuple[dict[int, Message], dict[int, Message]]:
        """Compare all stored records with the records after the last write. Returns the written and the removed records."""
        stored = self.stored_records()
        written = {id_: record for id_, record in stored.items() if self._records.get(id_) != record}
        removed = {id_: record for id_, record in self._records.items() if id_ not in stored}
        self._records = stored
        return written, removed

    def _apply_batch(self, undo: list[Undo], records_key: bytes) -> tuple[dict[int, Message], dict[int, Message]]:
        """Return the written and the removed records of a batch.

        The undo information tells which records changed, so a batch costs no comparison of all records.
        """
        records = self._keys.hash(records_key)
        written, removed = {}, {}
        changed_names = [name for key, name, _ in undo if key == records_key and name is not None]
        for name in dict.fromkeys(changed_names):
            id_, record = int(name), records.get(name)
            if record is not None:
                written[id_] = self._records[id_] = json.loads(record)
            elif id_ in self._records:
                removed[id_] = self._records.pop(id_)
        return written, removed


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
        self._meta_key = f"{{{namespace}}}:meta".encode()
        self._log_key = f"{{{namespace}}}:log".encode()
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
        return _decode_records(redis, redis.keys.hash(self._meta_key).get(b"records", b""))

    def _write_observer(self, redis: ReplicatedRedis) -> Callable[[list[Undo], str], None]:
        """Return a callback for `on_write` of a Redis, which records the writes that change the key `meta`."""

        def on_write(undo: list[Undo], sender: str) -> None:
            if any(key == self._meta_key for key, _, _ in undo):
                self._on_write(redis, redis.log[-1], undo, sender)

        return on_write

    def _read_observer(self, redis: ReplicatedRedis) -> Callable[[str, StreamRead], None]:
        """Return a callback for `on_blocking_read` of a Redis, which records the state that the reader knows.

        The id after which the reader reads the log shows the latest batch that the reader has applied.
        """

        def on_blocking_read(reader: str, read: StreamRead) -> None:
            """Record the state that `reader` knows, unless the reader demonstrably knows a later state."""
            epoch, sequence = read.after.get(self._log_key, (0, 0))
            # The id of a log entry is `epoch-sequence`, with sequence = 1000 * index + part.
            position = epoch, sequence // 1000
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

    def _on_write(self, redis: ReplicatedRedis, write: Write, undo: list[Undo], sender: str) -> None:
        """Record the state after a write as a node of the tree, and the change relative to the parent state.

        A repeated batch gets the earlier state, and is not recorded again. `undo` lists the changed keys and fields. `sender`
        is the name of the node that sent the write.
        """
        meta, replaced = redis.keys.hash(self._meta_key), self.head(redis)
        index, clock, next_id, next_fence = meta[b"counters"].split()
        position, records_key = (int(meta[b"epoch"]), int(index)), meta[b"records"]
        if replaced is not None and replaced.records_key == records_key:
            records = dict(replaced.records)
            changed_names = [name for key, name, _ in undo if key == records_key and name is not None]
            for name in dict.fromkeys(changed_names):
                if name == b"0":
                    continue  # this field keeps the hash from being empty
                record = redis.keys.hash(records_key).get(name)
                if record is None:
                    records.pop(int(name), None)
                else:
                    records[int(name)] = json.loads(record)
        else:
            records = _decode_records(redis, records_key)
        earlier = self._states.get((position, sender))
        if earlier is not None and replaced in (earlier, earlier.parent) and earlier.records == records:
            write.state = earlier  # the server has repeated a batch
            return
        is_snapshot = index == b"0" and not meta.get(b"base")  # a takeover without a snapshot has a base
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
            records_key=records_key,
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
        change = Change(
            written={id_: record for id_, record in records.items() if old_records.get(id_) != record},
            removed={id_: record for id_, record in old_records.items() if id_ not in records},
            epoch=position[0],
            counters=(int(index), float(clock), int(next_id), int(next_fence)),
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
        continues_base = latest_known is None or (base is not None and base.descends_from(latest_known))
        earliest = base if continues_base else skip_takeovers(latest_known, writer)
        if earliest is None or earliest.records == records:
            return earliest
        matching = [
            state for state in self._states.values() if state.records == records and state.descends_from(earliest)
        ]
        return max(matching, key=lambda state: state.number, default=earliest)


def _decode_records(redis: ReplicatedRedis, key: bytes) -> dict[int, Message]:
    """Return the records in the hash `key` of a Redis, by request id."""
    return {int(field): json.loads(record) for field, record in redis.keys.hash(key).items() if record}
