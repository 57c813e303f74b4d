"""Finding free tokens of a wallet and locking them in Genie.

A search draws candidates at random from the wallet's cache, skips those that are known to be held,
and asks Genie for them together with some spares, in one request. If other clients were faster it
retries at once with more spares. If the cache has too few free tokens it loads the wallet, or waits
until others release theirs. Only with a consistent load does it report that funds are insufficient.
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
    """Mutual exclusion of the requests of one transaction.

    Locks do not exclude their own transaction. Without the mutex two concurrent requests of one
    transaction could be granted the same token. Different transactions never wait for each other.
    """

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        """By transaction: its lock, and how many tasks hold it or wait for it."""

    @asynccontextmanager
    async def hold(self, transaction: str) -> AsyncIterator[None]:
        """Wait for the mutex of a transaction, and hold it in the block."""
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


def spares(needed: int) -> int:
    """Return how many spare tokens to request: half of those needed, and at least three.

    With five needed, three of eight may have been locked by others a moment ago, and one round trip
    still suffices. If one token of ten is held, one request of 200 fails. Each further name costs
    Genie and the client time to parse.
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
    """Tokens in the order in which to request them. The first `needed` reach the amount.

    `complete`: the wallet has no further ones. `skipped`: how many were left out because others hold
    them.
    """

    tokens: list[Token]
    needed: int
    complete: bool
    skipped: int = 0

    @property
    def contended(self) -> bool:
        """Whether a request without knowledge of the holders would have had too few spares."""
        return self.skipped > spares(self.needed)


def pick_candidates(
    request: SelectionRequest,
    cache: WalletCache,
    tracker: LockTracker,
    now: float,
    *,
    include_own: bool,
    spare_factor: int,
) -> Candidates | None:
    """Draw tokens that are free as far as is known; None if they don't reach the amount.

    `include_own` includes tokens that the same transaction has locked, but no selection here
    reserves. `spare_factor` multiplies the number of spares.
    """
    picked = _pick(request, cache.draw(request.prefer), tracker, now, include_own, spare_factor)
    if request.limit is not None and picked is not None and picked.needed > request.limit:
        picked = _pick(request, cache.draw("large"), tracker, now, include_own, spare_factor)
        if picked is not None and picked.needed > request.limit:
            return None
    return picked


def _pick(
    request: SelectionRequest,
    drawn: Iterator[Token],
    tracker: LockTracker,
    now: float,
    include_own: bool,
    spare_factor: int,
) -> Candidates | None:
    missing, where, transaction = request.amount, request.where, request.transaction
    reservations, observed = tracker.reservations, tracker.observed
    tokens: list[Token] = []
    wanted = -1
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
        if wanted < 0:
            if missing <= 0:
                needed = len(tokens)
                wanted = needed + spares(needed) * spare_factor
        elif len(tokens) >= wanted:
            return Candidates(tokens, needed, False, skipped)
    return Candidates(tokens, needed, True, skipped) if wanted >= 0 else None


def all_candidates(
    request: SelectionRequest, cache: WalletCache, tracker: LockTracker, now: float
) -> Candidates | None:
    """Return all tokens that this selector has not reserved, those believed free first; None if they are too few.

    For the last attempt: what is known of the holders may be out of date, Genie decides.
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
    """What a wallet has for one request: the sum of what is `free`, and of what is `locked` by others.

    With a `limit`: `best_free` and `best` are the sums of its `limit` largest tokens, of the free ones
    and of all.
    """

    free: int = 0
    locked: int = 0
    best_free: int = 0
    best: int = 0

    @classmethod
    def of(cls, request: SelectionRequest, tokens: Iterable[Token], tracker: LockTracker, now: float) -> Balance:
        """Sum up all tokens."""
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
            balance.best_free = sum(sorted(free, reverse=True)[: request.limit])
            balance.best = sum(sorted(free + locked, reverse=True)[: request.limit])
        return balance

    def suffices(self, request: SelectionRequest) -> bool:
        """Whether the amount can be reached once all others have released their tokens."""
        return self.surplus(request) >= 0

    def surplus(self, request: SelectionRequest) -> int:
        """Return what remains beyond the amount once all others have released their tokens."""
        return (self.free + self.locked if request.limit is None else self.best) - request.amount

    def missing(self, request: SelectionRequest) -> int:
        """Return the amount that must become free before another attempt makes sense."""
        return 1 if request.limit is not None else max(1, request.amount - self.free)

    def shortfall_error(self, request: SelectionRequest, wallet: Wallet) -> InsufficientFunds | TooManyTokens:
        """Return the error that says why the amount can't be reached."""
        if self.free + self.locked < request.amount:
            return InsufficientFunds(request.amount, self.free, self.locked, wallet)
        if request.limit is not None and self.best < request.amount:
            return TooManyTokens(request.amount, request.limit, self.best_free)
        return FundsLocked(request.amount, self.free, self.locked, wallet)


