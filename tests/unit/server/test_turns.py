"""The time of an iteration of the event loop, which batches, slices and slow commands of all namespaces share in turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from genie import work_time
from genie.config import Limits
from genie.lock_modes import X
from genie.observability.stats import Stats
from genie.roles import Starting
from genie.server import pipeline as pipeline_module
from genie.server import watch_events
from genie.server.connection import Connection
from genie.server.dispatcher import Dispatcher
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.peer import Item, Peer
from genie.server.pipeline import DeferredEvents
from genie.server.scheduler import CommandScheduler, Execute
from genie.server.turns import (
    BATCH_S,
    ITERATION_S,
    LONG_S,
    MAX_DENIED,
    OVERDUE_ITERATIONS,
    RESTING_ITERATIONS,
    IterationTurns,
)
from genie.server.watch_events import WatchEvents
from support.core.sliced_pipeline import Client, World, expire
from support.core.turns import TurnsWithoutLoop

NAMESPACES = 4
COMMANDS = 5


async def test_the_namespaces_of_a_server_execute_one_slow_command_in_an_iteration() -> None:
    turns, executed = IterationTurns(), list[list[int]]()
    schedulers = [CommandScheduler(1 << 20, turns) for _ in range(NAMESPACES)]
    for scheduler in schedulers:
        for _ in range(COMMANDS):
            handler = FollowerHandler(Stats(), "genie", 1 << 20, Starting)
            scheduler.add(Connection(handler, Limits(), AdmissionControl(Limits())), [b"slow"], 4)

    def run(number: int) -> None:
        """Run a batch, and do it again in the next iteration if commands are queued, as a pipeline does."""

        def execute_slow(_connection: Peer, items: Iterator[Item]) -> None:
            next(items)
            executed[-1].append(number)

        schedulers[number].run_batch(lambda _, items: next(items), execute_slow)
        if schedulers[number]:
            loop.call_soon(run, number)

    loop = asyncio.get_running_loop()
    for number in range(NAMESPACES):
        loop.call_soon(run, number)
    while any(schedulers) or not executed:
        executed.append([])
        await asyncio.sleep(0)
    assert max(map(len, executed)) == 1
    order = [number for numbers in executed for number in numbers]
    assert order == [*range(NAMESPACES)] * COMMANDS
    assert len(executed) <= NAMESPACES * COMMANDS + 1


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Clock:
    """A clock that only work advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(work_time, "now", lambda: self.now)

    def work(self, seconds: float = 0.6 * ITERATION_S) -> None:
        """Take more than half of the time of an iteration."""
        self.now += seconds


def test_a_namespace_without_slow_commands_keeps_no_turn() -> None:
    turns = TurnsWithoutLoop()
    assert [turns.begin_slow(caller) for caller in "abc"] == [True, False, False]
    turns._end_iteration()
    assert not turns.begin_slow("a"), "the others have waited longer"
    turns._end_iteration()
    assert turns.begin_slow("a")


def test_the_batches_of_an_iteration_share_their_time() -> None:
    turns = TurnsWithoutLoop()
    first = [turns.begin_batch(number) for number in range(NAMESPACES)]
    assert first == [BATCH_S, BATCH_S / 2, BATCH_S / 3, BATCH_S / 4], "how many batches follow is not known yet"
    turns._end_iteration()
    assert [turns.begin_batch(number) for number in range(NAMESPACES)] == [BATCH_S / 4] * NAMESPACES
    turns._end_iteration()
    assert turns.begin_batch(0) == BATCH_S / 4
    turns._end_iteration()
    assert turns.begin_batch(0) == BATCH_S
    turns._end_iteration()
    assert not turns.is_active


def test_a_namespace_that_begins_again_ends_an_iteration_without_work() -> None:
    """The event loop need not do it. So an iteration with little work has no callback at its end."""
    turns = IterationTurns()
    assert turns.begin_slow("a")
    assert not turns.begin_slow("b")
    turns.begin_batch("a")
    assert turns.begin_slow("b")


