"""Caches of wallets: their unspent tokens, loaded from the store and kept current by its change
feed.

`TokenPool` and `AmountIndex` draw tokens at random; `WalletTokens` keeps held tokens out of the
draws; `WalletCache` is one wallet; `WalletCaches` are all wallets in use. A wallet may have a
hundred thousand tokens, most of them held, and a selection needs five: so adding, removing and
drawing a token take constant time.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import chain, count
from random import random
from typing import Any, Literal, NamedTuple

from genie.backoff import Backoff
from genie.tasks import cancel_and_wait, closing
from genie_tokens.guard import Guard
from genie_tokens.sherdlock.holds import LockTracker
from genie_tokens.store import Added, Spent, TokenStore
from genie_tokens.supervisor import supervise
from genie_tokens.token import Token, Wallet, wallets_of

Prefer = Literal["small", "large"]
Where = Callable[[Token], bool]

MAX_RECORDED_TOKENS = 1_000
"""Maximum number of free tokens that a waiting selection records: its wallet may have a hundred thousand."""


class TokenPool:
    """An unordered set of tokens that can be drawn at random.

    `position_by_id` maps the id of each token to its index in the list of tokens. Pools without common
    tokens may share one mapping.
    """

    __slots__ = ("_position_by_id", "_tokens")

    def __init__(self, position_by_id: dict[str, int] | None = None) -> None:
        self._position_by_id: dict[str, int] = {} if position_by_id is None else position_by_id
        self._tokens: list[Token] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[Token]:
        return iter(self._tokens)

    def __contains__(self, id: str) -> bool:
        return id in self._position_by_id

    def add(self, token: Token) -> None:
        """Add a token that is not in the pool."""
        self._position_by_id[token.id] = len(self._tokens)
        self._tokens.append(token)

    def update(self, token_by_id: dict[str, Token]) -> None:
        """Add many tokens that are not in the pool."""
        self._position_by_id.update(zip(token_by_id, count(len(self._tokens)), strict=False))
        self._tokens.extend(token_by_id.values())

    def pop(self, id: str) -> Token:
        """Remove a token that is in the pool, and return it."""
        position = self._position_by_id.pop(id)
        last_token = self._tokens.pop()
        if last_token.id == id:
            return last_token
        token, self._tokens[position] = self._tokens[position], last_token  # the last token fills the gap
        self._position_by_id[last_token.id] = position
        return token

    def draw(self) -> Iterator[Token]:
        """Iterate over the tokens in a new random order, without removing them.

        Random sampling without replacement: a Fisher-Yates shuffle that advances only as tokens are
        consumed. The pool must not change during the iteration.
        """
        tokens, position_by_id = self._tokens, self._position_by_id
        count = len(tokens)
        for position in range(count):
            drawn = position + int(random() * (count - position))  # noqa: S311 - no secret
            token = tokens[drawn]
            if drawn != position:  # swap the tokens at the two positions
                tokens[drawn] = displaced_token = tokens[position]
                tokens[position] = token
                position_by_id[displaced_token.id] = drawn
                position_by_id[token.id] = position
            yield token


class AmountIndex:
    """Tokens in the order of their amounts; those of the same amount are drawn in random order."""

    __slots__ = ("_amounts", "_pool_by_amount", "_position_by_id")

    def __init__(self, tokens: Iterable[Token]) -> None:
        self._position_by_id: dict[str, int] = {}
        """By token id: the token's position in its pool. All pools share this mapping."""
        self._pool_by_amount: dict[int, TokenPool] = {}
        """By amount: the tokens that have this amount."""
        for token in tokens:
            self._pool(token.amount).add(token)
        self._amounts = sorted(self._pool_by_amount)
        """The amounts that have a pool, the smallest first."""

    def add(self, token: Token) -> None:
        """Add a token that is not in the index."""
        if token.amount not in self._pool_by_amount:
            insort(self._amounts, token.amount)
        self._pool(token.amount).add(token)

    def remove(self, token: Token) -> None:
        """Remove a token that is in the index."""
        pool = self._pool_by_amount[token.amount]
        pool.pop(token.id)
        if not pool:
            del self._pool_by_amount[token.amount]
            del self._amounts[bisect_left(self._amounts, token.amount)]

    def draw(self, prefer: Prefer) -> Iterator[Token]:
        """Iterate over the tokens, the smallest or the largest first. The index must not change
        during the iteration.
        """
        for amount in self._amounts if prefer == "small" else reversed(self._amounts):
            yield from self._pool_by_amount[amount].draw()

    def _pool(self, amount: int) -> TokenPool:
        """Return the pool of the tokens with this amount, which is created on first use."""
        pool = self._pool_by_amount.get(amount)
        if pool is None:
            pool = self._pool_by_amount[amount] = TokenPool(self._position_by_id)
        return pool


