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
"""How many epochs a history contains at most. A rollback by more epochs is treated as a fork: the state of Redis wins."""


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """The lineage of a state. `ends` has the last position of each earlier epoch, oldest first, then the state's own position."""

    ends: tuple[Position, ...] = ((0, 0),)

    @property
    def position(self) -> Position:
        """The position of the state whose lineage this is."""
        return self.ends[-1]

    @property
    def last_committed(self) -> Position:
        """The last position at which a batch was committed. Epochs without a batch are skipped: they acknowledged nothing."""
        return next((end for end in reversed(self.ends) if end[1]), self.ends[0])

    def contains(self, position: Position) -> bool:
        """Return whether `position` is on this lineage: the position of this state, or of an earlier state that led to it."""
        return any(epoch == position[0] and position[1] <= index for epoch, index in self.ends)

    def extends(self, position: Position) -> bool:
        """Return whether `position` is on this lineage and earlier than the position of this state."""
        return position != self.position and self.contains(position)

    def has_commits_beyond(self, other: EpochHistory) -> bool:
        """Return whether this lineage continues the lineage `other` with at least one more commit."""
        return self.last_committed != other.last_committed and self.extends(other.last_committed)

    def without(self, unacknowledged: Collection[Position]) -> EpochHistory:
        """Return this history without the batches in `unacknowledged`, each of which is the last batch of its epoch."""
        return EpochHistory(
            tuple(
                (epoch, index - 1) if (epoch, index) in unacknowledged else (epoch, index) for epoch, index in self.ends
            )
        )

    def advanced_to(self, position: Position) -> EpochHistory:
        """Return this history, continued to a later position in the last epoch or in a new epoch.

        Only the last `MAX_EPOCHS` epochs are kept.
        """
        ends = self.ends[:-1] if position[0] == self.position[0] else self.ends
        return EpochHistory((*ends, position)[-MAX_EPOCHS:])


def decode_position(stored: bytes) -> Position:
    """Decode a position in the form `epoch-index`. An empty string is the start of the log, (0, 0)."""
    epoch, _, index = stored.partition(b"-")
    return int(epoch or 0), int(index or 0)


def decode_ends(stored: bytes) -> tuple[Position, ...]:
    """Decode the last positions of epochs, which `encode_ends` has separated with spaces."""
    return tuple(map(decode_position, stored.split()))


def encode_ends(history: EpochHistory) -> str:
    """Encode the positions of a history as `epoch-index`, separated by spaces."""
    return " ".join(f"{epoch}-{index}" for epoch, index in history.ends)


# -- The replication log ------------------------------------------------------------------------------

MAX_LOG_BYTES = 32 << 20
"""About how many bytes of the log are retained. A follower that lags by more must load the snapshot."""

MAX_LOG_ENTRIES = 100_000
"""How many entries the log retains at most."""

MAX_ENTRY_FIELDS = 6_000
"""How many fields and values one entry contains at most. `commit.lua` divides a larger batch into several entries."""

MAX_READ_ENTRIES = 200
"""How many stream entries one call of `LogReader.read` reads at most."""


@dataclass(frozen=True, slots=True)
class EpochStarted:
    """The log entry of a takeover. The new leader `node` continues from the position `base`; (0, 0): from a restored snapshot."""

    position: Position
    base: Position
    node: Node | None


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """The log entry of a batch. `resigned`: the leader has resigned with this batch, and any node may take over."""

    position: Position
    records: dict[bytes, bytes]
    """Encoded record by id; an empty record deletes the id."""
    counters: bytes
    """The encoded counters after the batch, see `decode_counters`."""
    resigned: bool


LogEntry = EpochStarted | BatchCommitted


class LogTruncated(Exception):
    """The log does not continue at the reader's position. The follower must load the snapshot."""


