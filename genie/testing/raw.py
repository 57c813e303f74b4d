"""A client of a simulated world that speaks the wire itself: quick, careless, and at times rude.

It knows no more of the protocol than its page says, and shares no code with the clients that are shipped.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from genie.testing.history import NOTE
from genie.testing.raw_talk import RawTalk, Wish
from genie.testing.wishes import Wishes

if TYPE_CHECKING:
    from genie.testing.world import World


class RawClient(RawTalk):
    """One connection after the other. With a `session` its requests outlive them."""

    def __init__(self, world: World, name: str, random: Random, session: str | None) -> None:
        super().__init__(world, name, random, session)
        self._ask = Wishes(world.plan, random, self.extra)

    def __str__(self) -> str:
        living = [f"{wish.id or ref}" for ref, wish in self.wishes.items() if not wish.ended]
        return f"{self.name} waits for {' '.join(living) or 'nothing'}"

    async def run(self) -> None:  # noqa: C901 - a life, from beginning to end
        """Do this and that until the world asks for the end, then see that everything ends."""
        while not self.world.ending:
            await asyncio.sleep(self.random.expovariate(1 / self.world.plan.think_s))
            if self._wire is None:
                await self._connect()
            elif self._welcome and not self.world.ending:
                self._act()
        while True:
            if self._wire is None and not await self._connect():
                await asyncio.sleep(self.random.uniform(0.05, 0.3))
                continue
            self._changed.clear()
            if self._welcome and self._leave_all() and not self._pinged:
                break
            await asyncio.sleep(0.02)
            try:
                async with asyncio.timeout(1):
                    await self._changed.wait()
            except TimeoutError:
                if self._welcome:
                    self._resend()
                if not self._pinged:
                    self._ping()
        if self._wire is not None and self.featured and self.extra.random() < 0.5:
            self._bye()
        elif self._wire is not None:
            self._wire.transport.close()
        self.world.history.note(NOTE, self.name, "is done")

    # -- what it does -------------------------------------------------------------------------------------

    def _act(self) -> None:  # noqa: C901, PLR0912 - a list of things to do
        random = self.random
        dice = random.random()
        if self.featured and self._act_by_features():
            return
        living = [wish for wish in self.wishes.values() if self._known(wish) and not wish.ended and not wish.patient]
        if dice < 0.5 or not living:
            for _ in range(random.choice([1, 1, 1, 2, 4])):
                self._request()
        elif dice < 0.8:
            held = [wish for wish in living if wish.held]
            self._release(random.choice(held or living))
        elif dice < 0.85:
            wish = random.choice(living)
            if wish.id:
                self._say("extend", ref=self._ref(), id=wish.id, transactionTimeout=random.choice([50, 1_000, 5_000]))
        elif dice < 0.88:
            self._ping()
        elif dice < 0.9:
            self._say("inspect", ref=self._ref(), limit=random.choice([1, 100]))
        elif dice < 0.93:
            other = self.world.anybodys_id(random)
            if other:
                self._say("release", ref=self._ref(), id=other)
        elif dice < 0.95:
            ref = random.choice(list(self.wishes))
            if self.wishes[ref].sent:
                self._repeat(self.wishes[ref])
        elif dice < 0.97:
            self._hang_up()
        else:
            self._request()
            if self._wire is not None and random.random() < 0.5 and self.session is None:
                self._wire.said_all = True
                self._wire.transport.write_eof()

    def _act_by_features(self) -> bool:
        """Do, now and then, what only featured worlds have. Whether that was all."""
        dice = self.extra.random()
        if dice < 0.02:
            self._bye()
        elif dice < 0.12:
            ended = [wish for wish in self.wishes.values() if wish.ended and wish.life == self.life and wish.id]
            if ended and self.extra.random() < 0.7:
                self._repeat(self.extra.choice(ended[-5:]))
            elif ended:
                self._say("release", ref=self.extra.choice(ended[-5:]).ref)
        elif dice < 0.14:
            self._say("release", ref=self._ref())  # no request has this ref
        return dice < 0.14

    def _known(self, wish: Wish) -> bool:
        """Whether a request can be released: by its id, or where it was sent on this quiet connection by its ref."""
        return wish.id != 0 or (self.quiet and wish.sent)

    def _request(self) -> None:
        if sum(not wish.ended for wish in self.wishes.values()) >= self.world.plan.at_once:
            return
        payload = self._ask.payload(self.name) | {"ref": self._ref()}
        wish = Wish(payload, self.random.random() < 0.2, self.life)
        self.wishes[wish.ref] = wish
        self._repeat(wish)

    def _leave_all(self) -> bool:
        """Release what is held, but for what ends by itself. Whether all has ended."""
        for wish in self.wishes.values():
            if wish.held and not wish.ended and not wish.leaving and not wish.patient:
                self._release(wish)
        self._settle_unmentioned()
        return all(wish.ended for wish in self.wishes.values())