class LockedToken(NamedTuple):
    """A token that another client has locked, and the transaction of its lock."""

    token: Token
    transaction: str | None


class WalletTokens:
    """The tokens of one wallet: candidates, and tokens that are set aside because they are held. Only
    candidates are drawn, so that held tokens cost a draw nothing.

    Invariants:
        - Each token is either a candidate, or in `reserved`, or in `locked`.
        - A token in `reserved` was reserved by this selector, and a token in `locked` was locked by
          another client, when it was set aside. Since then no end of a hold was reported, because each
          report puts the token back (`put_back`, `put_back_locked`). So it is still held.
        - `locked_amount` is the sum of the tokens in `locked`. If Genie grants such a token to this selector,
          because the report of the other client's lock was outdated, the token is put back.
        - The ids of these tokens are in `held_ids`, a set that all wallets share.

    A candidate may be held, too, until a draw finds it and sets it aside.
    """

    __slots__ = ("_by_amount", "_held_ids", "_locked_ids", "candidates", "locked", "locked_amount", "reserved")

    def __init__(self, held_ids: set[str]) -> None:
        self._held_ids = held_ids
        self.candidates = TokenPool()
        """The tokens that may be free."""
        self._by_amount: AmountIndex | None = None
        """The candidates by amount. Built when a selection first prefers small or large tokens, then
        kept current.
        """
        self.reserved: dict[str, Token] = {}
        """By token id: tokens that this selector has reserved."""
        self.locked: dict[str, LockedToken] = {}
        """By token id: tokens on which the watch has observed a lock."""
        self.locked_amount = 0
        self._locked_ids: dict[str | None, set[str]] = {}
        """The ids of the tokens in `locked`, by the transaction of the lock."""

    def __len__(self) -> int:
        return len(self.candidates) + len(self.reserved) + len(self.locked)

    def __iter__(self) -> Iterator[Token]:
        return chain(self.candidates, self.held())

    def __contains__(self, id: str) -> bool:
        return id in self.candidates or id in self.locked or id in self.reserved

    def held(self) -> Iterator[Token]:
        """Iterate over the tokens that are set aside."""
        return chain(self.reserved.values(), (locked.token for locked in self.locked.values()))

    def add(self, token: Token) -> None:
        """Add a token that is not in the wallet, as a candidate."""
        self.candidates.add(token)
        if self._by_amount is not None:
            self._by_amount.add(token)

    def pop(self, id: str) -> Token:
        """Remove a token of the wallet, and return it."""
        self.put_back(id)
        return self._pop_candidate(id)

    def _pop_candidate(self, id: str) -> Token:
        token = self.candidates.pop(id)
        if self._by_amount is not None:
            self._by_amount.remove(token)
        return token

    def draw(self, prefer: Prefer | None) -> Iterator[Token]:
        """Iterate over the candidates: the smallest or the largest first as `prefer` says, or in random
        order (None). The tokens must not change during the iteration.
        """
        if prefer is None:
            return self.candidates.draw()
        if self._by_amount is None:
            self._by_amount = AmountIndex(self.candidates)
        return self._by_amount.draw(prefer)

    def set_aside(self, reserved: Iterable[Token], locked: Iterable[LockedToken]) -> None:
        """Set candidates aside that this selector has reserved, or that other clients have locked."""
        for token in reserved:
            self.reserved[token.id] = self._pop_candidate(token.id)
            self._held_ids.add(token.id)
        for each in locked:
            id = each.token.id
            self._pop_candidate(id)
            self.locked[id] = each
            self.locked_amount += each.token.amount
            self._locked_ids.setdefault(each.transaction, set()).add(id)
            self._held_ids.add(id)

    def put_back(self, id: str) -> None:
        """Make a token a candidate again, if it is set aside."""
        token = self.reserved.pop(id, None)
        if token is None and id in self.locked:
            token, transaction = self.locked.pop(id)
            self.locked_amount -= token.amount
            self._locked_ids[transaction].discard(id)
            if not self._locked_ids[transaction]:
                del self._locked_ids[transaction]
        if token is not None:
            self.add(token)

    def put_back_locked_by(self, transaction: str) -> None:
        """Make the tokens that a transaction has locked candidates again, because it may use them itself."""
        for id in [*self._locked_ids.get(transaction, ())]:
            self.put_back(id)

    def put_back_locked(self) -> None:
        """Make all tokens in `locked` candidates again."""
        if self.locked:
            self.candidates.update({id: locked.token for id, locked in self.locked.items()})
            self.locked, self.locked_amount, self._locked_ids = {}, 0, {}
            self._by_amount = None


