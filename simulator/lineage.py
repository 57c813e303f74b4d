"""The recorder of one or several Redis servers, which may roll back or diverge."""

from __future__ import annotations

from collections.abc import Callable

from genie.storage.redis.log import EpochHistory, decode_ends
from genie.testing.simulation.history import Message
from genie.testing.simulation.redis.commands import StreamRead
from genie.testing.simulation.redis.keyspace import Undo
from simulator.history import STORE, Change, ClusterHistory, StoreState
from simulator.replication import ReplicatedRedis, Write
from simulator.store_recorder import StoredNamespace, Unrecoverable, apply_batch, checkpoint_violation, difference


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


class LineageRecorder:
    """Records every change of a namespace on each Redis server, as a tree of states.

    A state is acknowledged when the primary and `min_replicas` replicas have it.
    """

    def __init__(
        self, redises: list[ReplicatedRedis], history: ClusterHistory, min_replicas: int, namespace: str = "genie"
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
                violation = checkpoint_violation(self._namespace, redis.keys, {} if head is None else head.records)
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
        written, removed = difference(old_records, records)
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
