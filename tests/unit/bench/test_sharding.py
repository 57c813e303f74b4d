"""The simulation of sharding: it completes all jobs, is deterministic, and with one shard equals one leader."""

from __future__ import annotations

import random

import pytest

from benchmarks.sharding_parts.arithmetic import gain, touched, wait_ms
from benchmarks.sharding_parts.cases import inversion, reserved_is_held, two_lines, two_takes
from benchmarks.sharding_parts.deadlocks import Ends, Steppers, Steps
from benchmarks.sharding_parts.load import Clients, Load, run
from benchmarks.sharding_parts.mixed import Mix, mixed
from benchmarks.sharding_parts.ways import WAYS
from benchmarks.sharding_parts.world import Costs, Shard, World
from simulator import invariants

LOAD = Load(clients=12, jobs=200, resources=3, keys=30, work_ms=1)
STEPS = Steps(clients=12, transactions=120, keys=40)


def is_empty(shard: Shard) -> bool:
    table = shard.manager.table
    invariants.check(shard.manager)
    return not table.held and not table.waiting and not shard.granted_ms


@pytest.mark.parametrize("way", WAYS)
def test_every_job_is_completed_once_and_all_locks_are_released(way: str) -> None:
    world = World()
    servers = WAYS[way](world, 1 if way == "one leader" else 4, random.Random(2))  # noqa: S311 - seeded
    clients = Clients(world, servers, LOAD, seed=1)
    clients.run()
    assert clients.begun == len(clients.jobs) == len(set(clients.jobs)) == LOAD.jobs
    assert all(is_empty(shard) for shard in servers.shards)
    assert all(job.arrived_ms < job.locked_ms for job in clients.jobs)


@pytest.mark.parametrize("way", WAYS)
def test_a_seed_determines_the_run(way: str) -> None:
    assert run(way, 1 if way == "one leader" else 4, LOAD) == run(way, 1 if way == "one leader" else 4, LOAD)
    assert run(way, 1, LOAD, seed=2) != run(way, 1, LOAD, seed=1)


@pytest.mark.parametrize("way", ["ordered", "chained"])
def test_one_shard_equals_one_leader(way: str) -> None:
    assert run(way, 1, LOAD) == run("one leader", 1, LOAD)


def test_the_simulation_agrees_with_the_arithmetic_model() -> None:
    costs = Costs()
    alone = run("ordered", 8, Load(clients=1, jobs=2_000, resources=3))
    assert sum(alone.wait_ms) / len(alone.wait_ms) == pytest.approx(
        wait_ms(touched(3, 8), costs, chained=False), rel=0.02
    )
    saturating = Load(clients=600, jobs=6_000, resources=3)
    rate = run("ordered", 8, saturating).cycles_per_s / run("one leader", 1, saturating).cycles_per_s
    assert rate == pytest.approx(gain(3, 8, costs), rel=0.05)


def test_large_requests_are_not_overtaken_only_with_one_order_of_all_queues() -> None:
    mix = Mix(duration_ms=500, large_per_s=20)
    results = {way: mixed(way, mix) for way in ("one leader", "ordered", "sequenced")}
    assert all(waits.begun == waits.ended for waits in results.values())
    assert results["one leader"].overtaken == results["sequenced"].overtaken == 0
    assert results["ordered"].overtaken > 1


def run_steps(shards: int, period_ms: float | None, load: Steps = STEPS) -> tuple[Ends, bool]:
    steppers = Steppers(load, shards, period_ms, seed=3)
    ends = steppers.run()
    return ends, all(is_empty(shard) for shard in steppers.shards)


@pytest.mark.parametrize(("shards", "period_ms"), [(1, None), (4, 10), (4, None)])
def test_every_transaction_ends_and_releases_its_locks(shards: int, period_ms: float | None) -> None:
    ends, released = run_steps(shards, period_ms)
    assert ends.begun == ends.ended == STEPS.transactions
    assert released
    assert ends == run_steps(shards, period_ms)[0]


def test_one_leader_detects_deadlocks_immediately_and_shards_periodically() -> None:
    leader, often, seldom, never = (run_steps(*each)[0] for each in ((1, None), (4, 10), (4, 100), (4, None)))
    assert leader.at_once
    assert leader.rearrangements
    assert not leader.gathered
    assert not leader.timed_out
    assert often.gathered
    assert often.needless
    assert often.stuck_ms[len(often.stuck_ms) // 2] < seldom.stuck_ms[len(seldom.stuck_ms) // 2]
    assert never.timed_out


def test_the_documented_cases() -> None:
    assert two_lines().leader == "R1 holds all, R2 waits"
    assert two_lines().shards.endswith("cycle: R1 waits for R2 waits for R1")
    assert reserved_is_held().leader == "R waits, T holds all"
    assert reserved_is_held().shards.endswith("cycle: T waits for R waits for T")
    assert inversion().leader == "urgent holds all, after 0 grants of lower priority"
    assert inversion(middles=50).shards == "urgent waits, after 50 grants of lower priority"
    assert (two_takes().leader, two_takes().shards) == ("X gets 3, Y gets 0", "X gets 2, Y gets 2: neither has 3")
