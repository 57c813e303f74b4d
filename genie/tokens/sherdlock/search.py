"""One after another, by transaction.

What a transaction holds is free to the same transaction. So two asks of one transaction at the same time could be given
the same token; they take turns. Asks of different transactions never wait for each other.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from random import random
from types import TracebackType
from typing import Any, NamedTuple

from genie.errors import GenieError
from genie.tokens.errors import FundsLocked, InsufficientFunds, TooManyTokens
from genie.tokens.sherdlock.cache import Cache, Prefer, Wallets, Where
from genie.tokens.sherdlock.grants import Grants, Short, take
from genie.tokens.sherdlock.holds import Held, Hold
from genie.tokens.sherdlock.selection import Keeper
from genie.tokens.token import MAX_AMOUNT, Token, Wallet


class Turns:
    """The transactions whose turn it is, and for each those who come next."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: dict[str, deque[asyncio.Future[None]]] = {}

    def turn(self, transaction: str) -> Turn:
        """`async with` it."""
        return Turn(self._next, transaction)


class Turn:
    """A transaction's turn, from when it comes until it is left."""

    __slots__ = ("_next", "_transaction")

    def __init__(self, nexts: dict[str, deque[asyncio.Future[None]]], transaction: str) -> None:
        self._next = nexts
        self._transaction = transaction

    async def __aenter__(self) -> None:
        line = self._next.get(self._transaction)
        if line is None:
            self._next[self._transaction] = deque()
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(place)
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled():
                self._leave()  # it came, and nobody is there to use it
            else:
                line.remove(place)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        line = self._next[self._transaction]
        while line:
            place = line.popleft()
            if not place.done():
                place.set_result(None)
                return
        del self._next[self._transaction]


# -- Which tokens to ask Genie for, and what a wallet comes to if they can't be had --------

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


# -- How tokens are found and held for somebody who asks, and what it takes to say that there are not enough --------

MORE_SPARES = 8
"""How many times more spares each immediate retry has."""
COUNTED = 1_000
"""Tokens of which Genie is asked how much others hold, only to say it in an error."""
MOVING = 2
"""How often a wallet is read again at once because it moved while it was read."""


class Found(NamedTuple):
    """Tokens that are held."""

    grants: Grants
    hold: Hold


