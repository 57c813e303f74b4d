"""Tokens to draw from: in random order, or by amount and in random order among equals.

Putting in, taking out and drawing the next one cost the same however many there are: a wallet may have a hundred thousand
tokens, and a selection needs five.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from random import random
from typing import Any, Literal

from genie.tasks import closing, end
from genie.tokens.sherdlock.background import Attempts, again_and_again
from genie.tokens.store import Added, Spent, TokenStore
from genie.tokens.token import Token, Wallet, wallets_of

Prefer = Literal["small", "large"]


class Bag:
    """Tokens in no order. `places` is where each lies; bags that never share a token may share it."""

    __slots__ = ("_places", "_tokens")

    def __init__(self, places: dict[str, int] | None = None) -> None:
        self._places: dict[str, int] = {} if places is None else places
        self._tokens: list[Token] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[Token]:
        return iter(self._tokens)

    def __contains__(self, id: str) -> bool:
        return id in self._places

    def add(self, token: Token) -> None:
        """Put in a token that is not there."""
        self._places[token.id] = len(self._tokens)
        self._tokens.append(token)

    def pop(self, id: str) -> Token:
        """Take out a token that is there."""
        place = self._places.pop(id)
        last = self._tokens.pop()
        if last.id == id:
            return last
        token, self._tokens[place] = self._tokens[place], last
        self._places[last.id] = place
        return token

    def draw(self) -> Iterator[Token]:
        """All tokens in an order that is new each time, drawn one by one (they stay in).

        It is the shuffle of Fisher and Yates, done as far as it is asked for. Nothing may be put in or taken out
        meanwhile.
        """
        tokens, places = self._tokens, self._places
        count = len(tokens)
        for place in range(count):
            other = place + int(random() * (count - place))  # noqa: S311 - no secret
            token = tokens[other]
            if other != place:
                tokens[other] = moved = tokens[place]
                tokens[place] = token
                places[moved.id], places[token.id] = other, place
            yield token


class ByAmount:
    """Tokens by amount, and in no order among equals."""

    __slots__ = ("_amounts", "_bags", "_places")

    def __init__(self, tokens: Iterable[Token]) -> None:
        self._places: dict[str, int] = {}
        self._bags: dict[int, Bag] = {}
        for token in tokens:
            self._bag(token.amount).add(token)
        self._amounts = sorted(self._bags)

    def add(self, token: Token) -> None:
        """Put in a token that is not there."""
        if token.amount not in self._bags:
            insort(self._amounts, token.amount)
        self._bag(token.amount).add(token)

    def remove(self, token: Token) -> None:
        """Take out a token that is there."""
        bag = self._bags[token.amount]
        bag.pop(token.id)
        if not bag:
            del self._bags[token.amount]
            del self._amounts[bisect_left(self._amounts, token.amount)]

    def draw(self, prefer: Prefer) -> Iterator[Token]:
        """All tokens, those that are preferred first. Nothing may be put in or taken out meanwhile."""
        for amount in self._amounts if prefer == "small" else reversed(self._amounts):
            yield from self._bags[amount].draw()

    def _bag(self, amount: int) -> Bag:
        bag = self._bags.get(amount)
        if bag is None:
            bag = self._bags[amount] = Bag(self._places)
        return bag


# -- What is known of one wallet's unspent tokens, and who waits for more of them --------

Where = Callable[[Token], bool]


class Load:
    """One reading of a wallet. `number` counts the wallet's readings; `feed` is the feed that was followed when it began
    (0: none).
    """

    __slots__ = ("came", "error", "feed", "gone", "number", "pages", "told")

    def __init__(self, number: int, feed: int) -> None:
        self.number = number
        self.feed = feed
        self.pages = 0
        self.told: dict[str, Token] = {}
        self.came: set[str] = set()
        """What was added while it was read: it may not have been told."""
        self.gone: set[str] = set()
        """What was spent while it was read: it may have been told nevertheless."""
        self.error: Exception | None = None


class Waiter:
    """Somebody who waits for tokens that are worth `missing`, to be free or to come.

    `spare` is what the wallet has beyond what was asked for, if everybody gave back what they hold. When that is used up
    there is nothing to wait for.
    """

    __slots__ = ("missing", "spare", "turn", "where")

    def __init__(self, missing: int, spare: int, where: Where | None, turn: asyncio.Future[bool]) -> None:
        self.missing = missing
        self.spare = spare
        self.where = where
        self.turn = turn

    def offer(self, token: Token) -> None:
        """A token is free."""
        self.missing -= self._worth(token)
        if self.missing <= 0:
            self.wake(enough=True)

    def count(self, token: Token, sign: int) -> None:
        """A token has come (1) or is spent (-1)."""
        had = self.spare
        self.spare += sign * self._worth(token)
        if self.spare < 0 <= had:
            self.wake(enough=True)

    def _worth(self, token: Token) -> int:
        try:
            return token.amount if self.where is None or self.where(token) else 0
        except Exception:  # noqa: BLE001 - whoever waits will meet the same, and can say so
            self.wake(enough=True)
            return 0

    def wake(self, *, enough: bool) -> None:
        """Let it look again, or say that its time is over."""
        if not self.turn.done():
            self.turn.set_result(enough)


class Cache:
    """A wallet's tokens. `load` is the reading that is under way, `done` the last that came to its end."""

    __slots__ = ("_bag", "_by_amount", "_waiters", "asked_at", "done", "load", "loads", "steady", "tried_at", "wallet")

    def __init__(self, wallet: Wallet) -> None:
        self.wallet = wallet
        self._bag = Bag()
        self._by_amount: ByAmount | None = None
        """Made when it is first asked for, and kept from then on."""
        self._waiters: dict[Waiter, None] = {}
        self.loads = 0
        """Readings begun so far."""
        self.load: Load | None = None
        self.done: Load | None = None
        self.tried_at = -float("inf")
        """When the last reading began, however it ended."""
        self.asked_at = -float("inf")
        """When somebody last selected from it."""
        self.steady = False
        """Whether the last reading told what was there at one moment."""

    def __len__(self) -> int:
        return len(self._bag)

    def __iter__(self) -> Iterator[Token]:
        return iter(self._bag)

    def __contains__(self, id: str) -> bool:
        return id in self._bag

    def draw(self, prefer: Prefer | None) -> Iterator[Token]:
        """The tokens in the order in which they are to be tried. Nothing may change meanwhile."""
        if prefer is None:
            return self._bag.draw()
        if self._by_amount is None:
            self._by_amount = ByAmount(self._bag)
        return self._by_amount.draw(prefer)

    # -- what comes and goes --------------------------------------------------------------------------------

    def add(self, token: Token) -> None:
        """A token was issued."""
        if self.load is not None:
            self.load.came.add(token.id)
        self._put(token)

    def remove(self, id: str) -> None:
        """A token is spent."""
        if self.load is not None:
            self.load.gone.add(id)
        self._take(id)

    def begin(self, load: Load, now: float) -> None:
        """A reading begins."""
        self.load = load
        self.loads = load.number
        self.tried_at = now

    def page(self, tokens: Sequence[Token]) -> list[Token]:
        """A page of it has come. Returns what is new."""
        load = self.load
        if load is None:
            return []
        load.pages += 1
        load.told.update((token.id, token) for token in tokens)
        new = [token for token in tokens if token.id not in load.gone and token.id not in self._bag]
        for token in new:
            self._put(token)
        return new

    def end(self, error: Exception | None = None) -> list[Token]:
        """The reading has ended. Returns what is not there any more.

        Pages may be of different moments, and then a token that was spent while they were read, and its change, may both
        be missing. So a reading of several pages is believed to be one moment's if nothing has moved since the one before.
        """
        load, self.load = self.load, None
        if load is None:
            return []
        load.error = error
        old: list[Token] = []
        if error is None:
            old = [token for token in self._bag if token.id not in load.told and token.id not in load.came]
            before = {} if self.done is None else self.done.told
            same = not load.gone and not load.came and load.told.keys() == before.keys()
            self.steady = same or load.pages <= 1
            for token in old:
                self._take(token.id)
            self.done = load
        for waiter in list(self._waiters):
            waiter.wake(enough=True)
        return old

    # -- those who wait -------------------------------------------------------------------------------------

    @property
    def waited_for(self) -> bool:
        """Whether anybody waits for more."""
        return bool(self._waiters)

    def offer(self, token: Token) -> None:
        """A token is free now, as far as is known."""
        for waiter in list(self._waiters):
            waiter.offer(token)

    async def wait(self, missing: int, spare: int, where: Where | None, until: float | None) -> bool:
        """Wait until tokens that are worth `missing` have come, more than `spare` are gone, or a reading ends; or until a
        time: then False.
        """
        loop = asyncio.get_running_loop()
        waiter = Waiter(missing, spare, where, loop.create_future())
        bound = None if until is None else loop.call_at(until, lambda: waiter.wake(enough=False))
        self._waiters[waiter] = None
        try:
            return await waiter.turn
        finally:
            del self._waiters[waiter]
            if bound is not None:
                bound.cancel()

    def wake(self) -> None:
        """Let all who wait look again."""
        for waiter in list(self._waiters):
            waiter.wake(enough=True)

    # -- inside ---------------------------------------------------------------------------------------------

    def _put(self, token: Token) -> None:
        if token.id not in self._bag:
            self._bag.add(token)
            if self._by_amount is not None:
                self._by_amount.add(token)
            for waiter in self._waiters:
                waiter.count(token, 1)

    def _take(self, id: str) -> None:
        if id in self._bag:
            token = self._bag.pop(id)
            if self._by_amount is not None:
                self._by_amount.remove(token)
            for waiter in self._waiters:
                waiter.count(token, -1)


