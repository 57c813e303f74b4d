"""The wait queue of a resource, and the resource itself: its holders and its waiters.

A `WaitQueue` consists of a `SortedQueue` for each mode. A `SortedQueue` finds, inserts and
removes entries at any position in logarithmic time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain, islice
from math import inf
from operator import itemgetter
from sys import maxsize
from typing import ClassVar, Final

from genie.core.model import Owner, QueueEntry, Request
from genie.core.special import Counted, Subtree
from genie.core.tables import CHECKED_SIZES, MANY_ITEMS, compact, ordered
from genie.lock_modes import CONFLICTS, IS, IX, QueueMode, S, U, UnitCount, X, is_subtree

MIN_UNIFORM_CHUNK = 16
"""A chunk with more than this number of entries has an entry in `_uniform_owners`. Reading a shorter chunk again costs as much
as the bookkeeping."""

MERGED_SHARE: Final = 0.75
"""Adjacent chunks are merged if together they have at most this share of `max_chunk` entries. Without merges, a client could
make queues of very many short chunks, all of which each search reads. The share is less than 1, so that a merged chunk is not
split soon."""

MAX_ARRIVAL_STEPS = 6_000
"""Maximum number of steps to find the place of a new request in the wait queues and in the wait-for graph. One step reads an
edge of the graph, a resource for which an owner waits, or a request in a rearranged queue, or it ranks an owner. A request
that needs more steps is rejected."""
STEPS_PER_MOVE = 2
"""Number of steps for which the move of a request to another position counts, in addition to one step for each of its names:
the whole request must be stored again, with up to 1,024 names."""

MAX_MOVED_STEPS = 2_000
"""Maximum number of `move_steps` of all waiters that have moved in the queue of one subtree. When the subtree is no longer locked
or waited for, one step of the lock manager undoes all these moves."""

_last = itemgetter(-1)


class SortedQueue:
    """The wait-queue entries of one mode, sorted, in a list of short sorted lists (chunks).

    Most entries are added at the end and removed at the front, but priorities, timeouts and
    cancellations affect any position. Each operation costs a bisection and moves at most `max_chunk`
    pointers. In a single list of 100,000 entries, removing the first entry would move all others.
    """

    __slots__ = ("_chunks", "_uniform_owners")

    max_chunk: ClassVar[int] = 512
    """Maximum entries of one chunk, so that an insertion or removal moves at most this many pointers."""

    def __init__(self) -> None:
        self._chunks: list[list[QueueEntry]] = []
        self._uniform_owners: list[Owner | None] | None = None
        """For each chunk, the owner of all its entries, or None if the entries have several owners or were not read. There is
        no list before `_first_not_owned_by` has found the first chunk of a single owner."""

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
        """Return whether this queue has an entry of another owner than `owner` before `entry`.

        `entry` need not be in this queue.
        """
        if not self._chunks:
            return False
        first = self._chunks[0][0]
        if first >= entry:
            return False
        return first[2].owner != owner or self._first_not_owned_by(owner, entry) is not None

    def _first_not_owned_by(self, owner: Owner, high: QueueEntry | None) -> QueueEntry | None:
        """Return the first entry whose request has another owner, or None. With `high`, search only the entries before it.

        A client can make long queues of one owner, and each of its next requests searches them. So the search skips chunks in
        which an earlier search has found no other owner, and reads about `max_chunk` entries.
        """
        for index, chunk in enumerate(self._chunks):
            if self._uniform_owners is None or self._uniform_owners[index] != owner:
                for entry in chunk:
                    if entry[2].owner != owner:
                        return entry if high is None or entry < high else None
                if len(chunk) > MIN_UNIFORM_CHUNK:
                    if self._uniform_owners is None:
                        self._uniform_owners = [None] * len(self._chunks)
                    self._uniform_owners[index] = owner
            if high is not None and chunk[-1] >= high:
                return None
        return None

    def add(self, entry: QueueEntry) -> None:
        """Insert an entry at its sorted position. A chunk that exceeds `max_chunk` is split in half.

        `_uniform_owners` keeps the owner of a chunk only if the entry certainly has the same owner.
        """
        chunks = self._chunks
        if not chunks:
            chunks.append([entry])
            return
        if entry > chunks[-1][-1]:  # the usual case: append
            if len(chunks[-1]) < self.max_chunk:
                chunks[-1].append(entry)
                if self._uniform_owners is not None and self._uniform_owners[-1] != entry[2].owner:
                    self._uniform_owners[-1] = None
            else:
                chunks.append([entry])
                if self._uniform_owners is not None:
                    self._uniform_owners.append(None)
                self._on_new_chunk(entry)
            return
        index = bisect_left(chunks, entry, key=_last)
        chunk = chunks[index]
        chunk.insert(bisect_left(chunk, entry), entry)
        if self._uniform_owners is not None:
            self._uniform_owners[index] = None
        if len(chunk) > self.max_chunk:
            chunks.insert(index + 1, chunk[self.max_chunk // 2 :])
            del chunk[self.max_chunk // 2 :]
            if self._uniform_owners is not None:
                self._uniform_owners.insert(index + 1, None)
            self._on_new_chunk(entry)

    def _on_new_chunk(self, entry: QueueEntry) -> None:
        """Do nothing, for subclasses: the insertion of `entry` has made one more chunk."""

    def add_all(self, entries: Iterable[QueueEntry]) -> None:
        """Insert many entries, in any order."""
        merged = sorted(chain(self, entries))
        self._chunks = [merged[start : start + self.max_chunk] for start in range(0, len(merged), self.max_chunk)]
        self._uniform_owners = None

    def collect(self, found: list[QueueEntry], limit: float = inf) -> None:
        """Append all entries to `found`, chunk by chunk, until it has at least `limit`. This is faster than an iteration."""
        for chunk in self._chunks:
            if len(found) >= limit:
                break
            found += chunk

    def pop_chunk(self) -> list[QueueEntry]:
        """Remove and return the entries of the first chunk. The queue must not be empty."""
        self._uniform_owners = None
        return self._chunks.pop(0)

    def remove(self, entry: QueueEntry) -> None:
        """Remove an entry, which must be present."""
        chunks = self._chunks
        if len(chunks) > 1:
            self._remove_from_many(entry)
            return
        chunk = chunks[0]
        position = 0 if chunk[0] is entry else bisect_left(chunk, entry)
        assert chunk[position] == entry, "the entry is not in this queue"  # noqa: S101 - an invariant
        del chunk[position]
        if not chunk:
            chunks.clear()
            self._uniform_owners = None

    def _remove_from_many(self, entry: QueueEntry) -> None:
        """Remove an entry from one of several chunks, and merge the chunk with an adjacent one if both are short."""
        chunks = self._chunks
        index = bisect_left(chunks, entry, key=_last)
        chunk = chunks[index]
        position = bisect_left(chunk, entry)
        assert chunk[position] == entry, "the entry is not in this queue"  # noqa: S101 - an invariant
        del chunk[position]
        limit = self.max_chunk * MERGED_SHARE
        if not chunk:
            del chunks[index]
            if self._uniform_owners is not None:
                del self._uniform_owners[index]
        elif index and len(chunks[index - 1]) + len(chunk) <= limit:
            self._merge(index - 1)
        elif index + 1 < len(chunks) and len(chunk) + len(chunks[index + 1]) <= limit:
            self._merge(index)

    def _merge(self, index: int) -> None:
        """Merge a chunk with the next one."""
        chunks, owners = self._chunks, self._uniform_owners
        chunks[index] += chunks.pop(index + 1)
        if owners is not None and owners.pop(index + 1) != owners[index]:
            owners[index] = None

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
        """Yield the entries after `low` and before `high`. With None for a bound, the queue itself is the bound."""
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


class UnitQueue(SortedQueue):
    """The waiters for units of the resource `name`, with cached sums of the units that they ask for.

    The check of a waiter needs the sum of the units of all earlier waiters, and a queue may have a million waiters. So the sum
    of each chunk is cached until the chunk changes. All chunks except the first and the last one always have a sum, so that a
    check never reads more than two of them.
    """

    __slots__ = ("_chunk_sums", "_name", "_sums_before")

    max_chunk: ClassVar[int] = 64

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._chunk_sums: dict[int, UnitCount] = {}
        """By the `id` of a chunk: the sum of the units of its waiters, and their smallest limit."""
        self._sums_before: list[UnitCount] = [NO_WAITERS]
        """At the index of a chunk: the sum of the units of the waiters in all earlier chunks, and their smallest limit. Ends
        before the first chunk after a change."""

    def add(self, entry: QueueEntry) -> None:
        """Insert an entry at its sorted position."""
        if self._chunk_sums:
            index = self._forget_sums(entry)
            super().add(entry)
            if 0 < index < len(self._chunks) - 1:
                self._sum_changed_chunks(entry)
        else:
            super().add(entry)

    def remove(self, entry: QueueEntry) -> None:
        """Remove an entry, which must be present."""
        if self._chunk_sums:
            index = self._forget_sums(entry)
            super().remove(entry)
            if index:
                self._sum_changed_chunks(entry)
        else:
            super().remove(entry)

    def _on_new_chunk(self, entry: QueueEntry) -> None:
        self._sum_changed_chunks(entry)

    def _merge(self, index: int) -> None:
        for chunk in self._chunks[index : index + 2]:
            self._chunk_sums.pop(id(chunk), None)
        del self._sums_before[index + 1 :]
        super()._merge(index)

    def add_units_before(self, units: UnitCount, entry: QueueEntry | None, *, included: bool = False) -> UnitCount:
        """Return the sum of `units` and of the units that the waiters before `entry` ask for, and the smallest limit of all.

        With None for `entry`, all waiters count. With `included`, `entry` itself counts, too, if it is in the queue. Once the
        sum reaches the smallest limit, later waiters may be missing in both.
        """
        chunks, sums_before = self._chunks, self._sums_before
        bisect = bisect_right if included else bisect_left
        index = len(chunks) if entry is None else bisect(chunks, entry, key=_last)  # of the chunk that contains `entry`
        if index:
            if len(sums_before) <= index:
                of_first_waiters = _add_units(units, islice(chunks[0], MIN_UNIFORM_CHUNK), self._name)
                if of_first_waiters[0] >= of_first_waiters[1]:  # the usual case: few units, and a long queue
                    return of_first_waiters
            while len(sums_before) <= index:
                sums_before.append(_sum(sums_before[-1], self._sum_of(chunks[len(sums_before) - 1])))
            units = _sum(units, sums_before[index])
        if index == len(chunks) or entry is None:
            return units
        chunk = chunks[index]
        return _add_units(units, islice(chunk, bisect(chunk, entry)), self._name)

    def _sum_of(self, chunk: list[QueueEntry]) -> UnitCount:
        """Return the sum of the units of the waiters in a chunk, and their smallest limit, and cache them."""
        found = self._chunk_sums.get(id(chunk))
        if found is None:
            found = self._chunk_sums[id(chunk)] = _add_units(NO_WAITERS, chunk, self._name)
        return found

    def _forget_sums(self, entry: QueueEntry) -> int:
        """Drop the sums that change when `entry` is added or removed. Return the index of the chunk that changes."""
        chunks = self._chunks
        index = min(bisect_left(chunks, entry, key=_last), len(chunks) - 1)
        self._chunk_sums.pop(id(chunks[index]), None)
        del self._sums_before[index + 1 :]
        return index

    def _sum_changed_chunks(self, entry: QueueEntry) -> None:
        """Cache the sums of the chunks that have changed because `entry` was added or removed, but not of the first or last chunk.

        These change with nearly every command. If others had no sums, a client could make very many such chunks, and the next
        check would read all of them.
        """
        chunks = self._chunks
        index = bisect_left(chunks, entry, key=_last)
        for chunk in chunks[max(index - 1, 1) : min(index + 2, len(chunks) - 1)]:
            self._sum_of(chunk)


NO_WAITERS: Final[UnitCount] = (0, maxsize)
"""The sum of the units and the smallest limit of no waiters."""


def move_steps(requests: Iterable[Request]) -> int:
    """Return the number of steps, of `MAX_ARRIVAL_STEPS`, for which moves of these requests to other positions count."""
    return sum([STEPS_PER_MOVE + request.name_count() for request in requests])


def _sum(one: UnitCount, other: UnitCount) -> UnitCount:
    return one[0] + other[0], min(one[1], other[1])


def _add_units(units: UnitCount, entries: Iterable[QueueEntry], name: str) -> UnitCount:
    """Return the sum of `units` and of the units of waiters, and their smallest limit. Ends once the sum reaches this limit."""
    total, smallest = units
    for entry in entries:
        asked, limit = entry[2].units[name]
        total += asked
        smallest = min(smallest, limit)
        if total >= smallest:
            break
    return total, smallest


# -- Resources and their wait queues -------------------------------------------------


class LockedResource:
    """A resource that is held or waited for."""

    __slots__ = ("exclusive_count", "holders", "special", "wait_queue")

    def __init__(self, holder: Request | None = None, exclusive_count: int = 0) -> None:
        self.holders: dict[int, Request] = {} if holder is None else {holder.id: holder}
        """The requests that hold this resource, by id. Several may have the same owner."""
        self.exclusive_count = exclusive_count
        """Number of exclusive holders. If it is not 0, all holders have the same owner."""
        self.wait_queue: WaitQueue | None = None
        """The waiting requests; None if there are none."""
        self.special: Counted | Subtree | None = None
        """The additional state of a counted resource or of a subtree. None for a plain name."""

    def add_holder(self, id: int, request: Request) -> None:
        """Add a holder."""
        holders = self.holders
        holders[id] = request
        if len(holders) == MANY_ITEMS:
            self.holders = ordered(holders)

    def remove_holder(self, id: int) -> None:
        """Remove a holder."""
        holders = self.holders
        del holders[id]
        if len(holders) in CHECKED_SIZES:
            compact(holders)

    @property
    def has_mixed_holders(self) -> bool:
        """True if one owner holds the resource in several modes, so that `holder_mode` searches the names of each holder."""
        return 0 < self.exclusive_count < len(self.holders)

    def holder_mode(self, name: str, holder: Request) -> QueueMode:
        """Return the mode in which `holder` holds this resource, which has the name `name`.

        A holder may hold a thousand resources, so its names are searched only if `has_mixed_holders`. `Request.queue_mode`
        would build a dict of all names of the holder.
        """
        if holder.details is not None and name in holder.details.units:
            return U
        if self.exclusive_count in (0, len(self.holders)):
            return X if self.exclusive_count else S
        if len(holder.shared) < len(holder.exclusive):
            return S if name in holder.shared else X
        return X if name in holder.exclusive else S


class WaitQueue:
    """The waiters of one resource, in order.

    The modes are kept in separate queues, so that a search for the nearest waiter of one mode
    never iterates over waiters of another mode.
    """

    __slots__ = ("exclusive", "inverted", "moved", "non_simple_count", "others", "shared")

    def __init__(self) -> None:
        self.shared = SortedQueue()
        self.exclusive = SortedQueue()
        self.others: dict[QueueMode, SortedQueue] = NO_QUEUES
        """The queues of the other modes: `U` for a counted resource, intentions for a subtree. An empty queue is removed."""
        self.non_simple_count = 0
        """Number of waiters that are not `simple`. If it is 0, no cycle of the wait-for graph passes through this queue."""
        self.inverted: dict[int, Request] | None = None
        """By id, the waiters in a priority inversion: they have a position of another priority than their own, because a
        rearrangement put a request before a request of higher priority. None if there are no such waiters."""
        self.moved: dict[int, Request] = NO_REQUESTS
        """By id, the waiters that a rearrangement has moved in this queue. Only for the queue of a subtree."""

    def __len__(self) -> int:
        return len(self.shared) + len(self.exclusive) + sum(map(len, self.others.values()))

    def __iter__(self) -> Iterator[QueueEntry]:
        """Yield all entries, first to last."""
        if self.others:
            return merge(self.shared, self.exclusive, *self.others.values())
        return merge(self.shared, self.exclusive) if self.exclusive else iter(self.shared)

    def of_mode(self, mode: QueueMode) -> SortedQueue:
        """Return the queue of one mode. The caller must not add to it: the result may be `NO_ENTRIES`."""
        if mode == S:
            return self.shared
        return self.exclusive if mode == X else self.others.get(mode, NO_ENTRIES)

    def modes(self) -> list[QueueMode]:
        """Return the modes in which requests wait."""
        return [mode for mode, queue in ((S, self.shared), (X, self.exclusive)) if queue] + list(self.others)

    def conflicting(self, mode: QueueMode) -> list[SortedQueue]:
        """Return the queues of the modes that conflict with `mode`, without empty queues."""
        return [queue for other in CONFLICTS[mode] if (queue := self.of_mode(other))]

    def add_units_before(self, units: UnitCount, entry: QueueEntry | None, *, included: bool = False) -> UnitCount:
        """Return the result of `UnitQueue.add_units_before` for the waiters for units, or `units` if there are none."""
        queue = self.others.get(U)
        return queue.add_units_before(units, entry, included=included) if isinstance(queue, UnitQueue) else units

    def add(self, name: str, entry: QueueEntry, mode: QueueMode) -> None:
        """Insert an entry at its sorted position. `name` is the resource of this queue."""
        if mode > X:
            self._create_queue(name, mode)
        self.of_mode(mode).add(entry)

    def _create_queue(self, name: str, mode: QueueMode) -> None:
        if not self.others:
            self.others = {}
        if mode not in self.others:
            self.others[mode] = UnitQueue(name) if mode == U else SortedQueue()

    def remove(self, entry: QueueEntry, mode: QueueMode) -> None:
        """Remove an entry, which must be present."""
        queue = self.of_mode(mode)
        queue.remove(entry)
        if mode > X and not queue:  # units or an intention
            del self.others[mode]

    def collect(self, found: list[QueueEntry], *, with_intentions: bool = True, limit: float = inf) -> None:
        """Append entries to `found`, in any order, until it has about `limit`.

        Without `with_intentions`, only the entries of requests that name this resource are appended.
        """
        self.shared.collect(found, limit)
        self.exclusive.collect(found, limit)
        for mode, queue in self.others.items():
            if with_intentions or mode not in (IS, IX):
                queue.collect(found, limit)

    def pop_chunk(self) -> list[QueueEntry]:
        """Remove and return entries of one intention from the queue of a subtree. There must be some."""
        mode, queue = next(iter(self.others.items()))
        entries = queue.pop_chunk()
        if not queue:
            del self.others[mode]
        return entries

    @property
    def is_empty(self) -> bool:
        """True if no request waits."""
        return not (self.exclusive or self.shared or self.others)

    def entries(self) -> list[QueueEntry]:
        """Return all entries, first to last."""
        return list(self)

    def entries_between(self, low: QueueEntry, high: QueueEntry, limit: int) -> list[QueueEntry]:
        """Return the entries of all modes after `low` and before `high`, at most `limit`."""
        queues = [queue.between(low, high) for queue in (self.shared, self.exclusive, *self.others.values())]
        return list(islice(merge(*queues), limit))

    def insert(self, name: str, request: Request, mode: QueueMode, moved: dict[Request, int]) -> None:
        """Insert a new request after the last request of the same or a higher priority.

        Other requests change their positions only if the queue contains a priority inversion. Each of them becomes a key of
        `moved`, with the value 0. `moved[request]` becomes the number of steps that the insertions of the new request have
        taken, in this queue and in earlier ones. If it exceeds `MAX_ARRIVAL_STEPS`, the position in this queue is wrong, and the
        request must leave all queues.
        """
        if not request.simple:
            self.non_simple_count += 1
        if self.inverted is not None:
            self._insert_among_inverted(name, request, mode, moved)
        elif mode == X:
            self.exclusive.add(request.entry(name))
        elif mode == S:
            self.shared.add(request.entry(name))
        else:
            self.add(name, request.entry(name), mode)

    def _insert_among_inverted(self, name: str, request: Request, mode: QueueMode, moved: dict[Request, int]) -> None:
        """Insert a new request into a queue with a priority inversion.

        There, the sorted position of the new request may be before requests that it must be after, or after requests that it
        must be before. Each of these requests moves by one position, and the new request gets the position that becomes free.
        """
        entry = request.entry(name)
        steps = moved.get(request, 0) + len(self.inverted or ())
        demoted = self._last_demoted(name, request.priority)
        steps_left = max(0, MAX_ARRIVAL_STEPS - steps)
        max_moves = steps_left // STEPS_PER_MOVE
        if demoted is not None:
            others = [*self.entries_between(entry, demoted, max_moves), demoted]
        else:
            others = self._lower_priorities_before(entry, request, max_moves)
        self.add(name, entry, mode)
        requests = [other[2] for other in others]
        # If these requests may not move, the new request must be rejected, as if the steps were too many.
        needed_steps = move_steps(requests) if self.may_move(name, requests) else steps_left + 1
        if needed_steps <= steps_left:
            if demoted is not None:  # the new request moves back
                changed = self.rearrange(name, [entry, *others], [*requests, request])
            else:  # the new request moves forward
                changed = self.rearrange(name, [*others, entry], [request, *requests])
            moved |= dict.fromkeys(changed, 0)
        moved[request] = steps + needed_steps

    def _last_demoted(self, name: str, priority: float) -> QueueEntry | None:
        """Return the last demoted entry, or None: its request has at least `priority`, and its position has a lower priority."""
        last: QueueEntry | None = None
        for request in (self.inverted or {}).values():
            entry = request.entry(name)
            if -entry[0] < priority <= request.priority and (last is None or entry > last):
                last = entry
        return last

    def remove_inverted(self, id: int) -> None:
        """Remove a request from `inverted`, if it is there: it is no longer at a position of another priority."""
        if self.inverted is not None:
            self.inverted.pop(id, None)
            self.inverted = self.inverted or None

    def _lower_priorities_before(self, entry: QueueEntry, request: Request, limit: int) -> list[QueueEntry]:
        """Return the entries directly before `entry` whose requests have a lower priority than `request`, in queue order.

        Returns at most `limit + 1` entries, so that the caller can detect that there are too many.
        """
        found: list[QueueEntry] = []
        before = self._before(entry)
        while before is not None and before[2].priority < request.priority and len(found) <= limit:
            found.append(before)
            before = self._before(before)
        found.reverse()
        return found

    def undo_insertion(self, name: str, request: Request) -> None:
        """Restore the previous positions of the requests that the insertion of `request` has moved.

        Nothing else may have changed in the queue since the insertion.
        """
        original, entry = request.queue_entry, request.entry(name)  # the first two items are the position
        assert original is not None  # noqa: S101 - what mypy needs to know
        moved: list[QueueEntry] = []  # the entries from the current position of the request to its original position
        has_moved_forward = entry < original
        other: QueueEntry | None = entry
        while other is not None and (not moved or moved[-1][:2] != original[:2]):
            other = self._after(other) if has_moved_forward else self._before(other)
            if other is not None:
                moved.append(other)
        others = [each[2] for each in moved]
        if has_moved_forward:
            self.rearrange(name, [entry, *moved], [*others, request])
        else:
            self.rearrange(name, [*reversed(moved), entry], [request, *reversed(others)])

    def may_move(self, name: str, requests: Iterable[Request]) -> bool:
        """Return whether waiters may be moved in this queue. In the queue of a subtree, `MAX_MOVED_STEPS` is the limit."""
        if not is_subtree(name):
            return True
        all_moved = self.moved | {request.id: request for request in requests}
        return move_steps(all_moved.values()) <= MAX_MOVED_STEPS

    def rearrange(self, name: str, entries: Sequence[QueueEntry], order: Sequence[Request]) -> list[Request]:
        """Put the requests of `entries`, which are sorted, into `order`. Return the requests whose positions changed.

        The requests exchange their positions, which are (negated priority, ticket) pairs. The set of positions stays the same,
        so later requests are inserted as without the change.
        """
        moves = [(entry, request) for entry, request in zip(entries, order, strict=True) if entry[2] is not request]
        for entry, _ in moves:
            self.remove(entry, entry[2].queue_mode(name))
        for entry, request in moves:
            request.move(name, entry)
            self._insert_entry(name, request, request.queue_mode(name))
        return [request for _, request in moves]

    def restore(self, name: str, request: Request, mode: QueueMode) -> None:
        """Insert a request that was loaded from the store, at its stored position."""
        self.non_simple_count += not request.simple
        self._insert_entry(name, request, mode)

    def restore_all(self, name: str, requests: Iterable[Request], mode: QueueMode) -> None:
        """Insert many waiters below the subtree `name`, none of them `simple`, at their stored positions."""
        self._create_queue(name, mode)
        entries = [request.entry(name) for request in requests]
        self.of_mode(mode).add_all(entries)
        self.non_simple_count += len(entries)
        for entry in entries:
            if entry[2].moved is not None:
                self._note_position(name, entry)

    def _insert_entry(self, name: str, request: Request, mode: QueueMode) -> None:
        """Insert a request at the position of its entry for `name`."""
        entry = request.entry(name)
        self.add(name, entry, mode)
        self._note_position(name, entry)

    def _note_position(self, name: str, entry: QueueEntry) -> None:
        """Update `inverted`, and `moved` in the queue of a subtree, for the request of a new entry."""
        request = entry[2]
        if is_subtree(name):
            if request.moved is not None and name in request.moved:
                self.moved = self.moved or {}
                self.moved[request.id] = request
            else:
                self.moved.pop(request.id, None)
        if -entry[0] != request.priority:
            if self.inverted is None:
                self.inverted = {}
            self.inverted[request.id] = request
        else:
            self.remove_inverted(request.id)

    def _before(self, entry: QueueEntry) -> QueueEntry | None:
        """Return the last entry of all modes before `entry`, or None."""
        return max(filter(None, [queue.before(entry) for queue in self._queues()]), default=None)

    def _after(self, entry: QueueEntry) -> QueueEntry | None:
        """Return the first entry of all modes after `entry`, or None."""
        return min(filter(None, [queue.after(entry) for queue in self._queues()]), default=None)

    @property
    def last(self) -> QueueEntry | None:
        """The last entry of all modes, or None."""
        if self.others:
            return max(filter(None, [queue.last for queue in self._queues()]))
        shared, exclusive = self.shared.last, self.exclusive.last
        if shared is None or exclusive is None:
            return shared or exclusive
        return max(shared, exclusive)

    def _queues(self) -> list[SortedQueue]:
        return [self.shared, self.exclusive, *self.others.values()]


NO_ENTRIES: Final = SortedQueue()
"""An empty queue. Never changed."""
NO_QUEUES: Final[dict[QueueMode, SortedQueue]] = {}
"""`others` of the queue of a plain name. Never changed."""
NO_REQUESTS: Final[dict[int, Request]] = {}
"""`moved` of a queue without moved waiters. Never changed."""
