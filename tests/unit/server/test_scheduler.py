"""Fair scheduling, with a clock that only the execution of commands advances."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from genie.access import Principal
from genie.config import Limits
from genie.observability.stats import Stats
from genie.protocol.framing import SPLIT_BYTES, UnsplitLines
from genie.roles import Starting
from genie.server import scheduler as scheduler_module
from genie.server import turns as turns_module
from genie.server.connection import Connection
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.peer import Input, Item, Peer
from genie.server.scheduler import CommandScheduler
from genie.server.sessions import SessionEnd
from genie.server.turns import BATCH_S
from support.core.turns import TurnsWithoutLoop

TURNS_PER_BATCH = round(BATCH_S / scheduler_module.QUANTUM_S)


class SchedulerWithClock:
    """A scheduler, and connections by name. A command is `name cost`: it takes `cost` ms.

    Each batch has an iteration of the event loop of its own.
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.now = 100.0
        self.executed: list[str] = []
        self.turns = TurnsWithoutLoop()
        self.scheduler = CommandScheduler(max_bytes, self.turns)
        self.scheduler._clock = lambda: self.now
        self.connections: dict[str, Connection] = {}

    def add(self, name: str, *costs_ms: float, size: int = 1) -> None:
        items: list[Item] = [b"%s %f" % (name.encode(), cost) for cost in costs_ms]
        self.add_items(name, items, size)

    def add_items(self, name: str, items: Input, size: int) -> None:
        if name not in self.connections:
            self.connect(name)
        self.scheduler.add(self.connections[name], items, size)

    def connect(self, name: str, principal: str | None = None) -> None:
        self.connections[name] = Connection(
            FollowerHandler(Stats(), "genie", 1 << 20, Starting), Limits(), AdmissionControl(Limits())
        )
        self.connections[name].principal = None if principal is None else Principal(principal)

    def batch(self) -> list[str]:
        self.executed = []
        self.turns._end_iteration()
        self.scheduler.run_batch(self._execute)
        return self.executed

    def _execute(self, _connection: Peer, items: Iterator[Item]) -> None:
        for item in items:
            assert isinstance(item, bytes)
            name, cost = item.split()
            self.now += float(cost) / 1000
            self.executed.append(name.decode())


def test_a_batch_is_bounded_in_time() -> None:
    simulated = SchedulerWithClock()
    simulated.add("a", *[1.0] * 1_000)
    assert len(simulated.batch()) * 0.001 <= BATCH_S + scheduler_module.CHUNK * 0.001


@pytest.mark.parametrize("floods", [1, 50])
@pytest.mark.parametrize("cost_ms", [0.01, 0.05, 10.0])
def test_a_light_connection_waits_for_at_most_one_batch(floods: int, cost_ms: float) -> None:
    simulated = SchedulerWithClock()
    for number in range(floods):
        simulated.add(f"flood {number}".replace(" ", ""), *[cost_ms] * 10_000, size=SPLIT_BYTES + 1)
    for _ in range(5):
        simulated.batch()
        simulated.add("light", 0.01)
        assert simulated.batch()[0] == "light"


def test_connections_with_slow_commands_are_busy_after_two_turns() -> None:
    """Each connection sends a slow command, and the next one after the reply."""
    simulated = SchedulerWithClock()
    floods = [f"flood{number}" for number in range(50)]
    for _ in range(2):
        for flood in floods:
            simulated.add(flood, 10.0)
        while simulated.scheduler:
            simulated.batch()
    for flood in floods:
        simulated.add(flood, 10.0)
    simulated.add("light", 0.01)
    assert simulated.batch()[0] == "light"


def test_a_single_overrun_does_not_make_a_connection_busy() -> None:
    simulated = SchedulerWithClock()
    simulated.add("paused", 20.0)  # as if the process had been paused
    simulated.batch()
    simulated.add("flood", *[0.05] * 10_000, size=SPLIT_BYTES + 1)
    simulated.batch()
    simulated.add("paused", 0.01)
    assert simulated.batch()[0] == "paused"


