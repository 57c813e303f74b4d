"""The store of a simulated cluster: a single Redis, one that crashes, or a primary and two replicas with sentinels."""

from __future__ import annotations

import asyncio
from random import Random

from genie.testing.simulation.history import FAULT, Message
from genie.testing.simulation.loop import Node, SimLoop
from genie.testing.simulation.network import Network
from genie.testing.simulation.redis.server import SimRedis
from simulator.history import ClusterHistory, StoreState
from simulator.lineage import LineageRecorder
from simulator.replication import ReplicatedRedis, ReplicationLog
from simulator.scenario import Scenario
from simulator.sentinel import CHECK_INTERVAL_S, SentinelQuorum
from simulator.sentinel import NAME as MASTER_NAME
from simulator.store_recorder import StoreRecorder


class OneRedis:
    """A single Redis and the recorder of its writes."""

    url = "redis://redis:6379/0"
    hosts = ("redis",)

    def __init__(self, loop: SimLoop, history: ClusterHistory) -> None:
        self._loop = loop
        self.master = SimRedis()
        self.redises = [self.master]
        self.recorder = StoreRecorder(self.master, history)
        self.process = loop.create_node("redis")

    @property
    def processes(self) -> list[Node]:
        """The Redis processes, which can be stopped."""
        return [self.process]

    async def start(self) -> None:
        await self._loop.spawn(self.process, self.master.serve("redis"))

    def stored_records(self) -> dict[int, Message]:
        """Return the records that the store holds now, by request id."""
        return self.recorder.stored_records()

    def detect_lost_writes(self) -> None:
        """Let the recorder compare the store with the recorded state, after a fault that may have lost writes."""
        self.recorder.detect_lost_writes()

    def heal(self) -> None:
        """Do nothing: no fault of a single Redis lasts."""

    async def wait_until_settled(self) -> None:
        """Return at once: there are no replicas that would have to follow a primary."""

    def record_final_state(self) -> None:
        """Do nothing: only several Redis servers have a final state, which selects the surviving lineage."""


class RedisWithLineage:
    """Redis servers whose states are recorded as a tree, because they may lose acknowledged writes.

    `redises` begins with the first primary.
    """

    url: str
    hosts: tuple[str, ...]

    def __init__(
        self, network: Network, history: ClusterHistory, redises: list[ReplicatedRedis], min_replicas: int
    ) -> None:
        self._loop = network.loop
        self._history = history
        self.redises = redises
        self._recorder = LineageRecorder(redises, history, min_replicas)
        """Records the states that the store has had, and which state each of them follows: lost writes start a new branch."""

    @property
    def master(self) -> ReplicatedRedis:
        """The primary."""
        return self.redises[0]

    @property
    def head(self) -> StoreState | None:
        """The current state of the primary; None if no server has written to it."""
        return self._recorder.head(self.master)

    @property
    def process(self) -> Node:
        """The process of the primary."""
        return self.master.process

    @property
    def processes(self) -> list[Node]:
        """The Redis processes, which can be stopped."""
        return [redis.process for redis in self.redises]

    async def start(self) -> None:
        """Start the Redis servers."""
        for redis in self.redises:
            redis.start()

    def stored_records(self) -> dict[int, Message]:
        """Return the records that the primary holds now, by request id."""
        return self._recorder.stored_records(self.master)

    def detect_lost_writes(self) -> None:
        """Do nothing: the recorder reads the state of a Redis before each write."""

    def heal(self) -> None:
        """Restart the Redis servers that were killed, and resume the replication to every replica."""
        for redis in self.redises:
            redis.revive()
            redis.resume_replication()

    async def wait_until_settled(self) -> None:
        """Return at once: without sentinels there are no replicas that would have to follow a primary."""

    def record_final_state(self) -> None:
        """Record the state of the primary as the final state: its ancestors are the surviving lineage."""
        self._history.final = self.head


class CrashingRedis(RedisWithLineage):
    """A single Redis, whose crashes lose the writes that are not on its disk. It loads its data when it starts again."""

    url = "redis://redis:6379/0"
    hosts = ("redis",)

    def __init__(self, scenario: Scenario, network: Network, history: ClusterHistory) -> None:
        redis = ReplicatedRedis(network.loop, "redis", ReplicationLog(), Random(f"{scenario.seed} redis"), max_lag_s=0)
        super().__init__(network, history, [redis], min_replicas=0)


class RedisWithSentinels(RedisWithLineage):
    """A primary and two replicas, each with a sentinel on the same machine."""

    def __init__(self, scenario: Scenario, network: Network, history: ClusterHistory) -> None:
        self.hosts = tuple(f"redis{number}" for number in (1, 2, 3))
        self.url = f"redis+sentinel://{','.join(self.hosts)}/{MASTER_NAME}"
        replication_log = ReplicationLog()
        redises = [
            ReplicatedRedis(
                network.loop,
                host,
                replication_log=replication_log,
                random=Random(f"{scenario.seed} {host}"),
                max_lag_s=scenario.max_lag_s,
            )
            for host in self.hosts
        ]
        for replica in redises[1:]:
            replica.master = self.hosts[0]
            replica.read_only = True
        self.sentinels = SentinelQuorum(
            network, redises, Random(f"{scenario.seed} sentinels"), self._on_sentinel_action
        )
        super().__init__(network, history, redises, scenario.min_replicas)

    @property
    def master(self) -> ReplicatedRedis:
        """The primary, according to the latest election of the sentinels."""
        return self.sentinels.master

    async def start(self) -> None:
        """Start the Redis servers and the sentinels."""
        await super().start()
        for sentinel in self.sentinels.members:
            node = self._loop.create_node(f"sentinel of {sentinel.host}", sentinel.host)
            await self._loop.spawn(node, self.sentinels.serve(sentinel))
        self._monitoring = self._loop.spawn(self._loop.create_node("sentinels"), self.sentinels.monitor())

    async def wait_until_settled(self) -> None:
        """Wait until the sentinels agree and all replicas follow the primary."""
        while not self.sentinels.is_settled:  # noqa: ASYNC110 - once in a simulation
            await asyncio.sleep(CHECK_INTERVAL_S)

    def _on_sentinel_action(self, action: str) -> None:
        self._history.append(FAULT, "sentinels", action)
