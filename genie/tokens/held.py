"""Which tokens are held: by others, as Genie tells, and by this selector itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf

from genie.tokens.background import Attempts
from genie.tokens.locks import TOKEN, Client

_PREFIX = len(TOKEN)


class Hold:
    """Tokens that this selector holds, or is asking for, for a transaction.

    `until` is when it ends by itself, at the earliest: from then on it is only what Genie tells that counts.
    """

    __slots__ = ("ids", "lasting", "transaction", "until")

    def __init__(self, transaction: str, ids: Iterable[str]) -> None:
        self.transaction = transaction
        self.ids = set(ids)
        self.until = inf
        self.lasting = False
        """Nobody will give it back."""

    @property
    def asking(self) -> bool:
        """Whether Genie has not answered yet."""
        return self.until == inf


class Held:
    """`freed` is told the id of each token that nobody holds any more, as far as is known."""

    __slots__ = ("_also", "_freed", "_lasting", "mine", "others")

    def __init__(self, freed: Callable[[str], None]) -> None:
        self._freed = freed
        self.mine: dict[str, Hold] = {}
        """By token. One whose time is over may still be here."""
        self.others: dict[str, tuple[int, str | None]] = {}
        """By token: the lock that Genie has told of, and its transaction. This selector's own are among them."""
        self._also: dict[str, list[tuple[int, str | None]]] = {}
        """More locks on the same token: one transaction can hold it twice."""
        self._lasting: deque[Hold] = deque()
        """Holds that nobody will give back."""

    # -- who may have a token -------------------------------------------------------------------------------

    def here(self, id: str, now: float) -> Hold | None:
        """The hold that this selector has on a token."""
        hold = self.mine.get(id)
        return None if hold is None or hold.until <= now else hold

    def selected(self, ids: Iterable[str], now: float) -> bool:
        """Whether somebody here holds any of these tokens and may still give them back."""
        return any((hold := self.here(id, now)) is not None and not hold.lasting for id in ids)

    def elsewhere(self, id: str, transaction: str) -> bool:
        """Whether another transaction holds a token, as Genie has told."""
        other = self.others.get(id)
        return other is not None and other[1] != transaction

    def anybody(self, id: str, now: float) -> bool:
        """Whether a token is held."""
        return id in self.others or self.here(id, now) is not None

    # -- this selector's own --------------------------------------------------------------------------------

    def take(self, hold: Hold) -> None:
        """Its tokens are not to be had by anybody else here."""
        for id in hold.ids:
            self.mine[id] = hold

    def keep(self, hold: Hold, ids: Iterable[str]) -> None:
        """Of what was asked for it is these that were given."""
        kept = set(ids)
        for id in hold.ids - kept:
            if self.mine.get(id) is hold:
                del self.mine[id]  # somebody else's, so nobody is told that it is free
        hold.ids = kept
        self.take(hold)

    def drop(self, hold: Hold) -> None:
        """Its tokens may be had again."""
        for id in hold.ids:
            if self.mine.get(id) is hold:
                del self.mine[id]
                if id not in self.others:
                    self._freed(id)

    def leave(self, hold: Hold, now: float) -> None:
        """Nobody will give it back: it ends when its time is over."""
        if not hold.lasting:
            hold.lasting = True
            self._lasting.append(hold)
        while self._lasting and self._lasting[0].until <= now:
            self.drop(self._lasting.popleft())

    # -- what Genie tells -----------------------------------------------------------------------------------

    async def follow(self, client: Client, attempts: Attempts) -> None:
        """Learn who holds what, until the client can't tell any more."""
        others, also, freed = self.others, self._also, self._freed
        others.clear()
        also.clear()
        async for change in client.watch(TOKEN):
            attempts.worked()
            id, lock = change.resource[_PREFIX:], change.id
            held = others.get(id)
            if change.state == "locked":
                if held is None:
                    others[id] = (lock, change.transaction)
                elif held[0] != lock:
                    also.setdefault(id, []).append((lock, change.transaction))
            elif held is None:
                continue
            elif id in also:
                left = [one for one in (held, *also.pop(id)) if one[0] != lock]
                if left:
                    others[id] = left[0]
                if len(left) > 1:
                    also[id] = left[1:]
            elif held[0] == lock:
                del others[id]
                freed(id)