# -- one wallet -----------------------------------------------------------------------------------------------


class Load:
    """One load of a wallet from the store, in progress or ended."""

    __slots__ = ("added_ids", "error", "feed_epoch", "number", "page_count", "spent_ids", "token_by_id")

    def __init__(self, number: int, feed_epoch: int) -> None:
        self.number = number
        """The loads of the wallet are numbered from 1."""
        self.feed_epoch = feed_epoch
        """The number of the change feed's connection when the load began; 0: not connected."""
        self.page_count = 0
        """The number of pages read so far."""
        self.token_by_id: dict[str, Token] = {}
        """The tokens of all pages."""
        self.added_ids: set[str] = set()
        """Ids of tokens added during the load: the pages may lack them."""
        self.spent_ids: set[str] = set()
        """Ids of tokens spent during the load: the pages may contain them."""
        self.error: Exception | None = None
        """The error with which the load has failed, or None."""


class Waiter:
    """A selection that waits until tokens worth `missing_amount` are free, or until its `surplus_amount` is
    negative: then waiting is pointless.
    """

    __slots__ = ("_freed_amounts", "awaits_load", "future", "missing_amount", "must_retry", "surplus_amount", "where")

    def __init__(
        self, missing_amount: int, surplus_amount: int, where: Where | None, future: asyncio.Future[bool]
    ) -> None:
        self.missing_amount = missing_amount
        """The amount that must become free."""
        self.surplus_amount = surplus_amount
        """By how much the wallet would exceed the requested amount if all others released their
        tokens.
        """
        self.where = where
        self.future = future
        """The result is False at the deadline, else True."""
        self._freed_amounts: dict[str, int] = {}
        """By token id: the amounts that were subtracted from the missing amount, of the first
        `MAX_RECORDED_TOKENS` tokens. Because of the others, the wait may end too early.
        """
        self.awaits_load = False
        """True if the wait also ends when a load of the wallet ends."""
        self.must_retry = False
        """True if the wait must end whatever is missing."""

    def on_free(self, token: Token) -> bool:
        """Subtract the amount of a free token from the missing amount. Returns whether nothing is
        missing.
        """
        if token.id not in self._freed_amounts:
            amount = self._accepted_amount(token)
            self.missing_amount -= amount
            if amount and len(self._freed_amounts) < MAX_RECORDED_TOKENS:
                self._freed_amounts[token.id] = amount
        return self.missing_amount <= 0

    def is_satisfied(self, is_free: Callable[[str], bool]) -> bool:
        """Return whether the wait must end. Adds the amounts of tokens that are no longer free to the
        missing amount.
        """
        for id in [id for id in self._freed_amounts if not is_free(id)]:
            self.missing_amount += self._freed_amounts.pop(id)
        return self.must_retry or self.missing_amount <= 0

    def on_wallet_changed(self, token: Token, sign: int) -> None:
        """Count a token that was added to the wallet (`sign` 1) or spent (`sign` -1). Wakes the
        waiting selection once the whole wallet is worth less than the requested amount, because
        waiting is pointless then.
        """
        previous = self.surplus_amount
        self.surplus_amount += sign * self._accepted_amount(token)
        if self.surplus_amount < 0 <= previous:
            self.wake()

    def _accepted_amount(self, token: Token) -> int:
        """Return a token's amount, or 0 if `where` rejects the token. If `where` raises an
        exception, wakes the waiting selection.
        """
        try:
            return token.amount if self.where is None or self.where(token) else 0
        except Exception:  # noqa: BLE001 - the woken selection calls `where` too, and raises its error
            self.wake()
            return 0

    def wake(self, *, timed_out: bool = False) -> None:
        """End the wait: the waiting call returns False if it has `timed_out`, else True."""
        if not self.future.done():
            self.future.set_result(not timed_out)