# -- the search -------------------------------------------------------------------------------------------------

SPARE_FACTOR = 8
"""By how much each immediate retry multiplies the number of spares."""
MAX_COUNTED_TOKENS = 1_000
"""Tokens for which Genie is asked how much others hold, only to report it in an error."""
MAX_RELOADS = 2
"""How often a wallet that changed during its load is loaded again at once."""


class RetryBudget:
    """The loads and waits that one request has used, and those that are left.

    `since`: a load with a greater number began late enough to count. `waits` and `reloads` are left;
    `deadline` is the end of the current wait.
    """

    __slots__ = ("deadline", "has_waited", "reloads", "since", "waits")

    def __init__(self, since: int, waits: int) -> None:
        self.since = since
        self.waits = waits
        self.has_waited = False
        self.deadline: float | None = None
        self.reloads = MAX_RELOADS

    def has_loaded(self, cache: WalletCache) -> bool:
        """Whether a load that began late enough has succeeded."""
        return cache.last_load is not None and cache.last_load.number > self.since

    def must_load(self, cache: WalletCache, *, suffices: bool, is_current: bool) -> bool:
        """Whether the next step needs a load. A current cache with a sufficient balance waits once before it."""
        return not self.has_loaded(cache) and not (suffices and is_current and self.waits and not self.has_waited)

    def reload(self, cache: WalletCache) -> None:
        """Require another load."""
        self.reloads -= 1
        self.since = cache.load_count


class Match(NamedTuple):
    """Tokens that were locked for a request, and their reservation."""

    grants: Grants
    reservation: Reservation


