"""Finding free tokens of a wallet and locking them in Genie.

A search draws candidates at random from the wallet's cache, sets aside tokens that are known to be
held, and requests the locks of the others, together with some spare tokens, in one request. If
other clients have locked too many of them, it retries at once with more spares. If the cache has
too few free tokens, it loads the wallet, or waits until others release theirs. It reports
insufficient funds only after a consistent load.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from heapq import nlargest
from itertools import chain
from random import random
from typing import Any, NamedTuple

from genie import GenieError
from genie_tokens.errors import FundsLocked, InsufficientFunds, TooManyTokens
from genie_tokens.sherdlock.cache import LockedToken, Prefer, WalletCache, WalletTokens, Where
from genie_tokens.sherdlock.grants import Grants, Shortfall, acquire
from genie_tokens.sherdlock.holds import LockTracker, Reservation
from genie_tokens.sherdlock.selection import SelectorContext
from genie_tokens.token import MAX_AMOUNT, Token, Wallet


@dataclass(slots=True)
class _SharedLock:
    """A lock, and the number of tasks that hold it or wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    user_count: int = 0


class TransactionMutex:
    """Serializes the requests of each transaction; different transactions never wait for each
    other.

    Genie's locks do not exclude their own transaction: without this mutex, two concurrent requests
    of one transaction could be granted the same token.
    """

    __slots__ = ("_lock_by_transaction",)

    def __init__(self) -> None:
        self._lock_by_transaction: dict[str, _SharedLock] = {}
        """The locks that tasks hold or wait for."""

    @asynccontextmanager
    async def hold(self, transaction: str) -> AsyncIterator[None]:
        """Wait for the mutex of a transaction, and hold the mutex during the block."""
        shared = self._lock_by_transaction.get(transaction)
        if shared is None:
            shared = self._lock_by_transaction[transaction] = _SharedLock()
        shared.user_count += 1
        try:
            async with shared.lock:
                yield
        finally:
            shared.user_count -= 1
            if not shared.user_count:
                del self._lock_by_transaction[transaction]


# -- candidates -------------------------------------------------------------------------------------------------

MIN_SPARES = 3
"""Minimum number of spare tokens in a request."""


