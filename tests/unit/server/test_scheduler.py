"""Which connection's commands run next, with a clock that only commands move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from genie.config import Limits
from genie.observability.stats import Stats
from genie.protocol.framing import SPLIT_BYTES, UnsplitLines
from genie.server import scheduler as module
from genie.server.connection import Connection
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.peer import Input, Item, Peer
from genie.server.scheduler import CommandScheduler

TURNS_OF_A_BATCH = round(module.BATCH_S / module.QUANTUM_S)


class World:
    """A scheduler, and connections by name. A command `name cost` takes so many ms."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.now = 100.0
        self.ran: list[str] = []
        self.scheduler = CommandScheduler(max_bytes)
        self.scheduler._clock = lambda: self.now
        self.connections: dict[str, Connection] = {}

    def add(self, name: str, *costs_ms: float, size: int = 1) -> None:
        items: list[Item] = [b"%s %f" % (name.encode(), cost) for cost in costs_ms]
        self.put(name, items, size)

    def put(self, name: str, items: Input, size: int) -> None:
        if name not in self.connections:
            self.connections[name] = Connection(
                FollowerHandler(Stats(), "genie", 1 << 20), Limits(), AdmissionControl(Limits())
            )
        self.scheduler.add(self.connections[name], items, size)

    def batch(self) -> list[str]:
        self.ran = []
        self.scheduler.run_batch(self._take)
        return self.ran

    def _take(self, _connection: Peer, items: Iterator[Item]) -> bool:
        for item in items:
            assert isinstance(item, bytes)
            name, cost = item.split()
            self.now += float(cost) / 1000
            self.ran.append(name.decode())
        return False


def test_a_batch_ends_with_its_time() -> None:
    world = World()
    world.add("a", *[1.0] * 1_000)
    assert len(world.batch()) * 0.001 <= module.BATCH_S + module.CHUNK * 0.001


@pytest.mark.parametrize("floods", [1, 50])
@pytest.mark.parametrize("cost_ms", [0.01, 0.05, 10.0])
def test_a_light_connection_waits_for_one_batch_only(floods: int, cost_ms: float) -> None:
    world = World()
    for number in range(floods):
        world.add(f"flood {number}".replace(" ", ""), *[cost_ms] * 10_000, size=SPLIT_BYTES + 1)
    for _ in range(5):
        world.batch()
        world.add("light", 0.01)
        assert world.batch()[0] == "light"


def test_floods_that_send_little_at_once_are_busy_after_two_turns() -> None:
    """Each sends its next command when it has the answer, and each command takes long."""
    world = World()
    floods = [f"flood{number}" for number in range(50)]
    for _ in range(2):
        for flood in floods:
            world.add(flood, 10.0)
        while world.scheduler:
            world.batch()
    for flood in floods:
        world.add(flood, 10.0)
    world.add("light", 0.01)
    assert world.batch()[0] == "light"


def test_one_long_pause_makes_no_connection_busy() -> None:
    world = World()
    world.add("paused", 20.0)  # the process was stopped meanwhile
    world.batch()
    world.add("flood", *[0.05] * 10_000, size=SPLIT_BYTES + 1)
    world.batch()
    world.add("paused", 0.01)
    assert world.batch()[0] == "paused"


def test_a_busy_connection_becomes_light_again() -> None:
    world = World()
    for _ in range(2):
        world.add("a", 10.0)
        world.batch()
    world.add("flood", *[0.05] * 10_000, size=SPLIT_BYTES + 1)
    world.add("a", 0.01)
    assert "a" not in world.batch()[:1]
    world.now += 10.0 / 1000 / module.LIGHT_SHARE
    world.add("a", 0.01)
    assert world.batch()[0] == "a"


def test_light_connections_do_not_starve_a_busy_one() -> None:
    world = World()
    world.add("busy", *[0.05] * 1_000, size=SPLIT_BYTES + 1)
    for number in range(10 * TURNS_OF_A_BATCH):
        world.add(f"light{number}", 0.4)
    for _ in range(3):
        assert "busy" in world.batch()


def test_busy_connections_take_turns() -> None:
    world = World()
    for name in ("a", "b", "c"):
        world.add(name, *[0.05] * 1_000, size=SPLIT_BYTES + 1)
    first = world.batch()
    assert set(first) == {"a", "b", "c"}
    assert max(map(first.count, "abc")) <= min(map(first.count, "abc")) + 2 * module.CHUNK


def test_long_commands_run_a_few_at_a_time() -> None:
    """The clock is read between them: each may take milliseconds."""
    world = World()
    world.add("long", *[6.0] * 16, size=16 * module.CHUNK_BYTES)
    assert world.batch() == ["long"]


def test_lines_are_split_when_their_turn_comes() -> None:
    world = World()
    data = b"a 0.01\n" * 10_000
    world.put("a", UnsplitLines(data), len(data))
    world.add("a", 0.01)
    ran = 0
    while world.scheduler:
        ran += len(world.batch())
    assert ran == 10_001
    assert (world.scheduler.bytes, world.connections["a"].queued_bytes) == (0, 0)


def test_everything_of_one_connection_is_taken_out_in_order() -> None:
    world = World()
    data = b"".join(b"%d\n" % number for number in range(10_000))
    world.put("a", [b"first"], 1)
    world.put("a", UnsplitLines(data), len(data))
    world.add("b", 1.0)
    world.put("a", [b"last"], 1)
    taken: list[Item] = []

    def take(connection: Connection, items: Iterator[Item]) -> bool:
        if connection is world.connections["a"]:
            taken.extend(items)
            for more in world.scheduler.take_all(connection):
                taken.extend(more)
        return False

    world.scheduler.run_batch(take)
    assert taken == [b"first", *data.splitlines(), b"last"]
    assert not world.connections["a"].input_queue
    while world.scheduler:
        world.batch()
    assert (world.scheduler.bytes, world.connections["a"].queued_bytes) == (0, 0)


def test_a_connection_is_read_again_only_when_little_of_it_is_queued() -> None:
    world = World()
    size = module.MAX_QUEUED_BYTES // 2 + 1
    for _ in range(3):
        world.add("a", *[1.0] * module.CHUNK, size=size)
    connection = world.connections["a"]
    assert connection.input_paused
    paused = []
    while world.scheduler:
        world.batch()
        paused.append((connection.input_paused, connection.queued_bytes > module.MAX_QUEUED_BYTES))
    assert all(is_paused == is_above for is_paused, is_above in paused)
    assert {is_paused for is_paused, _ in paused} == {True, False}


def test_connections_that_were_paused_for_the_sum_are_read_again_when_it_is_small() -> None:
    world = World(max_bytes=1_000)
    world.add("a", *[1.0] * 20, size=900)
    world.add("b", 0.1, size=200)
    a, b = world.connections["a"], world.connections["b"]
    assert (a.input_paused, b.input_paused) == (False, True)
    world.put("b", [b"b 0.1"], 900)
    while world.scheduler:
        world.batch()
        assert b.input_paused == (world.scheduler.bytes > 1_000)
    assert not b.input_paused


def test_a_connection_that_is_empty_before_the_sum_is_small_is_read_again_later() -> None:
    world = World(max_bytes=1_000)
    world.add("a", *[3.0] * 4 * module.CHUNK, size=2_000)
    world.add("b", 0.1, size=200)
    b = world.connections["b"]
    world.batch()
    world.batch()
    assert not b.input_queue
    assert b.input_paused
    while world.scheduler:
        world.batch()
    assert not b.input_paused
    assert not world.connections["a"].input_paused
