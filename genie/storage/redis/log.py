"""The log of a namespace, and the epoch history that tells a rollback from a fork.

*Rollback*: a Redis returns to an earlier state, because its last writes were lost with its machine. Then a node that
has replicated more restores the snapshot. *Fork*: two Redis instances continue from one state during a partition, each
with its own leader. Then a node discards the commits that the surviving Redis never had. Epoch numbers alone cannot
distinguish the two cases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from genie.storage.redis.connection import RedisFailure
from genie.storage.redis.primary import Primary
from genie.storage.redis.records import split_batch
from genie.storage.store import Node, decode_node

Position = tuple[int, int]
"""A position in the log: the epoch, and the index of the batch within it. Index 0 is the start of the epoch."""

MAX_EPOCHS = 50
"""How many epochs a history contains at most. A rollback by more epochs is treated as a fork: the state of Redis is
kept."""


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """The epoch history of a state: the epochs that led to it. It shows whether one of two states led to the other."""

    ends: tuple[Position, ...] = ((0, 0),)
    """The last position of each earlier epoch, oldest first, then the position of the state."""

    @property
    def position(self) -> Position:
        """The position of the state whose epoch history this is."""
        return self.ends[-1]

    @property
    def last_committed(self) -> Position:
        """The last position at which a batch was committed. Epochs without a batch are skipped."""
        return next((end for end in reversed(self.ends) if end[1]), self.ends[0])

    def contains(self, position: Position) -> bool:
        """Return whether `position` is that of this state, or of an earlier state that led to it."""
        epoch, index = position
        return any(end_epoch == epoch and index <= end_index for end_epoch, end_index in self.ends)

    def extends(self, position: Position) -> bool:
        """Return whether `position` is that of an earlier state that led to this state."""
        return position != self.position and self.contains(position)

    def has_commits_beyond(self, other: EpochHistory) -> bool:
        """Return whether this history continues the history `other` with at least one more commit."""
        return self.last_committed != other.last_committed and self.extends(other.last_committed)

    def without(self, unacknowledged: Collection[Position]) -> EpochHistory:
        """Return this history without the batches in `unacknowledged`, each of which is the last batch of its epoch."""
        ends = [
            (epoch, index - 1) if (epoch, index) in unacknowledged else (epoch, index) for epoch, index in self.ends
        ]
        return EpochHistory(tuple(ends))

    def advanced_to(self, position: Position) -> EpochHistory:
        """Return this history, continued to a later position in the last epoch or in a new epoch.

        Only the last `MAX_EPOCHS` epochs are kept.
        """
        ends = self.ends[:-1] if position[0] == self.position[0] else self.ends
        return EpochHistory((*ends, position)[-MAX_EPOCHS:])

    def up_to(self, position: Position) -> EpochHistory:
        """Return the epoch history of the earlier state at `position`, which this history must contain."""
        earlier_ends = [end for end in self.ends if end[0] < position[0]]
        return EpochHistory((*earlier_ends, position))


def encode_position(position: Position) -> str:
    """Encode a position as `epoch-index`, which is also the id of its log entry."""
    return f"{position[0]}-{position[1]}"


def decode_position(stored: bytes) -> Position:
    """Decode a position in the form `epoch-index`. An empty string is the start of the log, (0, 0)."""
    epoch, _, index = stored.partition(b"-")
    return int(epoch or 0), int(index or 0)


def decode_ends(stored: bytes) -> tuple[Position, ...]:
    """Decode the result of `encode_ends`."""
    return tuple(map(decode_position, stored.split()))


def encode_ends(ends: tuple[Position, ...]) -> str:
    """Encode the last positions of epochs, each as `epoch-index`, separated by spaces."""
    return " ".join(map(encode_position, ends))


# -- The log ------------------------------------------------------------------------------------------

MAX_LOG_BYTES = 32 << 20
"""About how many bytes of log entries are retained for followers. A follower that lags by more must load the state."""

MAX_LOG_ENTRIES = 100_000
"""About how many log entries are retained for followers."""

FIRST_READ_ENTRIES = 16
"""How many entries a reader reads at first, while it does not know how large they are."""
MAX_READ_BYTES = 1 << 20
"""About how many bytes one call of `LogReader.read` reads. Limited, because Redis serves no other client while it
copies them, and the reader serves none while it decodes them."""
MAX_READ_ENTRIES = 200
"""How many entries one call of `LogReader.read` reads at most."""


@dataclass(frozen=True, slots=True)
class EpochStarted:
    """The log entry of a takeover."""

    position: Position
    base: Position
    """The position from which the epoch continues, or (0, 0) if it continues from a restored snapshot."""
    node: Node | None
    """The leader. None if the epoch has no leader, so that any node can take over at once."""


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """The log entry of a batch."""

    position: Position
    encoded: bytes
    """The encoded batch. It is split only when it is used: one read may have 32 MiB of batches, which take about 50 ms."""
    resigned: bool
    """True if the leader has resigned with this batch, so that any node may take over."""

    def split(self) -> tuple[bytes, dict[bytes, bytes]]:
        """Return the encoded counters after the batch, and its encoded records by id. An empty record deletes the id."""
        return split_batch(self.encoded)


LogEntry = EpochStarted | BatchCommitted


class LogTruncated(Exception):
    """The log does not continue at the reader's position. The follower must load the state."""


