"""Choosing tokens for an amount out of the buckets.

All that is chosen is claimed at once, between two awaits. Only where the store must be read, because of some tokens
just id and amount are in memory, is there an await; what is claimed by then stays claimed, and is given back if it
comes to nothing: the store fails, the caller is cancelled, what is left is too little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from genie.tokens.errors import FundsLocked, InsufficientFunds, TooManyTokens
from genie.tokens.guard import Guard
from genie.tokens.in_memory.buckets import Bucket, Entry, largest, take
from genie.tokens.in_memory.claims import Claim, Claims
from genie.tokens.store import TokenStore
from genie.tokens.token import Token, Wallet

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
