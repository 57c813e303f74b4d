"""Caches of wallets: their unspent tokens, loaded from the store and kept current by its change feed.

`TokenPool` and `AmountIndex` draw tokens at random; `WalletCache` is one wallet; `WalletCaches` are
all wallets in use. Adding, removing and drawing a token take constant time: a wallet may have a
hundred thousand tokens, and a selection needs five.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from random import random
from typing import Any, Literal

from genie.backoff import Backoff
from genie.tasks import cancel_and_wait, closing, supervise
from genie.tokens.guard import Guard
from genie.tokens.sherdlock.holds import LockTracker
from genie.tokens.store import Added, Spent, TokenStore
from genie.tokens.token import Token, Wallet, wallets_of

Prefer = Literal["small", "large"]
Where = Callable[[Token], bool]


class TokenPool:
    """An unordered set of tokens that can be sampled at random.

    `positions` is the position of each token by id; pools that never share a token may share it.
    """

    __slots__ = ("_positions", "_tokens")

    def __init__(self, positions: dict[str, int] | None = None) -> None:
        self._positions: dict[str, int] = {} if positions is None else positions
        self._tokens: list[Token] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[Token]:
        return iter(self._tokens)

    def __contains__(self, id: str) -> bool:
        return id in self._positions

    def add(self, token: Token) -> None:
        """Add a token that is not in the pool."""
        self._positions[token.id] = len(self._tokens)
        self._tokens.append(token)

    def pop(self, id: str) -> Token:
        """Remove a token that is in the pool, and return it."""
        position = self._positions.pop(id)
        last = self._tokens.pop()
        if last.id == id:
            return last
        token, self._tokens[position] = self._tokens[position], last
        self._positions[last.id] = position
        return token

    def draw(self) -> Iterator[Token]:
        """Iterate over the tokens in a new random order, without removing them.

        Random sampling without replacement: a Fisher-Yates shuffle that runs only as far as it is
        consumed. The pool must not change meanwhile.
        """
        tokens, positions = self._tokens, self._positions
        count = len(tokens)
        for position in range(count):
            other = position + int(random() * (count - position))  # noqa: S311 - no secret
            token = tokens[other]
            if other != position:
                tokens[other] = moved = tokens[position]
                tokens[position] = token
                positions[moved.id], positions[token.id] = other, position
            yield token


class AmountIndex:
    """Tokens by amount; those of the same amount in random order."""

    __slots__ = ("_amounts", "_pools", "_positions")

    def __init__(self, tokens: Iterable[Token]) -> None:
        self._positions: dict[str, int] = {}
        self._pools: dict[int, TokenPool] = {}
        for token in tokens:
            self._pool(token.amount).add(token)
        self._amounts = sorted(self._pools)

    def add(self, token: Token) -> None:
        """Add a token that is not in the index."""
        if token.amount not in self._pools:
            insort(self._amounts, token.amount)
        self._pool(token.amount).add(token)

    def remove(self, token: Token) -> None:
        """Remove a token that is in the index."""
        pool = self._pools[token.amount]
        pool.pop(token.id)
        if not pool:
            del self._pools[token.amount]
            del self._amounts[bisect_left(self._amounts, token.amount)]

    def draw(self, prefer: Prefer) -> Iterator[Token]:
        """Iterate over the tokens, the smallest or the largest first. The index must not change meanwhile."""
        for amount in self._amounts if prefer == "small" else reversed(self._amounts):
            yield from self._pools[amount].draw()

    def _pool(self, amount: int) -> TokenPool:
        pool = self._pools.get(amount)
        if pool is None:
            pool = self._pools[amount] = TokenPool(self._positions)
        return pool


# -- one wallet -----------------------------------------------------------------------------------------------


class Load:
    """One load of a wallet from the store.

    `number` counts the loads of the wallet. `feed_epoch` is the epoch of the change feed when the load
    began (0: the feed was not connected).
    """

    __slots__ = ("added", "error", "feed_epoch", "number", "page_count", "spent", "tokens")

    def __init__(self, number: int, feed_epoch: int) -> None:
        self.number = number
        self.feed_epoch = feed_epoch
        self.page_count = 0
        self.tokens: dict[str, Token] = {}
        """What the pages contained."""
        self.added: set[str] = set()
        """Tokens added during the load: the pages may lack them."""
        self.spent: set[str] = set()
        """Tokens spent during the load: the pages may contain them."""
        self.error: Exception | None = None


class Waiter:
    """A selection that waits for `missing` more: for tokens that become free or are added.

    `surplus` is what the wallet has beyond the requested amount if all reservations are released. Once
    it is negative, waiting is pointless. `future` results in False at the deadline, else in True.
    """

    __slots__ = ("future", "missing", "surplus", "where")

    def __init__(self, missing: int, surplus: int, where: Where | None, future: asyncio.Future[bool]) -> None:
        self.missing = missing
        self.surplus = surplus
        self.where = where
        self.future = future

    def on_free(self, token: Token) -> None:
        """A token is free."""
        self.missing -= self._value(token)
        if self.missing <= 0:
            self.wake()

    def on_balance(self, token: Token, sign: int) -> None:
        """A token was added to the wallet (1) or spent (-1)."""
        before = self.surplus
        self.surplus += sign * self._value(token)
        if self.surplus < 0 <= before:
            self.wake()

    def _value(self, token: Token) -> int:
        try:
            return token.amount if self.where is None or self.where(token) else 0
        except Exception:  # noqa: BLE001 - the waiting selection calls `where` too, and raises it
            self.wake()
            return 0

    def wake(self, *, in_time: bool = True) -> None:
        """End the wait; `in_time` is False at the deadline."""
        if not self.future.done():
            self.future.set_result(in_time)


class WalletCache:
    """The unspent tokens of one wallet. `load` is the load in progress, `last_load` the last successful one.

    `waiting` is the set of caches that have waiters: the cache enters and leaves it.
    """

    __slots__ = (
        "_by_amount",
        "_pool",
        "_waiters",
        "_waiting",
        "consistent",
        "last_load",
        "last_used_at",
        "load",
        "load_count",
        "load_started_at",
        "wallet",
    )

    def __init__(self, wallet: Wallet, waiting: set[WalletCache]) -> None:
        self.wallet = wallet
        self._waiting = waiting
        self._pool = TokenPool()
        self._by_amount: AmountIndex | None = None
        """Built when first needed, then kept current."""
        self._waiters: dict[Waiter, None] = {}
        self.load_count = 0
        """Loads begun so far."""
        self.load: Load | None = None
        self.last_load: Load | None = None
        self.load_started_at = -float("inf")
        """When the last load began, successful or not."""
        self.last_used_at = -float("inf")
        """When a selection last used the cache."""
        self.consistent = False
        """Whether the last load was a snapshot of one moment."""

    def __len__(self) -> int:
        return len(self._pool)

    def __iter__(self) -> Iterator[Token]:
        return iter(self._pool)

    def __contains__(self, id: str) -> bool:
        return id in self._pool

    def draw(self, prefer: Prefer | None) -> Iterator[Token]:
        """Iterate over the tokens in the order in which to try them. The cache must not change meanwhile."""
        if prefer is None:
            return self._pool.draw()
        if self._by_amount is None:
            self._by_amount = AmountIndex(self._pool)
        return self._by_amount.draw(prefer)

    # -- changes --------------------------------------------------------------------------------------------

    def add(self, token: Token) -> None:
        """A token was issued."""
        if self.load is not None:
            self.load.added.add(token.id)
        self._insert(token)

    def remove(self, id: str) -> None:
        """A token was spent."""
        if self.load is not None:
            self.load.spent.add(id)
        self._delete(id)

    def begin_load(self, load: Load, now: float) -> None:
        """Begin a load."""
        self.load = load
        self.load_count = load.number
        self.load_started_at = now

    def add_page(self, tokens: Sequence[Token]) -> list[Token]:
        """Add a page of the load in progress, and return its new tokens."""
        load = self.load
        if load is None:
            return []
        load.page_count += 1
        load.tokens.update((token.id, token) for token in tokens)
        new = [token for token in tokens if token.id not in load.spent and token.id not in self._pool]
        for token in new:
            self._insert(token)
        return new

    def finish_load(self, error: Exception | None = None) -> list[Token]:
        """End the load in progress, and return the tokens that it has removed.

        The pages of a load may be of different moments. A token that was spent in between and its
        change may then both be missing. So a load of several pages counts as a consistent snapshot
        only if nothing has changed since the load before.
        """
        load, self.load = self.load, None
        if load is None:
            return []
        load.error = error
        removed: list[Token] = []
        if error is None:
            removed = [token for token in self._pool if token.id not in load.tokens and token.id not in load.added]
            before = {} if self.last_load is None else self.last_load.tokens
            unchanged = not load.spent and not load.added and load.tokens.keys() == before.keys()
            self.consistent = unchanged or load.page_count <= 1
            for token in removed:
                self._delete(token.id)
            self.last_load = load
        self.wake_waiters()
        return removed

    # -- waiters --------------------------------------------------------------------------------------------

    @property
    def has_waiters(self) -> bool:
        """Whether a selection waits for tokens of this wallet."""
        return bool(self._waiters)

    def on_free(self, token: Token) -> None:
        """Report to the waiters that a token is free."""
        for waiter in list(self._waiters):
            waiter.on_free(token)

    async def wait(self, missing: int, surplus: int, where: Where | None, deadline: float | None) -> bool:
        """Wait until tokens worth `missing` are free, more than `surplus` is spent, or a load ends.

        Returns False if the deadline (event-loop seconds) came first.
        """
        loop = asyncio.get_running_loop()
        waiter = Waiter(missing, surplus, where, loop.create_future())
        timer = None if deadline is None else loop.call_at(deadline, lambda: waiter.wake(in_time=False))
        self._waiters[waiter] = None
        self._waiting.add(self)
        try:
            return await waiter.future
        finally:
            del self._waiters[waiter]
            if not self._waiters:
                self._waiting.discard(self)
            if timer is not None:
                timer.cancel()

    def wake_waiters(self) -> None:
        """Let all waiters try again."""
        for waiter in list(self._waiters):
            waiter.wake()

    def _insert(self, token: Token) -> None:
        if token.id not in self._pool:
            self._pool.add(token)
            if self._by_amount is not None:
                self._by_amount.add(token)
            for waiter in self._waiters:
                waiter.on_balance(token, 1)

    def _delete(self, id: str) -> None:
        if id in self._pool:
            token = self._pool.pop(id)
            if self._by_amount is not None:
                self._by_amount.remove(token)
            for waiter in self._waiters:
                waiter.on_balance(token, -1)


# -- all wallets in use ----------------------------------------------------------------------------------------

IDLE_TIMEOUT_S = 600.0
"""A cache that no selection has used for this long is evicted when another wallet is needed."""


class WalletCaches:
    """The caches by wallet. They are loaded on first use and follow the store's change feed.

    `freshness` (seconds) is how old a cache may be while the change feed is not connected. Tokens
    that the `tracker` reports free are passed on to the waiters of their wallets.
    """

    def __init__(self, store: TokenStore, freshness: float, tracker: LockTracker, guard: Guard) -> None:
        self._store = store
        self._freshness = freshness
        self._tracker = tracker
        self._guard = guard
        tracker.on_free = self.on_free
        self._caches: OrderedDict[Wallet, WalletCache] = OrderedDict()
        """The least recently used first."""
        self._waiting: set[WalletCache] = set()
        """The caches that have waiters."""
        self._tokens: dict[str, Token] = {}
        """All tokens that are in a cache, by id."""
        self._expected: set[str] = set()
        """Outputs of spends in progress here that are not known to be spent."""
        self._feed_epoch = 0
        """The connection of the change feed, counted from 1; 0 while it is not connected."""
        self._feed_count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = False

    def start(self) -> None:
        """Follow the store's change feed."""
        if self._open:
            raise RuntimeError("the selector is open already")
        self._open = True
        self._spawn(supervise("following the token store", self._follow_changes))

    async def close(self) -> None:
        """Cancel the background tasks and wake all waiters, which raise RuntimeError."""
        self._open = False
        for task in list(self._tasks):
            await cancel_and_wait(task)
        self.wake_waiters()

    # -- for selections -------------------------------------------------------------------------------------

    def get(self, wallet: Wallet, now: float) -> WalletCache:
        """Return the cache of a wallet: a new, empty one on first use."""
        cache = self._caches.get(wallet)
        if cache is None:
            self._evict_idle(now)
            cache = self._caches[wallet] = WalletCache(wallet, self._waiting)
        else:
            self._caches.move_to_end(wallet)
        cache.last_used_at = now
        return cache

    def refresh(self, cache: WalletCache, now: float) -> None:
        """Load a cache in the background if it is neither current nor fresh."""
        if cache.load is None and not self.is_current(cache) and now - cache.load_started_at > self._freshness:
            self.load(cache)

    def is_current(self, cache: WalletCache) -> bool:
        """Whether the change feed has been connected without a gap since the cache was loaded."""
        return self._feed_epoch != 0 and cache.last_load is not None and cache.last_load.feed_epoch == self._feed_epoch

    def load(self, cache: WalletCache) -> Load:
        """Start to load a cache, unless a load is in progress; return the load."""
        load = cache.load
        if load is None:
            load = Load(cache.load_count + 1, self._feed_epoch)
            cache.begin_load(load, asyncio.get_running_loop().time())
            self._spawn(self._load(cache))
        return load

    def on_spent(self, id: str) -> None:
        """A token was spent: remove it from its wallets."""
        self._expected.discard(id)
        token = self._tokens.pop(id, None)
        for cache in self._caches_of(token):
            cache.remove(id)

    def expect(self, outputs: Sequence[Token]) -> list[Token]:
        """Return the outputs of a spend in progress that belong to a cached wallet.

        Until `stop_expecting` it is recorded if they are spent: the change feed may report that
        before this process knows that they were issued.
        """
        expected = [token for token in outputs if self._caches_of(token)]
        self._expected.update(token.id for token in expected)
        return expected

    def on_issued(self, expected: Sequence[Token]) -> None:
        """Expected outputs were issued: add those that are not spent already."""
        for token in expected:
            if token.id in self._expected:
                self._on_added(token)

    def stop_expecting(self, expected: Sequence[Token]) -> None:
        """The spend has ended, with whatever outcome."""
        self._expected.difference_update(token.id for token in expected)

    def on_free(self, id: str) -> None:
        """A token may have become free."""
        if self._waiting:
            token = self._tokens.get(id)
            if token is not None:
                self._offer(token)

    def wake_waiters(self) -> None:
        """Let all waiters of all wallets try again."""
        for cache in list(self._waiting):
            cache.wake_waiters()

    def check_open(self) -> None:
        """Raise RuntimeError before the start and after the end."""
        if not self._open:
            raise RuntimeError("the selector is not open: use it as an async context manager, or start() it")

    # -- internals ------------------------------------------------------------------------------------------

    def _is_free(self, id: str) -> bool:
        return not self._tracker.is_held(id, self._guard.time())

    def _offer(self, token: Token) -> None:
        for wallet in wallets_of(token):
            cache = self._caches.get(wallet)
            if cache is not None and cache.has_waiters and token.id in cache and self._is_free(token.id):
                cache.on_free(token)

    def _caches_of(self, token: Token | None) -> list[WalletCache]:
        """Return the caches that a token concerns. An unknown one may still appear in those being loaded."""
        if token is None:
            return [cache for cache in self._caches.values() if cache.load is not None]
        return [self._caches[wallet] for wallet in wallets_of(token) if wallet in self._caches]

    async def _follow_changes(self, backoff: Backoff) -> None:
        try:
            async with closing(self._store.changes()) as changes:
                async for change in changes:
                    if isinstance(change, Added):
                        self._on_added(change.token)
                    elif isinstance(change, Spent):
                        self.on_spent(change.id)
                    else:
                        self._feed_count += 1
                        self._feed_epoch = self._feed_count
                        backoff.reset()
        finally:
            self._feed_epoch = 0

    def _on_added(self, token: Token) -> None:
        caches = self._caches_of(token)
        if caches:
            self._tokens[token.id] = token
            for cache in caches:
                cache.add(token)
            self._offer(token)

    async def _load(self, cache: WalletCache) -> None:
        wallet = cache.wallet
        try:
            async with closing(self._store.unspent(**wallet._asdict())) as pages:
                async for page in pages:
                    for token in cache.add_page(page):
                        self._tokens[token.id] = token
                        if cache.has_waiters and self._is_free(token.id):
                            cache.on_free(token)
        except Exception as error:  # noqa: BLE001 - raised by the selections that need the load
            cache.finish_load(error)
        except BaseException:
            cache.finish_load(RuntimeError("the selector was closed"))
            raise
        else:
            for token in cache.finish_load():
                self._discard(token)

    def _discard(self, token: Token) -> None:
        if not any(token.id in cache for cache in self._caches_of(token)):
            self._tokens.pop(token.id, None)

    def _evict_idle(self, now: float) -> None:
        while self._caches:
            wallet, cache = next(iter(self._caches.items()))
            if now - cache.last_used_at < IDLE_TIMEOUT_S or cache.load is not None or cache.has_waiters:
                return
            del self._caches[wallet]
            for token in cache:
                self._discard(token)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
