"""The Redis of a simulated world: one, or three with sentinels, of which one is the master at a time."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from genie.testing.simulation.history import FAULT, Branches, Message, Place, Witness
from genie.testing.simulation.loop import Node
from genie.testing.simulation.redis.replication import ReplicatedRedis, Writes
from genie.testing.simulation.redis.sentinel import LOOK_S, NAME, Sentinels
from genie.testing.simulation.redis.server import SimRedis

if TYPE_CHECKING:
    from genie.testing.simulation.cluster import World


class OneRedis:
    """A Redis, and its witness."""

    url = "redis://redis:6379/0"
    hosts = ("redis",)

    def __init__(self, world: World) -> None:
        self._loop = world.loop
        self.master = SimRedis()
        self.redises = [self.master]
        self.witness = Witness(self.master, world.history)
        self.process = self._loop.node("redis")

    @property
    def processes(self) -> list[Node]:
        """All that can be stopped."""
        return [self.process]

    async def start(self) -> None:
        """Take connections."""
        await self._loop.spawn(self.process, self.master.serve("redis"))

    def stored(self) -> dict[int, Message]:
        """The records that are there now."""
        return self.witness.stored()

    def look(self) -> None:
        """Writes may have been lost."""
        self.witness.look()

    def mend(self) -> None:
        """Nothing to do."""

    async def settled(self) -> None:
        """It always is."""

    def finish(self) -> None:
        """The world is at its end."""


class ThreeRedises:
    """A master and two replicas, each with a sentinel on its machine."""

    def __init__(self, world: World) -> None:
        plan = world.plan
        self._world = world
        self._loop = world.loop
        self.hosts = tuple(f"redis{number}" for number in (1, 2, 3))
        self.url = f"redis+sentinel://{','.join(self.hosts)}/{NAME}"
        writes = Writes()
        self.redises = [
            ReplicatedRedis(self._loop, host, writes, Random(f"{plan.seed} {host}"), plan.lag_s) for host in self.hosts
        ]
        for replica in self.redises[1:]:
            replica.master, replica.read_only = self.hosts[0], True
        self.sentinels = Sentinels(world.network, self.redises, Random(f"{plan.seed} sentinels"), self._told)
        self._branches = Branches(self.redises, world.history, plan.min_replicas)

    @property
    def master(self) -> ReplicatedRedis:
        """The one that the sentinels name."""
        return self.sentinels.master

    @property
    def head(self) -> Place | None:
        """What the master has."""
        return self._branches.head(self.master)

    @property
    def process(self) -> Node:
        """The master's."""
        return self.master.process

    @property
    def processes(self) -> list[Node]:
        """All that can be stopped."""
        return [redis.process for redis in self.redises]

    async def start(self) -> None:
        """Start all."""
        for redis in self.redises:
            redis.start()
        for view in self.sentinels.views:
            node = self._loop.node(f"sentinel of {view.host}", view.host)
            await self._loop.spawn(node, self.sentinels.serve(view))
        observer = self._loop.node("sentinels")
        self._tasks = [self._loop.spawn(observer, watch) for watch in (self.sentinels.watch(), self._observe())]

    def stored(self) -> dict[int, Message]:
        """The records that the master has now."""
        return self._branches.stored(self.master)

    def look(self) -> None:
        """Writes are not lost here but by failovers, which the witness sees."""

    def mend(self) -> None:
        """Start those that were killed, and let no replica lag."""
        for redis in self.redises:
            redis.revive()
            redis.resume()

    async def settled(self) -> None:
        """Wait until all follow the master."""
        while not self.sentinels.settled:  # noqa: ASYNC110 - once in a life
            await asyncio.sleep(LOOK_S)

    def finish(self) -> None:
        """The world is at its end: what the master has is what has come of it."""
        self._world.history.final = self.head

    async def _observe(self) -> None:
        """Look, now and then, who can't do what it would."""
        world = self._world
        while True:
            await asyncio.sleep(LOOK_S)
            for host in world.hosts:
                cut_off = any(world.network.separated(frozenset((host.name, other))) for other in self.hosts)
                if cut_off or host.node.dead or host.node.stopped or world.faults.bad_commands:
                    world.history.hindered.setdefault(host.name, []).append(self._loop.time())

    def _told(self, what: str) -> None:
        self._world.history.note(FAULT, "sentinels", what)
