"""What expires next."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

SLACK = 1024
"""Ticks in the heap that may be empty before it is cleaned, beside one for each that is not."""


class Deadlines:
    """Ids by the millisecond in which they fall due.

    Taking one out leaves nothing behind but, at most, an empty tick in the heap, so that a million short locks cost no
    more memory than those that are held now.
    """

    __slots__ = ("_heap", "_ticks", "soonest")

    def __init__(self) -> None:
        self._ticks: dict[int, set[int]] = {}
        self._heap: list[int] = []
        self.soonest: float = inf
        """Nothing falls due before this. `next` says when something does."""

    def add(self, tick: int, id: int) -> None:
        """Let `id` fall due at the millisecond `tick`."""
        ids = self._ticks.get(tick)
        if ids is not None:
            ids.add(id)
            return
        self._ticks[tick] = {id}
        self.soonest = min(self.soonest, tick)
        heap = self._heap
        heappush(heap, tick)
        if len(heap) > 2 * len(self._ticks) + SLACK:
            self._heap = list(self._ticks)
            heapify(self._heap)

    def discard(self, tick: int, id: int) -> None:
        """Forget the deadline that was added for `id`."""
        ids = self._ticks[tick]
        ids.remove(id)
        if not ids:
            del self._ticks[tick]

    @property
    def next(self) -> float:
        """When something falls due, in ms; infinity when nothing does."""
        heap = self._heap
        while heap and heap[0] not in self._ticks:
            heappop(heap)
        self.soonest = heap[0] if heap else inf
        return self.soonest

    def due(self, now: float, limit: int) -> list[int]:
        """At most `limit` ids that are due, by millisecond and then by id. They stay until they are discarded."""
        due: list[int] = []
        passed: list[int] = []
        while len(due) < limit and self.next <= now:
            tick = heappop(self._heap)
            passed.append(tick)
            due += sorted(self._ticks[tick])[: limit - len(due)]
            while self._heap and self._heap[0] == tick:
                heappop(self._heap)
        for tick in passed:
            heappush(self._heap, tick)
        return due
