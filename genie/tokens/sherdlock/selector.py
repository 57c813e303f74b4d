"""The selector for replicas that share wallets: what each of them holds is locked in Genie.

Tokens are locked by the names `token/<id>`, exclusively, and the lock's owner is the transaction that will spend them.
What is spent stays locked until its lease ends, so that a replica that has not heard of it passes it by. What a replica
held when it crashed comes free in the same way. How tokens are found is said in `search.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import iscoroutinefunction
from math import inf
from types import TracebackType
from typing import Any, Self

from genie.tokens.errors import SelectionEnded
from genie.tokens.guard import Guard, ThreadGuard
from genie.tokens.selection import check_limit
from genie.tokens.sherdlock.cache import Prefer, Wallets, Where
from genie.tokens.sherdlock.grants import Lingering, Short, take_all
from genie.tokens.sherdlock.hints import Hints
from genie.tokens.sherdlock.holds import Held, Hold, Watching
from genie.tokens.sherdlock.locks import Client
from genie.tokens.sherdlock.search import Ask, Search
from genie.tokens.sherdlock.selection import Checkpoint, SherdlockSelection
from genie.tokens.store import TokenStore
from genie.tokens.token import Token, check_amount, wallet


class SherdlockSelector:
    """Selects unspent tokens and holds them in Genie, under `exclusive:token/<id>`, for the transaction that will spend
    them. Any number of selectors, in any number of processes, can serve the same wallets. An async context manager; the
    client must be open while it is. It belongs to the event loop in which it is started: RuntimeError where it is used from
    another thread.

    `lease` (seconds) is how long a selection is held at most, and how long what is spent, or was held by a replica that
    crashed, stays locked. `immediate_retries` is how often it is tried again at once when others were faster. `retries` is
    how often it is waited for what others hold, each time for a random part of `backoff` seconds. `freshness` (seconds) is
    how old a cache may be while the store's changes can't be followed. `replica` is this process's name, by which others
    are told which wallets it has seen (`last_seen`).
    """

    def __init__(
        self,
        client: Client,
        store: TokenStore,
        *,
        retries: int = 3,
        backoff: float = 5.0,
        immediate_retries: int = 5,
        lease: float = 180.0,
        freshness: float = 1.0,
        replica: str | None = None,
    ) -> None:
        if retries < 0 or immediate_retries < 0:
            raise ValueError("retries and immediate_retries must not be negative")
        if not backoff >= 0 or not freshness >= 0 or not 0 < lease < inf:
            raise ValueError("backoff and freshness must not be negative, and lease must be above 0")
        if not iscoroutinefunction(getattr(client, "acquire_any", None)):
            raise TypeError(f"client must be one of genie.connect() (asyncio), not {client!r}")
        self.client = client
        self.store = store
        self.lease = lease
        self.tokens_held = Held(lease, self._freed)
        self.lingering = Lingering()
        self._wallets = Wallets(store, freshness, self._is_free)
        self.watching = Watching(client, self.tokens_held, self._wallets.wake)
        self._search = Search(
            self, self._wallets, retries=retries, backoff=backoff, immediate_retries=immediate_retries
        )
        self._hints = None if replica is None else Hints(client, replica)
        self.guard: Guard = ThreadGuard("Make one for each thread.")

    async def start(self) -> None:
        """Begin to follow the store."""
        self._wallets.start()
        self.guard.bind()
        self.watching.start()
        if self._hints is not None:
            self._hints.start()

    async def close(self) -> None:
        """End what goes on in the background. Selections that are held stay so; who waits for one gets RuntimeError."""
        self.guard.check()
        await self.lingering.close()
        await self.watching.close()
        if self._hints is not None:
            await self._hints.close()
        await self._wallets.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- selecting ------------------------------------------------------------------------------------------

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
        """Tokens of one wallet that together reach the amount, held for a transaction.

        The wallet is that of an owner's key or, over all its keys, that of an account. `where` lets tokens through; it is
        called often and must only look at the token. `prefer` takes the smallest or the largest first, `limit` is how many
        tokens it may be; if it needs be, the largest are taken to keep it.

        Raises InsufficientFunds, if the wallet has not got the amount; FundsLocked, if others still hold too much of it
        after all retries; TooManyTokens, if it can't be had in `limit` tokens. Cancelled, or left by any error, nothing
        stays held. A second selection of the same transaction gets other tokens than the first.
        """
        ask = Ask(check_amount(amount), transaction, where, prefer, check_limit(limit))
        if type(transaction) is not str or not transaction:
            raise ValueError(f"transaction must be the name of the one that will spend the tokens, not {transaction!r}")
        if prefer not in (None, "small", "large"):
            raise ValueError(f"prefer must be 'small' or 'large', not {prefer!r}")
        of = wallet(owner=owner, account=account, token_type=token_type, identifier=identifier)
        self._wallets.check_open()
        self.guard.check()
        grants, hold = await self._search.find(ask, of)
        if self._hints is not None:
            self._hints.saw(of, self.now())
        return SherdlockSelection(self, grants, hold, amount)

    @property
    def collisions(self) -> int:
        """How often Genie had to be asked once more, because others held too many of the tokens that were tried."""
        return self._search.collisions

    def last_seen(
        self, *, token_type: str, identifier: str, owner: str | None = None, account: str | None = None
    ) -> str | None:
        """Which replica has selected from a wallet last, as far as is known: a hint, by which asks can be routed there.

        None where nobody has lately, and for a selector without a `replica` name, which does not listen for it.
        """
        of = wallet(owner=owner, account=account, token_type=token_type, identifier=identifier)
        return None if self._hints is None else self._hints.last_seen(of)

    async def restore(self, data: Mapping[str, Any]) -> SherdlockSelection:
        """The selection that `checkpoint` gave data of, held again for the same transaction; by any replica.

        SelectionEnded, if another transaction holds any of its tokens by now, which can't be before the lease has ended,
        and if they are selected here and not left yet.
        If the tokens are spent, it is `spend` that finds out: by this very transaction, it has no effect; else
        SpentAlready.
        """
        self._wallets.check_open()
        self.guard.check()
        of = Checkpoint.of(data)
        hold = Hold(of.transaction, [token.id for token in of.tokens])
        async with self._search.turns.turn(of.transaction):
            if self.tokens_held.selected(hold.ids, self.now()):
                raise SelectionEnded(f"the tokens of {of.transaction!r} are selected here already")
            granting = take_all(self.client, self.tokens_held, of.tokens, of.transaction, self.lease)
            grants = await self._search.hold(hold, granting)
        if isinstance(grants, Short):
            raise SelectionEnded(f"another transaction holds tokens of {of.transaction!r} by now")
        return SherdlockSelection(self, grants, hold, of.asked, of.locks)

    # -- for selections -------------------------------------------------------------------------------------

    def now(self) -> float:
        """The event loop's time."""
        return self.guard.time()

    def dropped(self, hold: Hold) -> None:
        """Tokens are held no longer."""
        self.tokens_held.drop(hold)

    def left(self, hold: Hold) -> None:
        """Nobody will give these tokens back."""
        self.tokens_held.leave(hold, self.now())

    def spent(self, ids: Sequence[str]) -> None:
        """Tokens are no part of any wallet any more."""
        for id in ids:
            self._wallets.spent(id)

    def expect(self, outputs: Sequence[Token]) -> list[Token]:
        """These are about to be issued."""
        return self._wallets.expect(outputs)

    def issued(self, expected: Sequence[Token]) -> None:
        """They are issued."""
        self._wallets.issued(expected)

    def expect_no_more(self, expected: Sequence[Token]) -> None:
        """They were issued or not, or nobody knows."""
        self._wallets.expect_no_more(expected)

    # -- inside ---------------------------------------------------------------------------------------------

    def _is_free(self, id: str) -> bool:
        return not self.tokens_held.anybody(id, self.now())

    def _freed(self, id: str) -> None:
        if self.watching.somebody_waits:
            self._wallets.freed(id)