def test_new_connections_with_expensive_commands_delay_other_principals_by_one_turn() -> None:
    simulated = SchedulerWithClock()
    for number in range(40):
        simulated.add(f"flood{number}", 20.0)
        simulated.connections[f"flood{number}"].principal = Principal("flood")
    simulated.batch()
    for _ in range(5):
        simulated.add("other", 0.01)
        assert simulated.batch()[0] == "other"


def test_new_connections_of_the_same_principal_delay_it_by_one_command_each() -> None:
    simulated = SchedulerWithClock()
    simulated.add("other", 0.01)
    simulated.batch()
    for number in range(40):
        simulated.add(f"flood{number}", 20.0)
    for _ in range(41):
        simulated.batch()
    for number in range(40):
        simulated.add(f"flood{number}", 20.0)
    simulated.batch()
    simulated.add("other", 0.01)
    assert simulated.batch()[0] == "other"


def test_principals_with_expensive_commands_take_turns() -> None:
    simulated = SchedulerWithClock()
    for number in range(6):
        simulated.add(f"many{number}", 20.0)
        simulated.connections[f"many{number}"].principal = Principal("many")
    for number in range(2):
        simulated.add(f"few{number}", 20.0)
        simulated.connections[f"few{number}"].principal = Principal("few")
    order = [name.rstrip("0123456789") for _ in range(8) for name in simulated.batch()]
    assert order == ["many", "few", "many", "few", "many", "many", "many", "many"]


@pytest.mark.parametrize("cost_ms", [0.01, 0.1, 0.4])
def test_many_connections_with_short_commands_delay_other_principals_by_one_batch(cost_ms: float) -> None:
    simulated = SchedulerWithClock()
    for number in range(3_000):
        simulated.add(f"flood{number}", cost_ms)
        simulated.connections[f"flood{number}"].principal = Principal("flood")
    simulated.add("early", 0.01)
    simulated.connections["early"].principal = Principal("other")
    simulated.batch()
    assert simulated.batch()[0] == "early"
    simulated.batch()
    simulated.add("late", 0.01)
    simulated.connections["late"].principal = Principal("other")
    assert simulated.batch()[0] == "late"


@pytest.mark.parametrize("principals", [1, 2, 12, 60])
@pytest.mark.parametrize("alternate", [False, True])
def test_many_connections_of_several_principals_delay_others_by_few_batches(principals: int, alternate: bool) -> None:
    """Neighbours in the queue have different principals, or the connections of each principal follow each other."""
    simulated = SchedulerWithClock()
    for number in range(3_000):
        principal = number % principals if alternate else number * principals // 3_000
        simulated.connect(f"flood{number}", f"flood{principal}")
        simulated.add(f"flood{number}", *[0.02] * 24)
    simulated.connect("other", "other")
    batches = 0
    while simulated.now < 101.2:  # longer than the delay of the principals
        if not simulated.connections["other"].input_queue:
            simulated.add("other", 0.01)
            batches = 0
        simulated.batch()
        batches += 1
        assert batches <= 3
    assert simulated.scheduler.delayed


@pytest.mark.parametrize("overrun_ms", [0.6, 5.0, 300.0])
def test_a_connection_with_an_overrun_takes_turns_with_delayed_principals(overrun_ms: float) -> None:
    """1,000 connections use up each batch, and those of one principal are always delayed."""
    simulated = SchedulerWithClock()
    for number in range(1_300):
        name = f"load{number}"
        simulated.connect(name, name if number < 1_000 else "flood")
        simulated.add(name, 0.01)
    simulated.connect("unlucky", "unlucky")
    simulated.add("unlucky", overrun_ms)
    sent_at, longest_wait_s = simulated.now + overrun_ms / 1000, 0.0
    end = sent_at + 1.5
    while simulated.now < end:
        for name in simulated.batch():
            if name == "unlucky":
                longest_wait_s = max(longest_wait_s, simulated.now - sent_at)
                sent_at = simulated.now
            simulated.add(name, 0.01)
    assert max(longest_wait_s, simulated.now - sent_at) < 8 * BATCH_S


