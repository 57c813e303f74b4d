"""The slow commands of several namespaces: one in an iteration of the event loop, in turns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from genie.config import Limits
from genie.observability.stats import Stats
from genie.roles import Starting
from genie.server import scheduler as scheduler_module
from genie.server.connection import Connection
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.peer import Item, Peer
from genie.server.scheduler import CommandScheduler, Execute
from genie.server.slow_turns import SlowTurns

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