class WalletCache:
    """The unspent tokens of one wallet.

    All caches share two sets: `caches_with_waiters` contains a cache while selections wait for its
    tokens, and `held_ids` contains the ids of the tokens that a cache has set aside. `is_free` returns
    whether no transaction is known to hold a token.
    """

    __slots__ = (
        "_caches_with_waiters",
        "_is_free",
        "_satisfied",
        "_waiters",
        "is_consistent",
        "last_load",
        "last_used_at",
        "load",
        "load_count",
        "load_started_at",
        "search_count",
        "tokens",
        "wallet",
    )

    def __init__(
        self, wallet: Wallet, caches_with_waiters: set[WalletCache], held_ids: set[str], is_free: Callable[[str], bool]
    ) -> None:
        self.wallet = wallet
        self._caches_with_waiters = caches_with_waiters
        """Shared by all caches: contains a cache while selections wait for the cache's tokens."""
        self._is_free = is_free
        self.tokens = WalletTokens(held_ids)
        self._waiters: dict[Waiter, None] = {}
        """The selections that wait for tokens, the longest waiting first."""
        self._satisfied: dict[Waiter, None] = {}
        """The selections to wake, in this order: enough tokens are free for them, or they must try again.
        While it is not empty, the event loop will call `_wake_next`.
        """
        self.load_count = 0
        """The number of loads begun so far."""
        self.load: Load | None = None
        """The load in progress, or None."""
        self.last_load: Load | None = None
        """The last successful load, or None."""
        self.load_started_at = -float("inf")
        """When the last load began, successful or not."""
        self.last_used_at = -float("inf")
        """When a selection last began to use the cache."""
        self.search_count = 0
        """The number of selections that use the cache now."""
        self.is_consistent = False
        """True if the last load has read the wallet as it was at one point in time."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[Token]:
        return iter(self.tokens)

    def __contains__(self, id: str) -> bool:
        return id in self.tokens

    # -- changes --------------------------------------------------------------------------------------------

    def add(self, token: Token) -> None:
        """Add a token that was issued."""
        if self.load is not None:
            self.load.added_ids.add(token.id)
        self._insert(token)

    def remove(self, id: str) -> None:
        """Remove a token that was spent."""
        if self.load is not None:
            self.load.spent_ids.add(id)
        self._delete(id)

    def begin_load(self, load: Load, now: float) -> None:
        """Record a load that begins at the time `now`."""
        self.load = load
        self.load_count = load.number
        self.load_started_at = now

    def add_page(self, tokens: Sequence[Token]) -> list[Token]:
        """Add the tokens of a page that the load in progress has read, except tokens that were
        spent since the load began. Returns the tokens that were not in the cache before.
        """
        load = self.load
        if load is None:
            return []
        load.page_count += 1
        load.token_by_id.update((token.id, token) for token in tokens)
        new = [token for token in tokens if token.id not in load.spent_ids and token.id not in self.tokens]
        for token in new:
            self._insert(token)
        return new

    def finish_load(self, error: Exception | None = None) -> list[Token]:
        """End the load in progress, and wake the waiting selections. If the load has succeeded
        (`error` is None), remove the tokens that the load has not found, and return them.

        Pages are read at different times: if a token is spent in between, both this token and the
        token issued as its change may be missing in the pages. So a load of several pages counts as
        consistent only if the wallet has not changed since the previous load.
        """
        load, self.load = self.load, None
        if load is None:
            return []  # no load was in progress
        load.error = error
        removed: list[Token] = []
        if error is None:
            removed = [
                token for token in self.tokens if token.id not in load.token_by_id and token.id not in load.added_ids
            ]
            previous = {} if self.last_load is None else self.last_load.token_by_id
            unchanged = not load.spent_ids and not load.added_ids and load.token_by_id.keys() == previous.keys()
            self.is_consistent = unchanged or load.page_count <= 1
            for token in removed:
                self._delete(token.id)
            self.last_load = load
        self.retry(waiter for waiter in self._waiters if waiter.awaits_load)
        return removed

    # -- waiters --------------------------------------------------------------------------------------------

    @property
    def has_waiters(self) -> bool:
        """True if any selection waits for tokens of this wallet."""
        return bool(self._waiters)

    def on_free(self, token: Token) -> None:
        """Notify the waiting selections that a token is free.

        Those for which enough tokens are free now are woken one after the other, the longest waiting
        first, if the tokens are still free then. If all were woken, one would get the token, and the
        others would search the whole wallet in vain.
        """
        self._wake_in_turn(waiter for waiter in self._waiters if waiter.on_free(token))

    def retry(self, waiters: Iterable[Waiter] | None = None) -> None:
        """Wake waiting selections, by default all, one after the other: each then searches the wallet."""
        chosen = list(self._waiters if waiters is None else waiters)
        for waiter in chosen:
            waiter.must_retry = True
        self._wake_in_turn(chosen)

    def _wake_in_turn(self, waiters: Iterable[Waiter]) -> None:
        was_empty = not self._satisfied
        self._satisfied.update(dict.fromkeys(waiters))
        if was_empty and self._satisfied:
            asyncio.get_running_loop().call_soon(self._wake_next)

    def _wake_next(self) -> None:
        """Wake the next of the waiting selections in `_satisfied`, unless its tokens are no longer free. It
        reserves its tokens before the event loop calls this function again.
        """
        waiter = next(iter(self._satisfied))
        del self._satisfied[waiter]
        if waiter in self._waiters and waiter.is_satisfied(self._has_free):
            waiter.wake()
        if self._satisfied:
            asyncio.get_running_loop().call_soon(self._wake_next)

    def _has_free(self, id: str) -> bool:
        return id in self.tokens and self._is_free(id)

    async def wait(self, missing_amount: int, surplus_amount: int, where: Where | None, deadline: float | None) -> bool:
        """Wait until tokens worth `missing_amount` become free. Only tokens that `where` accepts count.
        Without a deadline, the wait also ends when a load of the wallet ends.

        The wait also ends when tokens worth more than `surplus_amount` are spent, because the wallet can
        no longer reach the requested amount then. Returns False if the `deadline` is reached first
        (event-loop seconds; None: no deadline), and True otherwise.
        """
        loop = asyncio.get_running_loop()
        waiter = Waiter(missing_amount, surplus_amount, where, loop.create_future())
        waiter.awaits_load = deadline is None
        timer = None if deadline is None else loop.call_at(deadline, lambda: waiter.wake(timed_out=True))
        self._waiters[waiter] = None
        self._caches_with_waiters.add(self)
        try:
            return await waiter.future
        finally:
            del self._waiters[waiter]
            if not self._waiters:
                self._caches_with_waiters.discard(self)
            if timer is not None:
                timer.cancel()

    def wake_waiters(self) -> None:
        """Wake all waiting selections of this wallet, which then try again."""
        for waiter in list(self._waiters):
            waiter.wake()

    def _insert(self, token: Token) -> None:
        """Insert a token, and notify the waiting selections. Has no effect if the token is present
        already.
        """
        if token.id not in self.tokens:
            self.tokens.add(token)
            for waiter in self._waiters:
                waiter.on_wallet_changed(token, 1)

    def _delete(self, id: str) -> None:
        """Delete a token, and notify the waiting selections. Has no effect if the token is absent."""
        if id in self.tokens:
            token = self.tokens.pop(id)
            for waiter in self._waiters:
                waiter.on_wallet_changed(token, -1)


# -- all wallets in use ----------------------------------------------------------------------------------------

IDLE_TIMEOUT_S = 600.0
"""A cache that no selection has used for this long is evicted when another wallet is needed."""


class WalletCaches:
    """The caches of all wallets in use. A cache is loaded when its wallet is first used, and then
    follows the store's change feed.

    While the change feed is not connected, caches older than `max_cache_age` seconds are loaded
    again. When the `tracker` reports that a token is free, the selections that wait for tokens of
    its wallets are notified.
    """

    def __init__(self, store: TokenStore, max_cache_age: float, tracker: LockTracker, guard: Guard) -> None:
        self._store = store
        self._max_cache_age = max_cache_age
        self._tracker = tracker
        self._guard = guard
        tracker.on_hold_ended = self.on_hold_ended
        tracker.on_cleared = self.put_back_locked
        self._caches: OrderedDict[Wallet, WalletCache] = OrderedDict()
        """By wallet, the least recently used first."""
        self._caches_with_waiters: set[WalletCache] = set()
        """The caches for whose tokens selections wait."""
        self._held_ids: set[str] = set()
        """Ids of all tokens that a cache has set aside."""
        self._tokens: dict[str, Token] = {}
        """All tokens that are in a cache, by id."""
        self._expected_ids: set[str] = set()
        """Ids of the tokens that spends in progress in this process are about to issue, except
        tokens that are known to be spent.
        """
        self._feed_epoch = 0
        """The number of the change feed's current connection, from 1. 0 while the feed is not
        connected.
        """
        self._feed_count = 0
        """The number of connections of the change feed so far."""
        self._tasks: set[asyncio.Task[None]] = set()
        """The background tasks: the loads, and the task that follows the change feed."""
        self._is_open = False
        """True between `start` and `close`."""

    def start(self) -> None:
        """Start to follow the store's change feed."""
        if self._is_open:
            raise RuntimeError("the selector is open already")
        self._is_open = True
        self._spawn(supervise("following the token store", self._follow_changes))

    async def close(self) -> None:
        """Cancel the background tasks, and wake all waiting selections, which then raise
        RuntimeError.
        """
        self._is_open = False
        for task in list(self._tasks):
            await cancel_and_wait(task)
        for cache in list(self._caches_with_waiters):
            cache.wake_waiters()

    # -- for selections -------------------------------------------------------------------------------------

    def get(self, wallet: Wallet, now: float) -> WalletCache:
        """Return the cache of a wallet. Creates the cache on first use; before that, evicts the
        caches that are idle at the time `now`.
        """
        cache = self._caches.get(wallet)
        if cache is None:
            self._evict_idle(now)
            cache = self._caches[wallet] = WalletCache(wallet, self._caches_with_waiters, self._held_ids, self._is_free)
        else:
            self._caches.move_to_end(wallet)
        cache.last_used_at = now
        return cache

    def refresh(self, cache: WalletCache, now: float) -> None:
        """Begin to load a cache that may be outdated.

        Does nothing if the change feed keeps the cache current, if a load is in progress, or if the
        last load began at most `max_cache_age` seconds ago.
        """
        if cache.load is None and not self.is_current(cache) and now - cache.load_started_at > self._max_cache_age:
            self.load(cache)

    def is_current(self, cache: WalletCache) -> bool:
        """Return whether the change feed has been connected without interruption since the cache
        was loaded.
        """
        return self._feed_epoch != 0 and cache.last_load is not None and cache.last_load.feed_epoch == self._feed_epoch

    def load(self, cache: WalletCache) -> Load:
        """Return the cache's load in progress, or begin a load if there is none."""
        load = cache.load
        if load is None:
            load = Load(number=cache.load_count + 1, feed_epoch=self._feed_epoch)
            cache.begin_load(load, asyncio.get_running_loop().time())
            self._spawn(self._load(cache))
        return load

    def on_spent(self, id: str) -> None:
        """Remove a spent token from the caches of its owner's and its account's wallets."""
        self._expected_ids.discard(id)
        self.put_back(id)
        token = self._tokens.pop(id, None)
        for cache in self._caches_of(token):
            cache.remove(id)

    def expect(self, outputs: Sequence[Token]) -> list[Token]:
        """Begin to record which of these outputs are spent: an output stays in `_expected_ids` until it
        is spent, or `stop_expecting` is called.

        Must be called before this process issues the outputs, because the change feed may report
        that an output is spent before the issuing call returns. Returns the outputs that belong to
        a cached wallet; the other outputs are not recorded.
        """
        expected = [token for token in outputs if self._caches_of(token)]
        self._expected_ids.update(token.id for token in expected)
        return expected

    def on_issued(self, expected: Sequence[Token]) -> None:
        """Add the outputs of a spend that has succeeded. `expected`: the return value of `expect`.

        An output that was spent meanwhile is no longer recorded in `_expected_ids`, and is skipped.
        """
        for token in expected:
            if token.id in self._expected_ids:
                self._on_added(token)

    def stop_expecting(self, expected: Sequence[Token]) -> None:
        """Stop recording which of these outputs are spent, because the spend that issues them has
        succeeded or failed.
        """
        self._expected_ids.difference_update(token.id for token in expected)

    def on_hold_ended(self, id: str, is_free: bool) -> None:
        """Make a token a candidate of its wallets again, because one of its holds has ended. If it may be
        free now, notify the selections that wait for tokens of its wallets.
        """
        if id in self._held_ids:
            self.put_back(id)
        if is_free and self._caches_with_waiters:
            token = self._tokens.get(id)
            if token is not None:
                self._notify_waiters(token)

    def put_back(self, id: str) -> None:
        """Make a token a candidate of its wallets again, if it is set aside."""
        if id in self._held_ids:
            self._held_ids.discard(id)
            for cache in self._caches_of(self._tokens[id]):
                cache.tokens.put_back(id)

    def put_back_locked(self) -> None:
        """Make all tokens on which the watch has observed a lock candidates of their wallets again."""
        self._held_ids.clear()
        for cache in self._caches.values():
            cache.tokens.put_back_locked()
            self._held_ids.update(cache.tokens.reserved)

    def retry_waiters(self) -> None:
        """Wake the waiting selections of all wallets, one after the other, which then try again."""
        for cache in self._caches_with_waiters:
            cache.retry()

    def check_open(self) -> None:
        """Raise RuntimeError before `start` and after `close`."""
        if not self._is_open:
            raise RuntimeError("the selector is not open: use it as an async context manager, or start() it")

    # -- internals ------------------------------------------------------------------------------------------

    def _is_free(self, id: str) -> bool:
        """Return whether no transaction is known to hold a token."""
        return not self._tracker.is_held(id, self._guard.time())

    def _notify_waiters(self, token: Token) -> None:
        """If a token is free, notify the selections that wait for tokens of its wallets."""
        for wallet in wallets_of(token):
            cache = self._caches.get(wallet)
            if cache is not None and cache.has_waiters and token.id in cache and self._is_free(token.id):
                cache.on_free(token)

    def _caches_of(self, token: Token | None) -> list[WalletCache]:
        """Return the existing caches of a token's wallets. If the token is not in any cache (None),
        return the caches that are being loaded, because their loads may still find the token.
        """
        if token is None:
            return [cache for cache in self._caches.values() if cache.load is not None]
        return [self._caches[wallet] for wallet in wallets_of(token) if wallet in self._caches]

    async def _follow_changes(self, backoff: Backoff) -> None:
        """Apply the changes of the store's change feed until the feed fails. The caller retries,
        with a `backoff` that is reset when the feed is connected.
        """
        try:
            async with closing(self._store.changes()) as changes:
                async for change in changes:
                    if isinstance(change, Added):
                        self._on_added(change.token)
                    elif isinstance(change, Spent):
                        self.on_spent(change.id)
                    else:  # Resync: the feed is connected
                        self._feed_count += 1
                        self._feed_epoch = self._feed_count
                        backoff.reset()
        finally:
            self._feed_epoch = 0

    def _on_added(self, token: Token) -> None:
        """Add a token that was issued to the caches of its wallets."""
        caches = self._caches_of(token)
        if caches:
            self._tokens[token.id] = token
            for cache in caches:
                cache.add(token)
            self._notify_waiters(token)

    async def _load(self, cache: WalletCache) -> None:
        """Load a wallet from the store into its cache, page by page. An error of the store is not
        raised, but stored in the `Load`.
        """
        wallet = cache.wallet
        try:
            async with closing(self._store.unspent(**wallet._asdict())) as pages:
                async for page in pages:
                    for token in cache.add_page(page):
                        self._tokens[token.id] = token
                        if cache.has_waiters and self._is_free(token.id):
                            cache.on_free(token)
        except Exception as error:  # noqa: BLE001 - the selections that wait for the load raise it
            cache.finish_load(error)
        except BaseException:  # `close` has cancelled the task
            cache.finish_load(RuntimeError("the selector was closed"))
            raise
        else:
            for token in cache.finish_load():
                self._discard(token)

    def _discard(self, token: Token) -> None:
        """Remove a token from `_tokens`, the tokens by id, unless a cache still contains it."""
        self.put_back(token.id)
        if not any(token.id in cache for cache in self._caches_of(token)):
            self._tokens.pop(token.id, None)

    def _evict_idle(self, now: float) -> None:
        """Evict caches that no selection has used for `IDLE_TIMEOUT_S`, the least recently used
        first. Stops at the first cache that was used since, is in use, or is being loaded.
        """
        while self._caches:
            wallet, cache = next(iter(self._caches.items()))  # the least recently used
            if now - cache.last_used_at < IDLE_TIMEOUT_S or cache.search_count or cache.load is not None:
                return
            del self._caches[wallet]
            for token in cache:
                self._discard(token)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a background task, which `close` cancels."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
