"""The journal: the last batches in the order in which they were committed, for those who follow the leader.

A stream beside the records. The id of an entry is the epoch, and a thousand times the number of the batch, plus the place
of the entry within a batch that has several. The entries:

- `base`, `node`: a leader begins, with number 0, and goes on from there (nowhere: it has written everything anew);
- ids with their records, or with nothing where there is nothing to be known any more; in the last entry of a batch also
  its `counters`, and `resigned` where it is the leader's last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from genie.storage.history import History, Position, read_position
from genie.storage.master import Master
from genie.storage.node import Node, unpack

KEPT_BYTES = 32 << 20
"""So much of the journal is kept, more or less: what a follower that was held up can catch up with."""

KEPT = 100_000
"""Entries that are kept at most."""

PIECE = 6_000
"""Fields and values in one entry of a large batch (`commit.lua`)."""

AT_ONCE = 200
"""Entries that are read in one call."""


@dataclass(frozen=True, slots=True)
class Began:
    """Another server leads from here on. It went on from `base`; from (0, 0) where it wrote everything anew."""

    position: Position
    base: Position
    node: Node | None


@dataclass(frozen=True, slots=True)
class Committed:
    """A batch. Behind the last one of a leader that has `resigned`, anybody may lead."""

    position: Position
    records: dict[bytes, bytes]
    """By id, as they are stored; nothing where nothing is to be known any more."""
    counters: bytes
    resigned: bool


class Gap(Exception):
    """The journal does not go back to where we are: read the records."""


class Journal:
    """Reads the journal on from a position."""

    def __init__(self, master: Master, key: str) -> None:
        self._master = master
        self._key = key
        self._parts: dict[bytes, bytes] = {}
        self._pieces = 0
        self.history = History()
        """How far it has been read."""
        self._cursor = "0-0"

    @property
    def position(self) -> Position:
        """How far it has been read."""
        return self.history.position

    def start(self, history: History) -> None:
        """Read on behind this batch."""
        self.history = history
        epoch, number = history.position
        self._cursor = f"{epoch}-{1000 * number + 999}"
        self._parts, self._pieces = {}, 0

    async def read(self, wait_ms: int | None) -> list[Began | Committed]:
        """What comes next, or nothing where nothing comes within a time (None: that is there by now). Gap, where it begins
        further on.
        """
        block = () if wait_ms is None else ("BLOCK", wait_ms)
        command = ("XREAD", "COUNT", AT_ONCE, *block, "STREAMS", self._key, self._cursor)
        found = await self._master.call(*command, wait_s=(wait_ms or 0) / 1000)
        entries = (
            [(id_, dict(zip(parts[::2], parts[1::2], strict=True))) for id_, parts in found[0][1]] if found else []
        )
        return list(self._follow(entries))

    def _follow(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[Began | Committed]:
        for id_, fields in entries:
            epoch, _, place = id_.partition(b"-")
            number, piece = divmod(int(place), 1000)
            at = int(epoch), number
            if b"base" in fields:
                base = read_position(fields[b"base"])
                if base != self.position:
                    raise Gap
                self.start(self.history.at(at))
                yield Began(at, base, unpack(fields[b"node"]))
                continue
            if at != (self.position[0], self.position[1] + 1) or piece != self._pieces:
                raise Gap
            self._cursor = id_.decode()
            self._pieces += 1
            counters, resigned = fields.pop(b"counters", None), fields.pop(b"resigned", None)
            self._parts |= fields
            if counters is not None:
                records, self._parts, self._pieces = self._parts, {}, 0
                self.history = self.history.at(at)
                yield Committed(at, records, counters, resigned is not None)


class Kept:
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
