"""How tokens are found and held for somebody who asks, and what it takes to say that there are not enough.

1. The wallet's cache has tokens that nobody holds, as far as is known. Some of them go to Genie in one request, which
   takes the first free ones that reach the amount. That is all, as a rule.
2. Others were faster with too many of them: at once again, with more spares each time, in the end with all there are.
3. What is free in the cache does not reach the amount. If the cache is followed and what others hold makes the
   difference, it is waited for: until enough has been given back or has come as change, for a random time at most.
   Otherwise the wallet is read, once for all who want it; who waits goes on as soon as what has been read is enough.
4. InsufficientFunds is proven by a reading that began after the ask did, and that told too little, even with all that
   others hold. A reading of one page shows one moment. One of several pages may miss a token that is spent meanwhile
   together with its change, so it proves nothing until it has been done twice and has told the same.
5. After the last wait Genie is asked for everything, whatever was heard of who holds it. Then it is FundsLocked.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from random import random
from typing import Any, NamedTuple

from genie.errors import GenieError
from genie.tokens.errors import FundsLocked
from genie.tokens.sherdlock.cache import Cache
from genie.tokens.sherdlock.candidates import Ask, Picked, Survey, everything, pick
from genie.tokens.sherdlock.granting import Grants, Short, take
from genie.tokens.sherdlock.held import Hold
from genie.tokens.sherdlock.selection import Keeper
from genie.tokens.sherdlock.turns import Turns
from genie.tokens.sherdlock.wallets import Wallets
from genie.tokens.token import MAX_AMOUNT, Token, Wallet

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
