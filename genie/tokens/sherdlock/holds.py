"""Which tokens are held: by others, as Genie tells, and by this selector itself."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

from genie.errors import GenieError
from genie.tasks import closing, end
from genie.tokens.sherdlock.background import Attempts, again_and_again
from genie.tokens.sherdlock.locks import TOKEN, Client

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


# -- Listening to Genie about who holds which tokens: while it costs little, or is of use --------

LOOK_S = 1.0
"""How often it is looked whether it should go on."""
FEW_PER_S = 500.0
"""So many changes cost next to nothing to hear: some milliseconds in each second."""
PAUSE_S = 30.0
"""Where there were more, and it was of no use, it is tried again after this."""
LINGERS_S = 5.0
"""It goes on for so long after it was last of use."""
WEIGHT = 0.05
"""Of one ask in the average of the last ones."""
MUCH = 0.2
"""Of the last asks, the part that fails without listening, from which on it is worth while: a failed ask costs one round
trip more."""
LITTLE = 0.05
"""And from which on it is not any more."""

_PREFIX = len(TOKEN)


class Watching:
    """Tells `held` what is heard. `heard` is called when it has been told all that is held at the beginning."""

    def __init__(self, client: Client, held: Held, heard: Callable[[], None]) -> None:
        self._client = client
        self._held = held
        self._heard = heard
        self._strain = 0.0
        self._needed_at = -inf
        self._waiting = 0
        self._changes = 0
        """Heard since it was looked last."""
        self._watch: asyncio.Task[None] | None = None
        self._check: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        """Begin to listen."""
        loop = asyncio.get_running_loop()
        if self._watch is None and not self._closed:
            if self._check is not None:
                self._check.cancel()
            self._watch = loop.create_task(again_and_again("watching the locks of tokens", self._follow))
            self._check = loop.call_later(LOOK_S, self._look)

    def asked(self, *, strained: bool) -> None:
        """Somebody has asked Genie for tokens; `strained`: without listening, spares are, or would be, too few."""
        self._strain += WEIGHT * (strained - self._strain)
        if strained and self._strain > MUCH:
            self._listen()

    @property
    def somebody_waits(self) -> bool:
        """Whether anybody waits for what others hold."""
        return self._waiting > 0

    def __enter__(self) -> None:
        """Somebody waits from here on."""
        self._waiting += 1
        self._listen()

    def __exit__(self, *_: object) -> None:
        self._waiting -= 1

    async def close(self) -> None:
        """Listen no more."""
        self._closed = True
        self._end()
        for task in list(self._ending):
            await end(task)

    # -- inside ---------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._needed_at = asyncio.get_running_loop().time()
        self.start()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        few, self._changes = self._changes <= FEW_PER_S * LOOK_S, 0
        if few or self._waiting or self._strain > LITTLE or loop.time() - self._needed_at < LINGERS_S:
            self._check = loop.call_later(LOOK_S, self._look)
        else:
            self._end()
            self._check = loop.call_later(PAUSE_S, self.start)

    def _end(self) -> None:
        watch, self._watch = self._watch, None
        if self._check is not None:
            self._check.cancel()
        if watch is not None:
            self._ending.add(watch)
            watch.add_done_callback(self._ending.discard)
            watch.cancel()
            self._held.forget()

    async def _follow(self, attempts: Attempts) -> None:
        held, loop = self._held, asyncio.get_running_loop()
        held.forget()
        async with closing(self._client.watch(TOKEN)) as changes:
            begin = loop.create_task(self._begin(attempts))
            try:
                async for change in changes:
                    self._changes += 1
                    if change.state == "locked":
                        held.locked(change.resource[_PREFIX:], change.id, change.transaction, loop.time())
                    else:
                        held.unlocked(change.resource[_PREFIX:], change.id)
            finally:
                await end(begin)

    async def _begin(self, attempts: Attempts) -> None:
        """The answer to a ping comes behind what is told at the beginning."""
        try:
            await self._client.ping()
            attempts.worked()
        except GenieError:
            pass  # those who wait look for themselves, this once
        self._changes = 0  # what there was at the beginning is told once
        self._heard()
