"""Fair scheduling of random commands, with a clock that only their execution advances, compared with a simple model.

The model: a batch takes at most `BATCH_S` and its longest command. A light connection waits for at most two batches of each
other principal, and for a few more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import pytest

from genie.access import Principal
from genie.config import Limits
from genie.observability.stats import Stats
from genie.protocol.framing import SPLIT_BYTES
from genie.roles import Starting
from genie.server.connection import Connection
from genie.server.dispatcher import EXPENSIVE_S
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.peer import Item, Peer
from genie.server.scheduler import CommandScheduler
from genie.server.turns import BATCH_S
from support.core.turns import TurnsWithoutLoop

BATCHES = 200


class Command(bytes):
    """A command that takes `cost_s`, or as long for each slice of a slow one."""

    cost_s: float
    slices_left: int


def command(cost_s: float, slices: int = 0) -> Command:
    result = Command()
    result.cost_s, result.slices_left = cost_s, slices
    return result


class Load:
    """Random connections. Each sends commands, loses its client or changes its principal at random moments."""

    def __init__(self, chance: random.Random, principals: int, connections: int, cost_s: float) -> None:
        self.now = 100.0
        self.turns = TurnsWithoutLoop()
        self.scheduler = CommandScheduler(1 << 30, self.turns)
        self.scheduler._clock = lambda: self.now
        self._chance = chance
        self._cost_s = cost_s
        self._names = [f"principal{number}" for number in range(principals)]
        self._admission: AdmissionControl[Connection] = AdmissionControl(Limits())
        self.all: list[Connection] = []
        self.connections = [self.connect(chance.choice(self._names)) for _ in range(connections)]
        """The connections that send commands at random moments."""
        self.kinds = chance.choices(["short", "many", "expensive", "slow"], k=2)
        self.executed: set[Peer] = set()

    def connect(self, principal: str) -> Connection:
        connection = Connection(FollowerHandler(Stats(), "genie", 1 << 30, Starting), Limits(), self._admission)
        connection.principal = Principal(principal)
        self.all.append(connection)
        return connection

    def send(self, connection: Connection) -> None:
        kind, count = self._chance.choice(self.kinds), self._chance.choice([1, 30])
        items: list[Command] = []
        for _ in range(count):
            if kind == "slow":
                items.append(command(self._cost_s, slices=self._chance.choice([1, 3])))
            items.append(command(self._cost_s if kind == "expensive" else 0.000_01))
        if kind == "many":
            items *= 20
        self.scheduler.add(connection, items, SPLIT_BYTES + 1 if len(items) > 1 else 50)

    def change(self) -> None:
        """Change some connections at random."""
        chance = self._chance
        for connection in self.connections:
            if chance.random() < (0.7 if not connection.input_queue else 0.002) and not connection.closed:
                self.send(connection)
            if chance.random() < 0.002:
                connection.write_blocked = True
            elif connection.write_blocked and chance.random() < 0.05:
                connection.write_blocked = False
                self.scheduler.unpark(connection)
            if chance.random() < 0.002:
                connection.principal = Principal(chance.choice(self._names))
            if chance.random() < 0.0005 and not connection.closed:
                connection.closed = True
                self.scheduler.add(connection, [command(0.0)], 0)

    def batch(self) -> set[Peer]:
        """Run a batch and return the connections of which a command was finished."""
        self.executed = set()
        self.turns._end_iteration()
        self.scheduler.run_batch(self._execute, self._execute_slow)
        return self.executed

    def _execute(self, connection: Peer, items: Iterator[Item]) -> Item | None:
        for item in items:
            assert isinstance(item, Command)
            if item.slices_left:
                return item
            self.now += item.cost_s
            self.executed.add(connection)
            if item.cost_s > EXPENSIVE_S:
                self.turns.spend(item.cost_s)
                return next(items, None)
        return None

    def _execute_slow(self, connection: Peer, items: Iterator[Item]) -> Item | None:
        (item,) = items
        assert isinstance(item, Command)
        self.now += item.cost_s
        item.slices_left -= 1
        self.executed.add(connection)
        return item if item.slices_left > 0 else None

    def check(self) -> None:
        """Each connection with commands is in one queue, once, and no other connection is."""
        scheduler = self.scheduler
        queues = [*scheduler.delayed.values(), *scheduler.busy.values(), *scheduler.slow.values()]
        assert all(queues)
        queued = Counter(chain(scheduler.light, *queues, list(scheduler._parked)))
        assert set(queued.values()) <= {1}
        assert set(queued) == {connection for connection in self.all if connection.input_queue}
        assert scheduler.bytes == sum(each.queued_bytes for each in queued if each not in scheduler._parked)
        assert scheduler._paused_counts == Counter(scheduler._paused.values())
        assert scheduler.busy or not scheduler._is_busy_first


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("principals", [1, 3, 12])
def test_a_light_connection_waits_as_long_as_the_model_says(seed: int, principals: int) -> None:
    chance = random.Random(100 * seed + principals)  # noqa: S311
    cost_s = chance.choice([0.0006, 0.003, 0.02])
    load = Load(chance, principals, chance.choice([3, 50]), cost_s)
    light = load.connect("light")
    longest_wait_s, sent_at = 0.0, load.now
    for _ in range(BATCHES):
        load.change()
        if not light.input_queue:
            sent_at = load.now
            load.scheduler.add(light, [command(0.000_01)], 50)
        load.batch()
        load.now += 0.000_1
        load.check()
        longest_wait_s = max(longest_wait_s, load.now - sent_at)
    assert longest_wait_s < (2 * principals + 3) * (BATCH_S + cost_s)
