"""Following a token store: its tokens, then every change, none missed and none kept too long.

The change feed begins with `Resync`: every later change is reported. Only then are the tokens
loaded, page by page, while changes are applied as they arrive. A token that is added meanwhile
appears as a change, in a page, or in both. One that is spent meanwhile may still be in a page: the
ids spent during a load are therefore recorded, and pages do not add them back. On another `Resync`
everything is loaded again; tokens that this load lacks were spent in between.

A store that fails is retried with exponential backoff.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol, TypeVar

from genie.backoff import Backoff
from genie.tasks import cancel_and_wait, closing
from genie.tokens.store import Added, Change, Resync, Spent, TokenStore
from genie.tokens.token import Token

T = TypeVar("T")


class TokenSink(Protocol):
    """What receives the tokens and changes."""

    def add(self, token: Token) -> None:
        """A token exists. It may have been added before."""

    def remove(self, id: str) -> bool:
        """A token was spent. Returns whether it was present."""

    def ids(self) -> Iterable[str]:
        """The ids of all tokens."""


class StoreFollower:
    """Keeps a sink in step with the store.

    `store_error` is the store's last error until it has been loaded again: meanwhile the sink may
    be outdated.
    """

    def __init__(self, store: TokenStore, sink: TokenSink) -> None:
        self.store_error: Exception | None = None
        self._store = store
        self._sink = sink
        self._following: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._first_load: asyncio.Future[None] | None = None
        self._backoff = Backoff()
        self._unconfirmed: set[str] = set()
        """Spent by this process, and not yet reported by the change feed."""
        self._expected: set[str] = set()
        """Outputs of spends in progress here that are not known to be spent."""
        self._spent: set[str] | None = None
        """Spent since the load began; None while there is no load."""
        self._stale: set[str] = set()
        """Present before the load began, and not reported since."""

    async def start(self) -> None:
        """Start, and wait for the first load. Raises the store's errors during it; can be called
        again then.
        """
        if self._following is not None:
            raise RuntimeError("the store is being followed already")
        self._first_load = asyncio.get_running_loop().create_future()
        self._following = asyncio.create_task(self._follow(self._first_load), name="tokens: follow the store")
        try:
            await self.wait_loaded()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop to follow the store."""
        await cancel_and_wait(self._following)
        await cancel_and_wait(self._loading)
        self._following = None
        if self._first_load is not None and not self._first_load.done():
            self._fail_first_load(RuntimeError("the selector was closed before the store was loaded"))

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not closed since."""
        return self._following is not None

    @property
    def is_ready(self) -> bool:
        """Whether the first load has succeeded, and it was not closed since."""
        first_load = self._first_load
        return (
            self._following is not None
            and first_load is not None
            and first_load.done()
            and first_load.exception() is None
        )

    async def wait_loaded(self) -> None:
        """Wait for the first load. Raises the error with which it failed; RuntimeError if there is
        none in progress.
        """
        if self._first_load is None or (self._following is None and self._first_load.exception() is None):
            raise RuntimeError("the selector is not open: use it as an async context manager, or start() it")
        await asyncio.shield(self._first_load)

    def on_spent(self, id: str) -> None:
        """Remove a token that this process has spent. Late reports of it do not bring it back."""
        self._expected.discard(id)
        if self._sink.remove(id):
            self._unconfirmed.add(id)
        if self._spent is not None:
            self._spent.add(id)

    def expect(self, outputs: Iterable[Token]) -> None:
        """Record whether outputs that this process is about to issue are spent before that is
        known.
        """
        self._expected.update(token.id for token in outputs)

    def on_issued(self, outputs: Iterable[Token]) -> None:
        """Expected outputs were issued: add those that are not spent already.

        So change can be selected when its spend returns, however late the change feed reports it.
        """
        for token in outputs:
            if token.id in self._expected:
                self._add(token)

    def stop_expecting(self, outputs: Iterable[Token]) -> None:
        """The spend has ended, with whatever outcome."""
        self._expected.difference_update(token.id for token in outputs)

    # -- changes ------------------------------------------------------------------------------------------

    async def _follow(self, first_load: asyncio.Future[None]) -> None:
        while not (first_load.done() and first_load.exception()):
            try:
                async with closing(self._store.changes()) as changes:
                    async for change in changes:
                        self._apply(change, first_load)
                raise ConnectionError("the change feed of the store has ended")  # noqa: TRY301 - as if it had failed
            except Exception as error:  # noqa: BLE001 - whatever a store can raise
                await cancel_and_wait(self._loading)
                await self._back_off(error, first_load)

    def _apply(self, change: Change, first_load: asyncio.Future[None]) -> None:
        if isinstance(change, Added):
            self._add(change.token)
        elif isinstance(change, Spent):
            self._unconfirmed.discard(change.id)
            self._expected.discard(change.id)
            self._stale.discard(change.id)
            if self._spent is not None:
                self._spent.add(change.id)
            self._sink.remove(change.id)
        elif isinstance(change, Resync):
            if self._loading is not None:
                self._loading.cancel()
            self._spent = set()
            self._stale = set(self._sink.ids())
            self._loading = asyncio.create_task(
                self._load(first_load, self._unconfirmed.copy()), name="tokens: load the store"
            )

    def _add(self, token: Token) -> None:
        if token.id not in self._unconfirmed:
            self._stale.discard(token.id)
            self._sink.add(token)

    async def _back_off(self, error: Exception, first_load: asyncio.Future[None]) -> None:
        if not first_load.done():
            self._fail_first_load(error)
        self.store_error = error
        await asyncio.sleep(self._backoff.next_delay())

    def _fail_first_load(self, error: Exception) -> None:
        if self._first_load is not None:
            self._first_load.set_exception(error)
            self._first_load.exception()  # marks it as retrieved: possibly nothing awaits it

    # -- loading ----------------------------------------------------------------------------------------------

    async def _load(self, first_load: asyncio.Future[None], unconfirmed: set[str]) -> None:
        while True:
            try:
                await self._read()
                break
            except Exception as error:  # noqa: BLE001 - whatever a store can raise
                await self._back_off(error, first_load)
        for id in self._stale:
            self._sink.remove(id)
        self._stale = set()
        self._spent = None
        self._unconfirmed -= unconfirmed  # possibly reported before the feed was connected
        self._backoff.reset()
        self.store_error = None
        if not first_load.done():
            first_load.set_result(None)

    async def _read(self) -> None:
        async with closing(self._store.unspent()) as pages:
            async for page in pages:
                for token in page:
                    if self._spent is None or token.id not in self._spent:
                        self._add(token)
                await asyncio.sleep(0)  # yield to other tasks even if the store does not
