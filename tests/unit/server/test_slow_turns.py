"""The slow commands of several namespaces: one in an iteration of the event loop, in turns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from genie.config import Limits
from genie.observability.stats import Stats
from genie.roles import Starting
from genie.server import pipeline as pipeline_module
from genie.server import scheduler as scheduler_module
from genie.server import slow_turns as slow_turns_module
from genie.server.connection import Connection
from genie.server.dispatcher import Dispatcher
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.peer import Item, Peer
from genie.server.pipeline import DeferredEvents
from genie.server.scheduler import CommandScheduler, Execute
from genie.server.slow_turns import SlowTurns
from support.core.sliced_pipeline import Client, World, expire

NAMESPACES = 4
COMMANDS = 5


async def test_the_namespaces_of_a_server_execute_one_slow_command_in_an_iteration() -> None:
    turns, executed = SlowTurns(), list[list[int]]()
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


async def test_a_namespace_without_slow_commands_keeps_no_turn() -> None:
    turns = SlowTurns()
    assert [turns.take(caller) for caller in "abc"] == [True, False, False]
    await asyncio.sleep(0)
    assert not turns.take("a"), "the others have waited longer"
    await asyncio.sleep(0)
    assert turns.take("a")


async def test_the_batches_of_an_iteration_share_their_time() -> None:
    turns = SlowTurns()
    first = [turns.share(12.0) for _ in range(NAMESPACES)]
    assert first == [12.0, 6.0, 4.0, 3.0], "how many batches follow is not known yet"
    await asyncio.sleep(0)
    assert [turns.share(12.0) for _ in range(NAMESPACES)] == [3.0] * NAMESPACES
    await asyncio.sleep(0)
    assert turns.share(12.0) == 3.0
    await asyncio.sleep(0)
    assert turns.share(12.0) == 12.0


class Clock:
    """A clock that only work advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(slow_turns_module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def work(self) -> None:
        """Take more than half of the time of the slices of an iteration."""
        self.now += 0.6 * slow_turns_module.SLICES_S


async def test_the_slices_of_an_iteration_share_their_time_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, clock, done = SlowTurns(), Clock(monkeypatch), list[str]()
    for _ in range(NAMESPACES):
        for caller in "abcd":
            turns.run_slice(caller, lambda caller=caller: (done.append(caller), clock.work()))  # type: ignore[misc]
        await asyncio.sleep(0)
    assert done == ["a", "b", "c", "d"] * 2


async def test_expired_locks_of_many_namespaces_end_in_a_bounded_number_of_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, ended = Clock(monkeypatch), list[int]()
    turns, expire_now = SlowTurns(), Dispatcher.expire
    worlds = [World(turns) for _ in range(10 * NAMESPACES)]

    def expire_and_work(dispatcher: Dispatcher, now: float) -> None:
        ended[-1] += 1
        clock.work()
        expire_now(dispatcher, now)

    clients = [Client(world) for world in worlds]
    for world, client in zip(worlds, clients, strict=True):
        client.lock("a", transactionTimeout=1000)
        await world.settle()
    monkeypatch.setattr(Dispatcher, "expire", expire_and_work)
    ended.append(0)
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
    turns, clock, flushed = SlowTurns(), Clock(monkeypatch), [0]

    class Watcher:
        watch_bytes = 1

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
    now = [0.0]
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    turns, executed = SlowTurns(), [0] * NAMESPACES

    def execute_of(number: int) -> Execute:
        def execute(_connection: Peer, items: Iterator[Item]) -> None:
            for _ in items:
                executed[number] += 1
                now[0] += scheduler_module.BATCH_S / 10

        return execute

    schedulers = [CommandScheduler(1 << 20, turns) for _ in range(NAMESPACES)]
    for scheduler in schedulers:
        for _ in range(100):
            handler = FollowerHandler(Stats(), "genie", 1 << 20, Starting)
            scheduler.add(Connection(handler, Limits(), AdmissionControl(Limits())), [b"ping"], 4)
    for _ in range(2):
        executed[:] = [0] * NAMESPACES
        for number, scheduler in enumerate(schedulers):
            scheduler.run_batch(execute_of(number))
        await asyncio.sleep(0)
    assert sum(executed) <= 10 + NAMESPACES
    assert min(executed) > 0
