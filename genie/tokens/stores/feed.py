"""What those who follow a store's changes have not read yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from weakref import WeakSet

from genie.tokens.store import Change, Resync

MOST_UNREAD = 100_000
"""Changes that wait for one reader. One that is further behind has read the store sooner than them: it is told so."""


class Feed(AsyncIterator[Change]):
    """The changes for one reader: told to it since it was made, whether it is being read or not.

    Its reader can be cancelled while it waits, and read on. `start` is awaited before the first change is given.
    """

    __slots__ = ("__weakref__", "_ended", "_some", "_start", "_unread")

    def __init__(self, start: Callable[[], Awaitable[None]] | None = None) -> None:
        self._unread: deque[Change] = deque((Resync(),))
        self._some = asyncio.Event()
        self._start = start
        self._ended = False

    def tell(self, changes: Sequence[Change]) -> None:
        """They have happened, in this order."""
        if self._ended:
            return
        if len(self._unread) + len(changes) > MOST_UNREAD:
            self.resync()
        else:
            self._unread.extend(changes)
            self._some.set()

    def resync(self) -> None:
        """Changes may have been missed: what was not read yet is in the store as well."""
        self._unread.clear()
        self._unread.append(Resync())
        self._some.set()

    def end(self) -> None:
        """There is nothing more to come, and nobody waits any longer."""
        self._ended = True
        self._unread.clear()
        self._some.set()

    async def __anext__(self) -> Change:
        if self._start is not None and not self._ended:
            await self._start()
            self._start = None
        while not self._unread:
            if self._ended:
                raise StopAsyncIteration
            self._some.clear()
            await self._some.wait()
        return self._unread.popleft()


class Feeds:
    """All feeds of a store. One that nobody has any more is forgotten."""

    __slots__ = ("_all", "_ended")

    def __init__(self) -> None:
        self._all: WeakSet[Feed] = WeakSet()
        self._ended = False

    def __bool__(self) -> bool:
        return bool(self._all)

    def open(self, start: Callable[[], Awaitable[None]] | None = None) -> Feed:
        """A feed of what happens from now on. One of a closed store has ended."""
        feed = Feed(start)
        self._all.add(feed)
        if self._ended:
            feed.end()
        return feed

    def tell(self, changes: Sequence[Change]) -> None:
        """They have happened, in this order."""
        for feed in self._all:
            feed.tell(changes)

    def resync(self) -> None:
        """Changes may have been missed."""
        for feed in self._all:
            feed.resync()

    def end(self) -> None:
        """The store is closed."""
        self._ended = True
        for feed in self._all:
            feed.end()