async def test_the_event_loop_ends_an_iteration_with_work() -> None:
    turns = IterationTurns()
    turns.begin_batch("a")
    turns.spend(ITERATION_S)
    assert turns.begin_batch("a") == turns.begin_batch("b") == 0.0, "an iteration that is not over"
    await iterations(2)
    assert turns.begin_batch("b") > 0.0


def test_the_slices_of_an_iteration_share_its_time_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, clock, done = TurnsWithoutLoop(), Clock(monkeypatch), list[str]()
    for _ in range(NAMESPACES):
        for caller in "abcd":
            turns.run_slice(caller, lambda caller=caller: (done.append(caller), clock.work()))  # type: ignore[misc]
        turns._end_iteration()
    assert done == ["a", "b", "c", "d"] * 2


def test_after_a_long_iteration_batches_are_first() -> None:
    turns, began = TurnsWithoutLoop(), list[str]()
    turns.begin_batch("a")
    turns.spend(2 * LONG_S)
    for _ in range(RESTING_ITERATIONS + 1):
        turns._end_iteration()
        turns.run_slice("slices of a", began.append, "slice")
        if turns.begin_batch("a"):
            began.append("batch")
    assert began == ["batch"] * RESTING_ITERATIONS + ["slice", "batch"]


def test_each_kind_of_parts_has_its_turn_if_each_part_fills_an_iteration() -> None:
    """The parts ask in the order of a batch: slices, the batch, a slow command."""
    turns, began = TurnsWithoutLoop(), list[str]()

    def work(kind: str) -> None:
        began.append(kind)
        turns.spend(ITERATION_S)

    for _ in range(6):
        turns.run_slice("slices of a", work, "slice")
        if turns.begin_batch("a"):
            work("batch")
        if turns.begin_slow("a"):
            work("slow")
        turns._end_iteration()
    assert began[:3] == ["slice", "slow", "batch"]
    assert sorted(began) == sorted(["slice", "slow", "batch"] * 2)


