"""The deadlines of requests: when the next request expires, and which requests have expired.

A tick is a deadline in whole milliseconds. Many requests may have the same tick.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import islice
from math import inf

from genie.core.tables import LARGE_SIZES, clear_in_parts, compact

NEVER = 2**62
"""The deadline of a request that waits without a time limit. Such a request is not added to `Deadlines`."""

MAX_CHUNK = 1_024
"""Maximum number of ticks in a chunk. A longer chunk is split in half."""

FEW_TICKS = 1_000
"""Number of ticks above which `add` searches for empty ticks."""

EXAMINED_TICKS = 4
"""Number of ticks that `add` examines for each new tick. It drops the empty ones."""

MAX_EMPTY_TICKS = 1_000
"""Maximum number of empty ticks that one call of `next` drops, or that one call of `expired` skips."""

MAX_SORTED_IDS = 10_000
"""Maximum number of expired ids of one tick that are sorted together. If a tick has more ids, their order is approximate."""


class Deadlines:
    """The ids of requests, grouped by tick.

    A tick that becomes empty stays for a while, since the next id is likely to get the same tick. If there are many ticks,
    adding a tick drops a few empty ones. So the memory is bounded by the number of current ids. No call reads all ticks, of
    which there may be millions.
    """

    __slots__ = ("_chunks", "_examined", "_lasts", "_ticks", "soonest")

    def __init__(self) -> None:
        self._ticks: dict[int, dict[int, None]] = {}
        """Ids by tick. The ids of a tick are a dict, used as an ordered set, which may be empty."""
        self._chunks: list[list[int]] = []
        """The ticks in ascending order, in chunks of 1 to `MAX_CHUNK` ticks."""
        self._lasts: list[int] = []
        """The last tick of each chunk."""
        self._examined = -1
        """The tick that was examined last; -1 before the first one."""
        self.soonest: float = inf
        """A lower bound of the next deadline in ms, cheap to read. `next` computes a better bound."""

    def add(self, tick: int, id: int) -> None:
        """Add `id` with the deadline `tick`, which has not passed."""
        ids = self._ticks.get(tick)
        if ids is not None:
            ids[id] = None
        else:
            if len(self._ticks) > FEW_TICKS:
                self._drop_empty_ticks()
            self._ticks[tick] = {id: None}
            self._insert(tick)
        if tick < self.soonest:  # a call of `min` takes longer
            self.soonest = tick + 0.0  # a float, as mypyc requires; a call of `float` takes longer

    def discard(self, tick: int, id: int) -> None:
        """Remove `id`, which was added with the deadline `tick`."""
        ids = self._ticks[tick]
        del ids[id]
        if len(ids) in LARGE_SIZES:
            compact(ids)

    @property
    def next(self) -> float:
        """The earliest deadline in ms, or infinity if there is none.

        After more than `MAX_EMPTY_TICKS` ticks became empty, this may be an empty tick, which is a lower bound.
        """
        chunks, dropped = self._chunks, 0
        while chunks and dropped < MAX_EMPTY_TICKS and not self._ticks[chunks[0][0]]:
            del self._ticks[chunks[0].pop(0)]
            dropped += 1
            if not chunks[0]:
                del chunks[0], self._lasts[0]
        self.soonest = chunks[0][0] if chunks else inf
        return self.soonest

    def expired(self, now: float, limit: int) -> list[int]:
        """Return at most `limit` ids whose deadline has passed, by deadline and then by id.

        The ids are not removed: the caller discards an id when it ends the request. The search ends after `MAX_EMPTY_TICKS`
        empty ticks. Then it may return fewer ids than have expired, or none, and `next` is still not later than `now`: the
        caller calls again.
        """
        ids: list[int] = []
        if self.next > now:
            return ids
        empty_count = 0
        for chunk in self._chunks:
            for tick in chunk:
                if tick > now or len(ids) >= limit or empty_count >= MAX_EMPTY_TICKS:
                    return ids
                of_tick = self._ticks[tick]
                if len(of_tick) > 1:  # sorting all of a million ids would delay other commands
                    ids += sorted(islice(of_tick, MAX_SORTED_IDS))[: limit - len(ids)]
                else:
                    ids += of_tick
                    empty_count += not of_tick
        return ids

    def free_in_parts(self) -> Iterator[None]:
        """Remove all ids, in parts, because they are no longer used. Yield between the parts."""
        yield from clear_in_parts(self._ticks)
        while len(self._chunks) > 1:
            self._chunks.pop()
            yield
        self._chunks.clear()
        self._lasts.clear()

    def _insert(self, tick: int) -> None:
        """Insert a new tick into `_chunks`, and split its chunk if it becomes too long."""
        chunks, lasts = self._chunks, self._lasts
        index = bisect_left(lasts, tick)
        if not chunks:
            chunks.append([tick])
            lasts.append(tick)
        elif index == len(chunks):
            index -= 1
            chunks[index].append(tick)
            lasts[index] = tick
        else:
            insort(chunks[index], tick)
        if len(chunks[index]) > MAX_CHUNK:
            chunk = chunks[index]
            half = len(chunk) // 2
            chunks[index : index + 1] = chunk[:half], chunk[half:]
            lasts.insert(index, chunk[half - 1])

    def _drop_empty_ticks(self) -> None:
        """Examine the next `EXAMINED_TICKS` ticks after `_examined`, and drop the empty ones.

        Examines fewer ticks at the end of a chunk. After the last tick, continues with the first.
        """
        index = bisect_right(self._lasts, self._examined)
        if index == len(self._chunks):
            self._examined, index = -1, 0
        chunk = self._chunks[index]
        position = bisect_right(chunk, self._examined)
        for tick in chunk[position : position + EXAMINED_TICKS]:
            self._examined = tick
            if self._ticks[tick]:
                position += 1
            else:
                del self._ticks[tick], chunk[position]
        if index == len(self._chunks) - 1 and position == len(chunk):
            self._examined = -1  # otherwise it would follow new ticks that are added at the end
        if chunk:
            self._lasts[index] = chunk[-1]
        else:
            del self._chunks[index], self._lasts[index]
