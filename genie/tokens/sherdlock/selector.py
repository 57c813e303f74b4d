"""The selector for replicas that share wallets: what each of them holds is locked in Genie.

Each selected token is locked exclusively under the name `token/<id>`; the owner of the lock is the
transaction that will spend the token. Spent tokens stay locked until their lease expires, so that a
replica that has not read the spend yet skips them. The tokens of a crashed replica become free in
the same way. `search.py` explains how tokens are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import iscoroutinefunction
from math import inf
from types import TracebackType
from typing import Any, Self

from genie.tokens.errors import SelectionEnded
from genie.tokens.guard import ThreadGuard
from genie.tokens.selection import check_limit
from genie.tokens.sherdlock.cache import Prefer, WalletCaches, Where
from genie.tokens.sherdlock.grants import Shortfall, SpentLocks, acquire_all
from genie.tokens.sherdlock.holds import LockSubscription, LockTracker, Reservation
from genie.tokens.sherdlock.locks import LockClient
from genie.tokens.sherdlock.search import Search, SelectionRequest
from genie.tokens.sherdlock.selection import Checkpoint, SelectorContext, SherdlockSelection
from genie.tokens.store import TokenStore
from genie.tokens.token import check_amount, wallet


class SherdlockSelector:
    """Selects unspent tokens and locks them in Genie for the transaction that will spend them.

    Any number of selectors, in any number of processes, can serve the same wallets. An async context
    manager; the client must be open meanwhile. It belongs to the event loop in which it is started:
    RuntimeError if another thread uses it.

    Args:
        client: A client of `genie.connect()`.
        store: The tokens of all wallets.
        retries: How often to wait for tokens that others hold.
        backoff: Upper bound of each of these waits in seconds; its duration is random.
        immediate_retries: How often to retry at once after a collision with other replicas.
        lease: Seconds for which a selection is held at most, and for which the tokens that were
            spent, or were held by a crashed replica, stay locked.
        freshness: Age in seconds up to which a wallet's cache is used while the store's change feed
            is not connected.
    """

    def __init__(
        self,
        client: LockClient,
        store: TokenStore,
        *,
        retries: int = 3,
        backoff: float = 5.0,
        immediate_retries: int = 5,
        lease: float = 180.0,
        freshness: float = 1.0,
    ) -> None:
        if retries < 0 or immediate_retries < 0:
            raise ValueError("retries and immediate_retries must not be negative")
        if not backoff >= 0 or not freshness >= 0 or not 0 < lease < inf:
            raise ValueError("backoff and freshness must not be negative, and lease must be above 0")
        if not iscoroutinefunction(getattr(client, "acquire_any", None)):
            raise TypeError(f"client must be one of genie.connect() (asyncio), not {client!r}")
        guard = ThreadGuard("Create one selector for each thread.")
        tracker = LockTracker(lease)
        caches = WalletCaches(store, freshness, tracker, guard)
        self._context = SelectorContext(
            client,
            store,
            guard,
            lease,
            tracker,
            caches,
            LockSubscription(client, tracker, caches.wake_waiters),
            SpentLocks(),
        )
        self._search = Search(self._context, retries=retries, backoff=backoff, immediate_retries=immediate_retries)

    async def start(self) -> None:
        """Start to follow the store's changes and the locks of tokens."""
        self._context.caches.start()
        self._context.guard.bind()
        self._context.subscription.start()

    async def close(self) -> None:
        """Cancel the background tasks. Selections stay held; waiting `select` calls raise RuntimeError."""
        self._context.guard.check()
        await self._context.spent_locks.close()
        await self._context.subscription.close()
        await self._context.caches.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def select(
        self,
        amount: int,
        *,
        token_type: str,
        identifier: str,
        transaction: str,
        owner: str | None = None,
        account: str | None = None,
        where: Where | None = None,
        prefer: Prefer | None = None,
        limit: int | None = None,
    ) -> SherdlockSelection:
        """Select and hold tokens of one wallet that together reach the amount.

        If it raises or is cancelled nothing stays held. A second selection of the same transaction
        gets other tokens than the first.

        Args:
            amount: What the tokens must be worth together, in their smallest unit.
            token_type: With `identifier`, what the tokens are an amount of.
            identifier: See `token_type`.
            transaction: The transaction that will spend the tokens.
            owner: The key whose wallet it is; or
            account: the account whose keys together are the wallet.
            where: Accepts or rejects a token. Called often; it must only look at the token.
            prefer: Take the smallest or the largest tokens first; by default a random order.
            limit: How many tokens to select at most. The largest are taken if that is needed.

        Raises:
            InsufficientFunds: The wallet has less than the amount.
            FundsLocked: Others still hold too much of it after all retries.
            TooManyTokens: The amount can't be reached in `limit` tokens.
        """
        request = SelectionRequest(check_amount(amount), transaction, where, prefer, check_limit(limit))
        if type(transaction) is not str or not transaction:
            raise ValueError(f"transaction must be the name of the one that will spend the tokens, not {transaction!r}")
        if prefer not in (None, "small", "large"):
            raise ValueError(f"prefer must be 'small' or 'large', not {prefer!r}")
        of = wallet(owner=owner, account=account, token_type=token_type, identifier=identifier)
        self._context.caches.check_open()
        self._context.guard.check()
        grants, reservation = await self._search.find(request, of)
        return SherdlockSelection(self._context, grants, reservation, amount)

    @property
    def collisions(self) -> int:
        """How many requests Genie has rejected because others held too many of the requested tokens."""
        return self._search.collisions

    async def restore(self, data: Mapping[str, Any]) -> SherdlockSelection:
        """Hold the tokens of a selection's `checkpoint` again, for the same transaction; in any replica.

        SelectionEnded if another transaction holds any of them, which is impossible before the lease
        has expired, or if a selection of this selector still holds them. If they have been spent,
        `spend` finds out: it has no effect if this transaction has spent them, else it raises
        SpentAlready.
        """
        context = self._context
        context.caches.check_open()
        context.guard.check()
        checkpoint = Checkpoint.of(data)
        transaction = checkpoint.transaction
        reservation = Reservation(transaction, [token.id for token in checkpoint.tokens])
        async with self._search.mutex.hold(transaction):
            if context.tracker.any_releasable(reservation.ids, context.now()):
                raise SelectionEnded(f"a selection of this selector holds the tokens of {transaction!r} already")
            acquiring = acquire_all(context.client, context.tracker, checkpoint.tokens, transaction, context.lease)
            grants = await self._search.reserve(reservation, acquiring)
        if isinstance(grants, Shortfall):
            raise SelectionEnded(f"another transaction holds tokens of {transaction!r}")
        return SherdlockSelection(context, grants, reservation, checkpoint.asked, checkpoint.locks)
