"""The selector for replicas that share wallets: selected tokens are locked in Genie.

Each selected token is locked exclusively under the name `token/<id>`; the owner of the lock is the
transaction that will spend the token. The lock of a spent token stays until its lease expires, so
that a replica that has not read the spend yet skips the token. The tokens of a crashed replica
become free in the same way. `search.py` explains how tokens are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import iscoroutinefunction
from math import inf
from types import TracebackType
from typing import Any, Self

from genie_tokens.errors import SelectionEnded
from genie_tokens.guard import ThreadGuard
from genie_tokens.selection import check_limit
from genie_tokens.sherdlock.cache import Prefer, WalletCaches, Where
from genie_tokens.sherdlock.grants import Shortfall, SpentLocks, acquire_all
from genie_tokens.sherdlock.holds import LockSubscription, LockTracker, Reservation
from genie_tokens.sherdlock.locks import LockClient
from genie_tokens.sherdlock.search import Search, SelectionRequest
from genie_tokens.sherdlock.selection import Checkpoint, SelectorContext, SherdlockSelection
from genie_tokens.store import TokenStore
from genie_tokens.token import check_amount, make_wallet


class SherdlockSelector:
    """Selects unspent tokens and locks them in Genie for the transaction that will spend them.

    Any number of selectors, in any number of processes, can serve the same wallets. An async
    context manager; the client must be open meanwhile. It belongs to the event loop in which it is
    started: RuntimeError if another thread uses it.

    Args:
        client: A client created by `genie.connect()`.
        store: The tokens of all wallets.
        retries: How often to wait for tokens that others hold.
        backoff: Upper bound of each of these waits in seconds; its duration is random.
        immediate_retries: How often to retry at once after other replicas were granted some of the
            requested tokens.
        lease: Maximum time in seconds for which a selection is held. Tokens that were spent, or were
            held by a replica that has crashed, stay locked for as long.
        max_cache_age: Seconds after which the cache of a wallet is loaded again while the store's
            change feed is not connected.
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
        max_cache_age: float = 1.0,
    ) -> None:
        if retries < 0 or immediate_retries < 0:
            raise ValueError(
                f"retries and immediate_retries must not be negative, but are {retries} and {immediate_retries}"
            )
        if not backoff >= 0 or not max_cache_age >= 0:  # also rejects NaN
            raise ValueError(f"backoff and max_cache_age must not be negative, but are {backoff} and {max_cache_age}")
        if not 0 < lease < inf:
            raise ValueError(f"lease must be a number of seconds above 0, not {lease}")
        if not iscoroutinefunction(getattr(client, "acquire_any", None)):
            raise TypeError(f"client must be a client of genie.connect() (asyncio), not {client!r}")
        guard = ThreadGuard("Create one selector for each thread.")
        tracker = LockTracker(lease)
        caches = WalletCaches(store, max_cache_age, tracker, guard)
        self._context = SelectorContext(
            client=client,
            store=store,
            guard=guard,
            lease=lease,
            tracker=tracker,
            caches=caches,
            subscription=LockSubscription(client, tracker, on_snapshot=caches.retry_waiters),
            spent_locks=SpentLocks(),
        )
        self._search = Search(self._context, retries=retries, backoff=backoff, immediate_retries=immediate_retries)

    async def start(self) -> None:
        """Start to follow the store's change feed, and to watch the locks of tokens. Raises
        RuntimeError if the selector is open already.
        """
        self._context.caches.start()
        self._context.guard.bind()
        self._context.subscription.start()

    async def close(self) -> None:
        """Stop the background tasks. Selections stay held until they are released or their lease
        expires. Calls of `select` that are in progress raise RuntimeError.
        """
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
            amount: Minimum sum of the tokens, in their smallest unit.
            token_type: The type of the tokens, such as "Fiat".
            identifier: The kind of token within this type, such as "GBP".
            transaction: The transaction that will spend the tokens.
            owner: Select from the wallet of this owner's key. Give either `owner` or `account`.
            account: Select from the wallet of this account, which has the tokens of several keys.
            where: A predicate that accepts or rejects a token. It is called often, and must have no side
                effects.
            prefer: "small" or "large": try the smallest or the largest tokens first. By default the
                order is random.
            limit: Maximum number of tokens to select. The largest are selected if that is necessary.

        Raises:
            InsufficientFunds: The wallet has less than the amount.
            FundsLocked: Other transactions still hold too much of it after all retries.
            TooManyTokens: The amount can't be reached in `limit` tokens.
        """
        request = SelectionRequest(
            amount=check_amount(amount),
            transaction=transaction,
            where=where,
            prefer=prefer,
            limit=check_limit(limit),
        )
        if type(transaction) is not str or not transaction:
            raise ValueError(f"transaction must be a non-empty string, not {transaction!r}")
        if prefer not in (None, "small", "large"):
            raise ValueError(f"prefer must be 'small' or 'large', not {prefer!r}")
        wallet = make_wallet(owner=owner, account=account, token_type=token_type, identifier=identifier)
        self._context.caches.check_open()
        self._context.guard.check()
        grants, reservation = await self._search.find(request, wallet)
        return SherdlockSelection(self._context, grants, reservation, amount)

    @property
    def collisions(self) -> int:
        """The number of requests that Genie has rejected because others held too many of the
        requested tokens.
        """
        return self._search.collisions

    async def restore(self, data: Mapping[str, Any]) -> SherdlockSelection:
        """Create a selection again from its `checkpoint`, in any replica, by locking its tokens for
        the same transaction.

        Raises SelectionEnded if a selection of this selector still holds any of the tokens. Also
        raises SelectionEnded if another transaction holds any of them; that is possible only after
        the lease has expired.

        Does not check whether the tokens were spent. If this transaction has spent them, `spend`
        has no effect. If another transaction has spent them, `spend` raises SpentAlready.
        """
        context = self._context
        context.caches.check_open()
        context.guard.check()
        checkpoint = Checkpoint.parse(data)
        transaction = checkpoint.transaction
        reservation = Reservation(transaction, [token.id for token in checkpoint.tokens])
        async with self._search.mutex.hold(transaction):
            if context.tracker.has_releasable_reservation(reservation.token_ids, context.now()):
                raise SelectionEnded(f"a selection of this selector holds the tokens of {transaction!r} already")
            acquiring = acquire_all(
                context.client, context.tracker, checkpoint.tokens, transaction=transaction, lease=context.lease
            )
            grants = await self._search.reserve(reservation, acquiring)
        if isinstance(grants, Shortfall):
            raise SelectionEnded(f"another transaction holds tokens of {transaction!r}")
        for token in grants.tokens:
            context.caches.put_back(token.id)  # a report of another client's lock was outdated
        return SherdlockSelection(context, grants, reservation, checkpoint.target, earlier_locks=checkpoint.locks)
