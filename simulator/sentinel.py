"""Three simulated sentinels, one on the machine of each Redis. A majority of two elects the master.

A partitioned sentinel continues to report the old master. As in reality, time passes until a master counts as down, until
another master is elected, and until a former master that is reachable again is demoted. These delays are random.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from genie.testing.simulation.network import Network
from genie.testing.simulation.redis.resp import CommandParser, Failure, encode
from simulator.replication import ReplicatedRedis

SENTINEL_PORT = 26379
NAME = "genie"
CHECK_INTERVAL_S = 0.1
DOWN_AFTER_S = 0.5, 2.0
"""The shortest and the longest time for which a master must be unreachable before it counts as down."""
ELECTION_DELAY_S = 0.05, 0.7
DEMOTION_DELAY_S = 0.2, 6.0
"""The shortest and the longest time after which sentinels demote a former master that they can reach."""


@dataclass(slots=True)
class Sentinel:
    """A sentinel, and the master that it knows.

    `epoch` is the number of the election of this master. `down_since` is the time since which the sentinel cannot reach the
    master, or None while the master is reachable.
    """

    host: str
    master: str
    epoch: int = 0
    down_since: float | None = None


class SentinelQuorum:
    """The three sentinels, which elect and demote masters together.

    `on_action` is called with a description of each failover and each demotion.
    """

    def __init__(
        self, network: Network, redises: list[ReplicatedRedis], random: Random, on_action: Callable[[str], None]
    ) -> None:
        self._network = network
        self._loop = network.loop
        self._redises = {redis.host: redis for redis in redises}
        self._random = random
        self._on_action = on_action
        self.members = [Sentinel(redis.host, redises[0].host) for redis in redises]
        self._down_after_s = random.uniform(*DOWN_AFTER_S)
        self._election_at: float | None = None
        """When the next master is elected; None while no majority considers the master down."""
        self._misconfigured: dict[str, float] = {}
        """The hosts of Redis servers with the wrong role or master, and when the sentinels correct each."""

    async def serve(self, sentinel: Sentinel) -> None:
        """Accept connections to a sentinel, as part of the running node."""
        await self._loop.create_server(lambda: _Connection(sentinel), sentinel.host, SENTINEL_PORT)

    async def monitor(self) -> None:
        """Monitor the master at intervals, elect another master when it is down, and correct roles. Never returns."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self._gossip()
            self._check_master()
            self._correct_roles()

    @property
    def master(self) -> ReplicatedRedis:
        """The master that was elected last."""
        return self._redises[max(self.members, key=lambda sentinel: sentinel.epoch).master]

    def fail_over(self) -> str:
        """SENTINEL FAILOVER: elect another master at once.

        Returns a description of the new master, or "" if there is no majority or no replica can be promoted.
        """
        latest_epoch = max(sentinel.epoch for sentinel in self.members)
        for sentinel in self._agreeing_majority():
            if sentinel.epoch == latest_epoch:
                return self._elect(sentinel)
        return ""

    @property
    def is_settled(self) -> bool:
        """True if the sentinels agree, can reach the master, and every Redis has the role that they expect."""
        return all(
            (sentinel.epoch, sentinel.down_since) == (self.members[0].epoch, None) for sentinel in self.members
        ) and all(self._has_role(redis, self.members[0]) for redis in self._redises.values())

    # -- inside -------------------------------------------------------------------------------------------

    def _reaches(self, one: str, other: str) -> bool:
        """Return whether two hosts are not partitioned from each other."""
        return one == other or not self._network.is_partitioned(frozenset((one, other)))

    def _gossip(self) -> None:
        """Distribute the result of the latest election among the sentinels that can reach each other."""
        for sentinel in self.members:
            for other in self.members:
                if other.epoch > sentinel.epoch and self._reaches(sentinel.host, other.host):
                    sentinel.epoch, sentinel.master, sentinel.down_since = other.epoch, other.master, None

    def _check_master(self) -> None:
        """Update `down_since` of each sentinel, and elect another master if a majority considers the master down.

        The election takes place after a random delay, unless the master is reachable again by then.
        """
        now = self._loop.time()
        for sentinel in self.members:
            master = self._redises[sentinel.master]
            if master.alive and master.master is None and self._reaches(sentinel.host, sentinel.master):
                sentinel.down_since = None
            elif sentinel.down_since is None:
                sentinel.down_since = now
        reporting_down = [
            sentinel
            for sentinel in self._agreeing_majority()
            if sentinel.down_since is not None and now - sentinel.down_since >= self._down_after_s
        ]
        if len(reporting_down) < 2:  # no majority of the three sentinels
            self._election_at = None
        elif self._election_at is None:
            self._election_at = now + self._random.uniform(*ELECTION_DELAY_S)
        elif now >= self._election_at:
            self._election_at = None
            elected = self._elect(reporting_down[0])
            if elected:
                self._on_action(f"failover to {elected}")

    def _agreeing_majority(self) -> list[Sentinel]:
        """Return the sentinels that can reach each other and agree on the epoch; an empty list if they are not a majority."""
        for sentinel in self.members:
            agreeing = [
                other
                for other in self.members
                if self._reaches(sentinel.host, other.host) and other.epoch == sentinel.epoch
            ]
            if len(agreeing) >= 2:  # a majority of the three sentinels
                return agreeing
        return []

    def _elect(self, sentinel: Sentinel) -> str:
        """Promote the replica with the greatest offset among the replicas that a sentinel can reach.

        Returns a description of the new master, or "" if the sentinel can reach no replica.
        """
        candidates = [
            redis
            for redis in self._redises.values()
            if redis.host != sentinel.master
            and redis.alive
            and redis.master is not None
            and self._reaches(sentinel.host, redis.host)
        ]
        if not candidates:
            return ""
        best = max(candidates, key=lambda redis: redis.offset)
        former = self._redises[sentinel.master]
        best.promote()
        # No two elections have the same epoch, because any two majorities have a sentinel in common.
        epoch = max(sentinel.epoch for sentinel in self.members) + 1
        sentinel.master, sentinel.epoch, sentinel.down_since = best.host, epoch, None
        self._misconfigured.clear()
        return f"{best.host}, which has {best.offset} writes; {former.host} has {former.offset}"

    def _has_role(self, redis: ReplicatedRedis, sentinel: Sentinel) -> bool:
        """Return whether a Redis has the role that a sentinel expects: master, or replica of the sentinel's master."""
        return redis.master == (None if redis.host == sentinel.master else sentinel.master)

    def _correct_roles(self) -> None:
        """Reconfigure each reachable Redis that has the wrong role or the wrong master, after a random delay."""
        now = self._loop.time()
        sentinel = max(self.members, key=lambda sentinel: sentinel.epoch)  # it knows the latest election
        for redis in self._redises.values():
            if self._has_role(redis, sentinel) or not redis.alive or not self._reaches(sentinel.host, redis.host):
                self._misconfigured.pop(redis.host, None)
            elif redis.host not in self._misconfigured:
                delay_range_s = DEMOTION_DELAY_S if redis.master is None else ELECTION_DELAY_S
                self._misconfigured[redis.host] = now + self._random.uniform(*delay_range_s)
            elif now >= self._misconfigured[redis.host]:
                del self._misconfigured[redis.host]
                redis.call_in_process(partial(redis.demote, sentinel.master))
                self._on_action(f"{redis.host} follows {sentinel.master}")


class _Connection(asyncio.Protocol):
    """A client's connection to a sentinel."""

    def __init__(self, sentinel: Sentinel) -> None:
        self._sentinel = sentinel
        self._parser = CommandParser()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        for command in self._parser.feed(data):
            self._transport.write(encode(self._reply_to(command)))

    def _reply_to(self, command: list[bytes]) -> object:
        """Return the reply to SENTINEL MASTER or SENTINEL GET-MASTER-ADDR-BY-NAME, according to this sentinel."""
        epoch, host = b"%d" % self._sentinel.epoch, self._sentinel.master.encode()
        name = b" ".join(command[:2]).upper()
        if name == b"SENTINEL GET-MASTER-ADDR-BY-NAME":
            return [host, b"6379"] if command[2] == NAME.encode() else None
        if name != b"SENTINEL MASTER":
            return Failure(f"ERR unknown command '{name.decode()}'")
        if command[2] != NAME.encode():
            return Failure("ERR No such master with that name")
        return {b"name": command[2], b"ip": host, b"port": b"6379", b"flags": b"master", b"config-epoch": epoch}
