"""The wallets that are in use, read from the store when it must be and followed from then on."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from genie.tasks import closing, end
from genie.tokens.sherdlock.background import Attempts, again_and_again
from genie.tokens.sherdlock.cache import Cache, Load
from genie.tokens.store import Added, Spent, TokenStore
from genie.tokens.token import Token, Wallet, wallets_of

IDLE_S = 600.0
"""A wallet that nobody has selected from for so long is forgotten when another one is needed."""


class Wallets:
    """Caches by wallet. `freshness` (seconds) is how old one may be while the store's changes can't be followed.

    `free` says whether a token can be had by somebody who waits for one.
    """

    def __init__(self, store: TokenStore, freshness: float, free: Callable[[str], bool]) -> None:
        self._store = store
        self._freshness = freshness
        self._free = free
        self._caches: OrderedDict[Wallet, Cache] = OrderedDict()
        self._known: dict[str, Token] = {}
        """All tokens that are in a cache."""
        self._expected: set[str] = set()
        """Tokens that are being issued here, and that nobody has spent yet."""
        self._feed = 0
        """Which feed is followed: they are counted. 0 while there is none."""
        self._feeds = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = False

    def start(self) -> None:
        """Follow the store."""
        if self._open:
            raise RuntimeError("the selector is open already")
        self._open = True
        self._spawn(again_and_again("following the store of tokens", self._follow))

    async def close(self) -> None:
        """End what goes on, and wake everybody who waits."""
        self._open = False
        for task in list(self._tasks):
            await end(task)
        self.wake()

    # -- for those who select -------------------------------------------------------------------------------

    def cache(self, wallet: Wallet, now: float) -> Cache:
        """A wallet's cache. It is empty at first."""
        cache = self._caches.get(wallet)
        if cache is None:
            self._forget_idle(now)
            cache = self._caches[wallet] = Cache(wallet)
        else:
            self._caches.move_to_end(wallet)
        cache.asked_at = now
        return cache

    def refresh(self, cache: Cache, now: float) -> None:
        """Read a wallet in the background if what is known of it may be old, or is nothing."""
        if cache.load is None and not self.follows(cache) and now - cache.tried_at > self._freshness:
            self.read(cache)

    def follows(self, cache: Cache) -> bool:
        """Whether all that has happened since the cache was read has been told, or will be at once."""
        return self._feed != 0 and cache.done is not None and cache.done.feed == self._feed

    def read(self, cache: Cache) -> Load:
        """Read a wallet; once for all who want it."""
        load = cache.load
        if load is None:
            load = Load(cache.loads + 1, self._feed)
            cache.begin(load, asyncio.get_running_loop().time())
            self._spawn(self._read(cache))
        return load

    def spent(self, id: str) -> None:
        """A token is spent."""
        self._expected.discard(id)
        token = self._known.pop(id, None)
        for cache in self._of(token):
            cache.remove(id)

    def expect(self, outputs: Sequence[Token]) -> list[Token]:
        """Those of the tokens that are about to be issued here that some cache is to have at once.

        It must be known if somebody spends them before it is heard that they are there.
        """
        expected = [token for token in outputs if self._of(token)]
        self._expected.update(token.id for token in expected)
        return expected

    def issued(self, expected: Sequence[Token]) -> None:
        """They are issued."""
        for token in expected:
            if token.id in self._expected:
                self._added(token)

    def expect_no_more(self, expected: Sequence[Token]) -> None:
        """Their issue is over, however it went."""
        self._expected.difference_update(token.id for token in expected)

    def freed(self, id: str) -> None:
        """A token may have become free."""
        token = self._known.get(id)
        if token is not None:
            self._offer(token)

    def wake(self) -> None:
        """Let all who wait look again."""
        for cache in self._caches.values():
            cache.wake()

    def check_open(self) -> None:
        """RuntimeError before the start and after the end."""
        if not self._open:
            raise RuntimeError("the selector is not open: use it as an async context manager, or start() it")

    # -- inside ---------------------------------------------------------------------------------------------

    def _offer(self, token: Token) -> None:
        for wallet in wallets_of(token):
            cache = self._caches.get(wallet)
            if cache is not None and cache.waited_for and token.id in cache and self._free(token.id):
                cache.offer(token)

    def _of(self, token: Token | None) -> list[Cache]:
        """The caches that a token concerns. One that nobody has yet may still come to those that are being read."""
        if token is None:
            return [cache for cache in self._caches.values() if cache.load is not None]
        return [self._caches[wallet] for wallet in wallets_of(token) if wallet in self._caches]

    async def _follow(self, attempts: Attempts) -> None:
        try:
            async with closing(self._store.changes()) as changes:
                async for change in changes:
                    if isinstance(change, Added):
                        self._added(change.token)
                    elif isinstance(change, Spent):
                        self.spent(change.id)
                    else:
                        self._feeds += 1
                        self._feed = self._feeds
                        attempts.worked()
        finally:
            self._feed = 0

    def _added(self, token: Token) -> None:
        caches = self._of(token)
        if caches:
            self._known[token.id] = token
            for cache in caches:
                cache.add(token)
            self._offer(token)

    async def _read(self, cache: Cache) -> None:
        wallet = cache.wallet
        try:
            async with closing(self._store.unspent(**wallet._asdict())) as pages:
                async for page in pages:
                    for token in cache.page(page):
                        self._known[token.id] = token
                        if cache.waited_for and self._free(token.id):
                            cache.offer(token)
        except Exception as error:  # noqa: BLE001 - it is raised to those who can't do without
            cache.end(error)
        except BaseException:
            cache.end(RuntimeError("the selector was closed"))
            raise
        else:
            for token in cache.end():
                self._drop(token)

    def _drop(self, token: Token) -> None:
        if not any(token.id in cache for cache in self._of(token)):
            self._known.pop(token.id, None)

    def _forget_idle(self, now: float) -> None:
        while self._caches:
            wallet, cache = next(iter(self._caches.items()))
            if now - cache.asked_at < IDLE_S or cache.load is not None or cache.waited_for:
                return
            del self._caches[wallet]
            for token in cache:
                self._drop(token)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