class LogReader:
    """Reads the log from a given position, and assembles large batches, which are stored as several stream entries (parts).

    The id of a stream entry is `epoch-sequence`, with sequence = 1000 * index of the batch + number of the part.
    """

    def __init__(self, primary: Primary, key: str) -> None:
        self._primary = primary
        self._key = key
        self._partial_records: dict[bytes, bytes] = {}
        """The records of a large batch of which only some parts were read."""
        self._part_count = 0
        """How many parts of that batch were read."""
        self.history = EpochHistory()
        """The lineage of the last batch that was read."""
        self._cursor = "0-0"
        """The id of the last stream entry that was read."""

    @property
    def position(self) -> Position:
        """The position of the last batch that was read."""
        return self.history.position

    def seek(self, history: EpochHistory) -> None:
        """Move the reader: the next `read` returns the first entry after the position of `history`."""
        self.history = history
        epoch, index = history.position
        self._cursor = f"{epoch}-{1000 * index + 999}"  # after the last possible part of the batch
        self._partial_records, self._part_count = {}, 0

    async def read(self, wait_ms: int | None) -> list[LogEntry]:
        """Return the next entries, at most `MAX_READ_ENTRIES`, and move the reader to the last one.

        Waits up to `wait_ms` milliseconds for the first entry; with None, does not wait. Returns an empty list if there is no
        entry. Raises LogTruncated if the log does not continue at the position of this reader.
        """
        block = () if wait_ms is None else ("BLOCK", wait_ms)
        command = ("XREAD", "COUNT", MAX_READ_ENTRIES, *block, "STREAMS", self._key, self._cursor)
        streams = await self._primary.call(*command, wait_s=(wait_ms or 0) / 1000)
        entries = streams[0][1] if streams else []
        return list(self._decode([(id_, dict(zip(parts[::2], parts[1::2], strict=True))) for id_, parts in entries]))

    def _decode(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[LogEntry]:
        """Decode stream entries (id, fields), and advance the reader.

        Raises LogTruncated if an entry does not directly follow the previous one.
        """
        for id_, fields in entries:
            epoch, _, sequence = id_.partition(b"-")
            index, part = divmod(int(sequence), 1000)
            position = int(epoch), index
            if b"base" in fields:  # a takeover
                base = decode_position(fields[b"base"])
                if base != self.position:
                    raise LogTruncated
                self.seek(self.history.advanced_to(position))  # the batches of the new epoch follow
                yield EpochStarted(position, base, decode_node(fields[b"node"]))
                continue
            if position != (self.position[0], self.position[1] + 1) or part != self._part_count:
                raise LogTruncated
            self._cursor = id_.decode()
            self._part_count += 1
            counters, resigned = fields.pop(b"counters", None), fields.pop(b"resigned", None)
            self._partial_records |= fields
            if counters is not None:  # the last part of the batch
                records, self._partial_records, self._part_count = self._partial_records, {}, 0
                self.history = self.history.advanced_to(position)
                yield BatchCommitted(position, records, counters, resigned is not None)


class LogRetention:
    """Computes how many entries the leader retains, so that the log exceeds neither its limit in bytes nor in entries."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()
        """The sizes in bytes of the retained entries of this leader, oldest first."""
        self._total_bytes = 0
        """The sum of `_sizes`."""
        self._has_exceeded_limit = False
        """Whether this leader's own entries have exceeded a limit."""

    def add(self, size: int, change_count: int) -> int:
        """Add a batch of `size` bytes with `change_count` changes; return how many of the last entries to retain.

        The entries of earlier leaders, whose sizes are unknown, are retained until this leader's entries exceed a limit.
        """
        sizes = self._sizes
        part_count = 1 + max(0, 2 * change_count - 1) // MAX_ENTRY_FIELDS  # a large batch is several entries
        sizes.extend([size // part_count] * part_count)
        self._total_bytes += size // part_count * part_count
        while (self._total_bytes > MAX_LOG_BYTES or len(sizes) > MAX_LOG_ENTRIES) and len(sizes) > 1:
            self._total_bytes -= sizes.popleft()
            self._has_exceeded_limit = True
        return len(sizes) if self._has_exceeded_limit else MAX_LOG_ENTRIES