@pytest.mark.parametrize("seconds", [ITERATION_S, 1.1 * LONG_S])
def test_slices_of_different_work_have_equal_shares_beside_slow_commands(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The slices ask in the same order in each iteration, and in some iterations none begins."""
    turns, clock, counts = TurnsWithoutLoop(), Clock(monkeypatch), Counter[str]()

    def work(caller: str) -> None:
        counts[caller] += 1
        clock.work(seconds)

    for _ in range(300):
        for caller in "abc":
            turns.run_slice(caller, work, caller)
        if turns.begin_batch("pipeline"):
            turns.spend(BATCH_S)
        if turns.begin_slow("pipeline"):
            turns.spend(seconds)
        turns._end_iteration()
    assert max(counts.values()) <= 1.2 * min(counts.values()), counts


async def test_the_parts_of_a_namespace_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them takes the time of an iteration, and they are all due at the same moment."""
    clock, turns = Clock(monkeypatch), IterationTurns()
    world, parts = World(turns), list[list[str]]()

    def slow_down(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def work(*args: object) -> object:
            parts[-1].append(name)
            clock.work(1.1 * ITERATION_S)
            return original(*args)

        monkeypatch.setattr(owner, name, work)

    client, other, watcher, left = (Client(world) for _ in range(4))
    watcher.send("watch", prefix="")
    left.send("hello", session="secret-of-the-session", sessionTimeout=1000)
    await world.settle()
    left.lock("of the session", onDisconnect="release")
    client.lock("held")
    for _ in range(20):
        other.lock("held", queueTimeout=1000)
    client.lock("expires", transactionTimeout=1000)
    await world.settle()
    left.connection.connection_lost(None)
    await world.settle()
    for owner, name in (
        (Dispatcher, "_continue_grants"),
        (Dispatcher, "_expire_requests"),
        (Dispatcher, "_expire_sessions"),
        (WatchEvents, "send_waiting"),
        (Dispatcher, "_inspect"),
    ):
        slow_down(owner, name)
    monkeypatch.setattr(watch_events, "MAX_STEPS", 1)
    world.pipeline._dispatcher.watch_events._remaining_steps = 1
    world.manager.pending_grants["held"] = {X: None}
    client.lock("starts an event that waits")
    client.send("inspect", resource="held")
    world.now = 2000.0
    parts.append([])
    expire(world.pipeline)
    for _ in range(200):
        await asyncio.sleep(0)
        parts.append([])
    assert max(map(len, parts)) == 1, parts
    assert {name for names in parts for name in names} == {
        "_continue_grants",
        "_expire_requests",
        "_expire_sessions",
        "send_waiting",
        "_inspect",
    }
    assert not world.failures
    assert client.commands().count("released") == client.commands().count("inspected") == 1
    assert other.commands().count("released") == 20
    assert not world.pipeline._dispatcher.watch_events.waiting


async def test_expired_locks_of_many_namespaces_end_in_a_bounded_number_of_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, ended = Clock(monkeypatch), [0]
    turns, expire_now = IterationTurns(), Dispatcher._expire_requests
    worlds = [World(turns) for _ in range(10 * NAMESPACES)]

    def expire_and_work(dispatcher: Dispatcher, now: float) -> None:
        ended[-1] += 1
        clock.work()
        expire_now(dispatcher, now)

    clients = [Client(world) for world in worlds]
    for world, client in zip(worlds, clients, strict=True):
        client.lock("a", transactionTimeout=1000)
        await world.settle()
    monkeypatch.setattr(Dispatcher, "_expire_requests", expire_and_work)
    for world in worlds:
        world.now = 2000.0
        expire(world.pipeline)
    for _ in range(1_000):
        if not any(world.locks for world in worlds):
            break
        await asyncio.sleep(0)
        ended.append(0)
    assert not any(world.locks for world in worlds)
    assert max(ended) == 2
    assert len(ended) <= 2 * len(worlds)
    await asyncio.gather(*(world.settle() for world in worlds))
    assert all(client.commands()[-1] == "released" for client in clients)


async def test_watch_events_of_many_namespaces_are_flushed_in_a_bounded_number_of_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns, clock, flushed = IterationTurns(), Clock(monkeypatch), [0]

    class Watcher:
        deferred = (b"event",)

        def defer(self) -> None: ...

        def flush_deferred(self) -> None:
            flushed[-1] += 1
            clock.work()

    monkeypatch.setattr(pipeline_module, "WATCH_FLUSH_INTERVAL_S", 0.0)
    watchers = [Watcher() for _ in range(NAMESPACES)]
    for watcher in watchers:
        DeferredEvents(turns).add(watcher)  # type: ignore[arg-type]
    while sum(flushed) < len(watchers):
        await asyncio.sleep(0)
        flushed.append(0)
    assert max(flushed) == 2


async def test_a_batch_among_those_of_other_namespaces_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turns, executed = Clock(monkeypatch), IterationTurns(), [0] * NAMESPACES

    def execute_of(number: int) -> Execute:
        def execute(_connection: Peer, items: Iterator[Item]) -> None:
            for _ in items:
                executed[number] += 1
                clock.work(BATCH_S / 10)

        return execute

    schedulers = [CommandScheduler(1 << 20, turns) for _ in range(NAMESPACES)]
    for scheduler in schedulers:
        for _ in range(100):
            handler = FollowerHandler(Stats(), "genie", 1 << 20, Starting)
            scheduler.add(Connection(handler, Limits(), AdmissionControl(Limits())), [b"ping"], 4)
    for _ in range(10):
        before = sum(executed)
        for number, scheduler in enumerate(schedulers):
            scheduler.run_batch(execute_of(number))
        assert sum(executed) <= before + 10 * (BATCH_S + ITERATION_S) / BATCH_S
        await iterations(2)
    assert max(executed) <= 2 * min(executed)


async def test_expensive_commands_to_many_namespaces_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that exceeds the time of an iteration is its last one. The namespaces take turns."""
    clock, turns, executed = Clock(monkeypatch), IterationTurns(), [list[int]()]
    worlds = [World(turns) for _ in range(NAMESPACES)]

    def execute(dispatcher: Dispatcher, *args: object) -> None:
        executed[-1].append(
            next(number for number, world in enumerate(worlds) if world.pipeline._dispatcher is dispatcher)
        )
        clock.work(5 * LONG_S)
        return original(dispatcher, *args)  # type: ignore[arg-type]

    original = Dispatcher._release_by_ref
    monkeypatch.setattr(Dispatcher, "_release_by_ref", execute)
    clients = [Client(world) for world in worlds for _ in range(COMMANDS)]
    other, waited = Client(World(turns)), list[int]()
    """A client of another namespace, and how many expensive commands each of its pings waited for."""
    for client in clients:
        client.send("release", ref="unknown")
    for _ in range(10 * len(clients)):
        if len(other.received) == len(waited):
            other.send("ping")
            waited.append(-sum(map(len, executed)))
        executed.append([])
        await asyncio.sleep(0)
        if len(other.received) == len(waited) and waited[-1] <= 0:
            waited[-1] += sum(map(len, executed))
    assert max(map(len, executed)) == 1
    order = [number for numbers in executed for number in numbers]
    assert len(order) == len(clients)
    for start in range(0, len(order), NAMESPACES):
        assert sorted(order[start : start + NAMESPACES]) == [*range(NAMESPACES)], "in turns"
    assert max(waited[1:]) <= 1, "beyond the first commands, it is not known which are expensive"


def test_callers_that_ask_in_alternate_iterations_do_not_wait_for_each_other() -> None:
    """The timers of two namespaces with expired requests may have fired in turns since the slices had to wait."""
    turns, done = IterationTurns(), list[str]()
    for number in range(8):
        caller = "ab"[number % 2]
        if number < 2:
            turns.is_exhausted = True  # by a batch: the slices must wait
        turns.run_slice(caller, done.append, caller)
        turns._end_iteration()
    assert set(done) == {"a", "b"}


@pytest.mark.parametrize("seed", range(80))
def test_no_caller_is_denied_for_ever_however_often_the_callers_ask(seed: int) -> None:
    """Each caller asks for parts of one kind, in a pattern of iterations of its own, at least in every fourth one."""
    random, turns = Random(seed), IterationTurns()  # noqa: S311 - reproducible
    callers = range(random.randint(2, 8))
    kinds = [random.choice((turns._batches, turns._slices, turns._slow)) for _ in callers]
    periods = [random.randint(1, OVERDUE_ITERATIONS) for _ in callers]
    durations = [random.choice((0.0, ITERATION_S, 2 * LONG_S)) for _ in callers]
    denied, most_denied = [0 for _ in callers], 0
    for iteration in range(1_000):
        for caller in random.sample(callers, len(callers)) if seed % 2 else callers:
            if (iteration + caller) % periods[caller]:
                continue
            if turns._begin(kinds[caller], caller):
                turns.spent_s += durations[caller]
                turns.is_exhausted = turns.spent_s >= ITERATION_S
                turns._exhausting |= {caller} if turns.is_exhausted else set()
                denied[caller] = 0
            else:
                denied[caller] += 1
                most_denied = max(most_denied, denied[caller])
        turns._end_iteration()
    assert most_denied <= MAX_DENIED + OVERDUE_ITERATIONS * len(callers)


def test_a_caller_that_no_longer_asks_delays_the_others_for_a_few_iterations_only() -> None:
    turns, begun = IterationTurns(), list[bool]()
    turns.is_exhausted = True
    for _ in range(MAX_DENIED):
        turns._begin(turns._slow, "gone")
    for _ in range(OVERDUE_ITERATIONS + 2):
        turns._end_iteration()
        begun.append(turns._begin(turns._batches, "other"))
    assert begun == [False] * OVERDUE_ITERATIONS + [True, True]
