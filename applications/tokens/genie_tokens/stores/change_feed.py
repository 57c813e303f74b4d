"""Change feeds of a token store: a buffer of changes for each reader, and the encoding in which
processes publish changes to each other.

A process publishes a commit as payloads with a line for each token: `+id` for an added one, `-id`
for a spent one.
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
from genie_tokens.store import Added, Change, Resync, Spent
from genie_tokens.token import Token

MAX_UNREAD_CHANGES = 100_000
"""Maximum number of changes buffered for one reader. If it lags by more, a resync is faster."""


class ChangeFeed(AsyncIterator[Change]):
    """An iterator over the changes since its creation, for one reader. Unread changes are buffered.

    Cancelling a read loses no change. `start` is awaited before the first change is returned.
    """

    __slots__ = ("__weakref__", "_ended", "_ready", "_start", "_unread")

    def __init__(self, start: Callable[[], Awaitable[None]] | None = None) -> None:
        self._unread: deque[Change] = deque((Resync(),))
        """The changes that the reader has not received yet. A `Resync` makes it read the store."""
        self._ready = asyncio.Event()
        """Set when there are unread changes, or when the feed has ended."""
        self._start = start
        """Awaited before the first change is returned; None afterwards."""
        self._ended = False

    def publish(self, changes: Sequence[Change]) -> None:
        """Append changes to the buffer of unread changes. If the buffer would become too large,
        replace its content by a `Resync`. Has no effect after `end`.
        """
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
        """Discard the unread changes, and end the iteration."""
        self._ended = True
        self._unread.clear()
        self._ready.set()

    async def __anext__(self) -> Change:
        """Return the next change; wait for a change if there is none. Only the first call awaits
        `start`.
        """
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
    """The change feeds of all readers of a store. The references are weak, so that a feed that is
    no longer used need not be closed.
    """

    __slots__ = ("_ended", "_open_feeds")

    def __init__(self) -> None:
        self._open_feeds: WeakSet[ChangeFeed] = WeakSet()
        self._ended = False

    def __bool__(self) -> bool:
        return bool(self._open_feeds)

    def open(self, start: Callable[[], Awaitable[None]] | None = None) -> ChangeFeed:
        """Create a feed of the changes from now on; the feed awaits `start` before its first
        change. If the store is closed, the iteration of the feed ends at once.
        """
        feed = ChangeFeed(start)
        self._open_feeds.add(feed)
        if self._ended:
            feed.end()
        return feed

    def publish(self, changes: Sequence[Change]) -> None:
        """Publish changes to all feeds."""
        for feed in self._open_feeds:
            feed.publish(changes)

    def resync(self) -> None:
        """Make all readers read the store again: changes may have been lost."""
        for feed in self._open_feeds:
            feed.resync()

    def end(self) -> None:
        """End all feeds: the store is closed."""
        self._ended = True
        for feed in self._open_feeds:
            feed.end()


# -- changes between processes ----------------------------------------------------------------------------

MAX_PAYLOAD_BYTES = 7900
"""Size of a payload: PostgreSQL's NOTIFY carries less than 8,000 bytes."""

PAYLOADS_PER_BATCH = 10
"""Payloads that are processed without yielding to the event loop: at most some thousand tokens."""

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
"""Backoff between attempts to listen for changes."""

STOP_TIMEOUT_S = 5.0
"""How long `stop` waits until the listener ends, before it is cancelled."""

Get = Callable[[Sequence[str]], Awaitable[dict[str, Token]]]

_log = logging.getLogger(__name__)


def encode_changes(*, added: Iterable[str] = (), spent: Iterable[str] = ()) -> Iterator[str]:
    """Encode changes as payloads of limited size: a line `-id` for each spent token, and a line
    `+id` for each added token.

    The ids contain no line breaks, because they must be printable.
    """
    payload_lines: list[str] = []
    size = 0
    for line in (*(f"-{id}" for id in spent), *(f"+{id}" for id in added)):
        line_size = len(line.encode()) + 1  # with the line break
        if size + line_size > MAX_PAYLOAD_BYTES:
            yield "\n".join(payload_lines)
            payload_lines, size = [], 0
        payload_lines.append(line)
        size += line_size
    if payload_lines:
        yield "\n".join(payload_lines)


async def decode_changes(payloads: Iterable[str], get: Get) -> list[Change]:
    """Decode payloads, which have a line `+id` for each added token, and `-id` for each spent token.

    `get` reads the added tokens from the store. Added tokens that were spent since are omitted.
    """
    lines = [line for payload in payloads for line in payload.split("\n")]
    tokens = await get([line[1:] for line in lines if line[0] == "+"])
    changes: list[Change] = []
    for line in lines:
        sign, id = line[0], line[1:]
        if sign == "-":
            changes.append(Spent(id))
        elif id in tokens:
            changes.append(Added(tokens[id]))
    return changes


class ChangeListener(ABC):
    """A background task that receives the changes of all processes from the database, and publishes
    them to the feeds.
    """

    def __init__(self, feeds: ChangeFeeds, get: Get) -> None:
        self._feeds = feeds
        """The feeds to which changes are published."""
        self._get = get
        """Reads unspent tokens by id from the store."""
        self._task: asyncio.Task[None] | None = None
        """The background task; None until `wait_started` is called."""
        self._connected = asyncio.Event()
        """Set while the listener is connected to the database, and after `stop`."""
        self._wake = asyncio.Event()
        """Set when the task has something to do before its pause is over."""
        self._stopped = False

    async def wait_started(self) -> None:
        """Start the background task if necessary, and wait until it is connected: from then on it
        receives every change. Returns early if the listener is stopped.
        """
        if self._task is None and not self._stopped:
            self._task = asyncio.create_task(self._run())
        await self._connected.wait()

    async def stop(self) -> None:
        """Stop the background task, and wait until it has ended. A task that does not end within
        `STOP_TIMEOUT_S` is cancelled.
        """
        self._stopped = True
        self._connected.set()  # so that `wait_started` returns
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)
            await cancel_and_wait(self._task)

    async def _run(self) -> None:
        """Listen for changes until `stop` is called. After an error, pause and connect again, with
        exponential backoff.
        """
        backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        while not self._stopped:
            try:
                await self._listen()
            except Exception:  # noqa: BLE001 - a driver may raise anything
                if not self._stopped:
                    _log.exception("change feed lost, connecting again after a pause")
            if self._stopped:
                break
            if self._connected.is_set():  # the attempt to connect has succeeded
                backoff.reset()
            self._connected.clear()
            await self._wait_for_wake(backoff.next_delay())

    @abstractmethod
    async def _listen(self) -> None:
        """Connect, call `_on_connected`, and publish changes until the listener is stopped. Raises
        an exception if the connection fails.
        """

    def _on_connected(self) -> None:
        """Called as soon as every later change will be received. Makes all readers resync, because
        earlier changes may have been lost.
        """
        self._feeds.resync()
        self._connected.set()

    async def _publish(self, payloads: Sequence[str]) -> None:
        """Decode payloads, and publish the changes to the feeds. Without feeds nothing is decoded."""
        if self._feeds:
            self._feeds.publish(await decode_changes(payloads, self._get))

    async def _wait_for_wake(self, seconds: float) -> bool:
        """Wait at most `seconds` until the event `_wake` is set. Returns whether the event was set.

        Clears the event for the next wait. After `stop` the event stays set, so that no call waits.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        woken = self._wake.is_set()
        if not self._stopped:
            self._wake.clear()
        return woken
