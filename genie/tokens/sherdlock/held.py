"""Which tokens are held: by others, as Genie tells, and by this selector itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

BELIEVED_LEASES = 2
"""For so many leases it is believed that a token is held. Where very much is held Genie does not tell all that is, nor
all that is not any more.
"""
MAX_RELEASED = 10_000
"""Locks released here of which `Held` remembers that their `unlocked` is still to come. Genie lets no more messages than
that wait for one watcher.
"""


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


class Other(NamedTuple):
    """A lock that Genie has told of, and when that was."""

    lock: int
    transaction: str | None
    told_at: float


class Held:
    """`lease` (seconds) is what holds last. `freed` is told the id of each token that nobody holds any more, as far as is
    known.
    """

    __slots__ = ("_also", "_believed_s", "_freed", "_lasting", "_released", "mine", "others")

    def __init__(self, lease: float, freed: Callable[[str], None]) -> None:
        self._believed_s = BELIEVED_LEASES * lease
        self._freed = freed
        self.mine: dict[str, Hold] = {}
        """By token. One whose time is over may still be here."""
        self.others: dict[str, Other] = {}
        """By token: the lock that Genie has told of. This selector's own are among them."""
        self._also: dict[str, list[Other]] = {}
        """More locks on the same token: one transaction can hold it twice."""
        self._lasting: deque[Hold] = deque()
        """Holds that nobody will give back."""
        self._released: dict[int, None] = {}
        """Ids of locks that were released here, the oldest first, until their `unlocked` has come."""

    # -- who may have a token -------------------------------------------------------------------------------

    def here(self, id: str, now: float) -> Hold | None:
        """The hold that this selector has on a token."""
        hold = self.mine.get(id)
        return None if hold is None or hold.until <= now else hold

    def selected(self, ids: Iterable[str], now: float) -> bool:
        """Whether somebody here holds any of these tokens and may still give them back."""
        return any((hold := self.here(id, now)) is not None and not hold.lasting for id in ids)

    def elsewhere(self, id: str, now: float) -> Other | None:
        """The lock on a token that Genie has told of. What it told long ago it may have untold when nobody listened."""
        other = self.others.get(id)
        return None if other is None or now - other.told_at > self._believed_s else other

    def by_another(self, id: str, transaction: str, now: float) -> bool:
        """Whether another transaction holds a token, as Genie has told."""
        other = self.elsewhere(id, now)
        return other is not None and other.transaction != transaction

    def anybody(self, id: str, now: float) -> bool:
        """Whether a token is held."""
        return self.elsewhere(id, now) is not None or self.here(id, now) is not None

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

    def released(self, lock: int, ids: Iterable[str]) -> None:
        """Genie has confirmed the release of one of this selector's locks, on these tokens.

        The watch sends the events of a lock some milliseconds later than the answers to its owner. So whatever it still
        sends of this lock is out of date.
        """
        self._released[lock] = None
        if len(self._released) > MAX_RELEASED:
            del self._released[next(iter(self._released))]
        for id in ids:
            self._remove(id, lock)

    # -- what Genie tells -----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Nothing is heard any more, or all from the beginning."""
        self.others.clear()
        self._also.clear()

    def locked(self, id: str, lock: int, transaction: str | None, now: float) -> None:
        """A token is locked."""
        if lock in self._released:
            return
        new = Other(lock, transaction, now)
        if id in self.others:
            self._also.setdefault(id, []).append(new)
        else:
            self.others[id] = new

    def unlocked(self, id: str, lock: int) -> None:
        """One lock on a token has ended."""
        self._released.pop(lock, None)
        self._remove(id, lock)
        if id not in self.others:
            self._freed(id)

    # -- inside ---------------------------------------------------------------------------------------------

    def _remove(self, id: str, lock: int) -> None:
        """Remove a lock on a token from those that Genie has told of, if it is among them."""
        if id in self._also:
            left = [other for other in (self.others[id], *self._also.pop(id)) if other.lock != lock]
            self.others[id] = left[0]
            if len(left) > 1:
                self._also[id] = left[1:]
        elif id in self.others and self.others[id].lock == lock:
            del self.others[id]
