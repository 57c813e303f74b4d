"""Deadlines by millisecond: when the next request expires, and which requests have expired."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf

NEVER = 2**62
"""The deadline of a request that waits without a time limit. Such a request is not added to `Deadlines`."""

MAX_EMPTY_TICKS = 1024
"""A sweep runs when the number of ticks exceeds twice the number after the last sweep by this many."""


class Deadlines:
    """Ids by tick: the millisecond at which the ids expire.

    A tick that becomes empty stays for a while, since the next id is likely to get the same tick. A
    sweep drops all empty ticks at once. So memory is bounded by the number of current ids: a million
    locks that have ended leave nothing.
    """

    __slots__ = ("_heap", "_sorted", "_sweep_threshold", "_ticks", "soonest")

    def __init__(self) -> None:
        self._ticks: dict[int, dict[int, None]] = {}
        """Ids by tick. The dict of a tick, an ordered set, may be empty."""
        self._sorted: set[int] = set()
        """Expired ticks whose ids are sorted, so that a tick with very many ids is sorted once."""
        self._heap: list[int] = []
        """All ticks, each once: the keys of `_ticks` as a heap."""
        self._sweep_threshold = MAX_EMPTY_TICKS
        """The number of ticks at which the next sweep runs."""
        self.soonest: float = inf
        """A lower bound of the next deadline, cheap to read. `next` computes the exact deadline."""

    def add(self, tick: int, id: int) -> None:
        """Add `id` with the deadline `tick`, in whole milliseconds, which has not passed."""
        ids = self._ticks.get(tick)
        if ids is not None:
            ids[id] = None
        else:
            if len(self._ticks) >= self._sweep_threshold:
                self._sweep()
            self._ticks[tick] = {id: None}
            heappush(self._heap, tick)
        if tick < self.soonest:  # noqa: PLR1730 - a call of `min` takes longer
            self.soonest = tick

    def discard(self, tick: int, id: int) -> None:
        """Remove `id`, which was added with the deadline `tick`."""
        del self._ticks[tick][id]

    @property
    def next(self) -> float:
        """The earliest deadline in ms, or infinity if there is none."""
        heap, ticks = self._heap, self._ticks
        while heap and not ticks[heap[0]]:
            tick = heappop(heap)
            del ticks[tick]
            self._sorted.discard(tick)
        self.soonest = heap[0] if heap else inf
        return self.soonest

    def expired(self, now: float, limit: int) -> list[int]:
        """Return at most `limit` ids whose deadline has passed, by deadline and then by id.

        The ids are not removed: the caller discards an id when it ends the request.
        """
        ids: list[int] = []
        ticks: list[int] = []
        while len(ids) < limit and self.next <= now:
            tick = heappop(self._heap)  # so that `next` returns the following tick; pushed again below
            ticks.append(tick)
            expired = self._ticks[tick]
            if len(expired) > 1 and tick not in self._sorted:
                self._sorted.add(tick)
                self._ticks[tick] = expired = dict.fromkeys(sorted(expired))
            ids += islice(expired, limit - len(ids))
        for tick in ticks:
            heappush(self._heap, tick)
        if ticks:
            self.soonest = float(ticks[0])
        return ids

    def _sweep(self) -> None:
        """Drop all empty ticks, if they are many. Otherwise a growing number of ids would copy all ticks, a million in 0.2 s."""
        if 4 * sum(not ids for ids in self._ticks.values()) > len(self._ticks):
            self._ticks = {tick: ids for tick, ids in self._ticks.items() if ids}
            self._sorted &= self._ticks.keys()
            self._heap = list(self._ticks)
            heapify(self._heap)
        self._sweep_threshold = 2 * len(self._ticks) + MAX_EMPTY_TICKS
