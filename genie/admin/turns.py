"""One question after the other, and one answer for all who ask the same at about the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable

from genie.admin.encoding import Body
from genie.admin.pace import Pace
from genie.admin.problems import Problem
from genie.errors import Code

FRESH_S = 0.5
"""For so long an answer is given again."""
MOST_KEPT = 16
MOST_AT_ONCE = 64
"""Questions that wait for their turn. It is also that of the locks: more would take too much of it."""


class Turns:
    """However many ask, at most one slice is worked on between two turns of the event loop."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._turn = asyncio.Lock()
        self._asked = 0
        self._kept: dict[Hashable, tuple[float, Body]] = {}

    async def answer(self, key: Hashable, make: Callable[[], Awaitable[Body]]) -> Body:
        """The answer that `make` makes, or that it made for the same key within half a second."""
        if self._asked >= MOST_AT_ONCE:
            raise Problem(503, Code.TOO_MANY, f"{MOST_AT_ONCE} questions wait for their answers; ask again later")
        self._asked += 1
        try:
            async with self._turn:
                now = asyncio.get_running_loop().time()
                self._kept = {known: kept for known, kept in self._kept.items() if now - kept[0] < FRESH_S}
                if key not in self._kept:
                    await self.pace.pause()
                    body = await make()
                    if len(self._kept) >= MOST_KEPT:
                        del self._kept[next(iter(self._kept))]
                    self._kept[key] = asyncio.get_running_loop().time(), body
                return self._kept[key][1]
        finally:
            self._asked -= 1