def test_all_delayed_connections_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection is sorted once, however long it waits. The time for this is not added to that of any connection."""
    simulated = SchedulerWithClock()
    sorted_count = 0
    find_name = scheduler_module.principal_name

    def count(connection: Peer) -> str | None:
        nonlocal sorted_count
        sorted_count += 1
        simulated.now += 0.000_001
        return find_name(connection)

    monkeypatch.setattr(scheduler_module, "principal_name", count)
    simulated.add("expensive", 1.0)
    simulated.connections["expensive"].principal = Principal("many")
    for number in range(4_000):
        for name in ("few", "many") if number < 20 else ("many",):
            simulated.add(f"{name}{number}", 0.1)
            simulated.connections[f"{name}{number}"].principal = Principal(name)
    served: list[str] = []
    while simulated.scheduler:
        served += simulated.batch()
    assert len(served) == len(set(served)) == 4_021
    assert [name for name in served[:200] if name.startswith("few")] == [f"few{number}" for number in range(20)]
    assert sorted_count < 2 * len(served)
    assert [name for name, connection in simulated.connections.items() if connection.overran_until] == ["expensive"]


class ClosedLoop:
    """Connections that send the next command when the last one is executed, more in total than a batch executes.

    `principals` is the number of their principals, or 0 if they need no token.
    """

    def __init__(self, principals: int) -> None:
        self.simulated = SchedulerWithClock()
        self.sent_at: dict[str, float] = {}
        self.longest_wait_s = 0.0
        for number in range(1_200):
            self.send(f"load{number}", Principal(str(number % principals)) if principals else None)

    def send(self, name: str, principal: Principal | None = None, cost_ms: float = 0.01) -> None:
        self.simulated.add(name, cost_ms)
        if principal is not None:
            self.simulated.connections[name].principal = principal
        self.sent_at[name] = self.simulated.now

    def run(self, seconds: float) -> None:
        end = self.simulated.now + seconds
        while self.simulated.now < end:
            for name in self.simulated.batch():
                self.longest_wait_s = max(self.longest_wait_s, self.simulated.now - self.sent_at.pop(name))
                self.send(name)
        waiting_since = min(self.sent_at.values())
        self.longest_wait_s = max(self.longest_wait_s, self.simulated.now - waiting_since)


@pytest.mark.parametrize("principals", [0, 1, 3, 400, 1_200])
def test_a_principal_is_not_delayed_because_a_batch_has_ended_with_it(principals: int) -> None:
    loop = ClosedLoop(principals)
    loop.run(1.0)
    assert loop.longest_wait_s < 5 * BATCH_S


@pytest.mark.parametrize("principals", [0, 1, 3, 400])
@pytest.mark.parametrize("has_own_principal", [False, True])
def test_a_connection_with_an_overrun_is_served_although_others_use_up_each_batch(
    principals: int, has_own_principal: bool
) -> None:
    loop = ClosedLoop(principals)
    loop.run(0.1)
    principal = Principal("own") if has_own_principal else Principal("0") if principals else None
    loop.send("unlucky", principal, cost_ms=0.6)  # as if the process had been paused
    loop.run(0.5)
    assert loop.longest_wait_s < 0.15, "an overrun of 0.6 ms delays the connection for 0.06 s"


def test_a_busy_connection_becomes_light_again() -> None:
    simulated = SchedulerWithClock()
    for _ in range(2):
        simulated.add("a", 10.0)
        simulated.batch()
    simulated.add("flood", *[0.05] * 10_000, size=SPLIT_BYTES + 1)
    simulated.add("a", 0.01)
    assert "a" not in simulated.batch()[:1]
    simulated.now += 10.0 / 1000 / scheduler_module.LIGHT_SHARE
    simulated.add("a", 0.01)
    assert simulated.batch()[0] == "a"


def test_light_connections_do_not_starve_a_busy_one() -> None:
    simulated = SchedulerWithClock()
    simulated.add("busy", *[0.05] * 1_000, size=SPLIT_BYTES + 1)
    for number in range(10 * TURNS_PER_BATCH):
        simulated.add(f"light{number}", 0.4)
    for _ in range(3):
        assert "busy" in simulated.batch()


def test_busy_connections_are_served_round_robin() -> None:
    simulated = SchedulerWithClock()
    for name in ("a", "b", "c"):
        simulated.add(name, *[0.05] * 1_000, size=SPLIT_BYTES + 1)
    first = simulated.batch()
    assert set(first) == {"a", "b", "c"}
    assert max(map(first.count, "abc")) <= min(map(first.count, "abc")) + 2 * scheduler_module.CHUNK


def test_principals_take_turns_with_long_input() -> None:
    simulated = SchedulerWithClock()
    for number in range(300):
        simulated.connect(f"flood{number}", "flood")
        simulated.add(f"flood{number}", *[0.05] * 1_000, size=SPLIT_BYTES + 1)
    simulated.batch()
    simulated.connect("other", "other")
    simulated.add("other", 0.3, size=SPLIT_BYTES + 1)
    assert "other" in simulated.batch()


def test_large_commands_run_in_small_chunks() -> None:
    """The clock is read between chunks: each command may take milliseconds."""
    simulated = SchedulerWithClock()
    simulated.add("long", *[6.0] * 16, size=16 * scheduler_module.CHUNK_BYTES)
    assert simulated.batch() == ["long"]


def test_unsplit_lines_are_split_when_they_are_executed() -> None:
    simulated = SchedulerWithClock()
    data = b"a 0.01\n" * 10_000
    simulated.add_items("a", UnsplitLines(data), len(data))
    simulated.add("a", 0.01)
    executed = 0
    while simulated.scheduler:
        executed += len(simulated.batch())
    assert executed == 10_001
    assert (simulated.scheduler.bytes, simulated.connections["a"].queued_bytes) == (0, 0)


def test_all_queued_items_of_a_connection_can_be_replaced() -> None:
    simulated = SchedulerWithClock()
    data = b"".join(b"%d\n" % number for number in range(10_000))
    simulated.add_items("a", [b"first"], 1)
    simulated.add_items("a", UnsplitLines(data), len(data))
    simulated.add("b", 1.0)
    simulated.add_items("a", [b"last"], 1)
    connection = simulated.connections["a"]
    seen: list[Item] = []

    def collect(executed: Connection, items: Iterator[Item]) -> None:
        if executed is connection:
            seen.extend(items)
            if len(seen) == 1:
                simulated.scheduler.replace_all(connection, lambda item: [item])  # type: ignore[arg-type, return-value]

    simulated.scheduler.run_batch(collect)
    assert len(seen) < 5_000, "in several batches"
    while simulated.scheduler:
        simulated.scheduler.run_batch(collect)
    assert seen == [b"first", *([line] for line in data.splitlines()), [b"last"]]
    assert (simulated.scheduler.bytes, connection.queued_bytes) == (0, 0)


def test_reading_resumes_when_the_queue_of_a_connection_is_below_its_limit() -> None:
    simulated = SchedulerWithClock()
    size = scheduler_module.MAX_QUEUED_BYTES // 2 + 1
    for _ in range(3):
        simulated.add("a", *[1.0] * scheduler_module.CHUNK, size=size)
    connection = simulated.connections["a"]
    assert connection.input_paused
    paused = []
    while simulated.scheduler:
        simulated.batch()
        paused.append((connection.input_paused, connection.queued_bytes > scheduler_module.MAX_QUEUED_BYTES))
    assert all(is_paused == is_above for is_paused, is_above in paused)
    assert {is_paused for is_paused, _ in paused} == {True, False}


def test_reading_resumes_when_the_total_of_queued_bytes_is_below_its_limit() -> None:
    simulated = SchedulerWithClock(max_bytes=50_000)
    simulated.add("a", *[1.0] * 20, size=45_000)
    simulated.add("b", 0.1, size=10_000)
    a, b = simulated.connections["a"], simulated.connections["b"]
    assert (a.input_paused, b.input_paused) == (False, True)
    simulated.add_items("b", [b"b 0.1"], 45_000)
    while simulated.scheduler:
        simulated.batch()
        assert b.input_paused == (simulated.scheduler.bytes > 50_000)
    assert not b.input_paused


def test_a_connection_with_an_empty_queue_stays_paused_while_the_total_is_above_its_limit() -> None:
    simulated = SchedulerWithClock(max_bytes=100_000)
    simulated.add("a", *[3.0] * 4 * scheduler_module.CHUNK, size=200_000)
    simulated.add("b", 0.1, size=20_000)
    b = simulated.connections["b"]
    simulated.batch()
    simulated.batch()
    assert not b.input_queue
    assert b.input_paused
    while simulated.scheduler:
        simulated.batch()
    assert not b.input_paused
    assert not simulated.connections["a"].input_paused


def test_a_light_connection_is_read_although_too_many_bytes_are_queued_in_total() -> None:
    simulated = SchedulerWithClock(max_bytes=100_000)
    for number in range(4):
        simulated.add(f"flood{number}", *[1.0] * 20, size=60_000)
    for _ in range(3):
        simulated.add("light", 0.1, size=100)
    assert not simulated.connections["light"].input_paused
    simulated.add("light", 0.1, size=scheduler_module.LIGHT_BYTES)
    assert simulated.connections["light"].input_paused, "it has become a flood"


def test_a_principal_with_few_long_commands_is_read_although_too_many_bytes_are_queued_in_total() -> None:
    simulated = SchedulerWithClock(max_bytes=1_000_000)
    flood_size, size = 60_000, scheduler_module.LIGHT_BYTES + 1
    for number in range(2 * scheduler_module.MAX_PAUSED):
        simulated.connect(f"flood{number}", "flood")
        simulated.add(f"flood{number}", *[1.0] * 100, size=flood_size)
    assert simulated.scheduler.bytes > 2_000_000
    simulated.connect("other", "other")
    other = simulated.connections["other"]
    for _ in range(3):
        simulated.add("other", 0.1, size=size)
        assert other.input_paused
        simulated.batch()
        simulated.batch()
        assert not other.input_paused, "its commands are executed"
        simulated.scheduler.check_partial_line(other, size)
        assert not other.input_paused
    flood = simulated.connections[f"flood{number}"]
    simulated.scheduler.check_partial_line(flood, size)
    assert flood.input_paused
    while simulated.scheduler:
        simulated.batch()
    assert not any(each.input_paused for each in simulated.connections.values())
    assert not simulated.scheduler._paused_counts


def test_no_reference_to_a_connection_is_left_after_clear() -> None:
    simulated = SlowSchedulerWithClock(max_bytes=100)
    simulated.add_items("parked", [b"slow 1"], 10)
    simulated.connections["parked"].write_blocked = True
    simulated.batch()
    for name in ("light", "paused", "slow"):
        simulated.add(name, 1.0, size=scheduler_module.LIGHT_BYTES + 1)
    simulated.scheduler.clear()
    scheduler = simulated.scheduler
    assert not scheduler
    assert not any((scheduler._parked, scheduler._paused, scheduler._paused_counts))


async def test_reading_resumes_from_some_connections_in_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_RESUMED", 10)
    simulated = SchedulerWithClock(max_bytes=100)
    for number in range(100):
        simulated.add(f"{number}", 0.0, size=scheduler_module.LIGHT_BYTES + 1)
    paused = [each for each in simulated.connections.values() if each.input_paused]
    assert len(paused) > 90
    while simulated.scheduler:
        simulated.batch()
    before = sum(each.input_paused for each in paused)
    assert before > 20, "some were resumed when their commands were executed"
    counts = []
    for _ in range(12):
        await asyncio.sleep(0)
        counts.append(before - sum(each.input_paused for each in paused))
    assert counts[:2] == [10, 20]
    assert not any(each.input_paused for each in paused), "without another batch"


def test_reading_resumes_in_the_order_in_which_it_was_paused() -> None:
    simulated = SchedulerWithClock(max_bytes=50_000)
    for number in range(10):
        simulated.add(f"{number}", *[1.0] * 20, size=40_000)
    resumed: list[str] = []
    while simulated.scheduler:
        simulated.batch()
        resumed += [
            name for name, each in simulated.connections.items() if not each.input_paused and name not in resumed
        ]
    assert resumed == sorted(resumed), "the first one was never paused"


def test_a_connection_with_very_slow_commands_executes_one_in_a_chunk() -> None:
    simulated = SchedulerWithClock()
    simulated.add("heavy", *[10.0] * 200, size=4_000)
    executed = []
    while simulated.scheduler:
        executed.append(len(simulated.batch()))
    assert executed[:2] == [scheduler_module.CHUNK] * 2, "as the cost of its commands is not known yet"
    assert set(executed[2:]) == {1}


class ExpensiveSchedulerWithClock(SchedulerWithClock):
    """The duration of each command is added to the iteration at once, as the dispatcher does for expensive commands."""

    def _execute(self, connection: Peer, items: Iterator[Item]) -> None:
        started = self.now
        super()._execute(connection, items)
        self.turns.spend(self.now - started)


def test_expensive_commands_of_light_and_of_busy_connections_do_not_add_up() -> None:
    simulated = ExpensiveSchedulerWithClock()
    simulated.add("busy", 20.0, size=SPLIT_BYTES + 1)
    for number in range(3):
        simulated.add(f"light{number}", 20.0)
    ran = [simulated.batch() for _ in range(4)]
    assert ran == [["light0"], ["busy"], ["light1"], ["light2"]]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_expensive_commands_of_busy_connections_do_not_starve_light_ones(count: int) -> None:
    simulated = ExpensiveSchedulerWithClock()
    for number in range(count):
        simulated.add(f"busy{number}", *[20.0] * 100, size=SPLIT_BYTES + 1)
    for _ in range(2 * count):
        simulated.batch()
    simulated.add("expensive", 20.0)
    simulated.add("light", 0.01)
    assert "light" in [name for _ in range(3) for name in simulated.batch()]


def test_expensive_and_slow_commands_do_not_add_up() -> None:
    simulated = SlowSchedulerWithClock()
    simulated.add_items("slow", [b"slow 20"], 1)
    for number in range(5):
        simulated.add(f"light{number}", 20.0)
    ran = list[list[str]]()
    while simulated.scheduler:
        ran.append(simulated.batch())
    assert max(map(len, ran)) == 1
    assert ["slow"] in ran[:4], "not after all others"


class SlowSchedulerWithClock(SchedulerWithClock):
    """A command that begins with `slow` is slow."""

    def batch(self) -> list[str]:
        self.executed = []
        self.turns._end_iteration()
        self.scheduler.run_batch(self._execute_until_slow, self._execute_slow)
        return self.executed

    def _execute_until_slow(self, connection: Peer, items: Iterator[Item]) -> Item | None:
        for item in items:
            assert isinstance(item, bytes)
            if item.startswith((b"slow", b"end")):
                if item.startswith(b"end"):
                    connection.session.ending = SessionEnd([])
                return item
            self._execute(connection, iter((item,)))
        return None

    def _execute_slow(self, connection: Peer, items: Iterator[Item]) -> Item | None:
        """Execute a slow command, or a slice of `end N`, the end of a session: N slices are left."""
        (item,) = items
        assert isinstance(item, bytes)
        name, _, left = item.decode().partition(" ")
        if not connection.closed or name != "slow":
            self._execute(connection, iter((b"%s 1" % name.encode(),)))
        if name != "end" or left == "0":
            return None
        return b"end %d" % (int(left) - 1)


def test_a_batch_executes_one_slow_command_after_all_others_and_the_principals_take_turns() -> None:
    simulated = SlowSchedulerWithClock()
    for number in range(20):
        name = f"slow{number}"
        simulated.add(name, 100.0, 100.0)
        simulated.connections[name].principal = Principal("many" if number else "few")
    executed = []
    for number in range(40):
        simulated.add("light", 0.01)
        assert simulated.scheduler, number
        ran = simulated.batch()
        assert ran[0] == "light"
        executed += ran[1:]
    assert len(executed) == 40, "one in each batch"
    assert executed.index("slow0") <= 1
    assert executed[2:].index("slow0") <= 2, "the only connection of its principal is served every second time"
    assert (simulated.batch(), simulated.scheduler.bytes) == ([], 0)


def test_commands_that_arrive_during_a_long_slow_command_are_answered_before_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are read in the iteration of the event loop after it, when the batch of this iteration has begun already."""
    monkeypatch.setattr(turns_module, "LONG_S", 0.0005)
    simulated = SlowSchedulerWithClock()
    for number in range(3):
        simulated.add(f"slow{number}", 1.0)
    ran = list[list[str]]()
    while simulated.scheduler:
        ran.append(simulated.batch())
    assert ran == [["slow0"], [], [], ["slow1"], [], [], ["slow2"]]


