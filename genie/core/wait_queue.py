"""Waiters in order: a sorted sequence that stays fast however long it grows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import merge
from operator import itemgetter

from genie.core.model import Owner, QueueEntry, Request

MAX_CHUNK = 512
"""Entries in one list at most. Inserting or removing moves no more than that many pointers."""

_last = itemgetter(-1)


class SortedQueue:
    """Entries of one mode in one line, in order.

    Most arrive behind the last and most leave at the front, but priorities, timeouts and cancellations touch any
    place. So: a list of short sorted lists. Each operation costs a bisection and the move of a few pointers; a
    plain list or dict would make taking the first of a hundred thousand slow.
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
        """The entry that stands furthest ahead."""
        return self._chunks[0][0] if self._chunks else None

    @property
    def last(self) -> QueueEntry | None:
        """The entry behind all others."""
        return self._chunks[-1][-1] if self._chunks else None

    def first_not_owned_by(self, owner: Owner) -> QueueEntry | None:
        """The first entry that is not this owner's."""
        if not self._chunks:
            return None
        first = self._chunks[0][0]
        return first if first[2].owner != owner else next((entry for entry in self if entry[2].owner != owner), None)

    def add(self, entry: QueueEntry) -> None:
        """Put an entry where it belongs."""
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
        """Take an entry out. It must be there."""
        chunks = self._chunks
        index = bisect_left(chunks, entry, key=_last) if len(chunks) > 1 else 0
        chunk = chunks[index]
        place = bisect_left(chunk, entry)
        assert chunk[place] == entry, "not in this line"  # noqa: S101 - an invariant
        del chunk[place]
        if not chunk:
            del chunks[index]

    def before(self, entry: QueueEntry) -> QueueEntry | None:
        """The nearest entry ahead of this place."""
        chunks = self._chunks
        index = bisect_left(chunks, entry, key=_last)
        if index < len(chunks):
            place = bisect_left(chunks[index], entry)
            if place:
                return chunks[index][place - 1]
        return chunks[index - 1][-1] if index else None

    def after(self, entry: QueueEntry) -> QueueEntry | None:
        """The nearest entry behind this place."""
        return next(self.between(entry, None), None)

    def between(self, low: QueueEntry | None, high: QueueEntry | None) -> Iterator[QueueEntry]:
        """The entries behind `low` (None: from the first) and ahead of `high` (None: to the last), in order."""
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


# -- One resource: who holds it, and the line of those who wait for it --------


class LockedResource:
    """A name that is held or waited for. One that is neither does not exist."""

    __slots__ = ("exclusives", "holders", "wait_queue")

    def __init__(self, holder: Request | None = None, exclusives: int = 0) -> None:
        self.holders: dict[int, Request] = {} if holder is None else {holder.id: holder}
        """The grants on it by id. An owner may have several."""
        self.exclusives = exclusives
        """How many of them are exclusive. Above zero, all the grants are one owner's."""
        self.wait_queue: WaitQueue | None = None


class WaitQueue:
    """Those who wait for a resource, in the order in which they stand.

    The two modes are kept apart, each in order, so that neither "is an exclusive request ahead of me" nor "who is
    next" ever walks through a crowd of the other mode.
    """

    __slots__ = ("exclusive", "non_simple_count", "priority_inverted", "shared")

    def __init__(self) -> None:
        self.shared = SortedQueue()
        self.exclusive = SortedQueue()
        self.non_simple_count = 0
        """How many of them are not simple: without them no cycle goes through this line."""
        self.priority_inverted = False
        """Whether a reordering put requests of different priorities in another order than theirs."""

    def __len__(self) -> int:
        return len(self.shared) + len(self.exclusive)

    def __iter__(self) -> Iterator[QueueEntry]:
        """All places, first to last."""
        return merge(self.shared, self.exclusive) if self.exclusive else iter(self.shared)

    def entries(self) -> list[QueueEntry]:
        """The same, all at once."""
        return list(self)

    def insert(self, name: str, request: Request, exclusive: bool, moved: dict[Request, None]) -> None:
        """Put a newcomer right behind the last request of its priority or a higher one.

        Adds the requests whose places changed by it to `moved`: none, unless the line is priority_inverted.
        """
        if not request.simple:
            self.non_simple_count += 1
        (self.exclusive if exclusive else self.shared).add(request.entry(name))
        if not self.priority_inverted:
            return
        order = [entry[2] for entry in self.entries() if entry[2] is not request]
        behind = max((i for i, other in enumerate(order) if other.priority >= request.priority), default=-1)
        order.insert(behind + 1, request)
        moved |= dict.fromkeys(self.rearrange(name, order))

    def rearrange(self, name: str, order: Sequence[Request]) -> list[Request]:
        """Let the same requests stand in another order, and return those whose places changed.

        The places themselves stay: they are dealt out anew, so that who comes next finds them as they were.
        """
        places = self.entries()
        changed = []
        for place, request in zip(places, order, strict=True):
            if place[2] is request:
                continue
            request.move(name, place)
            changed.append(request)
        if changed:
            self.shared, self.exclusive, self.priority_inverted = SortedQueue(), SortedQueue(), False
            for request in order:
                self.place(name, request, name in request.exclusive)
        return changed

    def restore(self, name: str, request: Request, exclusive: bool) -> None:
        """Take in a request that was loaded, at the place that it had."""
        self.non_simple_count += not request.simple
        self.place(name, request, exclusive)

    def place(self, name: str, request: Request, exclusive: bool) -> None:
        """Put a request at the place that it has."""
        entry = request.entry(name)
        (self.exclusive if exclusive else self.shared).add(entry)
        self.priority_inverted = self.priority_inverted or -entry[0] != request.priority

    @property
    def last(self) -> QueueEntry | None:
        """The place behind all others."""
        shared, exclusive = self.shared.last, self.exclusive.last
        if shared is None or exclusive is None:
            return shared or exclusive
        return max(shared, exclusive)
