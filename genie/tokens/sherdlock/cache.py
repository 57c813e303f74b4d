"""What is known of one wallet's unspent tokens, and who waits for more of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from genie.tokens.sherdlock.bag import Bag, ByAmount, Prefer
from genie.tokens.token import Token, Wallet

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