def test_commands_after_a_slow_one_wait_for_it() -> None:
    simulated = SlowSchedulerWithClock()
    simulated.add_items("a", [b"first 1", b"slow 1", b"second 1"], 10)
    simulated.add_items("a", [b"third 1"], 10)
    assert simulated.batch() == ["first", "slow"]
    simulated.add_items("a", [b"fourth 1"], 10)
    assert simulated.batch() == ["second", "third", "fourth"]
    assert (simulated.scheduler.bytes, bool(simulated.scheduler)) == (0, False)


def test_a_busy_connection_stays_busy_after_a_slow_command() -> None:
    simulated = SlowSchedulerWithClock()
    for name in ("a", "b"):
        simulated.add_items(name, [b"slow 1", b"%s 1" % name.encode()], 10)
    simulated.connections["a"].busy_until = simulated.now + 60
    assert simulated.batch() == ["slow"]
    simulated.add("other", 10.0)
    assert simulated.batch() == ["other", "a"], "it has one turn, after the connections that are not busy"
    assert [simulated.batch() for _ in range(3)] == [[], [], ["slow"]], "after the iterations that rest"
    assert simulated.batch() == ["b"]


def test_a_slow_command_is_parked_while_its_client_does_not_read() -> None:
    simulated = SlowSchedulerWithClock(max_bytes=15)
    simulated.add_items("a", [b"slow 1", b"after 1"], 10)
    reader = simulated.connections["a"]
    reader.write_blocked = True
    assert simulated.batch() == []
    assert (bool(simulated.scheduler), simulated.scheduler.bytes) == (False, 0), "it does not use up the room of others"
    simulated.add_items("b", [b"other 1"], 10)
    assert simulated.batch() == ["other"]
    reader.write_blocked = False
    simulated.scheduler.unpark(reader)
    assert simulated.batch() == ["slow"]
    assert simulated.batch() == ["after"]
    assert (simulated.scheduler.bytes, reader.queued_bytes, bool(simulated.scheduler)) == (0, 0, False)


