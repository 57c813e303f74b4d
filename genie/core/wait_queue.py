"""The wait queue of a resource, and the resource itself: who holds it and who waits for it.

A `WaitQueue` consists of two `SortedQueue`s, one for each mode. A `SortedQueue` finds, inserts and
removes at any position in logarithmic time, however long it grows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import merge
from operator import itemgetter

from genie.core.model import Owner, QueueEntry, Request

MAX_CHUNK = 512
"""Maximum entries of one chunk: an insertion or removal moves at most this many pointers."""

_last = itemgetter(-1)


class SortedQueue:
    """The wait-queue entries of one mode, sorted: a list of short sorted lists.

    Most entries are added at the end and removed at the front, but priorities, timeouts and
    cancellations affect any position. Each operation costs a bisection and the move of at most
    `MAX_CHUNK` pointers; removing the first entry of one list of 100,000 would move all others.
    """

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: list[list[QueueEntry]] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def __iter__(self) -> Iterator[QueueEntry]:
        for chunk in self._chunks:
            yield from chunk

    @property
    def first(self) -> QueueEntry | None:
        """The first entry, or None."""
        return self._chunks[0][0] if self._chunks else None

    @property
    def last(self) -> QueueEntry | None:
        """The last entry, or None."""
        return self._chunks[-1][-1] if self._chunks else None

    def first_not_owned_by(self, owner: Owner) -> QueueEntry | None:
        """Return the first entry of any other owner."""
        if not self._chunks:
            return None
        first = self._chunks[0][0]
        return first if first[2].owner != owner else next((entry for entry in self if entry[2].owner != owner), None)

    def add(self, entry: QueueEntry) -> None:
        """Insert an entry at its sorted position, into the last chunk in the usual case.

        A chunk that exceeds `MAX_CHUNK` is split in half.
        """
        chunks = self._chunks
        if not chunks:
            chunks.append([entry])
            return
        if entry > chunks[-1][-1]:
            if len(chunks[-1]) < MAX_CHUNK:
                chunks[-1].append(entry)
            else:
                chunks.append([entry])
            return
        index = bisect_left(chunks, entry, key=_last)
        chunk = chunks[index]
        chunk.insert(bisect_left(chunk, entry), entry)
        if len(chunk) > MAX_CHUNK:
            chunks.insert(index + 1, chunk[MAX_CHUNK // 2 :])
            del chunk[MAX_CHUNK // 2 :]

    def remove(self, entry: QueueEntry) -> None:
        """Remove an entry, which must be present."""
        chunks = self._chunks
        index = bisect_left(chunks, entry, key=_last) if len(chunks) > 1 else 0
        chunk = chunks[index]
        position = bisect_left(chunk, entry)
        assert chunk[position] == entry, "the entry is not in this queue"  # noqa: S101 - an invariant
        del chunk[position]
        if not chunk:
            del chunks[index]

    def before(self, entry: QueueEntry) -> QueueEntry | None:
        """Return the last entry before this one, which need not be present."""
        chunks = self._chunks
        index = bisect_left(chunks, entry, key=_last)
        if index < len(chunks):
            position = bisect_left(chunks[index], entry)
            if position:
                return chunks[index][position - 1]
        return chunks[index - 1][-1] if index else None

    def after(self, entry: QueueEntry) -> QueueEntry | None:
        """Return the first entry after this one."""
        return next(self.between(entry, None), None)

    def between(self, low: QueueEntry | None, high: QueueEntry | None) -> Iterator[QueueEntry]:
        """Yield the entries between `low` and `high`, both exclusive; None means no bound."""
        chunks = self._chunks
        index = 0 if low is None else bisect_right(chunks, low, key=_last)
        while index < len(chunks):
            chunk = chunks[index]
            start = 0 if low is None else bisect_right(chunk, low)
            if high is not None and chunk[-1] >= high:
                yield from chunk[start : bisect_left(chunk, high)]
                return
            yield from chunk[start:]
            low = None
            index += 1


# -- Resources and their wait queues -------------------------------------------------


class LockedResource:
    """A resource that is held or waited for. Resources that are neither have no object."""

    __slots__ = ("exclusives", "holders", "wait_queue")

    def __init__(self, holder: Request | None = None, exclusives: int = 0) -> None:
        self.holders: dict[int, Request] = {} if holder is None else {holder.id: holder}
        """The requests that hold it, by id. An owner may have several."""
        self.exclusives = exclusives
        """How many holders are exclusive. If any is, all holders have the same owner."""
        self.wait_queue: WaitQueue | None = None


class WaitQueue:
    """The waiters of one resource, in order.

    The two modes are kept apart, so that the questions "does an exclusive request wait before this
    one" and "which one is next" never iterate over waiters of the other mode.
    """

    __slots__ = ("exclusive", "non_simple_count", "priority_inverted", "shared")

    def __init__(self) -> None:
        self.shared = SortedQueue()
        self.exclusive = SortedQueue()
        self.non_simple_count = 0
        """Waiters that are not `simple`. If there are none, no cycle passes through this queue."""
        self.priority_inverted = False
        """Whether a rearrangement put a request before one of higher priority."""

    def __len__(self) -> int:
        return len(self.shared) + len(self.exclusive)

    def __iter__(self) -> Iterator[QueueEntry]:
        """Yield all entries, first to last."""
        return merge(self.shared, self.exclusive) if self.exclusive else iter(self.shared)

    def entries(self) -> list[QueueEntry]:
        """Return all entries, first to last."""
        return list(self)

    def insert(self, name: str, request: Request, exclusive: bool, moved: dict[Request, None]) -> None:
        """Insert a new request after the last one of the same or a higher priority.

        Adds the requests whose positions it changed to `moved`: none, unless `priority_inverted`.
        """
        if not request.simple:
            self.non_simple_count += 1
        (self.exclusive if exclusive else self.shared).add(request.entry(name))
        if not self.priority_inverted:
            return
        order = [entry[2] for entry in self.entries() if entry[2] is not request]
        last = max((i for i, other in enumerate(order) if other.priority >= request.priority), default=-1)
        order.insert(last + 1, request)
        moved |= dict.fromkeys(self.rearrange(name, order))

    def rearrange(self, name: str, order: Sequence[Request]) -> list[Request]:
        """Put the same requests into another order, and return those whose positions changed.

        The (priority, ticket) pairs are reassigned among the requests rather than created, so that
        a later request sorts against the same pairs as before.
        """
        entries = self.entries()
        changed = []
        for entry, request in zip(entries, order, strict=True):
            if entry[2] is request:
                continue
            request.move(name, entry)
            changed.append(request)
        if changed:
            self.shared, self.exclusive, self.priority_inverted = SortedQueue(), SortedQueue(), False
            for request in order:
                self._insert_entry(name, request, name in request.exclusive)
        return changed

    def restore(self, name: str, request: Request, exclusive: bool) -> None:
        """Insert a request that was loaded, at its stored position."""
        self.non_simple_count += not request.simple
        self._insert_entry(name, request, exclusive)

    def _insert_entry(self, name: str, request: Request, exclusive: bool) -> None:
        """Insert a request at the position that it already has."""
        entry = request.entry(name)
        (self.exclusive if exclusive else self.shared).add(entry)
        self.priority_inverted = self.priority_inverted or -entry[0] != request.priority

    @property
    def last(self) -> QueueEntry | None:
        """The last entry of both modes, or None."""
        shared, exclusive = self.shared.last, self.exclusive.last
        if shared is None or exclusive is None:
            return shared or exclusive
        return max(shared, exclusive)
