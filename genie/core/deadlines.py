"""What expires next."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

NEVER = 2**62
"""The deadline of a request that waits without a limit. It is not kept here."""

MAX_EMPTY_TICKS = 1024
"""Empty ticks that are kept at most, beside one for each that is not."""


class Deadlines:
    """Ids by the millisecond, the tick, in which they fall due.

    A tick whose ids were all taken out stays for a while: the next id is likely to fall into it. Now and then all
    empty ones are swept out together, so that a million short locks cost no more memory than those that are held now.
    """

    __slots__ = ("_heap", "_sweep_threshold", "_ticks", "soonest")

    def __init__(self) -> None:
        self._ticks: dict[int, set[int]] = {}
        self._heap: list[int] = []
        """Every tick, once."""
        self._sweep_threshold = MAX_EMPTY_TICKS
        """So many ticks may there be before the next sweep."""
        self.soonest: float = inf
        """Nothing falls due before this. `next` says when something does."""

    def add(self, tick: int, id: int) -> None:
        """Let `id` fall due at the millisecond `tick`."""
        ids = self._ticks.get(tick)
        if ids is not None:
            ids.add(id)
        else:
            if len(self._ticks) >= self._sweep_threshold:
                self._sweep()
            self._ticks[tick] = {id}
            heappush(self._heap, tick)
        self.soonest = min(self.soonest, tick)

    def discard(self, tick: int, id: int) -> None:
        """Forget the deadline that was added for `id`."""
        self._ticks[tick].remove(id)

    @property
    def next(self) -> float:
        """When something falls due, in ms; infinity when nothing does."""
        heap, ticks = self._heap, self._ticks
        while heap and not ticks[heap[0]]:
            del ticks[heappop(heap)]
        self.soonest = heap[0] if heap else inf
        return self.soonest

    def expired(self, now: float, limit: int) -> list[int]:
        """At most `limit` ids that are due, by millisecond and then by id. They stay until they are discarded."""
        due: list[int] = []
        passed: list[int] = []
        while len(due) < limit and self.next <= now:
            tick = heappop(self._heap)
            passed.append(tick)
            due += sorted(self._ticks[tick])[: limit - len(due)]
        for tick in passed:
            heappush(self._heap, tick)
        if passed:
            self.soonest = float(passed[0])
        return due

    def _sweep(self) -> None:
        self._ticks = {tick: ids for tick, ids in self._ticks.items() if ids}
        self._heap = list(self._ticks)
        heapify(self._heap)
        self._sweep_threshold = 2 * len(self._ticks) + MAX_EMPTY_TICKS
