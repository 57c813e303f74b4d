"""Work in slices: whoever looks at much lets the locks have their turn in between."""

from __future__ import annotations

import asyncio
from typing import Final

SLICE: Final = 1_000
"""Work between two pauses. One is about a microsecond: a row of a table looked at, a few hundred bytes written."""


class Pace:
    """Counts work and pauses. Not time: so what it does is the same on every machine and each time."""

    def __init__(self) -> None:
        self._done = 0
        self.most = 0
        """The most work that was ever done without a pause."""

    async def did(self, work: int) -> bool:
        """So much more was done. Returns whether there was a pause: then everything may have changed."""
        self._done += work
        self.most = max(self.most, self._done)
        if self._done < SLICE:
            return False
        await self.pause()
        return True

    async def pause(self) -> None:
        """Let others have their turn."""
        self._done = 0
        await asyncio.sleep(0)
