"""Following a store: what it has, and then each change of it, with no token missed or kept too long.

The store first says `Resync`: from then on it tells every change. Only then is what it has read, page by page, while
changes are taken as they come. A token that comes meanwhile is told as a change, in a page, or both. One that is spent
meanwhile may still be in a page that was read before, so the ids that were spent during a load are remembered, and such
a page does not bring them back. When the store says `Resync` again, all is read again: what it does not tell then, and
was there before, has been spent in between.

A store that fails is asked again, after a while that grows up to some seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol, TypeVar

from genie.client.config import delays
from genie.tasks import closing, end
from genie.tokens.store import Added, Change, Resync, Spent, TokenStore
from genie.tokens.token import Token

T = TypeVar("T")


class Sink(Protocol):
    """What is told of the store."""

    def add(self, token: Token) -> None:
        """A token is there. It may have been told before."""

    def remove(self, id: str) -> bool:
        """A token is spent; whether it was there."""

    def ids(self) -> Iterable[str]:
        """Of all tokens that are there."""


class Follower:
    """Keeps a sink as the store is.

    `trouble` is what made the store fail last, until it has been read again: then what the sink has may be old.
    """

    def __init__(self, store: TokenStore, sink: Sink) -> None:
        self.trouble: Exception | None = None
        self._store = store
        self._sink = sink
        self._following: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._delays = delays()
        self._untold: set[str] = set()
        """Spent by this process, and the store has not told it yet."""
        self._expected: set[str] = set()
        """Being issued by this process, and not known to be spent."""
        self._spent: set[str] | None = None
        """Spent since the load began; None when there is none."""
        self._doubted: set[str] = set()
        """Was there before the load began, and not told since."""

    async def start(self) -> None:
        """Begin, and wait until all is read once. Raises what the store raises until then; it can be said again."""
        if self._following is not None:
            raise RuntimeError("it has been started before")
        self._first = asyncio.get_running_loop().create_future()
        self._following = asyncio.create_task(self._follow(self._first), name="tokens: follow the store")
        try:
            await self.loaded()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Follow no longer."""
        await end(self._following)
        await end(self._loading)
        self._following = None
        if self._first is not None and not self._first.done():
            self._fail_first(RuntimeError("it was closed before all tokens were read"))

    @property
    def following(self) -> bool:
        """Whether it was started, and not closed since."""
        return self._following is not None

    @property
    def ready(self) -> bool:
        """Whether all was read once, and it is followed since."""
        first = self._first
        return self._following is not None and first is not None and first.done() and first.exception() is None

    async def loaded(self) -> None:
        """Wait until it is ready. Raises what makes the first load fail; RuntimeError, where none is under way."""
        if self._first is None or (self._following is None and self._first.exception() is None):
            raise RuntimeError("the store's tokens are not read: start() it first, and use it before it is closed")
        await asyncio.shield(self._first)

    def spent_here(self, id: str) -> None:
        """A token was spent by this process: it is removed now, and what comes late from before does not bring it back."""
        self._expected.discard(id)
        if self._sink.remove(id):
            self._untold.add(id)
        if self._spent is not None:
            self._spent.add(id)

    def expect(self, outputs: Iterable[Token]) -> None:
        """Tokens are about to be issued by this process: see whether they are spent before that is known."""
        self._expected.update(token.id for token in outputs)

    def issued_here(self, outputs: Iterable[Token]) -> None:
        """They are issued, and there now. So nobody misses change whose spend is over, however late the store tells."""
        for token in outputs:
            if token.id in self._expected:
                self._there(token)

    def expect_no_more(self, outputs: Iterable[Token]) -> None:
        """Their issue is over, however it went."""
        self._expected.difference_update(token.id for token in outputs)

    # -- changes ------------------------------------------------------------------------------------------

    async def _follow(self, first: asyncio.Future[None]) -> None:
        while not (first.done() and first.exception()):
            try:
                async with closing(self._store.changes()) as changes:
                    async for change in changes:
                        self._take(change, first)
                raise ConnectionError("the store tells no more changes")  # noqa: TRY301 - as if it had failed
            except Exception as error:  # noqa: BLE001 - whatever a store can raise
                await end(self._loading)
                await self._wait_behind(error, first)

    def _take(self, change: Change, first: asyncio.Future[None]) -> None:
        if isinstance(change, Added):
            self._there(change.token)
        elif isinstance(change, Spent):
            self._untold.discard(change.id)
            self._expected.discard(change.id)
            self._doubted.discard(change.id)
            if self._spent is not None:
                self._spent.add(change.id)
            self._sink.remove(change.id)
        elif isinstance(change, Resync):
            if self._loading is not None:
                self._loading.cancel()
            self._spent = set()
            self._doubted = set(self._sink.ids())
            self._loading = asyncio.create_task(self._load(first, self._untold.copy()), name="tokens: read the store")

    def _there(self, token: Token) -> None:
        if token.id not in self._untold:
            self._doubted.discard(token.id)
            self._sink.add(token)

    async def _wait_behind(self, error: Exception, first: asyncio.Future[None]) -> None:
        if not first.done():
            self._fail_first(error)
        self.trouble = error
        await asyncio.sleep(next(self._delays))

    def _fail_first(self, error: Exception) -> None:
        if self._first is not None:
            self._first.set_exception(error)
            self._first.exception()  # it may be that nobody waits for it

    # -- the load -----------------------------------------------------------------------------------------

    async def _load(self, first: asyncio.Future[None], untold: set[str]) -> None:
        while True:
            try:
                await self._read()
                break
            except Exception as error:  # noqa: BLE001 - whatever a store can raise
                await self._wait_behind(error, first)
        for id in self._doubted:
            self._sink.remove(id)
        self._doubted = set()
        self._spent = None
        self._untold -= untold  # the store may have told those when nobody was listening
        self._delays = delays()
        self.trouble = None
        if not first.done():
            first.set_result(None)

    async def _read(self) -> None:
        async with closing(self._store.unspent()) as pages:
            async for page in pages:
                for token in page:
                    if self._spent is None or token.id not in self._spent:
                        self._there(token)
                await asyncio.sleep(0)  # whatever the store does between pages, others get their turn
