"""Change feeds of a token store: buffered changes for each reader, and how processes announce them
to each other.

A process announces its commits as payloads with a line for each token: `+id` added, `-id` spent.
"""

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

MAX_UNREAD_CHANGES = 100_000
"""Changes buffered for one reader. For a reader that lags by more a resync is faster."""


class ChangeFeed(AsyncIterator[Change]):
    """The changes for one reader since the feed was made, buffered until they are read.

    A read can be cancelled and repeated. `start` is awaited before the first change is returned.
    """

    __slots__ = ("__weakref__", "_ended", "_ready", "_start", "_unread")

    def __init__(self, start: Callable[[], Awaitable[None]] | None = None) -> None:
        self._unread: deque[Change] = deque((Resync(),))
        self._ready = asyncio.Event()
        self._start = start
        self._ended = False

    def publish(self, changes: Sequence[Change]) -> None:
        """Buffer changes, in this order; resync if they are too many."""
        if self._ended:
            return
        if len(self._unread) + len(changes) > MAX_UNREAD_CHANGES:
            self.resync()
        else:
            self._unread.extend(changes)
            self._ready.set()

    def resync(self) -> None:
        """Replace the buffered changes by a `Resync`: changes may have been lost."""
        self._unread.clear()
        self._unread.append(Resync())
        self._ready.set()

    def end(self) -> None:
        """End the iteration."""
        self._ended = True
        self._unread.clear()
        self._ready.set()

    async def __anext__(self) -> Change:
        if self._start is not None and not self._ended:
            await self._start()
            self._start = None
        while not self._unread:
            if self._ended:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._unread.popleft()


class ChangeFeeds:
    """All feeds of a store. Feeds that are no longer referenced disappear."""

    __slots__ = ("_all", "_ended")

    def __init__(self) -> None:
        self._all: WeakSet[ChangeFeed] = WeakSet()
        self._ended = False

    def __bool__(self) -> bool:
        return bool(self._all)

    def open(self, start: Callable[[], Awaitable[None]] | None = None) -> ChangeFeed:
        """Create a feed of the changes from now on. A feed of a closed store has ended."""
        feed = ChangeFeed(start)
        self._all.add(feed)
        if self._ended:
            feed.end()
        return feed

    def publish(self, changes: Sequence[Change]) -> None:
        """Pass changes to all feeds, in this order."""
        for feed in self._all:
            feed.publish(changes)

    def resync(self) -> None:
        """Make all readers read the store again: changes may have been lost."""
        for feed in self._all:
            feed.resync()

    def end(self) -> None:
        """End all feeds: the store is closed."""
        self._ended = True
        for feed in self._all:
            feed.end()


# -- changes between processes ----------------------------------------------------------------------------

MAX_PAYLOAD_BYTES = 7900
"""Size of a payload: PostgreSQL's NOTIFY carries less than 8,000 bytes."""

PAYLOADS_PER_BATCH = 10
"""Payloads processed at once: at most some thousand tokens, which does not block the event loop for
long.
"""

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
"""Backoff between attempts to listen for changes."""

STOP_TIMEOUT_S = 5.0
"""How long `stop` waits for a step in progress."""

Get = Callable[[Sequence[str]], Awaitable[dict[str, Token]]]

_log = logging.getLogger(__name__)


def payloads(*, added: Iterable[str] = (), spent: Iterable[str] = ()) -> Iterator[str]:
    """Encode changes as payloads. An id is printable, so it contains no line break."""
    lines: list[str] = []
    size = 0
    for line in (*(f"-{id}" for id in spent), *(f"+{id}" for id in added)):
        line_size = len(line.encode()) + 1
        if size + line_size > MAX_PAYLOAD_BYTES:
            yield "\n".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += line_size
    if lines:
        yield "\n".join(lines)


async def changes(payloads: Iterable[str], get: Get) -> list[Change]:
    """Decode payloads. Reads the added tokens; those that have been spent since are left out."""
    lines = [line for payload in payloads for line in payload.split("\n")]
    tokens = await get([line[1:] for line in lines if line[0] == "+"])
    found: list[Change] = []
    for line in lines:
        if line[0] == "-":
            found.append(Spent(line[1:]))
        elif line[1:] in tokens:
            found.append(Added(tokens[line[1:]]))
    return found


class ChangeListener(ABC):
    """Publishes the changes of the database to the feeds, in a task, until it is stopped."""

    def __init__(self, feeds: ChangeFeeds, get: Get) -> None:
        self._feeds = feeds
        self._get = get
        self._task: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._wake = asyncio.Event()
        self._stopped = False

    async def wait_started(self) -> None:
        """Start, and wait until every later change is received, or until it is stopped."""
        if self._task is None and not self._stopped:
            self._task = asyncio.create_task(self._run())
        await self._connected.wait()

    async def stop(self) -> None:
        """Stop listening. Waits a moment for a step in progress."""
        self._stopped = True
        self._connected.set()
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)
            await cancel_and_wait(self._task)

    async def _run(self) -> None:
        backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        while not self._stopped:
            try:
                await self._listen()
            except Exception:  # noqa: BLE001 - a driver may raise anything
                if not self._stopped:
                    _log.exception("change feed lost, retrying")
            if self._stopped:
                break
            if self._connected.is_set():
                backoff.reset()
            self._connected.clear()
            await self._sleep(backoff.next_delay())

    @abstractmethod
    async def _listen(self) -> None:
        """Connect, call `_on_connected`, and publish changes until it is stopped or fails."""

    def _on_connected(self) -> None:
        """Every later change is received."""
        self._feeds.resync()
        self._connected.set()

    async def _publish(self, payloads: Sequence[str]) -> None:
        if self._feeds:
            self._feeds.publish(await changes(payloads, self._get))

    async def _sleep(self, seconds: float) -> bool:
        """Wait until it is woken; False if that did not happen in this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        woken = self._wake.is_set()
        if not self._stopped:
            self._wake.clear()
        return woken
