"""Selecting tokens in one process that has its wallets to itself.

Everything is decided in memory, in one event loop: whatever happens between two awaits is atomic, so that a token is
claimed by one transaction only, with no lock. For several threads there is `genie.tokens.sync.InMemorySelector`, for
several processes that share wallets `SherdlockSelector`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from genie.tokens.errors import FundsLocked
from genie.tokens.guard import Guard, ThreadGuard
from genie.tokens.in_memory.buckets import Buckets, take
from genie.tokens.in_memory.claims import Claim, Claims
from genie.tokens.in_memory.consolidation import Consolidation, smallest
from genie.tokens.in_memory.follow import Follower
from genie.tokens.in_memory.picking import Picker, Where, whole
from genie.tokens.in_memory.selection import InMemorySelection
from genie.tokens.selection import check_duration, check_limit, read_checkpoint
from genie.tokens.store import TokenStore
from genie.tokens.token import check_amount, wallet


class InMemorySelector:
    """Selects from a copy of a store's unspent tokens, which it loads and then follows. An async context manager.

    It belongs to the event loop in which it is started: RuntimeError where it is used from another thread. Threads use
    `genie.tokens.sync.InMemorySelector`.

    A selection that was neither spent nor released is over after `auto_unlock` seconds, and its tokens are free again; a
    call that makes a selection can say another time for it.
    At most `max_tokens` tokens are kept in memory; of the rest it keeps the ids and amounts, and reads the tokens from
    the store when they are selected, or asked about by a `where`.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        auto_unlock: float = 300.0,
        max_tokens: int | None = None,
    ) -> None:
        self._set_up(store, auto_unlock, max_tokens, ThreadGuard("Threads use genie.tokens.sync.InMemorySelector."))

    @classmethod
    def guarded_by(cls, guard: Guard, store: TokenStore, *, auto_unlock: float, max_tokens: int | None) -> Self:
        """A selector whose state is protected in another way than by confining it to a thread: for facades."""
        selector = cls.__new__(cls)
        cls._set_up(selector, store, auto_unlock, max_tokens, guard)
        return selector

    def _set_up(self, store: TokenStore, auto_unlock: float, max_tokens: int | None, guard: Guard) -> None:
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens must not be less than 0, but is {max_tokens!r}")
        self._store = store
        self._auto_unlock = check_duration(auto_unlock, "auto_unlock")
        self._guard = guard
        self._claims = Claims(Buckets(max_tokens), guard.time)
        self._follower = Follower(store, self._claims)
        self._picker = Picker(self._claims, store, guard)

    @property
    def trouble(self) -> Exception | None:
        """What the store failed with, until it could be read again: tokens are selected from an old copy meanwhile."""
        return self._follower.trouble

    async def start(self) -> None:
        """Load the store and follow it from then on. Raises what the store raises while it is loaded first."""
        if self._follower.following:
            self._guard.check()
        else:
            self._guard.bind()
        await self._follower.start()

    async def close(self) -> None:
        """Follow the store no longer, and select no more. What was selected can still be spent and released."""
        self._guard.check()
        await self._follower.close()

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
        limit: int | None = None,
        auto_unlock: float | None = None,
    ) -> InMemorySelection:
        """Hold free tokens for a transaction that reach `amount` together; all or none.

        Either of an `owner`'s key or of an `account` over all its keys; only such as `where` lets through; at most
        `limit` of them; for `auto_unlock` seconds where it is said, else for the selector's. Waits until the store is
        loaded, then for nothing but the store. InsufficientFunds, where there is not enough; FundsLocked, where there is,
        but others hold too much of it; TooManyTokens.
        """
        check_amount(amount)
        check_limit(limit)
        claim = Claim(transaction, self._auto_unlock if auto_unlock is None else self._duration(auto_unlock))
        of = wallet(owner=owner, account=account, token_type=token_type, identifier=identifier)
        if not self._follower.ready:
            self._guard.check_can_wait()
            await self._follower.loaded()
        self._claims.expire()  # looks at the guard's clock, which rejects calls from elsewhere
        tokens = await self._picker.pick(claim, of, amount, where, limit)
        return InMemorySelection(self._store, tokens, amount, claim, self._claims, self._follower, self._guard)

    async def consolidate(
        self,
        *,
        token_type: str,
        identifier: str,
        transaction: str,
        owner: str | None = None,
        account: str | None = None,
        where: Where | None = None,
        into: int = 1,
        at_most: int = 100,
        auto_unlock: float | None = None,
    ) -> Consolidation | None:
        """Hold small change that is to be joined: the `at_most` smallest free tokens, which are to be spent into `into`
        outputs of the amounts that it suggests. None, where not more than `into` tokens are free: nothing to be done.

        `where` keeps to tokens that can be joined: those of one issuer, or one notary. `auto_unlock` as in `select`.
        """
        self._guard.check()
        if not 1 <= into < at_most:
            raise ValueError(f"into must be at least 1 and less than at_most, not {into!r} and {at_most!r}")
        claim = Claim(transaction, self._duration(auto_unlock))
        of = wallet(owner=owner, account=account, token_type=token_type, identifier=identifier)
        if not self._follower.ready:
            self._guard.check_can_wait()
            await self._follower.loaded()
        try:
            while True:
                self._claims.expire()
                bucket = self._claims.buckets.find(of)
                free = list(bucket.free_entries()) if bucket is not None else []
                if where is not None:
                    free = [entry for entry in await self._picker.matching(free, where) if entry.claim is None]
                claim.entries = smallest(free, into, at_most)
                if not claim.entries:
                    return None
                take(claim.entries, claim)
                self._claims.hold(claim)
                tokens = whole(claim.entries) or await self._picker.read(claim)
                if len(tokens) > into:
                    return Consolidation(self._store, tokens, into, claim, self._claims, self._follower, self._guard)
                self._claims.end(claim)
        except BaseException:
            self._claims.end(claim)
            raise

    async def restore(self, data: Mapping[str, Any], *, auto_unlock: float | None = None) -> InMemorySelection:
        """Hold again what a selection's `checkpoint` says, for as long as a new one. Awaits nothing.

        Say it before `start`, for all that ran when the process ended: then nobody can select these tokens before. What
        the same transaction holds of them passes over to the selection that is returned. FundsLocked, where another
        transaction holds some of them: then nothing is held. Those that were spent meanwhile are told by the
        selection's `lost`, as soon as the store is loaded.
        """
        self._guard.check()
        transaction, asked, tokens = read_checkpoint(data)
        claim, into = Claim(transaction, self._duration(auto_unlock)), data.get("into")
        if into is not None and not (type(into) is int and 1 <= into < len(tokens)):
            raise ValueError(f"into must be an integer from 1 and below the number of tokens, not {into!r}")
        others = set(self._claims.again(claim, tokens))
        if others:
            locked = sum(token.amount for token in tokens if token.id in others)
            total = sum(token.amount for token in tokens)
            raise FundsLocked(total, total - locked, locked, f"what {claim.transaction!r} held before")
        if into is not None:
            return Consolidation(
                self._store, tokens, into, claim, self._claims, self._follower, self._guard, restored=True
            )
        return InMemorySelection(
            self._store, tokens, asked, claim, self._claims, self._follower, self._guard, restored=True
        )

    def _duration(self, auto_unlock: float | None) -> float:
        return self._auto_unlock if auto_unlock is None else check_duration(auto_unlock, "auto_unlock")
