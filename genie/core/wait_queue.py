"""The wait queue of a resource, and the resource itself: its holders and its waiters.

A `WaitQueue` consists of two `SortedQueue`s, one for each mode. A `SortedQueue` finds, inserts and
removes entries at any position in logarithmic time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import merge
from operator import itemgetter

from genie.core.model import Owner, QueueEntry, Request

MAX_CHUNK = 512
"""Maximum entries of one chunk, so that an insertion or removal moves at most this many pointers."""

MIN_UNIFORM_CHUNK = 16
"""Entries of a chunk above which its owner is kept. A shorter chunk is read again, which costs as much as the bookkeeping."""

_last = itemgetter(-1)


class SortedQueue:
    """The wait-queue entries of one mode, sorted, in a list of short sorted lists (chunks).

    Most entries are added at the end and removed at the front, but priorities, timeouts and
    cancellations affect any position. Each operation costs a bisection and moves at most `MAX_CHUNK`
    pointers. In a single list of 100,000 entries, removing the first entry would move all others.
    """

    __slots__ = ("_chunks", "_uniform_owners")

    def __init__(self) -> None:
        self._chunks: list[list[QueueEntry]] = []
        self._uniform_owners: list[Owner | None] | None = None
        """The owner of all entries of each chunk; None if it is not known. None instead of a list before
        `_first_not_owned_by` has read a whole chunk of one owner."""

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
        """Return the first entry whose request has another owner, or None."""
        if not self._chunks:
            return None
        first = self._chunks[0][0]
        return first if first[2].owner != owner else self._first_not_owned_by(owner, None)

    def has_other_before(self, entry: QueueEntry, owner: Owner) -> bool:
        """Return whether an entry of another owner than `owner` is before `entry`, which need not be in this queue."""
        if not self._chunks:
            return False
        first = self._chunks[0][0]
        if first >= entry:
            return False
        return first[2].owner != owner or self._first_not_owned_by(owner, entry) is not None

    def _first_not_owned_by(self, owner: Owner, high: QueueEntry | None) -> QueueEntry | None:
        """Return the first entry before `high` whose request has another owner, or None. `high` None: of all entries.

        A client can make long queues of one owner, and each of its next requests searches them. So chunks in which an earlier
        search has found no other owner are skipped, and a search reads about `MAX_CHUNK` entries.
        """
        for index, chunk in enumerate(self._chunks):
            if self._uniform_owners is None or self._uniform_owners[index] != owner:
                for entry in chunk:
                    if entry[2].owner != owner:
                        return entry if high is None or entry < high else None
                if len(chunk) > MIN_UNIFORM_CHUNK:
                    self._set_uniform_owner(index, owner)
            if high is not None and chunk[-1] >= high:
                return None
        return None

    def _set_uniform_owner(self, index: int, owner: Owner) -> None:
        """Keep that all entries of a chunk have the same owner."""
        if self._uniform_owners is None:
            self._uniform_owners = [None] * len(self._chunks)
        self._uniform_owners[index] = owner

    def add(self, entry: QueueEntry) -> None:
        """Insert an entry at its sorted position. A chunk that exceeds `MAX_CHUNK` is split in half."""
        chunks = self._chunks
        if not chunks:
            chunks.append([entry])
            return
        if entry > chunks[-1][-1]:  # the usual case: append
            if len(chunks[-1]) < MAX_CHUNK:
                chunks[-1].append(entry)
                if self._uniform_owners is not None and self._uniform_owners[-1] != entry[2].owner:
                    self._uniform_owners[-1] = None
            else:
                chunks.append([entry])
                if self._uniform_owners is not None:
                    self._uniform_owners.append(None)
            return
        index = bisect_left(chunks, entry, key=_last)
        chunk = chunks[index]
        chunk.insert(bisect_left(chunk, entry), entry)
        if self._uniform_owners is not None:
            self._uniform_owners[index] = None
        if len(chunk) > MAX_CHUNK:
            chunks.insert(index + 1, chunk[MAX_CHUNK // 2 :])
            del chunk[MAX_CHUNK // 2 :]
            if self._uniform_owners is not None:
                self._uniform_owners.insert(index + 1, None)

    def remove(self, entry: QueueEntry) -> None:
        """Remove an entry, which must be present."""
        chunks = self._chunks
        index = bisect_left(chunks, entry, key=_last) if len(chunks) > 1 else 0
        chunk = chunks[index]
        position = 0 if chunk[0] is entry else bisect_left(chunk, entry)
        assert chunk[position] == entry, "the entry is not in this queue"  # noqa: S101 - an invariant
        del chunk[position]
        if not chunk:
            del chunks[index]
            if not chunks:
                self._uniform_owners = None
            elif self._uniform_owners is not None:
                del self._uniform_owners[index]

    def before(self, entry: QueueEntry) -> QueueEntry | None:
        """Return the last entry before `entry`, or None. `entry` need not be in this queue."""
        chunks = self._chunks
        index = bisect_left(chunks, entry, key=_last)
        if index < len(chunks):
            position = bisect_left(chunks[index], entry)
            if position:
                return chunks[index][position - 1]
        return chunks[index - 1][-1] if index else None

    def after(self, entry: QueueEntry) -> QueueEntry | None:
        """Return the first entry after `entry`, or None. `entry` need not be in this queue."""
        return next(self.between(entry, None), None)

    def between(self, low: QueueEntry | None, high: QueueEntry | None) -> Iterator[QueueEntry]:
        """Yield the entries between `low` and `high`, without these two. None: no bound on this side."""
        chunks = self._chunks
        index = 0 if low is None else bisect_right(chunks, low, key=_last)
        while index < len(chunks):
            chunk = chunks[index]
            start = 0 if low is None else bisect_right(chunk, low)
            if high is not None and chunk[-1] >= high:
                yield from chunk[start : bisect_left(chunk, high)]
                return
            yield from chunk[start:]
            low = None  # all later chunks are above the bound
            index += 1


# -- Resources and their wait queues -------------------------------------------------


class LockedResource:
    """A resource that is held or waited for."""

    __slots__ = ("exclusive_count", "holders", "wait_queue")

    def __init__(self, holder: Request | None = None, exclusive_count: int = 0) -> None:
        self.holders: dict[int, Request] = {} if holder is None else {holder.id: holder}
        """The requests that hold this resource, by id. Several may have the same owner."""
        self.exclusive_count = exclusive_count
        """Number of exclusive holders. If it is not 0, all holders have the same owner."""
        self.wait_queue: WaitQueue | None = None
        """The waiting requests; None if there are none."""


class WaitQueue:
    """The waiters of one resource, in order.

    The two modes are kept in separate queues, so that a search for the nearest waiter of one mode
    never iterates over waiters of the other mode.
    """

    __slots__ = ("exclusive", "non_simple_count", "priority_inverted", "shared")

    def __init__(self) -> None:
        self.shared = SortedQueue()
        self.exclusive = SortedQueue()
        self.non_simple_count = 0
        """Number of waiters that are not `simple`. If it is 0, no cycle passes through this queue."""
        self.priority_inverted = False
        """Whether a rearrangement put a request before a request of higher priority."""

    def __len__(self) -> int:
        return len(self.shared) + len(self.exclusive)

    def __iter__(self) -> Iterator[QueueEntry]:
        """Yield all entries, first to last."""
        return merge(self.shared, self.exclusive) if self.exclusive else iter(self.shared)

    def entries(self) -> list[QueueEntry]:
        """Return all entries, first to last."""
        return list(self)

    def insert(self, name: str, request: Request, exclusive: bool, moved: dict[Request, None]) -> None:
        """Insert a new request after the last request of the same or a higher priority.

        Other requests change their positions only if the queue is `priority_inverted`. They are added to
        `moved`, an ordered set.
        """
        if not request.simple:
            self.non_simple_count += 1
        (self.exclusive if exclusive else self.shared).add(request.entry(name))
        if not self.priority_inverted:
            return
        # The sorted position may be before requests of higher priority: put the new request after them.
        order = [entry[2] for entry in self.entries() if entry[2] is not request]
        last_before = max((i for i, other in enumerate(order) if other.priority >= request.priority), default=-1)
        order.insert(last_before + 1, request)
        moved |= dict.fromkeys(self.rearrange(name, order))

    def rearrange(self, name: str, order: Sequence[Request]) -> list[Request]:
        """Put the requests of this queue into `order`, and return the requests whose positions changed.

        The existing (priority, ticket) pairs are reassigned among the requests. So a later request is
        compared with the same pairs as before.
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
        """Insert a request that was loaded from the store, at its stored position."""
        self.non_simple_count += not request.simple
        self._insert_entry(name, request, exclusive)

    def _insert_entry(self, name: str, request: Request, exclusive: bool) -> None:
        """Insert a request at the position that its entry specifies."""
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
