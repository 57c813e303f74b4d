"""The replication log of a namespace, and the epoch history that tells a rollback from a fork.

*Rollback*: a Redis returns to an earlier state, because its last writes were lost with its machine. *Fork*: two Redis
instances continue from one state during a partition, each with its own leader. Epoch numbers alone cannot distinguish the
two, which need opposite treatment. After a rollback, a node that has replicated more restores the snapshot. After a fork, a
node discards the commits that the surviving Redis never had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from genie.storage.redis.primary import Primary
from genie.storage.store import Node, decode_node

Position = tuple[int, int]
"""A position in the log: the epoch, and the index of the batch within it. Index 0 is the start of the epoch."""

MAX_EPOCHS = 50
"""Epochs in a history. A rollback by more epochs than that is treated as a fork: the state of Redis wins."""


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """The lineage of a state: the last position of each epoch that led to it, and at the end its own position."""

    ends: tuple[Position, ...] = ((0, 0),)

    @property
    def position(self) -> Position:
        """The position of the state itself."""
        return self.ends[-1]

    @property
    def last_committed(self) -> Position:
        """The last position at which a batch was committed: epochs without a batch have acknowledged nothing."""
        return next((end for end in reversed(self.ends) if end[1]), self.ends[0])

    def contains(self, position: Position) -> bool:
        """Return whether the state at `position` is this one or an earlier one on its lineage."""
        return any(epoch == position[0] and position[1] <= index for epoch, index in self.ends)

    def extends(self, position: Position) -> bool:
        """Return whether the state at `position` is an earlier one on this lineage."""
        return position != self.position and self.contains(position)

    def has_commits_beyond(self, other: EpochHistory) -> bool:
        """Return whether this lineage continues `other` by at least one commit."""
        return self.last_committed != other.last_committed and self.extends(other.last_committed)

    def without(self, unacknowledged: Collection[Position]) -> EpochHistory:
        """Return this history, without the last batch of an epoch if its position is in `unacknowledged`."""
        return EpochHistory(
            tuple(
                (epoch, index - 1) if (epoch, index) in unacknowledged else (epoch, index) for epoch, index in self.ends
            )
        )

    def advanced_to(self, position: Position) -> EpochHistory:
        """Return this history, continued to a position of its last epoch or of a new one."""
        ends = self.ends[:-1] if position[0] == self.position[0] else self.ends
        return EpochHistory((*ends, position)[-MAX_EPOCHS:])


def decode_position(stored: bytes) -> Position:
    """Decode a position, `epoch-index`; an empty one is (0, 0), the start of the log."""
    epoch, _, index = stored.partition(b"-")
    return int(epoch or 0), int(index or 0)


def decode_ends(stored: bytes) -> tuple[Position, ...]:
    """Decode positions that are separated by spaces."""
    return tuple(map(decode_position, stored.split()))


def encode_ends(history: EpochHistory) -> str:
    """Encode the positions of a history for `decode_ends`."""
    return " ".join(f"{epoch}-{index}" for epoch, index in history.ends)


# -- The replication log ------------------------------------------------------------------------------

MAX_LOG_BYTES = 32 << 20
"""About how many bytes of the log are retained: the greatest lag from which a follower catches up without a snapshot."""

MAX_LOG_ENTRIES = 100_000
"""How many entries of the log are retained at most."""

MAX_ENTRY_FIELDS = 6_000
"""Fields and values in one entry. A larger batch is several entries (`commit.lua`)."""

MAX_READ_ENTRIES = 200
"""Entries read in one call."""


@dataclass(frozen=True, slots=True)
class EpochStarted:
    """The log entry of a new leader, `node`, that continues from `base`, or from (0, 0) if it restored a snapshot."""

    position: Position
    base: Position
    node: Node | None


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """The log entry of a batch. With `resigned` it is the last of its leader, and any node may take over."""

    position: Position
    records: dict[bytes, bytes]
    """By id, as stored; empty where the id is deleted."""
    counters: bytes
    resigned: bool


LogEntry = EpochStarted | BatchCommitted


class LogTruncated(Exception):
    """The log does not continue at the reader's position: load the snapshot instead."""


class LogReader:
    """Reads the log from a position on, and assembles large batches, which are stored as several stream entries.

    The id of a stream entry is `epoch-sequence`, with sequence = 1000 * index + part.
    """

    def __init__(self, primary: Primary, key: str) -> None:
        self._primary = primary
        self._key = key
        self._parts: dict[bytes, bytes] = {}
        """The fields of a large batch of which only some stream entries were read."""
        self._part_count = 0
        self.history = EpochHistory()
        """The lineage of the last batch that was read."""
        self._cursor = "0-0"
        """The id of the last stream entry that was read."""

    @property
    def position(self) -> Position:
        """The position of the last batch that was read."""
        return self.history.position

    def seek(self, history: EpochHistory) -> None:
        """Continue after the last batch of `history`."""
        self.history = history
        epoch, index = history.position
        self._cursor = f"{epoch}-{1000 * index + 999}"
        self._parts, self._part_count = {}, 0

    async def read(self, wait_ms: int | None) -> list[LogEntry]:
        """Return the next entries; none if none arrives within `wait_ms` (None: do not wait).

        Raises LogTruncated if the log does not continue at this reader's position.
        """
        block = () if wait_ms is None else ("BLOCK", wait_ms)
        command = ("XREAD", "COUNT", MAX_READ_ENTRIES, *block, "STREAMS", self._key, self._cursor)
        streams = await self._primary.call(*command, wait_s=(wait_ms or 0) / 1000)
        entries = streams[0][1] if streams else []
        return list(self._decode([(id_, dict(zip(parts[::2], parts[1::2], strict=True))) for id_, parts in entries]))

    def _decode(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[LogEntry]:
        """Decode stream entries (id, fields), and advance the reader; LogTruncated if one does not continue the last."""
        for id_, fields in entries:
            epoch, _, sequence = id_.partition(b"-")
            index, part = divmod(int(sequence), 1000)
            position = int(epoch), index
            if b"base" in fields:
                base = decode_position(fields[b"base"])
                if base != self.position:
                    raise LogTruncated
                self.seek(self.history.advanced_to(position))
                yield EpochStarted(position, base, decode_node(fields[b"node"]))
                continue
            if position != (self.position[0], self.position[1] + 1) or part != self._part_count:
                raise LogTruncated
            self._cursor = id_.decode()
            self._part_count += 1
            counters, resigned = fields.pop(b"counters", None), fields.pop(b"resigned", None)
            self._parts |= fields
            if counters is not None:  # the last part of the batch
                records, self._parts, self._part_count = self._parts, {}, 0
                self.history = self.history.advanced_to(position)
                yield BatchCommitted(position, records, counters, resigned is not None)


class LogRetention:
    """Computes how many entries the leader retains in the log, which is limited in bytes and in entries."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._trimming = False

    def add(self, size: int, changes: int) -> int:
        """Add a batch of `size` bytes with `changes` changes; return how many of the last entries to retain.

        The sizes of an earlier leader's entries are unknown: they are retained until this leader's own exceed the limits.
        """
        sizes, parts = self._sizes, 1 + max(0, 2 * changes - 1) // MAX_ENTRY_FIELDS  # a large batch is several entries
        sizes.extend([size // parts] * parts)
        self._bytes += size // parts * parts
        while (self._bytes > MAX_LOG_BYTES or len(sizes) > MAX_LOG_ENTRIES) and len(sizes) > 1:
            self._bytes -= sizes.popleft()
            self._trimming = True
        return len(sizes) if self._trimming else MAX_LOG_ENTRIES