class LogIncomplete(RedisFailure):
    """The log lacks entries after the checkpoint, so that the state cannot be loaded."""


class LogReader:
    """Reads the log entry by entry from a given position, about `max_read_bytes` at a time."""

    def __init__(self, primary: Primary, key: str, max_read_bytes: int = MAX_READ_BYTES) -> None:
        self._primary = primary
        self._key = key
        self._max_read_bytes = max_read_bytes
        self.history = EpochHistory()
        """The epoch history of the last entry that was read."""
        self._max_count = FIRST_READ_ENTRIES
        """How many entries of the average size of the last read have about `max_read_bytes` in total."""

    @property
    def position(self) -> Position:
        """The position of the last entry that was read."""
        return self.history.position

    def seek(self, history: EpochHistory) -> None:
        """Move the reader: the next `read` returns the first entry after the position of `history`."""
        self.history = history

    async def read(self, wait_ms: int | None) -> list[LogEntry]:
        """Return the next entries, and move the reader to the last of them.

        Returns at most `MAX_READ_ENTRIES` entries, of about `max_read_bytes` in total, or an empty list if there is
        none. Waits up to `wait_ms` milliseconds for the first entry, or not at all if `wait_ms` is None. 0 is not
        allowed, because Redis would wait forever. Raises LogTruncated if the log does not continue at the position of
        this reader. If some entries continue it, they are returned, and the next call raises.
        """
        block = () if wait_ms is None else ("BLOCK", wait_ms)
        count = min(self._max_count, MAX_READ_ENTRIES)
        command = ("XREAD", "COUNT", count, *block, "STREAMS", self._key, encode_position(self.position))
        streams = await self._primary.call(*command, wait_s=(wait_ms or 0) / 1000)
        entries = streams[0][1] if streams else []  # the reply is [[key, entries]]
        if entries:  # adapt the next count to the size of these entries
            size = sum(len(value) for _, fields in entries for value in fields)
            self._max_count = max(1, self._max_read_bytes * len(entries) // max(1, size))  # 0: not entries of Genie
        advanced: list[LogEntry] = []
        for id_, fields in entries:
            try:
                advanced.append(self._advance(id_, fields))
            except LogTruncated:
                if not advanced:
                    raise
                break  # the caller must get all entries up to the position of this reader
        return advanced

    def _advance(self, id_: bytes, fields: list[bytes]) -> LogEntry:
        """Decode a log entry, and move the reader to it.

        Raises LogTruncated if it does not follow the previous entry.
        """
        position = decode_position(id_)
        values = dict(zip(fields[::2], fields[1::2], strict=True))
        if b"base" in values:  # a takeover
            base = decode_position(values[b"base"])
            if base != self.position:
                raise LogTruncated
            self.history = self.history.advanced_to(position)
            return EpochStarted(position, base, decode_node(values[b"node"]))
        epoch, index = self.position
        if position != (epoch, index + 1):
            raise LogTruncated
        encoded = values.get(b"batch")
        if encoded is None:  # not an entry of Genie
            raise LogTruncated
        self.history = self.history.advanced_to(position)
        return BatchCommitted(position, encoded, resigned=b"resigned" in values)


class TrimPoint(NamedTuple):
    """An entry before which the log can be trimmed."""

    entry_index: int
    bytes_before: int
    """The size of all earlier entries of this leader."""


class LogRetention:
    """Computes which log entries the leader retains for followers: the last `MAX_LOG_BYTES` bytes, at most `MAX_LOG_ENTRIES`.

    The entries of earlier leaders, whose sizes are unknown, are retained until the leader's own entries exceed a limit.
    """

    def __init__(self) -> None:
        self._trim_points: deque[TrimPoint] = deque()
        """The indexes before which the log may be trimmed later, in ascending order."""
        self.first_retained = 0
        """The index of the first retained entry of this leader. 0 if entries of earlier leaders are retained as well."""

    def add_trim_point(self, index: int, bytes_before: int) -> None:
        """Record that the log can be trimmed before `index`, and advance `first_retained` if a limit is exceeded.

        The entries of this leader before `index` have `bytes_before` bytes in total.
        """
        points = self._trim_points
        points.append(TrimPoint(index, bytes_before))
        # Drop the oldest points until the entries from the first remaining point on are within both limits.
        while bytes_before - points[0].bytes_before > MAX_LOG_BYTES or index - points[0].entry_index > MAX_LOG_ENTRIES:
            points.popleft()
            self.first_retained = points[0].entry_index
