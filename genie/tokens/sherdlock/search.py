"""Finding free tokens of a wallet and locking them in Genie.

A search draws candidates at random from the wallet's cache, skips those that are known to be held,
and requests their locks, together with some spare tokens, in one request. If other clients have
locked too many of them, it retries at once with more spares. If the cache has too few free tokens,
it loads the wallet, or waits until others release theirs. It reports insufficient funds only after
a consistent load.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from random import random
from typing import Any, NamedTuple

from genie.errors import GenieError
from genie.tokens.errors import FundsLocked, InsufficientFunds, TooManyTokens
from genie.tokens.sherdlock.cache import Prefer, WalletCache, Where
from genie.tokens.sherdlock.grants import Grants, Shortfall, acquire
from genie.tokens.sherdlock.holds import LockTracker, Reservation
from genie.tokens.sherdlock.selection import SelectorContext
from genie.tokens.token import MAX_AMOUNT, Token, Wallet


class TransactionMutex:
    """Serializes the requests of each transaction; different transactions never wait for each
    other.

    Genie's locks do not exclude their own transaction: without this mutex, two concurrent requests
    of one transaction could be granted the same token.
    """

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        """By transaction: its lock, and the number of tasks that hold it or wait for it."""

    @asynccontextmanager
    async def hold(self, transaction: str) -> AsyncIterator[None]:
        """Wait for the mutex of a transaction, and hold it during the block."""
        lock, users = self._locks.get(transaction) or (asyncio.Lock(), 0)
        self._locks[transaction] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            _, users = self._locks[transaction]
            if users > 1:
                self._locks[transaction] = (lock, users - 1)
            else:
                del self._locks[transaction]


# -- candidates -------------------------------------------------------------------------------------------------

MIN_SPARES = 3
"""Minimum number of spare tokens in a request."""


def spare_count(needed: int) -> int:
    """Return the number of spare tokens to request beyond those that are needed: half as many, at
    least `MIN_SPARES`.

    With spares a request succeeds even if others have just locked some of its tokens: if five are
    needed, three of the eight requested. If others hold one token of ten, one request of 200 fails.
    More spares would cost Genie and the client time to parse their names.
    """
    return max(needed // 2, MIN_SPARES)


@dataclass(frozen=True, slots=True)
class SelectionRequest:
    """The arguments of `select`, without the wallet."""

    amount: int
    transaction: str
    where: Where | None
    prefer: Prefer | None
    limit: int | None

    def accepts(self, token: Token) -> bool:
        """Whether `where` accepts a token."""
        return self.where is None or self.where(token)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens to request, in this order. The first `needed` reach the amount; the rest are spares.

    `complete`: the wallet has no further candidates. `skipped`: the number of tokens left out
    because others hold them.
    """

    tokens: list[Token]
    needed: int
    complete: bool
    skipped: int = 0

    @property
    def contended(self) -> bool:
        """Whether others hold too many tokens for a request: without knowledge of the holders it
        would probably have failed.
        """
        return self.skipped > spare_count(self.needed)


def pick_candidates(
    request: SelectionRequest,
    cache: WalletCache,
    tracker: LockTracker,
    now: float,
    *,
    include_own: bool,
    spare_factor: int,
) -> Candidates | None:
    """Draw tokens of a wallet that are not known to be held, in the preferred order, or the largest
    if more than `limit` would be needed. None if they don't reach the amount.

    `include_own` includes tokens that the same transaction has locked, but that no selection of
    this selector has reserved. `spare_factor` multiplies the number of spares.
    """
    candidates = _take_candidates(request, cache.draw(request.prefer), tracker, now, include_own, spare_factor)
    if request.limit is not None and candidates is not None and candidates.needed > request.limit:
        candidates = _take_candidates(request, cache.draw("large"), tracker, now, include_own, spare_factor)
        if candidates is not None and candidates.needed > request.limit:
            return None
    return candidates


def _take_candidates(
    request: SelectionRequest,
    drawn: Iterator[Token],
    tracker: LockTracker,
    now: float,
    include_own: bool,
    spare_factor: int,
) -> Candidates | None:
    """Take tokens from an iterator, without those that are held or rejected by `where`, until they
    reach the amount and there are enough spares. None if they don't reach the amount.
    """
    missing, where, transaction = request.amount, request.where, request.transaction
    reservations, observed = tracker.reservations, tracker.observed
    tokens: list[Token] = []
    target_count = -1  # unknown until the amount is reached
    needed = skipped = 0
    for token in drawn:
        id = token.id
        if id in reservations and tracker.local_reservation(id, now) is not None:
            continue
        if id in observed:
            lock = tracker.observed_lock(id, now)
            if lock is not None and not (include_own and lock.transaction == transaction):
                skipped += 1
                continue
        if where is not None and not where(token):
            continue
        tokens.append(token)
        missing -= token.amount
        if target_count < 0:
            if missing <= 0:
                needed = len(tokens)
                target_count = needed + spare_count(needed) * spare_factor
        elif len(tokens) >= target_count:
            return Candidates(tokens, needed, False, skipped)
    return Candidates(tokens, needed, True, skipped) if target_count >= 0 else None


