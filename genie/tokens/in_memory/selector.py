"""Choosing tokens for an amount out of the buckets.

All that is chosen is claimed at once, between two awaits. Only where the store must be read, because of some tokens
just id and amount are in memory, is there an await; what is claimed by then stays claimed, and is given back if it
comes to nothing: the store fails, the caller is cancelled, what is left is too little.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from genie.tokens.errors import FundsLocked, InsufficientFunds, TooManyTokens
from genie.tokens.guard import Guard, ThreadGuard
from genie.tokens.in_memory.claims import Bucket, Buckets, Claim, Claims, Entry, largest, take
from genie.tokens.in_memory.follower import Follower
from genie.tokens.in_memory.selection import InMemorySelection
from genie.tokens.selection import check_duration, check_limit, read_checkpoint
from genie.tokens.store import TokenStore
from genie.tokens.token import MAX_AMOUNT, Token, Wallet, check_amount, wallet

Where = Callable[[Token], bool]

READ_AT_ONCE = 500
"""Tokens that the store is asked for in one go."""


class Picker:
    """Chooses from the buckets, and reads from the store what they don't keep."""

    __slots__ = ("_buckets", "_claims", "_guard", "_store")

    def __init__(self, claims: Claims, store: TokenStore, guard: Guard) -> None:
        self._guard = guard
        self._claims = claims
        self._buckets = claims.buckets
        self._store = store

    async def pick(self, claim: Claim, of: Wallet, asked: int, where: Where | None, limit: int | None) -> list[Token]:
        """Claim tokens that reach `asked`, and return them. Whatever it raises, nothing is claimed then."""
        try:
            while True:
                if where is None:
                    self._pick_any(claim, of, asked, limit)
                else:
                    await self._pick_where(claim, of, asked, where, limit)
                tokens = whole(claim.entries)
                if tokens is None:
                    tokens = await self.read(claim)
                    if sum(token.amount for token in tokens) < asked:
                        self._claims.end(claim)  # some were spent meanwhile: once more, without them
                        continue
                return tokens
        except BaseException:
            self._claims.end(claim)
            raise

    async def read(self, claim: Claim) -> list[Token]:
        """The tokens of a claim, with the store's help. Those that turn out to be spent are left out of it."""
        read: dict[str, Token] = {}
        for part in _parts([entry for entry in claim.entries if entry.token is None]):
            read |= await self._read(part)
        tokens = []
        for entry in claim.owned:
            token = entry.token or read.get(entry.id)
            if token is None:
                self._buckets.remove(entry.id)
            else:
                self._buckets.keep(entry, token)
                tokens.append(token)
        claim.entries = list(claim.owned)
        self._claims.hold(claim)
        return tokens

    async def _read(self, entries: Sequence[Entry]) -> dict[str, Token]:
        self._guard.check_can_wait()
        return await self._store.get([entry.id for entry in entries])

    # -- without a predicate ------------------------------------------------------------------------------

    def _pick_any(self, claim: Claim, of: Wallet, asked: int, limit: int | None) -> None:
        bucket = self._buckets.find(of)
        if bucket is None:
            raise InsufficientFunds(asked, 0, 0, of)
        if bucket.free < asked:
            locked = bucket.claimed - self._claims.held_by(claim.transaction, bucket)
            raise _short(asked, bucket.free, locked, of)
        claim.entries = bucket.pick(asked, claim)
        if limit is not None and len(claim.entries) > limit:
            self._claims.end(claim)
            self._take_largest(claim, bucket.free_entries(), self._of_others(bucket, claim), asked, limit, of)
        self._claims.hold(claim)

    def _take_largest(
        self, claim: Claim, entries: Iterable[Entry], held: list[Entry], asked: int, limit: int, of: Wallet
    ) -> None:
        """`held` is what others hold: with it the limit may well be kept."""
        free = list(entries)
        chosen, reached = largest(free, asked, limit)
        if reached < asked and largest([*free, *held], asked, limit)[1] >= asked:
            raise FundsLocked(asked, _worth(free), _worth(held), of)
        if reached < asked:
            raise TooManyTokens(asked, limit, reached)
        take(chosen, claim)
        claim.entries = chosen

    def _of_others(self, bucket: Bucket, claim: Claim) -> list[Entry]:
        return [entry for entry, holder in self._claims.claimed(bucket) if holder.transaction != claim.transaction]

    # -- with one -----------------------------------------------------------------------------------------

    async def _pick_where(self, claim: Claim, of: Wallet, asked: int, where: Where, limit: int | None) -> None:
        bucket = self._buckets.find(of)
        if bucket is None:
            raise InsufficientFunds(asked, 0, 0, of)
        self._claims.hold(claim)
        unread = bucket.search(asked, claim, where, claim.entries)
        reached = _worth(claim.owned)
        for part in _parts(unread):
            if reached >= asked:
                break
            self._claim_where(claim, part, await self._read(part), where, asked - reached)
            reached = _worth(claim.owned)
        if reached < asked:
            raise await self._short_where(claim, bucket, asked, reached, where)
        if limit is not None and len(claim.entries) > limit:
            self._claims.end(claim)
            matching = await self.matching(bucket.free_entries(), where)
            free = [entry for entry in matching if entry.claim is None]
            if _worth(free) < asked:
                raise await self._short_where(claim, bucket, asked, _worth(free), where)
            held = await self.matching(self._of_others(bucket, claim), where)
            free = [entry for entry in free if entry.claim is None]
            self._take_largest(claim, free, held, asked, limit, of)
        self._claims.hold(claim)

    def _claim_where(
        self, claim: Claim, entries: Iterable[Entry], read: dict[str, Token], where: Where, asked: int
    ) -> None:
        for entry in entries:
            if asked <= 0:
                break
            token = read.get(entry.id)
            if token is not None and entry.claim is None and where(token):
                take((entry,), claim)
                claim.entries.append(entry)
                asked -= entry.amount

    async def _short_where(
        self, claim: Claim, bucket: Bucket, asked: int, free: int, where: Where
    ) -> InsufficientFunds:
        held = await self.matching(self._of_others(bucket, claim), where)
        return _short(asked, free, _worth(held), bucket.wallet)

    async def matching(self, entries: Iterable[Entry], where: Where) -> list[Entry]:
        """Those that a predicate lets through. The store may have been awaited: they may be claimed or gone by then."""
        found: list[Entry] = []
        unread: list[Entry] = []
        for entry in entries:
            if entry.token is None:
                unread.append(entry)
            elif where(entry.token):
                found.append(entry)
        for part in _parts(unread):
            read = await self._read(part)
            found += [entry for entry in part if entry.id in read and where(read[entry.id])]
        return found