def spare_count(needed_count: int) -> int:
    """Return the number of spare tokens to request in addition to the `needed_count` tokens: half as
    many, but at least `MIN_SPARES`.

    With spares, a request succeeds even if other clients have just locked some of its tokens. For
    example, a request that needs 5 tokens gets 3 spares, so 3 of its 8 tokens may be locked. If
    other clients hold a tenth of the tokens, 1 of 200 such requests fails. More spares would cost
    the server and the client time, because each name must be parsed.
    """
    return max(needed_count // 2, MIN_SPARES)


@dataclass(frozen=True, slots=True)
class SelectionRequest:
    """The arguments of `select`, without the wallet."""

    amount: int
    transaction: str
    where: Where | None
    prefer: Prefer | None
    limit: int | None

    def accepts(self, token: Token) -> bool:
        """True if `where` accepts a token."""
        return self.where is None or self.where(token)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens to request, in this order. The first `needed_count` tokens reach the amount; the rest are
    spares.

    `complete` is True if the wallet has no further candidates. `skipped_count` is about the number of
    tokens that were left out because others hold them.
    """

    tokens: list[Token]
    needed_count: int
    complete: bool
    skipped_count: int = 0

    @property
    def contended(self) -> bool:
        """True if others hold too many tokens for a request: without knowing which tokens they
        hold, the request would probably have failed.
        """
        return self.skipped_count > spare_count(self.needed_count)


MAX_HELD_IN_DRAW = 1_000
"""Maximum number of held tokens that one draw sets aside, so that a draw takes only some milliseconds."""


class TooManyHeld(Exception):
    """A draw has found `MAX_HELD_IN_DRAW` held tokens, and has set them aside. The event loop should
    do other work before the next draw.
    """


def pick_candidates(
    request: SelectionRequest,
    cache: WalletCache,
    tracker: LockTracker,
    now: float,
    *,
    include_own: bool,
    spare_factor: int,
) -> Candidates | None:
    """Choose the tokens of a wallet whose locks are to be requested: enough for the amount, and some
    spare tokens in case others hold some of them. Skips tokens that are known to be locked.

    Uses the preferred order, or the largest tokens first if the preferred order would need more than
    `request.limit` tokens. Returns None if the amount can't be reached within the limit. Raises
    TooManyHeld if it must be called again in a later iteration of the event loop.

    With `include_own`, tokens that the same transaction has locked are included, unless a selection
    of this selector has reserved them. `spare_factor` multiplies the usual number of spare tokens.
    """
    if include_own:
        cache.tokens.put_back_locked_by(request.transaction)
    candidates = _take_candidates(request, cache, tracker, now, include_own=include_own, spare_factor=spare_factor)
    limit = request.limit
    if limit is not None and candidates is not None and candidates.needed_count > limit:
        request = replace(request, prefer="large")
        candidates = _take_candidates(request, cache, tracker, now, include_own=include_own, spare_factor=spare_factor)
        if candidates is not None and candidates.needed_count > limit:
            return None
    return candidates


@dataclass(slots=True)
class HeldTokens:
    """Tokens of a wallet that a draw has found held."""

    wallet: WalletTokens
    reserved: list[Token] = field(default_factory=list)
    locked: list[LockedToken] = field(default_factory=list)

    def add_if_held(self, token: Token, tracker: LockTracker, now: float, *, own: str | None) -> bool:
        """Add a token if it is held. Returns whether it is. A lock of the transaction `own` does not count.

        Once there are `MAX_HELD_IN_DRAW` tokens, sets them aside and raises TooManyHeld.
        """
        if tracker.local_reservation(token.id, now) is not None:
            self.reserved.append(token)
        else:
            lock = tracker.observed_lock(token.id, now)
            if lock is None or (own is not None and lock.transaction == own):
                return False
            self.locked.append(LockedToken(token, lock.transaction))
        if len(self.reserved) + len(self.locked) == MAX_HELD_IN_DRAW:
            self.set_aside()
            raise TooManyHeld
        return True

    def set_aside(self) -> None:
        """Set the tokens aside. The draw must have ended."""
        self.wallet.set_aside(self.reserved, self.locked)


def _take_candidates(
    request: SelectionRequest,
    cache: WalletCache,
    tracker: LockTracker,
    now: float,
    *,
    include_own: bool,
    spare_factor: int,
) -> Candidates | None:
    """Draw tokens in the preferred order until they reach the amount and there are enough spares.
    Tokens that `where` rejects are skipped; tokens that are known to be held are set aside. Returns
    None if the tokens don't reach the amount.
    """
    missing, where = request.amount, request.where
    own = request.transaction if include_own else None
    reservations, observed = tracker.reservations, tracker.observed_locks
    tokens: list[Token] = []
    held = HeldTokens(cache.tokens)
    target_count = -1  # the number of tokens to take, spares included; unknown until the amount is reached
    needed_count = 0
    complete = True
    for token in cache.tokens.draw(request.prefer):
        # Most tokens are in neither dict: looking them up here is faster than a call.
        if (token.id in reservations or token.id in observed) and held.add_if_held(token, tracker, now, own=own):
            continue
        if where is not None and not where(token):
            continue
        tokens.append(token)
        missing -= token.amount
        if target_count < 0:
            if missing <= 0:
                needed_count = len(tokens)
                target_count = needed_count + spare_count(needed_count) * spare_factor
        elif len(tokens) >= target_count:
            complete = False
            break
    if held.reserved or held.locked:
        held.set_aside()
    if target_count < 0:
        return None
    skipped_count = expected_skips(cache, len(tokens), prefer=request.prefer)
    return Candidates(tokens, needed_count, complete=complete, skipped_count=skipped_count)


def expected_skips(cache: WalletCache, taken_count: int, *, prefer: Prefer | None) -> int:
    """Return the approximate number of tokens held by others that a draw of `taken_count` free tokens
    would have skipped if no token had been set aside. In an order by amount this is all of them,
    because others probably prefer the same tokens.
    """
    locked_count = len(cache.tokens.locked)
    return locked_count if prefer else locked_count * taken_count // (len(cache.tokens.candidates) + 1)


def all_candidates(
    request: SelectionRequest, cache: WalletCache, tracker: LockTracker, now: float
) -> Candidates | None:
    """Return all tokens of a wallet that this selector has not reserved: first the free tokens,
    then the tokens that others are reported to hold. Returns None if the tokens don't reach the
    amount.

    Used for the last attempt: the reports may be outdated, so the server decides.
    """
    free: list[Token] = []
    cache.tokens.put_back_locked_by(request.transaction)
    reservations = tracker.reservations  # a pending request may have reserved a token that is set aside as locked
    locked = [
        token
        for token, _ in cache.tokens.locked.values()
        if (token.id not in reservations or tracker.local_reservation(token.id, now) is None) and request.accepts(token)
    ]
    order: Prefer | None = "large" if request.limit is not None else request.prefer
    for token in cache.tokens.draw(order):
        if tracker.local_reservation(token.id, now) is None and request.accepts(token):
            is_locked = tracker.held_by_other(token.id, request.transaction, now)
            (locked if is_locked else free).append(token)
    if order is not None:  # otherwise they are in the random order in which draws have set them aside
        locked.sort(key=lambda token: token.amount, reverse=order == "large")
    tokens = free + locked
    reached = 0
    for needed_count, token in enumerate(tokens, 1):
        reached += token.amount
        if reached >= request.amount:
            return Candidates(tokens, needed_count, complete=True)
    return None


@dataclass(slots=True)
class Balance:
    """The amounts in a wallet that a request can use: `free` is the amount of the free tokens,
    `locked` the amount of the tokens that other transactions hold.

    For a request with a `limit`, `largest_free` is the sum of the `limit` largest free tokens, and
    `largest` is the sum of the `limit` largest tokens, free or locked.
    """

    free: int = 0
    locked: int = 0
    largest_free: int = 0
    largest: int = 0

    @classmethod
    def of(cls, request: SelectionRequest, tokens: Iterable[Token], tracker: LockTracker, now: float) -> Balance:
        """Compute the balance of `tokens` for a request. Excludes tokens that `where` rejects, and
        tokens that this selector holds for the same transaction.
        """
        free: list[int] = []
        locked: list[int] = []
        for token in tokens:
            if not request.accepts(token):
                continue
            reservation = tracker.local_reservation(token.id, now)
            if reservation is None:
                is_locked = tracker.held_by_other(token.id, request.transaction, now)
                (locked if is_locked else free).append(token.amount)
            elif reservation.pending or reservation.transaction != request.transaction:
                locked.append(token.amount)  # a pending request may fail, which frees the token
        balance = cls(free=sum(free), locked=sum(locked))
        if request.limit is not None:
            balance.largest_free = sum(nlargest(request.limit, free))
            balance.largest = sum(nlargest(request.limit, free + locked))
        return balance

    @classmethod
    def of_wallet(cls, request: SelectionRequest, cache: WalletCache, tracker: LockTracker, now: float) -> Balance:
        """Compute the balance of a wallet for a request, like `of`. Without `where` and `limit`, the
        tokens that are set aside as locked are not read, but counted by their sum.
        """
        if request.where is not None or request.limit is not None:
            return cls.of(request, cache, tracker, now)
        tokens = cache.tokens
        tokens.put_back_locked_by(request.transaction)
        balance = cls.of(request, chain(tokens.candidates, tokens.reserved.values()), tracker, now)
        balance.locked += tokens.locked_amount
        return balance

    def suffices(self, request: SelectionRequest) -> bool:
        """Return whether the requested amount could be reached if all other transactions released
        their tokens.
        """
        return self.surplus(request) >= 0

    def surplus(self, request: SelectionRequest) -> int:
        """Return by how much the tokens would exceed the requested amount if all other transactions
        released theirs. Negative if the tokens would not suffice.
        """
        available = self.free + self.locked if request.limit is None else self.largest
        return available - request.amount

    def missing(self, request: SelectionRequest) -> int:
        """Return the amount that must become free before another attempt can succeed. With a
        `limit` this is 1, because any further token may suffice.
        """
        return 1 if request.limit is not None else max(1, request.amount - self.free)

    def shortfall_error(self, request: SelectionRequest, wallet: Wallet) -> InsufficientFunds | TooManyTokens:
        """Return the error for a request that can't be granted with this balance.

        InsufficientFunds: the wallet is worth less than the amount. TooManyTokens: the limit is too
        low even if all tokens were free. FundsLocked: other transactions hold too many tokens.
        """
        if self.free + self.locked < request.amount:
            return InsufficientFunds(request.amount, free=self.free, locked=self.locked, source=wallet)
        if request.limit is not None and self.largest < request.amount:
            return TooManyTokens(request.amount, limit=request.limit, reached=self.largest_free)
        return FundsLocked(request.amount, free=self.free, locked=self.locked, source=wallet)


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
    """The remaining retries of one request: waits for tokens that others hold, and reloads of its
    wallet.
    """

    __slots__ = ("has_waited", "reloads_left", "stale_load_number", "wait_deadline", "waits_left")

    def __init__(self, stale_load_number: int, waits: int) -> None:
        self.stale_load_number = stale_load_number
        """The number of the last load that began too early to count for the request."""
        self.waits_left = waits
        """How often the request may still wait for tokens that others hold."""
        self.has_waited = False
        """True if a wait has ended at its deadline."""
        self.wait_deadline: float | None = None
        """The end of the current wait (event-loop seconds), if there is one."""
        self.reloads_left = MAX_RELOADS
        """How often the wallet may still be loaded again."""

    def has_loaded(self, cache: WalletCache) -> bool:
        """Return whether the wallet was loaded successfully by a load that began after the request,
        or after the last `require_reload`.
        """
        return cache.last_load is not None and cache.last_load.number > self.stale_load_number

    def must_load(self, cache: WalletCache, *, suffices: bool, is_current: bool) -> bool:
        """Return whether the wallet must be loaded from the store before the next attempt.

        Returns False if the wallet was loaded since the request began. Before the first wait,
        returns False if the cache is current (`is_current`) and the wallet has enough tokens, free
        or locked (`suffices`): then waiting for other transactions is enough.
        """
        can_wait_first = suffices and is_current and self.waits_left and not self.has_waited
        return not self.has_loaded(cache) and not can_wait_first

    def require_reload(self, cache: WalletCache) -> None:
        """Use up one of the reloads. From now on `has_loaded` returns False until a load succeeds
        that begins after this call.
        """
        self.reloads_left -= 1
        self.stale_load_number = cache.load_count


class Match(NamedTuple):
    """Tokens that were locked for a request, and their reservation."""

    grants: Grants
    reservation: Reservation


class Search:
    """Executes selection requests. `retries`, `backoff` (seconds) and `immediate_retries` are the
    arguments of `SherdlockSelector`.
    """

    __slots__ = (
        "_backoff_s",
        "_caches",
        "_context",
        "_immediate_retries",
        "_retries",
        "_tracker",
        "collisions",
        "mutex",
    )

    def __init__(self, context: SelectorContext, *, retries: int, backoff: float, immediate_retries: int) -> None:
        self._context = context
        self._tracker = context.tracker
        self._caches = context.caches
        self._retries = retries
        """How often a request may wait for tokens that other transactions hold."""
        self._backoff_s = backoff
        """Upper bound of the random duration of each wait."""
        self._immediate_retries = immediate_retries
        """How often a request that was rejected is retried without a wait."""
        self.mutex = TransactionMutex()
        """Prevents concurrent requests of the same transaction."""
        self.collisions = 0
        """The number of requests that Genie has rejected because other clients held more of the
        tokens than this selector knew.
        """

    async def find(self, request: SelectionRequest, wallet: Wallet) -> Match:
        """Find tokens of a wallet and lock them. If an attempt fails, load the wallet, or wait
        until other transactions release tokens, and try again.

        Raises InsufficientFunds, FundsLocked or TooManyTokens if all attempts fail. After any
        error, and when cancelled, nothing stays locked.
        """
        now = self._context.now()
        cache = self._caches.get(wallet, now)
        cache.search_count += 1  # so that it is not evicted
        try:
            budget = RetryBudget(stale_load_number=cache.load_count, waits=self._retries)
            self._caches.refresh(cache, now)
            while True:
                include_own = budget.has_loaded(cache)
                match = await self._attempt(request, cache, include_own=include_own)
                if match is not None:
                    return match
                self._caches.check_open()  # `close` may have been called during the attempt
                balance = Balance.of_wallet(request, cache, self._tracker, self._context.now())
                suffices = balance.suffices(request)
                if budget.must_load(cache, suffices=suffices, is_current=self._caches.is_current(cache)):
                    await self._await_load(request, cache, balance, budget)
                    continue
                if not suffices:
                    await self._check_funds(request, cache)  # raises an error if the load was consistent
                    if budget.reloads_left:
                        budget.require_reload(cache)
                        continue
                if not await self._await_release(request, cache, balance, budget):
                    return await self._last_attempt(request, cache)
        finally:
            cache.search_count -= 1

    async def reserve(
        self, reservation: Reservation, acquiring: Coroutine[Any, Any, Grants | Shortfall], limit: int | None = None
    ) -> Grants | Shortfall:
        """Reserve tokens in the tracker, and lock them in Genie by awaiting `acquiring`, a call of
        `acquire` or `acquire_all`. Returns the locks, or a Shortfall if too few tokens were free.

        If the locks are on more than `limit` tokens, the locks are released, and a Shortfall is
        returned. After a Shortfall or an exception the tokens are no longer reserved. The caller
        must hold the transaction's mutex.
        """
        tracker = self._tracker
        tracker.reserve(reservation)
        try:
            result = await acquiring
            if isinstance(result, Grants) and limit is not None and len(result.tokens) > limit:
                await result.release()
                result = Shortfall(free=result.amount, locked=0)
        except BaseException:
            tracker.drop(reservation)
            raise
        if isinstance(result, Shortfall):
            tracker.narrow(reservation, ())  # no token stays reserved
        else:
            granted = [token.id for token in result.tokens]
            tracker.narrow(reservation, granted, expires_at=result.requested_at + self._context.lease)
        return result

    # -- attempts -------------------------------------------------------------------------------------------

    async def _attempt(self, request: SelectionRequest, cache: WalletCache, *, include_own: bool) -> Match | None:
        """Request the locks of candidates. If other clients hold too many of them, retry at once
        with more spares; a request with a `limit` is first retried with the largest tokens.

        Returns None if too few tokens are known to be free, or if all retries have failed.
        """
        spare_factor = 1
        for retries_left in range(self._immediate_retries, -1, -1):
            async with self.mutex.hold(request.transaction):
                candidates = await self._pick(request, cache, include_own=include_own, spare_factor=spare_factor)
                if candidates is None:
                    return None
                result = await self._acquire(request, candidates)
            collided = isinstance(result, Shortfall)
            self._context.subscription.record_request(contended=candidates.contended or collided)
            if not isinstance(result, Shortfall):
                return result
            self.collisions += 1
            if request.limit is not None and request.prefer != "large":
                request = replace(request, prefer="large")  # the largest tokens are the fewest
            elif candidates.complete:
                return None
            # The last retry requests all tokens.
            spare_factor = spare_factor * SPARE_FACTOR if retries_left > 1 else sys.maxsize
        return None

    async def _pick(
        self, request: SelectionRequest, cache: WalletCache, *, include_own: bool, spare_factor: int
    ) -> Candidates | None:
        """Call `pick_candidates`, in as many iterations of the event loop as it needs."""
        now = self._context.now()
        self._tracker.expire(now)
        while True:
            try:
                return pick_candidates(
                    request, cache, self._tracker, now, include_own=include_own, spare_factor=spare_factor
                )
            except TooManyHeld:
                await asyncio.sleep(0)
                now = self._context.now()

    async def _acquire(self, request: SelectionRequest, candidates: Candidates) -> Match | Shortfall:
        """Reserve the needed candidates in the tracker, and request locks on these and on the spare
        tokens.
        """
        context = self._context
        reservation = Reservation(
            request.transaction, [token.id for token in candidates.tokens[: candidates.needed_count]]
        )
        acquiring = acquire(
            context.client,
            self._tracker,
            candidates.tokens,
            amount=request.amount,
            transaction=request.transaction,
            lease=context.lease,
        )
        result = await self.reserve(reservation, acquiring, limit=request.limit)
        return result if isinstance(result, Shortfall) else Match(result, reservation)

    async def _last_attempt(self, request: SelectionRequest, cache: WalletCache) -> Match:
        """Request all tokens of the wallet, even tokens that others are reported to hold: the
        reports may be outdated. Raises InsufficientFunds, FundsLocked or TooManyTokens if the
        request fails.
        """
        async with self.mutex.hold(request.transaction):
            self._tracker.expire(self._context.now())
            candidates = all_candidates(request, cache, self._tracker, self._context.now())
            result = None if candidates is None else await self._acquire(request, candidates)
        if isinstance(result, Match):
            for token in result.grants.tokens:
                self._caches.put_back(token.id)  # the report of another client's lock was outdated
            return result
        balance = Balance.of_wallet(request, cache, self._tracker, self._context.now())
        if result is not None and request.limit is None and balance.suffices(request):
            # Report the free amount from Genie's reply, because Genie knows all locks.
            locked = balance.free + balance.locked - result.free
            raise FundsLocked(request.amount, free=result.free, locked=locked, source=cache.wallet)
        if not balance.suffices(request) and cache.last_load is not None:
            # Other replicas have spent tokens since the load, and the cache may lack the tokens that they got as change:
            # report the balance at the time of the load.
            balance = Balance.of(request, cache.last_load.token_by_id.values(), self._tracker, self._context.now())
        raise balance.shortfall_error(request, cache.wallet)

    # -- loading --------------------------------------------------------------------------------------------

    async def _await_load(
        self, request: SelectionRequest, cache: WalletCache, balance: Balance, budget: RetryBudget
    ) -> None:
        """Load the wallet from the store, or join the load in progress. Wait until the load has
        ended, or until the tokens loaded so far may suffice.

        A request with a `limit` waits for the end of the load. Raises the store's error if the load
        fails, unless the load began too early to count for the request.
        """
        current_load = self._caches.load(cache)
        # With a limit, wait for more than any wallet has: only the complete load shows which tokens are the largest.
        missing = balance.missing(request) if request.limit is None else MAX_AMOUNT
        await cache.wait(missing, balance.surplus(request), request.where, deadline=None)
        self._caches.check_open()
        if current_load.error is not None and current_load.number > budget.stale_load_number:
            raise current_load.error

    async def _check_funds(self, request: SelectionRequest, cache: WalletCache) -> None:
        """Raise InsufficientFunds or TooManyTokens if the last load of the wallet was consistent
        and did not find enough tokens for the request. Does nothing after an inconsistent load,
        because another load may find more tokens.
        """
        if cache.last_load is not None and cache.is_consistent:
            loaded = cache.last_load.token_by_id.values()
            balance = Balance.of(request, loaded, self._tracker, self._context.now())
            if not balance.suffices(request):
                reported_balance = await self._query_balance(request, loaded, balance)
                raise reported_balance.shortfall_error(request, cache.wallet)

    async def _query_balance(self, request: SelectionRequest, tokens: Iterable[Token], balance: Balance) -> Balance:
        """Return a balance with the free and the locked amount that Genie reports, for an error
        message. Without a subscription this selector does not know which tokens others hold.

        The request is for more than the sum of all tokens, so that Genie rejects it and reports
        both amounts. Returns the given balance if the request fails, or if there are too many
        tokens for such a request.
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
                    context.client,
                    self._tracker,
                    not_reserved_here,
                    amount=total + 1,  # so that Genie rejects the request
                    transaction=request.transaction,
                    lease=context.lease,
                )
                if isinstance(result, Shortfall):
                    return replace(balance, free=result.free, locked=balance.free + balance.locked - result.free)
        return balance

    # -- waiting --------------------------------------------------------------------------------------------

    async def _await_release(
        self, request: SelectionRequest, cache: WalletCache, balance: Balance, budget: RetryBudget
    ) -> bool:
        """Wait until the missing amount is free, but at most for a random part of the selector's
        `backoff`. Returns False, without waiting, if no waits are left, and True otherwise.

        If the wait ends before its deadline, the deadline stays in the budget: the next call
        continues the same wait. At the deadline, the wallet must be loaded again unless its cache
        is current.
        """
        if budget.wait_deadline is None:
            if not budget.waits_left:
                return False
            budget.waits_left -= 1
            budget.wait_deadline = self._context.now() + random() * self._backoff_s  # noqa: S311 - no secret
        with self._context.subscription:
            woken = await cache.wait(
                balance.missing(request), balance.surplus(request), request.where, deadline=budget.wait_deadline
            )
        self._caches.check_open()
        if not woken:
            budget.wait_deadline = None
            budget.has_waited = True
            if not self._caches.is_current(cache):
                budget.stale_load_number = cache.load_count  # load the wallet before the next attempt
        return True