def all_candidates(
    request: SelectionRequest, cache: WalletCache, tracker: LockTracker, now: float
) -> Candidates | None:
    """Return all tokens that this selector has not reserved, even those that others are reported to
    hold, after the free ones. None if they don't reach the amount.

    For the last attempt: the reports may be outdated, so Genie decides.
    """
    free: list[Token] = []
    locked: list[Token] = []
    for token in cache.draw("large" if request.limit is not None else request.prefer):
        if tracker.local_reservation(token.id, now) is None and request.accepts(token):
            (locked if tracker.held_by_other(token.id, request.transaction, now) else free).append(token)
    tokens = free + locked
    reached = 0
    for needed, token in enumerate(tokens, 1):
        reached += token.amount
        if reached >= request.amount:
            return Candidates(tokens, needed, complete=True)
    return None


@dataclass(slots=True)
class Balance:
    """The amounts in a wallet that a request can use: `free` ones, and those that others have
    `locked`.

    For a request with a `limit`, `largest_free` is the sum of the `limit` largest free tokens, and
    `largest` that of the `limit` largest tokens, free or locked.
    """

    free: int = 0
    locked: int = 0
    largest_free: int = 0
    largest: int = 0

    @classmethod
    def of(cls, request: SelectionRequest, tokens: Iterable[Token], tracker: LockTracker, now: float) -> Balance:
        """Compute the balance of tokens for a request. It excludes those that `where` rejects, and
        those that the same transaction holds.
        """
        free: list[int] = []
        locked: list[int] = []
        for token in tokens:
            if not request.accepts(token):
                continue
            reservation = tracker.local_reservation(token.id, now)
            if reservation is None:
                (locked if tracker.held_by_other(token.id, request.transaction, now) else free).append(token.amount)
            elif reservation.pending or reservation.transaction != request.transaction:
                locked.append(token.amount)
        balance = cls(sum(free), sum(locked))
        if request.limit is not None:
            balance.largest_free = sum(sorted(free, reverse=True)[: request.limit])
            balance.largest = sum(sorted(free + locked, reverse=True)[: request.limit])
        return balance

    def suffices(self, request: SelectionRequest) -> bool:
        """Return whether the amount could be reached if all others released their tokens."""
        return self.surplus(request) >= 0

    def surplus(self, request: SelectionRequest) -> int:
        """Return the amount in excess of the requested one, if all others released their tokens;
        negative if it would not suffice.
        """
        return (self.free + self.locked if request.limit is None else self.largest) - request.amount

    def missing(self, request: SelectionRequest) -> int:
        """Return the amount that must become free before another attempt can succeed.

        With a `limit` any further token may suffice.
        """
        return 1 if request.limit is not None else max(1, request.amount - self.free)

    def shortfall_error(self, request: SelectionRequest, wallet: Wallet) -> InsufficientFunds | TooManyTokens:
        """Return the error for a request that can't be granted with this balance."""
        if self.free + self.locked < request.amount:
            return InsufficientFunds(request.amount, self.free, self.locked, wallet)
        if request.limit is not None and self.largest < request.amount:
            return TooManyTokens(request.amount, request.limit, self.largest_free)
        return FundsLocked(request.amount, self.free, self.locked, wallet)


# -- the search -------------------------------------------------------------------------------------------------

SPARE_FACTOR = 8
"""Factor by which each immediate retry increases the number of spares."""
MAX_QUERIED_TOKENS = 1_000
"""Maximum number of tokens for which Genie is queried how much others hold, to report it in an
error.
"""
MAX_RELOADS = 2
"""How often a wallet that changed during its load is loaded again at once."""


class RetryBudget:
    """The remaining retries of one request: `waits_left` for tokens that others hold, and
    `reloads_left` of its wallet.

    `stale_load` is a load number: only loads with greater numbers began late enough for the
    request. `wait_deadline` is the end of the current wait, if there is one.
    """

    __slots__ = ("has_waited", "reloads_left", "stale_load", "wait_deadline", "waits_left")

    def __init__(self, stale_load: int, waits: int) -> None:
        self.stale_load = stale_load
        self.waits_left = waits
        self.has_waited = False
        self.wait_deadline: float | None = None
        self.reloads_left = MAX_RELOADS

    def has_loaded(self, cache: WalletCache) -> bool:
        """Return whether a load of the wallet that began late enough has succeeded."""
        return cache.last_load is not None and cache.last_load.number > self.stale_load

    def must_load(self, cache: WalletCache, *, suffices: bool, is_current: bool) -> bool:
        """Return whether the wallet must be loaded before the next attempt.

        It need not if that was done, nor before the first wait if the cache is current and its
        balance `suffices` (some of it is only locked).
        """
        can_wait_first = suffices and is_current and self.waits_left and not self.has_waited
        return not self.has_loaded(cache) and not can_wait_first

    def require_reload(self, cache: WalletCache) -> None:
        """Use one of the reloads: only loads that begin from now on count."""
        self.reloads_left -= 1
        self.stale_load = cache.load_count


