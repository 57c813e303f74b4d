"""Listening to Genie about who holds which tokens: while it costs little, or is of use.

What is held is not tried. But every lock that anybody takes is told to everybody who listens, so with many busy replicas
listening costs far more than locking; and where few tokens of many are held it buys nothing, for an ask has spares for those
that others have just taken. Then it is left off for a while. It goes on, whatever it costs,

- for those who wait for what others hold: they are woken when it is given back;
- where so much is held that spares are not enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from genie.errors import GenieError
from genie.tasks import closing, end
from genie.tokens.sherdlock.background import Attempts, again_and_again
from genie.tokens.sherdlock.held import Held
from genie.tokens.sherdlock.locks import TOKEN, Client

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
