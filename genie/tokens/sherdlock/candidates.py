"""Which tokens to ask Genie for, and what a wallet comes to if they can't be had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from genie.tokens.errors import FundsLocked, InsufficientFunds, TooManyTokens
from genie.tokens.sherdlock.bag import Prefer
from genie.tokens.sherdlock.cache import Cache, Where
from genie.tokens.sherdlock.held import Held
from genie.tokens.token import Token

MIN_SPARES = 3


def spares(needed: int) -> int:
    """Tokens that are asked for beyond those that are needed: half as many again, and three at least.

    So three of eight may have been taken by others a moment ago and five are had in one round trip. If one of ten is held,
    one ask of 200 fails; and each name costs Genie and the client something to read.
    """
    return max(needed // 2, MIN_SPARES)


@dataclass(frozen=True, slots=True)
class Ask:
    """What somebody wants of a wallet."""

    amount: int
    transaction: str
    where: Where | None
    prefer: Prefer | None
    limit: int | None

    def passes(self, token: Token) -> bool:
        """Whether it is one of those that are asked for."""
        return self.where is None or self.where(token)


@dataclass(frozen=True, slots=True)
class Picked:
    """Tokens in the order in which they are to be tried. The first `needed` reach the amount; `whole`: there are no more.

    `passed` are those that were passed by because others hold them.
    """

    tokens: list[Token]
    needed: int
    whole: bool
    passed: int = 0

    @property
    def strained(self) -> bool:
        """Whether an ask that did not know who holds what would have had too few spares."""
        return self.passed > spares(self.needed)


def pick(ask: Ask, cache: Cache, held: Held, now: float, *, own: bool, spread: int) -> Picked | None:
    """Tokens that are free, as far as is known; None if they don't reach the amount.

    `own` lets those through that Genie holds for the very same transaction, which no selection here has. There are
    `spread` times the usual spares.
    """
    picked = _pick(ask, cache.draw(ask.prefer), held, now, own, spread)
    if ask.limit is not None and picked is not None and picked.needed > ask.limit:
        picked = _pick(ask, cache.draw("large"), held, now, own, spread)
        if picked is not None and picked.needed > ask.limit:
            return None
    return picked


def _pick(ask: Ask, drawn: Iterator[Token], held: Held, now: float, own: bool, spread: int) -> Picked | None:
    missing, where, transaction = ask.amount, ask.where, ask.transaction
    mine, others = held.mine, held.others
    tokens: list[Token] = []
    wanted = -1
    needed = passed = 0
    for token in drawn:
        id = token.id
        if id in mine and held.here(id, now) is not None:
            continue
        if id in others:
            other = held.elsewhere(id, now)
            if other is not None and not (own and other.transaction == transaction):
                passed += 1
                continue
        if where is not None and not where(token):
            continue
        tokens.append(token)
        missing -= token.amount
        if wanted < 0:
            if missing <= 0:
                needed = len(tokens)
                wanted = needed + spares(needed) * spread
        elif len(tokens) >= wanted:
            return Picked(tokens, needed, False, passed)
    return Picked(tokens, needed, True, passed) if wanted >= 0 else None


def everything(ask: Ask, cache: Cache, held: Held, now: float) -> Picked | None:
    """All tokens but those that this selector holds, the free ones first: Genie knows better who holds what."""
    free: list[Token] = []
    locked: list[Token] = []
    for token in cache.draw("large" if ask.limit is not None else ask.prefer):
        if held.here(token.id, now) is None and ask.passes(token):
            (locked if held.by_another(token.id, ask.transaction, now) else free).append(token)
    tokens = free + locked
    reached = 0
    for needed, token in enumerate(tokens, 1):
        reached += token.amount
        if reached >= ask.amount:
            return Picked(tokens, needed, whole=True)
    return None


@dataclass(slots=True)
class Survey:
    """What a wallet comes to for somebody who asks: the sums of what is free, and of what others hold.

    `best_free` and `best` are what the `limit` largest tokens come to, of the free ones and of all.
    """

    free: int = 0
    locked: int = 0
    best_free: int = 0
    best: int = 0

    @classmethod
    def of(cls, ask: Ask, tokens: Iterable[Token], held: Held, now: float) -> Survey:
        """Look at every token."""
        free: list[int] = []
        locked: list[int] = []
        for token in tokens:
            if not ask.passes(token):
                continue
            hold = held.here(token.id, now)
            if hold is None:
                (locked if held.by_another(token.id, ask.transaction, now) else free).append(token.amount)
            elif hold.asking or hold.transaction != ask.transaction:
                locked.append(token.amount)
        survey = cls(sum(free), sum(locked))
        if ask.limit is not None:
            survey.best_free = sum(sorted(free, reverse=True)[: ask.limit])
            survey.best = sum(sorted(free + locked, reverse=True)[: ask.limit])
        return survey

    def enough(self, ask: Ask) -> bool:
        """Whether the amount can be reached if everybody gives back what they hold."""
        return self.spare(ask) >= 0

    def spare(self, ask: Ask) -> int:
        """What there is beyond the amount if everybody gives back what they hold."""
        return (self.free + self.locked if ask.limit is None else self.best) - ask.amount

    def missing(self, ask: Ask) -> int:
        """What must come for another try to be of any use."""
        return 1 if ask.limit is not None else max(1, ask.amount - self.free)

    def verdict(self, ask: Ask, of: object) -> InsufficientFunds | TooManyTokens:
        """Why the amount is not reached."""
        if self.free + self.locked < ask.amount:
            return InsufficientFunds(ask.amount, self.free, self.locked, of)
        if ask.limit is not None and self.best < ask.amount:
            return TooManyTokens(ask.amount, ask.limit, self.best_free)
        return FundsLocked(ask.amount, self.free, self.locked, of)
