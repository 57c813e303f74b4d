"""What breaks in a simulated world, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import TYPE_CHECKING

from genie.testing.simulation.history import FAULT
from genie.testing.simulation.loop import Node
from genie.testing.simulation.network import Connection
from genie.testing.simulation.redis.replication import ReplicatedRedis
from genie.testing.simulation.redis.server import CUT_AFTER, CUT_BEFORE, REFUSE
from genie.testing.simulation.stores import ThreeRedises

if TYPE_CHECKING:
    from genie.testing.simulation.cluster import Host, World

PAUSES_S = (0.05, 0.5, 1.5, 4.0, 12.0)
"""How long something is stopped: shorter and longer than all that waits for it."""


class Faults:
    """Chooses and makes the faults of a plan, one after the other."""

    failovers: Failovers
    """Those of several Redises."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = Random(f"{world.plan.seed} faults")
        self.failovers = Failovers(world, Random(f"{world.plan.seed} failovers"))
        self._bad_until = 0.0
        self._stop_for: float | None = None
        """How long the next server is stopped that commits something, right behind it."""
        for redis in world.store.redises:
            redis.fault = self._of_a_command

    @property
    def bad_commands(self) -> bool:
        """Whether commands to Redis fail now and then."""
        return self.world.loop.time() < self._bad_until

    async def go_on_for(self, seconds: float) -> None:
        """Break things until that much time has passed."""
        world, plan = self.world, self.world.plan
        until = world.loop.time() + seconds
        while plan.faults:
            pause = self.random.expovariate(1 / plan.every_s)
            if world.loop.time() + pause >= until:
                break
            await asyncio.sleep(pause)
            kind = self.random.choice(plan.faults)
            told = _KINDS[kind](self)
            if told:
                world.history.note(FAULT, "world", f"{kind}: {told}")
        await asyncio.sleep(max(0.0, until - world.loop.time()))

    def mend(self) -> None:
        """Let everything work again."""
        world = self.world
        self._bad_until = 0.0
        for redis in world.store.redises:
            redis.fault = lambda _command, _who: None
        world.network.heal()
        world.store.mend()
        for node in [*world.store.processes, *[host.node for host in world.hosts], *world.clients]:
            if node.stopped:
                world.loop.continue_node(node)
        for connection in list(world.network.connections):  # those of which one side has not heard yet
            if connection.client.gone != connection.server.gone:
                connection.client.lose("reset")
                connection.server.lose("reset")

    # -- of the network -----------------------------------------------------------------------------------

    def _cut_a_client(self) -> str:
        return self._cut(lambda connection: connection.address[1] != 6379)

    def _cut_the_store(self) -> str:
        return self._cut(lambda connection: connection.address[1] == 6379)

    def _cut(self, which: Callable[[Connection], bool]) -> str:
        found = [connection for connection in self.world.network.connections if which(connection)]
        if not found:
            return ""
        connection = self.random.choice(found)
        late = [self.random.choice([0.0, 0.001, 0.5, 3.0, 20.0]) for _ in range(2)]
        late[self.random.randrange(2)] = self.random.uniform(0, 0.01)
        self.world.network.cut(connection, *late)
        return f"{connection}, known after {late[0]:.3f} s and {late[1]:.3f} s"

    def _separate(self) -> str:
        stores = self.world.store.hosts
        hosts = [*stores, *[host.name for host in self.world.hosts], *[node.host for node in self.world.clients]]
        one, other = self.random.sample(hosts, 2)
        if {one, other} & set(stores) and not {one, other} & {host.name for host in self.world.hosts}:
            one, other = one if one in stores else other, self.random.choice(self.world.hosts).name
        pause = self.random.choice(PAUSES_S)
        self.world.network.separate(one, other)
        self.world.loop.call_later(pause, self.world.network.heal)
        return f"{one} and {other} for {pause} s"

    # -- of the store -------------------------------------------------------------------------------------

    def _of_a_command(self, command: list[bytes], who: str) -> str | None:
        if self._stop_for is not None and command[0] == b"EVALSHA":
            for host in self.world.hosts:
                if host.node.name == who:
                    self._stop(host.node, self._stop_for)
                    self._stop_for = None
        if self.world.loop.time() >= self._bad_until or self.random.random() > 0.2:
            return None
        fault = self.random.choice([CUT_BEFORE, CUT_AFTER, CUT_AFTER, REFUSE])
        self.world.history.note(FAULT, "redis", f"{fault} {command[0].decode()}")
        return fault

    def _bad_commands(self) -> str:
        pause = self.random.choice(PAUSES_S)
        self._bad_until = self.world.loop.time() + pause
        return f"for {pause} s"

    def _stall_the_store(self) -> str:
        return self._stop(self.world.store.process)

    def _restart_the_store(self) -> str:
        self.world.store.master.restart()
        return "with all it had"

    def _forget_scripts(self) -> str:
        self.world.store.master.flush_scripts()
        return "SCRIPT FLUSH"

    def _lose_writes(self) -> str:
        lost = self.world.store.master.restart(self.random.choice([1, 2, 5, 20]))
        self.world.store.look()
        return f"{lost} of them, in a restart"

    def _flush_the_store(self) -> str:
        self.world.store.master.flush()
        self.world.store.look()
        return "FLUSHALL"

    # -- of processes -------------------------------------------------------------------------------------

    def _stop(self, node: Node, pause: float | None = None) -> str:
        pause = self.random.choice(PAUSES_S) if pause is None else pause
        loop = self.world.loop
        if node.dead or node.stopped:
            return ""
        loop.stop_node(node)
        loop.call_later(pause, loop.continue_node, node, context=Context())
        return f"{node} for {pause} s"

    def _host(self) -> Host:
        return self.random.choice(self.world.hosts)

    def _stop_a_server(self) -> str:
        if self.random.random() < 0.5:
            self._stop_for = self.random.choice(PAUSES_S)
            return f"the next that commits, before it has the answer, for {self._stop_for} s"
        return self._stop(self._host().node)

    def _stop_a_client(self) -> str:
        return self._stop(self.random.choice(list(self.world.clients)))

    def _kill_a_server(self) -> str:
        host = self._host()
        if host.node.dead:
            return ""
        silently, pause = self.random.random() < 0.3, self.random.choice([0.0, 0.05, 1.0, 5.0])
        told = f"{host.node}{', silently' if silently else ''}, back after {pause} s"
        host.kill(pause, silently=silently)
        return told

    def _restart_a_server(self) -> str:
        host = self._host()
        self.world.terminate(host)
        return f"SIGTERM to {host.node}"

    def _kill_a_client(self) -> str:
        living = [node for node in self.world.clients if not node.dead]
        if len(living) < 2:
            return ""
        node = self.random.choice(living)
        self.world.loop.kill(node, silently=self.random.random() < 0.3)
        return str(node)


_KINDS: dict[str, Callable[[Faults], str]] = {
    "cut a client": Faults._cut_a_client,
    "cut the store": Faults._cut_the_store,
    "stall the store": Faults._stall_the_store,
    "restart the store": Faults._restart_the_store,
    "forget scripts": Faults._forget_scripts,
    "bad commands": Faults._bad_commands,
    "kill a server": Faults._kill_a_server,
    "restart a server": Faults._restart_a_server,
    "stop a server": Faults._stop_a_server,
    "stop a client": Faults._stop_a_client,
    "kill a client": Faults._kill_a_client,
    "separate": Faults._separate,
    "lose writes": Faults._lose_writes,
    "flush the store": Faults._flush_the_store,
    "lag": lambda faults: faults.failovers.lag(),
    "kill a master": lambda faults: faults.failovers.kill(),
    "fail over": lambda faults: faults.failovers.fail_over(),
    "stall a master": lambda faults: faults.failovers.stall(),
    "split": lambda faults: faults.failovers.split(),
}


# -- What breaks where there are several Redises, so that another of them becomes the master, or two are --------

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
