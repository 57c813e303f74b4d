"""What breaks where there are several Redises, so that another of them becomes the master, or two are."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from genie.testing.redis.replicated import ReplicatedRedis
from genie.testing.stores import ThreeRedises

if TYPE_CHECKING:
    from genie.testing.world import Host, World

LAGS_S = (0.05, 0.3, 1.0, 4.0, 12.0)
"""How long a replica gets nothing."""
STALLS_S = (1.5, 3.0, 6.0, 12.0)
"""How long a master stands still, or is cut off: shorter and longer than it takes until there is another."""
BACK_S = (0.1, 2.0, 6.0)
"""How long a Redis that was killed stays away."""
LEADER_BACK_S = (0.1, 6.0, 12.0)
"""The same of a server that dies with it: before and after another has taken over."""


class Failovers:
    """Makes them, by chance."""

    def __init__(self, world: World, random: Random) -> None:
        self._world = world
        self._random = random

    @property
    def _store(self) -> ThreeRedises:
        store = self._world.store
        assert isinstance(store, ThreeRedises)
        return store

    def lag(self) -> str:
        """A replica gets nothing for a while."""
        replica = self._random.choice([redis for redis in self._store.redises if redis is not self._store.master])
        return self._lag(replica, self._random.choice(LAGS_S))

    def kill(self) -> str:
        """The master dies, perhaps while its replicas lag; and comes back with all that it had."""
        master, leader = self._store.master, self._leader()
        lagging = self._all_lag(surely=leader is not None)
        silently, back_s = self._random.random() < 0.3, self._random.choice(BACK_S)
        leader_back_s = self._random.choice(LEADER_BACK_S)

        def kill() -> None:
            if not master.process.dead:
                self._world.loop.kill(master.process, silently=silently)
                if leader is not None:
                    leader.kill(leader_back_s, silently=False)
                self._world.loop.call_later(back_s, master.revive)

        self._world.loop.call_later(self._random.uniform(0.2, 1) if lagging else 0, kill)
        return f"{master.host}{', silently' if silently else ''}, back after {back_s} s{lagging}{'' if leader is None else f', with {leader.node}'}"

    def fail_over(self) -> str:
        """The sentinels are told to have another master. The old one is told late."""
        lagging = self._all_lag()
        told = self._store.sentinels.fail_over()
        return told and f"to {told}{lagging}"

    def stall(self) -> str:
        """The master stands still, and goes on as if it were the master still."""
        process, stall_s = self._store.process, self._random.choice(STALLS_S)
        lagging = self._all_lag()
        if process.dead or process.stopped:
            return ""
        self._world.loop.stop_node(process)
        self._world.loop.call_later(stall_s, self._world.loop.continue_node, process)
        return f"{process} for {stall_s} s{lagging}"

    def split(self) -> str:
        """The master is cut off, with some of the servers and clients. A few may reach both sides."""
        world, random = self._world, self._random
        others = [host.name for host in world.hosts] + [node.host for node in world.clients]
        master = self._store.master.host
        here: list[str] = []
        there = [host for host in self._store.hosts if host != master]
        for name in others:
            where = random.random()
            if where < 0.45:
                here.append(name)
            elif where < 0.85:
                there.append(name)
        for one in [master, *here]:
            for other in there:
                world.network.separate(one, other)
        pause_s = random.choice(STALLS_S)
        world.loop.call_later(pause_s, world.network.heal)
        return f"{', '.join([master, *here])} from {', '.join(there)} for {pause_s} s"

    def _leader(self) -> Host | None:
        """Where the server runs that shall die with the master; mostly none does."""
        head = self._store.head
        hosts = [host for host in self._world.hosts if head is not None and host.node.name == head.who]
        return hosts[0] if hosts and self._random.random() < 0.5 else None

    # -- inside -------------------------------------------------------------------------------------------

    def _all_lag(self, *, surely: bool = False) -> str:
        if self._random.random() < 0.4 and not surely:
            return ""
        lag_s = self._random.choice(LAGS_S[2:])
        for redis in self._store.redises:
            if redis is not self._store.master:
                self._lag(redis, lag_s)
        return f", where all replicas lag for {lag_s} s"

    def _lag(self, replica: ReplicatedRedis, lag_s: float) -> str:
        replica.pause()
        self._world.loop.call_later(lag_s, replica.resume)
        return f"{replica.host} for {lag_s} s"
