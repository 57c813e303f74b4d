"""Which resources are fought for: those on which most was waited and collided lately, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

WINDOW_MS: Final = 300_000
"""What is told goes back for one to two windows."""
MOST: Final = 4_096
"""Names in one window. When there are more, the half of them goes that matters least."""


@dataclass(slots=True)
class Heat:
    """One resource: requests that could not have it at once, and how long those that waited for it did."""

    collisions: int = 0
    waited_ms: float = 0.0


class Hot:
    """Counts by resource, in two windows of time."""

    def __init__(self) -> None:
        self._now: dict[str, Heat] = {}
        self._before: dict[str, Heat] = {}
        self._turned_ms = 0.0
        """When the present window began."""

    def turn(self, now: float) -> None:
        """Let time pass (`now` in ms, of any clock that goes on): what is old is forgotten."""
        if now - self._turned_ms >= WINDOW_MS:
            late = now - self._turned_ms >= 2 * WINDOW_MS
            self._before, self._now = {} if late else self._now, {}
            self._turned_ms = now

    def collided(self, names: Iterable[str]) -> None:
        """A request found these in others' hands."""
        for name in names:
            self.of(name).collisions += 1

    def waited(self, names: Iterable[str], waited_ms: float) -> None:
        """The wait of a request for these is over."""
        for name in names:
            self.of(name).waited_ms += waited_ms

    def top(self, limit: int) -> list[tuple[str, Heat]]:
        """The most waited for, then the most collided on, first."""
        return hottest(self.found(), limit)

    def found(self) -> Iterator[tuple[str, Heat]]:
        """Each resource once, in no order, as it is now: what changes while it is read is not missed, nor in the way."""
        before, now = self._before.copy(), self._now.copy()
        for name, heat in before.items():
            later = now.pop(name, None)
            yield (
                name,
                heat if later is None else Heat(heat.collisions + later.collisions, heat.waited_ms + later.waited_ms),
            )
        yield from now.items()

    def of(self, name: str) -> Heat:
        """What is counted of one resource, to be added to."""
        heat = self._now.get(name)
        if heat is None:
            if len(self._now) >= MOST:
                self._now = dict(sorted(self._now.items(), key=_weight, reverse=True)[: MOST // 2])
            heat = self._now[name] = Heat()
        return heat


def hottest(found: Iterable[tuple[str, Heat]], limit: int) -> list[tuple[str, Heat]]:
    """The most waited for, then the most collided on, first."""
    return nlargest(limit, found, _weight)


def _weight(item: tuple[str, Heat]) -> tuple[float, int]:
    return item[1].waited_ms, item[1].collisions
