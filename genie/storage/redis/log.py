"""The way by which a namespace came to where it is: whether one state of it is before another, or on another branch.

A Redis may go back to an earlier state (its last writes were lost with its machine), or two may have gone on from one
state, each with a leader of its own (they were cut off from each other). By the numbers of epochs alone these two can't be
told apart, and they want the opposite: in the first whoever knows more writes it anew, in the second whoever the surviving
Redis does not know must give in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from genie.storage.redis.primary import Primary
from genie.storage.store import Node, decode_node

Position = tuple[int, int]
"""How far the batches have come: the epoch, and the number of the batch within it."""

LONGEST = 50
"""Epochs that are remembered. A Redis that has gone back by more is believed."""


@dataclass(frozen=True, slots=True)
class EpochHistory:
    """A position, last, behind the last batch of each of the epochs before that led to it."""

    ends: tuple[Position, ...] = ((0, 0),)

    @property
    def position(self) -> Position:
        """Where it has come to."""
        return self.ends[-1]

    @property
    def settled(self) -> Position:
        """Where it had come to before those who led last and committed nothing: they have told nobody anything."""
        return next((end for end in reversed(self.ends) if end[1]), self.ends[0])

    def includes(self, position: Position) -> bool:
        """Whether it has come by there, or has just got there."""
        return any(epoch == position[0] and position[1] <= number for epoch, number in self.ends)

    def ahead_of(self, position: Position) -> bool:
        """Whether it has come by there, and gone on."""
        return position != self.position and self.includes(position)

    def knows_more_than(self, other: EpochHistory) -> bool:
        """Whether something was committed on this way that the other, which has come by there, does not have."""
        return self.settled != other.settled and self.ahead_of(other.settled)

    def without(self, untold: Collection[Position]) -> EpochHistory:
        """The same, where some batches are known to have been told to nobody: a state with them is none that somebody saw."""
        return EpochHistory(tuple((epoch, number - ((epoch, number) in untold)) for epoch, number in self.ends))

    def at(self, position: Position) -> EpochHistory:
        """The same, further on in the same epoch or in the one that follows."""
        ends = self.ends[:-1] if position[0] == self.position[0] else self.ends
        return EpochHistory((*ends, position)[-LONGEST:])


def read_position(stored: bytes) -> Position:
    """A position, as it is stored; nothing is the very beginning."""
    epoch, _, number = stored.partition(b"-")
    return int(epoch or 0), int(number or 0)


def read_ends(stored: bytes) -> tuple[Position, ...]:
    """Positions, as they are stored."""
    return tuple(map(read_position, stored.split()))


def ends(history: EpochHistory) -> str:
    """The same as it is stored."""
    return " ".join(f"{epoch}-{number}" for epoch, number in history.ends)


# -- The journal: the last batches in the order in which they were committed, for those who follow the leader --------

KEPT_BYTES = 32 << 20
"""So much of the journal is kept, more or less: what a follower that was held up can catch up with."""

KEPT = 100_000
"""Entries that are kept at most."""

PIECE = 6_000
"""Fields and values in one entry of a large batch (`commit.lua`)."""

AT_ONCE = 200
"""Entries that are read in one call."""


@dataclass(frozen=True, slots=True)
class EpochStarted:
    """Another server leads from here on. It went on from `base`; from (0, 0) where it wrote everything anew."""

    position: Position
    base: Position
    node: Node | None


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """A batch. Behind the last one of a leader that has `resigned`, anybody may lead."""

    position: Position
    records: dict[bytes, bytes]
    """By id, as they are stored; nothing where nothing is to be known any more."""
    counters: bytes
    resigned: bool


class LogTruncated(Exception):
    """The journal does not go back to where we are: read the records."""


class LogReader:
    """Reads the journal on from a position."""

    def __init__(self, master: Primary, key: str) -> None:
        self._master = master
        self._key = key
        self._parts: dict[bytes, bytes] = {}
        self._pieces = 0
        self.history = EpochHistory()
        """How far it has been read."""
        self._cursor = "0-0"

    @property
    def position(self) -> Position:
        """How far it has been read."""
        return self.history.position

    def start(self, history: EpochHistory) -> None:
        """Read on behind this batch."""
        self.history = history
        epoch, number = history.position
        self._cursor = f"{epoch}-{1000 * number + 999}"
        self._parts, self._pieces = {}, 0

    async def read(self, wait_ms: int | None) -> list[EpochStarted | BatchCommitted]:
        """What comes next, or nothing where nothing comes within a time (None: that is there by now). LogTruncated, where it begins
        further on.
        """
        block = () if wait_ms is None else ("BLOCK", wait_ms)
        command = ("XREAD", "COUNT", AT_ONCE, *block, "STREAMS", self._key, self._cursor)
        found = await self._master.call(*command, wait_s=(wait_ms or 0) / 1000)
        entries = (
            [(id_, dict(zip(parts[::2], parts[1::2], strict=True))) for id_, parts in found[0][1]] if found else []
        )
        return list(self._follow(entries))

    def _follow(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[EpochStarted | BatchCommitted]:
        for id_, fields in entries:
            epoch, _, place = id_.partition(b"-")
            number, piece = divmod(int(place), 1000)
            at = int(epoch), number
            if b"base" in fields:
                base = read_position(fields[b"base"])
                if base != self.position:
                    raise LogTruncated
                self.start(self.history.at(at))
                yield EpochStarted(at, base, decode_node(fields[b"node"]))
                continue
            if at != (self.position[0], self.position[1] + 1) or piece != self._pieces:
                raise LogTruncated
            self._cursor = id_.decode()
            self._pieces += 1
            counters, resigned = fields.pop(b"counters", None), fields.pop(b"resigned", None)
            self._parts |= fields
            if counters is not None:
                records, self._parts, self._pieces = self._parts, {}, 0
                self.history = self.history.at(at)
                yield BatchCommitted(at, records, counters, resigned is not None)


class LogRetention:
    """How many entries the journal may have, by their bytes. For the leader, who writes them."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._full = False

    def add(self, size: int, changes: int) -> int:
        """One more batch of so many bytes and changes; returns how many entries are to be kept.

        Nothing is known of what an earlier leader wrote: it is kept until there would be too much without it.
        """
        sizes, pieces = self._sizes, 1 + max(0, 2 * changes - 1) // PIECE
        sizes.extend([size // pieces] * pieces)
        self._bytes += size // pieces * pieces
        while (self._bytes > KEPT_BYTES or len(sizes) > KEPT) and len(sizes) > 1:
            self._bytes -= sizes.popleft()
            self._full = True
        return len(sizes) if self._full else KEPT