# -- The wallets that are in use, read from the store when it must be and followed from then on --------

IDLE_S = 600.0
"""A wallet that nobody has selected from for so long is forgotten when another one is needed."""


class Wallets:
    """Caches by wallet. `freshness` (seconds) is how old one may be while the store's changes can't be followed.

    `free` says whether a token can be had by somebody who waits for one.
    """

    def __init__(self, store: TokenStore, freshness: float, free: Callable[[str], bool]) -> None:
        self._store = store
        self._freshness = freshness
        self._free = free
        self._caches: OrderedDict[Wallet, Cache] = OrderedDict()
        self._known: dict[str, Token] = {}
        """All tokens that are in a cache."""
        self._expected: set[str] = set()
        """Tokens that are being issued here, and that nobody has spent yet."""
        self._feed = 0
        """Which feed is followed: they are counted. 0 while there is none."""
        self._feeds = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = False

    def start(self) -> None:
        """Follow the store."""
        if self._open:
            raise RuntimeError("the selector is open already")
        self._open = True
        self._spawn(again_and_again("following the store of tokens", self._follow))

    async def close(self) -> None:
        """End what goes on, and wake everybody who waits."""
        self._open = False
        for task in list(self._tasks):
            await end(task)
        self.wake()

    # -- for those who select -------------------------------------------------------------------------------

    def cache(self, wallet: Wallet, now: float) -> Cache:
        """A wallet's cache. It is empty at first."""
        cache = self._caches.get(wallet)
        if cache is None:
            self._forget_idle(now)
            cache = self._caches[wallet] = Cache(wallet)
        else:
            self._caches.move_to_end(wallet)
        cache.asked_at = now
        return cache

    def refresh(self, cache: Cache, now: float) -> None:
        """Read a wallet in the background if what is known of it may be old, or is nothing."""
        if cache.load is None and not self.follows(cache) and now - cache.tried_at > self._freshness:
            self.read(cache)

    def follows(self, cache: Cache) -> bool:
        """Whether all that has happened since the cache was read has been told, or will be at once."""
        return self._feed != 0 and cache.done is not None and cache.done.feed == self._feed

    def read(self, cache: Cache) -> Load:
        """Read a wallet; once for all who want it."""
        load = cache.load
        if load is None:
            load = Load(cache.loads + 1, self._feed)
            cache.begin(load, asyncio.get_running_loop().time())
            self._spawn(self._read(cache))
        return load

    def spent(self, id: str) -> None:
        """A token is spent."""
        self._expected.discard(id)
        token = self._known.pop(id, None)
        for cache in self._of(token):
            cache.remove(id)

    def expect(self, outputs: Sequence[Token]) -> list[Token]:
        """Those of the tokens that are about to be issued here that some cache is to have at once.

        It must be known if somebody spends them before it is heard that they are there.
        """
        expected = [token for token in outputs if self._of(token)]
        self._expected.update(token.id for token in expected)
        return expected

    def issued(self, expected: Sequence[Token]) -> None:
        """They are issued."""
        for token in expected:
            if token.id in self._expected:
                self._added(token)

    def expect_no_more(self, expected: Sequence[Token]) -> None:
        """Their issue is over, however it went."""
        self._expected.difference_update(token.id for token in expected)

    def freed(self, id: str) -> None:
        """A token may have become free."""
        token = self._known.get(id)
        if token is not None:
            self._offer(token)

    def wake(self) -> None:
        """Let all who wait look again."""
        for cache in self._caches.values():
            cache.wake()

    def check_open(self) -> None:
        """RuntimeError before the start and after the end."""
        if not self._open:
            raise RuntimeError("the selector is not open: use it as an async context manager, or start() it")

    # -- inside ---------------------------------------------------------------------------------------------

    def _offer(self, token: Token) -> None:
        for wallet in wallets_of(token):
            cache = self._caches.get(wallet)
            if cache is not None and cache.waited_for and token.id in cache and self._free(token.id):
                cache.offer(token)

    def _of(self, token: Token | None) -> list[Cache]:
        """The caches that a token concerns. One that nobody has yet may still come to those that are being read."""
        if token is None:
            return [cache for cache in self._caches.values() if cache.load is not None]
        return [self._caches[wallet] for wallet in wallets_of(token) if wallet in self._caches]

    async def _follow(self, attempts: Attempts) -> None:
        try:
            async with closing(self._store.changes()) as changes:
                async for change in changes:
                    if isinstance(change, Added):
                        self._added(change.token)
                    elif isinstance(change, Spent):
                        self.spent(change.id)
                    else:
                        self._feeds += 1
                        self._feed = self._feeds
                        attempts.worked()
        finally:
            self._feed = 0

    def _added(self, token: Token) -> None:
        caches = self._of(token)
        if caches:
            self._known[token.id] = token
            for cache in caches:
                cache.add(token)
            self._offer(token)

    async def _read(self, cache: Cache) -> None:
        wallet = cache.wallet
        try:
            async with closing(self._store.unspent(**wallet._asdict())) as pages:
                async for page in pages:
                    for token in cache.page(page):
                        self._known[token.id] = token
                        if cache.waited_for and self._free(token.id):
                            cache.offer(token)
        except Exception as error:  # noqa: BLE001 - it is raised to those who can't do without
            cache.end(error)
        except BaseException:
            cache.end(RuntimeError("the selector was closed"))
            raise
        else:
            for token in cache.end():
                self._drop(token)

    def _drop(self, token: Token) -> None:
        if not any(token.id in cache for cache in self._of(token)):
            self._known.pop(token.id, None)

    def _forget_idle(self, now: float) -> None:
        while self._caches:
            wallet, cache = next(iter(self._caches.items()))
            if now - cache.asked_at < IDLE_S or cache.load is not None or cache.waited_for:
                return
            del self._caches[wallet]
            for token in cache:
                self._drop(token)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