def whole(entries: Iterable[Entry]) -> list[Token] | None:
    """The tokens of entries; None, if not all of them are in memory."""
    tokens = []
    for entry in entries:
        if entry.token is None:
            return None
        tokens.append(entry.token)
    return tokens


def _parts(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    return (entries[start : start + READ_AT_ONCE] for start in range(0, len(entries), READ_AT_ONCE))


def _worth(entries: Iterable[Entry]) -> int:
    return sum(entry.amount for entry in entries)


def _short(asked: int, free: int, locked: int, of: Wallet) -> InsufficientFunds:
    """The error that fits."""
    kind = FundsLocked if free + locked >= asked else InsufficientFunds
    return kind(asked, free, locked, of)


# -- Joining small change: many tokens that spending has split are spent into few --------


class Consolidation(InMemorySelection):
    """Small change that is held to be joined. Spend it into outputs of `amounts`, the largest first."""

    __slots__ = ("amounts",)

    def __init__(
        self,
        store: TokenStore,
        tokens: Sequence[Token],
        into: int,
        claim: Claim,
        claims: Claims,
        follower: Follower,
        guard: Guard,
        *,
        restored: bool = False,
    ) -> None:
        asked = sum(token.amount for token in tokens)
        super().__init__(store, tokens, asked, claim, claims, follower, guard, restored=restored)
        self.amounts = split(self.amount, into)

    def checkpoint(self) -> dict[str, Any]:
        """Plain data by which `restore` gives this consolidation again; see `InMemorySelection.checkpoint`."""
        return super().checkpoint() | {"into": len(self.amounts)}


def split(total: int, into: int) -> tuple[int, ...]:
    """A total in so many parts that differ by one at most, the largest first."""
    part, rest = divmod(total, into)
    return (part + 1,) * rest + (part,) * (into - rest)


def smallest(entries: Iterable[Entry], into: int, at_most: int) -> list[Entry]:
    """The smallest, up to `at_most`, that `into` outputs can be worth together; none if they are not more than `into`:
    nothing would be joined then.
    """
    chosen: list[Entry] = []
    total = 0
    for entry in heapq.nsmallest(at_most, entries, key=lambda entry: entry.amount):
        total += entry.amount
        if total > into * MAX_AMOUNT:
            break
        chosen.append(entry)
    return chosen if len(chosen) > into else []


# -- Selecting tokens in one process that has its wallets to itself --------


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
