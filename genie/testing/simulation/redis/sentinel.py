"""Three simulated sentinels, each on the machine of one of three Redises. They agree on who the master is, two of them at
least, and tell whoever asks; one that is cut off tells what it knew.

What takes real ones seconds takes these as many, by chance: to see that a master is down, to agree on another, and to have
one that comes back follow it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from genie.testing.simulation.network import Network
from genie.testing.simulation.redis.replication import ReplicatedRedis
from genie.testing.simulation.redis.resp import Failure, Reader, encode

SENTINEL_PORT = 26379
NAME = "genie"
LOOK_S = 0.1
DOWN_AFTER_S = 0.5, 2.0
"""How long a master must not answer before it is given up."""
ELECTION_S = 0.05, 0.7
DEMOTED_AFTER_S = 0.2, 6.0
"""How long one that believes to be the master goes on where sentinels that know better reach it."""


@dataclass(slots=True)
class View:
    """What one sentinel knows: the master, since which election, and since when it does not answer."""

    host: str
    master: str
    epoch: int = 0
    down_since: float | None = None


class Sentinels:
    """All three. `told` is called with each thing that they do."""

    def __init__(
        self, network: Network, redises: list[ReplicatedRedis], random: Random, told: Callable[[str], None]
    ) -> None:
        self._network = network
        self._loop = network.loop
        self._redises = {redis.host: redis for redis in redises}
        self._random = random
        self._told = told
        self.views = [View(redis.host, redises[0].host) for redis in redises]
        self._down_after_s = random.uniform(*DOWN_AFTER_S)
        self._elects_at: float | None = None
        self._wrong: dict[str, float] = {}
        """Hosts of those that follow or lead as they should not, and until when they may."""

    async def serve(self, view: View) -> None:
        """Take questions, as the node that is running."""
        await self._loop.create_server(lambda: _Asked(view), view.host, SENTINEL_PORT)

    async def watch(self) -> None:
        """Look after the master, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._talk()
            self._look()
            self._put_right()

    @property
    def master(self) -> ReplicatedRedis:
        """The master by the last election."""
        return self._redises[max(self.views, key=lambda view: view.epoch).master]

    def fail_over(self) -> str:
        """SENTINEL FAILOVER: another becomes the master, though nothing is wrong. Says who, nothing where nobody can."""
        for view in self._together():
            if view.epoch == max(view.epoch for view in self.views):
                return self._elect(view)
        return ""

    @property
    def settled(self) -> bool:
        """Whether all are of one mind, and every Redis follows the master."""
        return all((view.epoch, view.down_since) == (self.views[0].epoch, None) for view in self.views) and all(
            self._right(redis, self.views[0]) for redis in self._redises.values()
        )

    # -- inside -------------------------------------------------------------------------------------------

    def _reaches(self, one: str, other: str) -> bool:
        return one == other or not self._network.separated(frozenset((one, other)))

    def _talk(self) -> None:
        """The latest news go to all that can be reached."""
        for view in self.views:
            for other in self.views:
                if other.epoch > view.epoch and self._reaches(view.host, other.host):
                    view.epoch, view.master, view.down_since = other.epoch, other.master, None

    def _look(self) -> None:
        now = self._loop.time()
        for view in self.views:
            master = self._redises[view.master]
            if master.alive and master.master is None and self._reaches(view.host, view.master):
                view.down_since = None
            elif view.down_since is None:
                view.down_since = now
        agreed = self._together()
        down = [
            view for view in agreed if now - (now if view.down_since is None else view.down_since) >= self._down_after_s
        ]
        if len(down) < 2:
            self._elects_at = None
        elif self._elects_at is None:
            self._elects_at = now + self._random.uniform(*ELECTION_S)
        elif now >= self._elects_at:
            self._elects_at = None
            told = self._elect(down[0])
            if told:
                self._told(f"failover to {told}")

    def _together(self) -> list[View]:
        """Those who are the majority, and of one mind."""
        for view in self.views:
            others = [
                other for other in self.views if self._reaches(view.host, other.host) and other.epoch == view.epoch
            ]
            if len(others) >= 2:
                return others
        return []

    def _elect(self, view: View) -> str:
        """The one that has got furthest of those that are there."""
        there = [
            redis
            for redis in self._redises.values()
            if redis.host != view.master
            and redis.alive
            and redis.master is not None
            and self._reaches(view.host, redis.host)
        ]
        if not there:
            return ""
        best = max(there, key=lambda redis: redis.offset)
        before = self._redises[view.master]
        best.promote()
        # None is given twice: of any two majorities some sentinel is in both, and remembers.
        epoch = max(view.epoch for view in self.views) + 1
        view.master, view.epoch, view.down_since = best.host, epoch, None
        self._wrong.clear()
        return f"{best.host}, which has {best.offset} writes; {before.host} has {before.offset}"

    def _right(self, redis: ReplicatedRedis, view: View) -> bool:
        return redis.master == (None if redis.host == view.master else view.master)

    def _put_right(self) -> None:
        """Have all follow the master that can be reached, each after a while."""
        now = self._loop.time()
        view = max(self.views, key=lambda view: view.epoch)
        for redis in self._redises.values():
            if self._right(redis, view) or not redis.alive or not self._reaches(view.host, redis.host):
                self._wrong.pop(redis.host, None)
            elif redis.host not in self._wrong:
                longest = DEMOTED_AFTER_S if redis.master is None else ELECTION_S
                self._wrong[redis.host] = now + self._random.uniform(*longest)
            elif now >= self._wrong[redis.host]:
                del self._wrong[redis.host]
                redis.order(partial(redis.demote, view.master))
                self._told(f"{redis.host} follows {view.master}")


class _Asked(asyncio.Protocol):
    """A connection to one sentinel."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._reader = Reader()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        for command in self._reader.feed(data):
            self._transport.write(encode(self._answer(command)))

    def _answer(self, command: list[bytes]) -> object:
        epoch, host = b"%d" % self._view.epoch, self._view.master.encode()
        what = b" ".join(command[:2]).upper()
        if what == b"SENTINEL GET-MASTER-ADDR-BY-NAME":
            return [host, b"6379"] if command[2] == NAME.encode() else None
        if what != b"SENTINEL MASTER":
            return Failure(f"ERR unknown command '{what.decode()}'")
        if command[2] != NAME.encode():
            return Failure("ERR No such master with that name")
        return {b"name": command[2], b"ip": host, b"port": b"6379", b"flags": b"master", b"config-epoch": epoch}