class Match(NamedTuple):
    """Tokens that were locked for a request, and their reservation."""

    grants: Grants
    reservation: Reservation


class Search:
    """Executes selection requests. `retries`, `backoff` (seconds) and `immediate_retries` are the
    arguments of `SherdlockSelector`.
    """

    __slots__ = ("_backoff", "_caches", "_context", "_immediate_retries", "_retries", "_tracker", "collisions", "mutex")

    def __init__(self, context: SelectorContext, *, retries: int, backoff: float, immediate_retries: int) -> None:
        self._context = context
        self._tracker = context.tracker
        self._caches = context.caches
        self._retries = retries
        self._backoff = backoff
        self._immediate_retries = immediate_retries
        self.mutex = TransactionMutex()
        self.collisions = 0
        """The number of requests that Genie has rejected because other clients held more of the
        tokens than this selector knew.
        """

    async def find(self, request: SelectionRequest, wallet: Wallet) -> Match:
        """Find and lock tokens of a wallet: try, then load the wallet or wait for others, and try
        again.

        InsufficientFunds, FundsLocked or TooManyTokens if that is impossible. After any error, and
        when cancelled, nothing stays locked.
        """
        now = self._context.now()
        cache = self._caches.get(wallet, now)
        budget = RetryBudget(cache.load_count, self._retries)
        self._caches.refresh(cache, now)
        while True:
            self._caches.check_open()
            match = await self._attempt(request, cache, include_own=budget.has_loaded(cache))
            if match is not None:
                return match
            self._caches.check_open()
            balance = Balance.of(request, cache, self._tracker, self._context.now())
            suffices = balance.suffices(request)
            if budget.must_load(cache, suffices=suffices, is_current=self._caches.is_current(cache)):
                await self._await_load(request, cache, balance, budget)
                continue
            if not suffices:
                await self._check_funds(request, cache)
                if budget.reloads_left:
                    budget.require_reload(cache)
                    continue
            if not await self._await_release(request, cache, balance, budget):
                return await self._last_attempt(request, cache)

    async def reserve(
        self, reservation: Reservation, acquiring: Coroutine[Any, Any, Grants | Shortfall], limit: int | None = None
    ) -> Grants | Shortfall:
        """Make a reservation in the tracker, and lock its tokens in Genie by awaiting `acquiring`,
        which is a call of `acquire` or `acquire_all`. The reservation is removed if that fails, or
        if it locks more tokens than `limit`.

        The caller must hold the transaction's mutex.
        """
        tracker = self._tracker
        tracker.reserve(reservation)
        try:
            grants = await acquiring
            if isinstance(grants, Grants) and limit is not None and len(grants.tokens) > limit:
                await grants.release()
                grants = Shortfall(grants.amount, 0)
        except BaseException:
            tracker.drop(reservation)
            raise
        if isinstance(grants, Shortfall):
            tracker.narrow(reservation, ())
        else:
            reservation.expires_at = grants.requested_at + self._context.lease
            tracker.narrow(reservation, [token.id for token in grants.tokens])
        return grants

    # -- attempts -------------------------------------------------------------------------------------------

    async def _attempt(self, request: SelectionRequest, cache: WalletCache, *, include_own: bool) -> Match | None:
        """Request candidates, and retry at once with more spares while other clients hold too many
        of them. None if too few tokens are known to be free, or all retries have failed.
        """
        spare_factor = 1
        for retries_left in range(self._immediate_retries, -1, -1):
            async with self.mutex.hold(request.transaction):
                candidates = pick_candidates(
                    request,
                    cache,
                    self._tracker,
                    self._context.now(),
                    include_own=include_own,
                    spare_factor=spare_factor,
                )
                if candidates is None:
                    return None
                result = await self._acquire(request, candidates)
            collided = isinstance(result, Shortfall)
            self._context.subscription.record_request(contended=candidates.contended or collided)
            if not isinstance(result, Shortfall):
                return result
            self.collisions += 1
            if request.limit is not None and request.prefer != "large":
                request = replace(request, prefer="large")  # which needs the fewest tokens
            elif candidates.complete:
                return None
            spare_factor = spare_factor * SPARE_FACTOR if retries_left > 1 else sys.maxsize  # all tokens at last
        return None

    async def _acquire(self, request: SelectionRequest, candidates: Candidates) -> Match | Shortfall:
        """Reserve the needed candidates, and request their locks with the spares."""
        context = self._context
        reservation = Reservation(request.transaction, [token.id for token in candidates.tokens[: candidates.needed]])
        acquiring = acquire(
            context.client, self._tracker, candidates.tokens, request.amount, request.transaction, context.lease
        )
        grants = await self.reserve(reservation, acquiring, request.limit)
        return grants if isinstance(grants, Shortfall) else Match(grants, reservation)

    async def _last_attempt(self, request: SelectionRequest, cache: WalletCache) -> Match:
        """Request all tokens, even those that others are reported to hold; if that fails raise the
        error that ends the search.
        """
        async with self.mutex.hold(request.transaction):
            candidates = all_candidates(request, cache, self._tracker, self._context.now())
            result = None if candidates is None else await self._acquire(request, candidates)
        if isinstance(result, Match):
            return result
        balance = Balance.of(request, cache, self._tracker, self._context.now())
        if result is not None and request.limit is None and balance.suffices(request):
            raise FundsLocked(request.amount, result.free, balance.free + balance.locked - result.free, cache.wallet)
        if not balance.suffices(request) and cache.last_load is not None:
            # Others have spent tokens since the load, and the cache may lack their change: use the balance of the load.
            balance = Balance.of(request, cache.last_load.tokens.values(), self._tracker, self._context.now())
        raise balance.shortfall_error(request, cache.wallet)

    # -- loading --------------------------------------------------------------------------------------------

    async def _await_load(
        self, request: SelectionRequest, cache: WalletCache, balance: Balance, budget: RetryBudget
    ) -> None:
        """Load the wallet, and wait until the load has ended, or the tokens loaded so far may
        suffice. Raises the error of the store if the load fails.
        """
        load = self._caches.load(cache)
        missing = balance.missing(request) if request.limit is None else MAX_AMOUNT
        await cache.wait(missing, balance.surplus(request), request.where, None)
        self._caches.check_open()
        if load.error is not None and load.number > budget.stale_load:
            raise load.error

    async def _check_funds(self, request: SelectionRequest, cache: WalletCache) -> None:
        """Raise the shortfall error if the last load of the wallet was consistent, and had not
        enough tokens for the request. Otherwise another load may find more.
        """
        if cache.last_load is not None and cache.consistent:
            loaded = cache.last_load.tokens.values()
            balance = Balance.of(request, loaded, self._tracker, self._context.now())
            if not balance.suffices(request):
                raise (await self._query_balance(request, loaded, balance)).shortfall_error(request, cache.wallet)

    async def _query_balance(self, request: SelectionRequest, tokens: Iterable[Token], balance: Balance) -> Balance:
        """Correct the free and the locked amount of a balance by those that Genie reports, since
        without a subscription this selector does not know what others hold. For error messages
        only.

        Requests more than the sum of all tokens, so that Genie locks nothing and reports the
        amounts.
        """
        context = self._context
        now = context.now()
        not_reserved_here = [
            token
            for token in tokens
            if self._tracker.local_reservation(token.id, now) is None and request.accepts(token)
        ]
        total = sum(token.amount for token in not_reserved_here)
        if 0 < len(not_reserved_here) <= MAX_QUERIED_TOKENS and total < MAX_AMOUNT:
            with suppress(GenieError):
                result = await acquire(
                    context.client, self._tracker, not_reserved_here, total + 1, request.transaction, context.lease
                )
                if isinstance(result, Shortfall):
                    return replace(balance, free=result.free, locked=balance.free + balance.locked - result.free)
        return balance

    # -- waiting --------------------------------------------------------------------------------------------

    async def _await_release(
        self, request: SelectionRequest, cache: WalletCache, balance: Balance, budget: RetryBudget
    ) -> bool:
        """Wait until the missing amount is free, at most for a random part of `backoff`. Returns
        False if no waits are left.

        If the wait ends early, the next call continues it: its deadline stays in the budget.
        """
        if budget.wait_deadline is None:
            if not budget.waits_left:
                return False
            budget.waits_left -= 1
            budget.wait_deadline = self._context.now() + random() * self._backoff  # noqa: S311 - no secret
        with self._context.subscription:
            woken = await cache.wait(
                balance.missing(request), balance.surplus(request), request.where, budget.wait_deadline
            )
        if not woken:
            budget.wait_deadline = None
            budget.has_waited = True
            if not self._caches.is_current(cache):
                budget.stale_load = cache.load_count
        return True