class Search:
    """`immediate_retries`, `retries` and `backoff` (seconds) are those of the selector."""

    __slots__ = ("_backoff", "_held", "_immediate_retries", "_keeper", "_retries", "_wallets", "collisions", "turns")

    def __init__(
        self, keeper: Keeper, wallets: Wallets, *, retries: int, backoff: float, immediate_retries: int
    ) -> None:
        self._keeper = keeper
        self._held = keeper.tokens_held
        self._wallets = wallets
        self._retries = retries
        self._backoff = backoff
        self._immediate_retries = immediate_retries
        self.turns = Turns()
        self.collisions = 0
        """Asks that Genie has refused: others were faster, and that was not known."""

    async def find(self, ask: Ask, of: Wallet) -> Found:
        """Tokens of a wallet, held. InsufficientFunds, FundsLocked or TooManyTokens where there are none; then, and
        after any other error and when it is cancelled, nothing is held.
        """
        now = self._keeper.now()
        cache = self._wallets.cache(of, now)
        patience = Patience(cache.loads, self._retries)
        self._wallets.refresh(cache, now)
        while True:
            self._wallets.check_open()
            found = await self._try(ask, cache, own=patience.has_read(cache))
            if found is not None:
                return found
            self._wallets.check_open()
            survey = Survey.of(ask, cache, self._held, self._keeper.now())
            if patience.must_read(cache, enough=survey.enough(ask), followed=self._wallets.follows(cache)):
                await self._read_on(ask, cache, survey, patience)
            elif not survey.enough(ask) and await self._may_have_moved(ask, cache) and patience.rereads:
                patience.reread(cache)
            elif not await self._wait(ask, cache, survey, patience):
                return await self._last(ask, cache)

    async def hold(
        self, hold: Hold, granting: Coroutine[Any, Any, Grants | Short], limit: int | None = None
    ) -> Grants | Short:
        """Have Genie lock tokens, as `take` or `take_all` does; if others were faster nothing is held. It must be the
        transaction's turn.
        """
        keeper, held = self._keeper, self._held
        held.take(hold)
        try:
            grants = await granting
            if isinstance(grants, Grants) and limit is not None and len(grants.tokens) > limit:
                await grants.give_back()
                grants = Short(grants.amount, 0)
        except BaseException:
            held.drop(hold)
            raise
        if isinstance(grants, Short):
            held.keep(hold, ())
        else:
            hold.until = grants.asked_at + keeper.lease
            held.keep(hold, [token.id for token in grants.tokens])
        return grants

    # -- one try --------------------------------------------------------------------------------------------

    async def _try(self, ask: Ask, cache: Cache, *, own: bool) -> Found | None:
        spread = 1
        for left in range(self._immediate_retries, -1, -1):
            async with self.turns.turn(ask.transaction):
                picked = pick(ask, cache, self._held, self._keeper.now(), own=own, spread=spread)
                if picked is None:
                    return None
                found = await self._take(ask, picked)
            self._keeper.watching.asked(strained=picked.strained or isinstance(found, Short))
            if not isinstance(found, Short):
                return found
            self.collisions += 1
            if ask.limit is not None and ask.prefer != "large":
                ask = replace(ask, prefer="large")  # which needs the fewest tokens
            elif picked.whole:
                return None
            spread = spread * MORE_SPARES if left > 1 else sys.maxsize
        return None

    async def _take(self, ask: Ask, picked: Picked) -> Found | Short:
        hold = Hold(ask.transaction, [token.id for token in picked.tokens[: picked.needed]])
        keeper = self._keeper
        granting = take(keeper.client, self._held, picked.tokens, ask.amount, ask.transaction, keeper.lease)
        grants = await self.hold(hold, granting, ask.limit)
        return grants if isinstance(grants, Short) else Found(grants, hold)

    async def _last(self, ask: Ask, cache: Cache) -> Found:
        async with self.turns.turn(ask.transaction):
            picked = everything(ask, cache, self._held, self._keeper.now())
            found = None if picked is None else await self._take(ask, picked)
        if isinstance(found, Found):
            return found
        survey = Survey.of(ask, cache, self._held, self._keeper.now())
        if found is not None and ask.limit is None and survey.enough(ask):
            raise FundsLocked(ask.amount, found.free, survey.free + survey.locked - found.free, cache.wallet)
        if not survey.enough(ask) and cache.done is not None:
            # It has moved since it was read: what was there then is partly somebody's change by now.
            survey = Survey.of(ask, cache.done.told.values(), self._held, self._keeper.now())
        raise survey.verdict(ask, cache.wallet)

    # -- reading --------------------------------------------------------------------------------------------

    async def _read_on(self, ask: Ask, cache: Cache, survey: Survey, patience: Patience) -> None:
        """Wait until a reading has ended, or has brought what is missing. Raises what makes the store fail."""
        load = self._wallets.read(cache)
        missing = survey.missing(ask) if ask.limit is None else MAX_AMOUNT
        await cache.wait(missing, survey.spare(ask), ask.where, None)
        self._wallets.check_open()
        if load.error is not None and load.number > patience.since:
            raise load.error

    async def _may_have_moved(self, ask: Ask, cache: Cache) -> bool:
        """Whether the last reading leaves it open if the amount can be reached. Raises where it can't."""
        if cache.done is not None and cache.steady:
            told = cache.done.told.values()
            survey = Survey.of(ask, told, self._held, self._keeper.now())
            if not survey.enough(ask):
                raise (await self._counted(ask, told, survey)).verdict(ask, cache.wallet)
        return True

    async def _counted(self, ask: Ask, tokens: Iterable[Token], survey: Survey) -> Survey:
        """How much of too little others hold, for those who are told. Genie knows, also where it is not listened to: it is
        asked for more than there is.
        """
        now = self._keeper.now()
        others = [each for each in tokens if self._held.here(each.id, now) is None and ask.passes(each)]
        total = sum(each.amount for each in others)
        if 0 < len(others) <= COUNTED and total < MAX_AMOUNT:
            with suppress(GenieError):
                short = await take(
                    self._keeper.client, self._held, others, total + 1, ask.transaction, self._keeper.lease
                )
                if isinstance(short, Short):
                    return replace(survey, free=short.free, locked=survey.free + survey.locked - short.free)
        return survey

    # -- waiting --------------------------------------------------------------------------------------------

    async def _wait(self, ask: Ask, cache: Cache, survey: Survey, patience: Patience) -> bool:
        """Wait until what is missing is free, or for the rest of a random time; False when that was often enough."""
        if patience.until is None:
            if not patience.waits:
                return False
            patience.waits -= 1
            patience.until = self._keeper.now() + random() * self._backoff  # noqa: S311 - no secret
        with self._keeper.watching:
            in_time = await cache.wait(survey.missing(ask), survey.spare(ask), ask.where, patience.until)
        if not in_time:
            patience.until = None
            patience.waited = True
            if not self._wallets.follows(cache):
                patience.since = cache.loads
        return True


class Patience:
    """What somebody who asks has done so far, and may still do.

    `since`: a reading with a greater number is one that began late enough. `waits` are left, and `rereads`; `until` is
    when the present wait ends.
    """

    __slots__ = ("rereads", "since", "until", "waited", "waits")

    def __init__(self, since: int, waits: int) -> None:
        self.since = since
        self.waits = waits
        self.waited = False
        self.until: float | None = None
        self.rereads = MOVING

    def has_read(self, cache: Cache) -> bool:
        """Whether a reading that began late enough has come to its end."""
        return cache.done is not None and cache.done.number > self.since

    def must_read(self, cache: Cache, *, enough: bool, followed: bool) -> bool:
        """Whether nothing more can be said without one. While the cache is followed and has enough, a wait comes first."""
        return not self.has_read(cache) and not (enough and followed and self.waits and not self.waited)

    def reread(self, cache: Cache) -> None:
        """Read once more."""
        self.rereads -= 1
        self.since = cache.loads
