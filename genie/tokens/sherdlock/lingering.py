"""Locks on what is spent: they stay until their lease ends, so that those who have not heard of the spend pass it by.

A session of Genie can have 100,000 requests. A busy replica would have used them up before the first lease ends, and could
select nothing until then. So beyond a number the oldest are given back: by then the store has told of them long ago.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from genie.errors import GenieError
from genie.tasks import end
from genie.tokens.sherdlock.locks import Lock

MOST = 80_000
"""Of a session's 100,000 requests; the others are for what is held and not spent yet."""


class Lingering:
    """Locks that nobody will give back, and when each ends."""

    __slots__ = ("_locks", "_releases")

    def __init__(self) -> None:
        self._locks: deque[tuple[float, Lock]] = deque()
        self._releases: set[asyncio.Task[None]] = set()

    def leave(self, locks: Iterable[Lock], until: float, now: float) -> None:
        """Their tokens are spent."""
        self._locks.extend((until, lock) for lock in locks)
        while self._locks and self._locks[0][0] <= now:
            self._locks.popleft()
        while len(self._locks) > MOST:
            task = asyncio.get_running_loop().create_task(_release(self._locks.popleft()[1]))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """End what goes on in the background."""
        for task in list(self._releases):
            await end(task)


async def _release(lock: Lock) -> None:
    with suppress(GenieError):  # it ends by its time
        await lock.release()