def test_the_end_of_a_connection_whose_slow_command_is_parked_is_executed() -> None:
    simulated = SlowSchedulerWithClock()
    simulated.add_items("a", [b"slow 1"], 10)
    lost = simulated.connections["a"]
    lost.write_blocked = True
    assert simulated.batch() == []
    lost.closed = True
    simulated.add_items("a", [b"end 0"], 0)
    assert simulated.batch() == []
    assert simulated.batch() == ["end"], "the slow command has nobody to answer"
    assert (simulated.scheduler.bytes, bool(simulated.scheduler)) == (0, False)


def test_the_ends_of_sessions_take_turns_with_the_principals() -> None:
    simulated = SlowSchedulerWithClock()
    for name in "pq":
        for number in range(10):
            simulated.add_items(f"{name}{number}", [f"slow{name} {number}".encode()], 10)
            simulated.connections[f"{name}{number}"].principal = Principal(name)
    simulated.batch()
    simulated.add_items("a", [b"end 2", b"after 1"], 10)
    simulated.connections["a"].write_blocked = True
    executed = [name for _ in range(9) for name in simulated.batch()]
    assert executed[:3].count("end") == 1, "three take turns: two principals, and the ends"
    assert executed[:9].count("end") == 3, "not parked, although the client does not read"
    assert simulated.batch()[0] == "after"
    while simulated.scheduler:
        simulated.batch()
    assert simulated.scheduler.bytes == 0


def test_the_slices_of_a_slow_command_do_not_lengthen_the_queue_of_its_connection() -> None:
    simulated = SlowSchedulerWithClock()
    simulated.add_items("a", [b"end 50"], 10)
    queue = simulated.connections["a"].input_queue
    lengths = list[int]()
    for _ in range(52):
        simulated.batch()
        lengths.append(len(queue))
    assert max(lengths) == 1
    assert (simulated.scheduler.bytes, bool(simulated.scheduler)) == (0, False)
