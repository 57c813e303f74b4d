"""Three simulated sentinels, one on the machine of each Redis. A majority of two elects the master.

A partitioned sentinel continues to report the old master. The delays are random and realistic: until a master counts as
down, until another is elected, and until a former master that is reachable again is demoted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from genie.testing.simulation.network import Network
from genie.testing.simulation.redis.replication import ReplicatedRedis
from genie.testing.simulation.redis.resp import CommandParser, Failure, encode

SENTINEL_PORT = 26379
NAME = "genie"
CHECK_INTERVAL_S = 0.1
DOWN_AFTER_S = 0.5, 2.0
"""How long a master must be unreachable before it counts as down."""
ELECTION_DELAY_S = 0.05, 0.7
DEMOTION_DELAY_S = 0.2, 6.0
"""How long a former master that the sentinels can reach still considers itself the master."""


@dataclass(slots=True)
class Sentinel:
    """The sentinel of one sentinel: the master, the epoch of its election, and since when it is unreachable."""

    host: str
    master: str
    epoch: int = 0
    down_since: float | None = None


class SentinelQuorum:
    """The three sentinels. `on_action` is called with a description of each failover and demotion."""

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
        self._misconfigured: dict[str, float] = {}
        """Hosts with the wrong role or master, and when the sentinels correct them."""

    async def serve(self, sentinel: Sentinel) -> None:
        """Accept connections of a sentinel, as the running node."""
        await self._loop.create_server(lambda: _Connection(sentinel), sentinel.host, SENTINEL_PORT)

    async def monitor(self) -> None:
        """Monitor the master, and elect another when it is down. Never returns."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self._gossip()
            self._check_master()
            self._correct_roles()

    @property
    def master(self) -> ReplicatedRedis:
        """The master according to the last election."""
        return self._redises[max(self.members, key=lambda sentinel: sentinel.epoch).master]

    def fail_over(self) -> str:
        """SENTINEL FAILOVER: elect another master at once; return a description, or "" if there is no majority."""
        for sentinel in self._agreeing_majority():
            if sentinel.epoch == max(sentinel.epoch for sentinel in self.members):
                return self._elect(sentinel)
        return ""

    @property
    def is_settled(self) -> bool:
        """Whether the sentinels agree, and every Redis has its role and its master accordingly."""
        return all(
            (sentinel.epoch, sentinel.down_since) == (self.members[0].epoch, None) for sentinel in self.members
        ) and all(self._has_role(redis, self.members[0]) for redis in self._redises.values())

    # -- inside -------------------------------------------------------------------------------------------

    def _reaches(self, one: str, other: str) -> bool:
        return one == other or not self._network.is_partitioned(frozenset((one, other)))

    def _gossip(self) -> None:
        """Distribute the latest election among the sentinels that can reach each other."""
        for sentinel in self.members:
            for other in self.members:
                if other.epoch > sentinel.epoch and self._reaches(sentinel.host, other.host):
                    sentinel.epoch, sentinel.master, sentinel.down_since = other.epoch, other.master, None

    def _check_master(self) -> None:
        """Update since when each sentinel cannot reach the master; elect another once a majority has not for long enough."""
        now = self._loop.time()
        for sentinel in self.members:
            master = self._redises[sentinel.master]
            if master.alive and master.master is None and self._reaches(sentinel.host, sentinel.master):
                sentinel.down_since = None
            elif sentinel.down_since is None:
                sentinel.down_since = now
        agreeing_that_down = [
            sentinel
            for sentinel in self._agreeing_majority()
            if now - (now if sentinel.down_since is None else sentinel.down_since) >= self._down_after_s
        ]
        if len(agreeing_that_down) < 2:
            self._election_at = None
        elif self._election_at is None:
            self._election_at = now + self._random.uniform(*ELECTION_DELAY_S)
        elif now >= self._election_at:
            self._election_at = None
            elected = self._elect(agreeing_that_down[0])
            if elected:
                self._on_action(f"failover to {elected}")

    def _agreeing_majority(self) -> list[Sentinel]:
        """Return the sentinels that form a majority and agree on the epoch, or none."""
        for sentinel in self.members:
            agreeing = [
                other
                for other in self.members
                if self._reaches(sentinel.host, other.host) and other.epoch == sentinel.epoch
            ]
            if len(agreeing) >= 2:
                return agreeing
        return []

    def _elect(self, sentinel: Sentinel) -> str:
        """Promote the replica with the greatest offset that the sentinel reaches; return a description, or "" if none."""
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
        # Epochs are unique: any two majorities share a sentinel.
        epoch = max(sentinel.epoch for sentinel in self.members) + 1
        sentinel.master, sentinel.epoch, sentinel.down_since = best.host, epoch, None
        self._misconfigured.clear()
        return f"{best.host}, which has {best.offset} writes; {former.host} has {former.offset}"

    def _has_role(self, redis: ReplicatedRedis, sentinel: Sentinel) -> bool:
        """Return whether a Redis is the master, or follows it, according to a sentinel."""
        return redis.master == (None if redis.host == sentinel.master else sentinel.master)

    def _correct_roles(self) -> None:
        """Reconfigure each reachable Redis with the wrong role or master, after a random delay."""
        now = self._loop.time()
        sentinel = max(self.members, key=lambda sentinel: sentinel.epoch)
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
    """A client connection to one sentinel."""

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
        """Return the reply to SENTINEL MASTER or GET-MASTER-ADDR-BY-NAME, according to this sentinel."""
        epoch, host = b"%d" % self._sentinel.epoch, self._sentinel.master.encode()
        name = b" ".join(command[:2]).upper()
        if name == b"SENTINEL GET-MASTER-ADDR-BY-NAME":
            return [host, b"6379"] if command[2] == NAME.encode() else None
        if name != b"SENTINEL MASTER":
            return Failure(f"ERR unknown command '{name.decode()}'")
        if command[2] != NAME.encode():
            return Failure("ERR No such master with that name")
        return {b"name": command[2], b"ip": host, b"port": b"6379", b"flags": b"master", b"config-epoch": epoch}