class Search:
    """Executes selection requests. `immediate_retries`, `retries` and `backoff` (seconds) are the selector's."""

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
        """Requests that Genie has rejected because other clients held more than was known here."""

    async def find(self, request: SelectionRequest, wallet: Wallet) -> Match:
        """Find and lock tokens of a wallet.

        InsufficientFunds, FundsLocked or TooManyTokens if that is impossible. After any error and when
        cancelled nothing stays locked.
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
            elif not suffices and await self._may_have_changed(request, cache) and budget.reloads:
                budget.reload(cache)
            elif not await self._await_release(request, cache, balance, budget):
                return await self._last_attempt(request, cache)

    async def reserve(
        self, reservation: Reservation, acquiring: Coroutine[Any, Any, Grants | Shortfall], limit: int | None = None
    ) -> Grants | Shortfall:
        """Reserve tokens here while Genie locks them by `acquire` or `acquire_all`; drop the reservation if it does not.

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
        """Request candidates, and retry at once with more spares while other clients are faster."""
        spare_factor = 1
        for left in range(self._immediate_retries, -1, -1):
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
                match = await self._acquire(request, candidates)
            collided = isinstance(match, Shortfall)
            self._context.subscription.record_request(contended=candidates.contended or collided)
            if not isinstance(match, Shortfall):
                return match
            self.collisions += 1
            if request.limit is not None and request.prefer != "large":
                request = replace(request, prefer="large")  # which needs the fewest tokens
            elif candidates.complete:
                return None
            spare_factor = spare_factor * SPARE_FACTOR if left > 1 else sys.maxsize
        return None

    async def _acquire(self, request: SelectionRequest, candidates: Candidates) -> Match | Shortfall:
        context = self._context
        reservation = Reservation(request.transaction, [token.id for token in candidates.tokens[: candidates.needed]])
        acquiring = acquire(
            context.client, self._tracker, candidates.tokens, request.amount, request.transaction, context.lease
        )
        grants = await self.reserve(reservation, acquiring, request.limit)
        return grants if isinstance(grants, Shortfall) else Match(grants, reservation)

    async def _last_attempt(self, request: SelectionRequest, cache: WalletCache) -> Match:
        """Request all tokens, also those that others are believed to hold; raise the error if that fails."""
        async with self.mutex.hold(request.transaction):
            candidates = all_candidates(request, cache, self._tracker, self._context.now())
            match = None if candidates is None else await self._acquire(request, candidates)
        if isinstance(match, Match):
            return match
        balance = Balance.of(request, cache, self._tracker, self._context.now())
        if match is not None and request.limit is None and balance.suffices(request):
            raise FundsLocked(request.amount, match.free, balance.free + balance.locked - match.free, cache.wallet)
        if not balance.suffices(request) and cache.last_load is not None:
            # The wallet has changed since it was loaded: part of what it had then is now change of other transactions.
            balance = Balance.of(request, cache.last_load.tokens.values(), self._tracker, self._context.now())
        raise balance.shortfall_error(request, cache.wallet)

    # -- loading --------------------------------------------------------------------------------------------

    async def _await_load(
        self, request: SelectionRequest, cache: WalletCache, balance: Balance, budget: RetryBudget
    ) -> None:
        """Wait until a load has ended, or has brought the missing amount. Raises the store's error."""
        load = self._caches.load(cache)
        missing = balance.missing(request) if request.limit is None else MAX_AMOUNT
        await cache.wait(missing, balance.surplus(request), request.where, None)
        self._caches.check_open()
        if load.error is not None and load.number > budget.since:
            raise load.error

    async def _may_have_changed(self, request: SelectionRequest, cache: WalletCache) -> bool:
        """Return True if the last load was not consistent, or sufficed; otherwise raise the shortfall error."""
        if cache.last_load is not None and cache.consistent:
            loaded = cache.last_load.tokens.values()
            balance = Balance.of(request, loaded, self._tracker, self._context.now())
            if not balance.suffices(request):
                raise (await self._counted(request, loaded, balance)).shortfall_error(request, cache.wallet)
        return True

    async def _counted(self, request: SelectionRequest, tokens: Iterable[Token], balance: Balance) -> Balance:
        """Return the balance with what others hold according to Genie, which knows it without a subscription too.

        Requests more than the tokens are worth, so that Genie locks nothing and reports the sums.
        """
        context = self._context
        now = context.now()
        others = [
            token
            for token in tokens
            if self._tracker.local_reservation(token.id, now) is None and request.accepts(token)
        ]
        total = sum(token.amount for token in others)
        if 0 < len(others) <= MAX_COUNTED_TOKENS and total < MAX_AMOUNT:
            with suppress(GenieError):
                short = await acquire(
                    context.client, self._tracker, others, total + 1, request.transaction, context.lease
                )
                if isinstance(short, Shortfall):
                    return replace(balance, free=short.free, locked=balance.free + balance.locked - short.free)
        return balance

    # -- waiting --------------------------------------------------------------------------------------------

    async def _await_release(
        self, request: SelectionRequest, cache: WalletCache, balance: Balance, budget: RetryBudget
    ) -> bool:
        """Wait until the missing amount is free, or for a random part of `backoff`; False if no waits are left."""
        if budget.deadline is None:
            if not budget.waits:
                return False
            budget.waits -= 1
            budget.deadline = self._context.now() + random() * self._backoff  # noqa: S311 - no secret
        with self._context.subscription:
            in_time = await cache.wait(
                balance.missing(request), balance.surplus(request), request.where, budget.deadline
            )
        if not in_time:
            budget.deadline = None
            budget.has_waited = True
            if not self._caches.is_current(cache):
                budget.since = cache.load_count
        return True
