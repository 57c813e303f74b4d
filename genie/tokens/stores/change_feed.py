"""What those who follow a store's changes have not read yet."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from weakref import WeakSet

from genie.backoff import Backoff
from genie.tasks import cancel_and_wait
from genie.tokens.store import Added, Change, Resync, Spent
from genie.tokens.token import Token

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


# -- How one process tells others what it has added and spent: texts with a line for each token --------

MOST_BYTES = 7900
"""Of a text: what PostgreSQL's NOTIFY carries is less than 8,000."""

TEXTS = 10
"""That are read at once: at most some thousand tokens, which does not stop everything else for long."""

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
"""Backoff between attempts to follow the changes."""

LAST_STEP_S = 5.0
"""What a step that is under way may take when following is to end."""

Get = Callable[[Sequence[str]], Awaitable[dict[str, Token]]]

_log = logging.getLogger(__name__)


def texts(*, added: Iterable[str] = (), spent: Iterable[str] = ()) -> Iterator[str]:
    """The changes as texts. An id is printable: a line's end is none of its characters."""
    lines: list[str] = []
    size = 0
    for line in (*(f"-{id}" for id in spent), *(f"+{id}" for id in added)):
        long = len(line.encode()) + 1
        if size + long > MOST_BYTES:
            yield "\n".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += long
    if lines:
        yield "\n".join(lines)


async def changes(texts: Iterable[str], get: Get) -> list[Change]:
    """The changes that texts tell. Added tokens are read; one that is spent by now has no need to be told."""
    lines = [line for text in texts for line in text.split("\n")]
    tokens = await get([line[1:] for line in lines if line[0] == "+"])
    told: list[Change] = []
    for line in lines:
        if line[0] == "-":
            told.append(Spent(line[1:]))
        elif line[1:] in tokens:
            told.append(Added(tokens[line[1:]]))
    return told


class Follower(ABC):
    """Tells the feeds what happens in the database, in a task of its own, for as long as it is not stopped."""

    def __init__(self, feeds: Feeds, get: Get) -> None:
        self._feeds = feeds
        self._get = get
        self._task: asyncio.Task[None] | None = None
        self._following = asyncio.Event()
        self._wake = asyncio.Event()
        self._stopped = False

    async def started(self) -> None:
        """Wait until nothing is missed any more that happens from now on, or until it is stopped."""
        if self._task is None and not self._stopped:
            self._task = asyncio.create_task(self._run())
        await self._following.wait()

    async def stop(self) -> None:
        """Follow no longer. A step that is under way may come to its end."""
        self._stopped = True
        self._following.set()
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=LAST_STEP_S)
            await cancel_and_wait(self._task)

    async def _run(self) -> None:
        backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        while not self._stopped:
            try:
                await self._follow()
            except Exception:  # noqa: BLE001 - said in the log, and the readers of the store find it too
                if not self._stopped:
                    _log.exception("the changes of the tokens can't be followed, trying again")
            if self._stopped:
                break
            if self._following.is_set():
                backoff.reset()
            self._following.clear()
            await self._sleep(backoff.next_delay())

    @abstractmethod
    async def _follow(self) -> None:
        """Connect, say `_begin`, and tell the feeds what happens until it is stopped or fails."""

    def _begin(self) -> None:
        """From here on nothing is missed."""
        self._feeds.resync()
        self._following.set()

    async def _tell(self, texts: Sequence[str]) -> None:
        if self._feeds:
            self._feeds.tell(await changes(texts, self._get))

    async def _sleep(self, seconds: float) -> bool:
        """Wait until it is woken; False if that did not happen for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        woken = self._wake.is_set()
        if not self._stopped:
            self._wake.clear()
        return woken
