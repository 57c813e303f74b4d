"""The model of shards: it loses nothing, repeats itself, and with one shard it is the one leader."""

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
from genie.testing.simulation import invariants

LOAD = Load(clients=12, jobs=200, resources=3, keys=30, work_ms=1)
STEPS = Steps(clients=12, transactions=120, keys=40)


def nothing_is_left(shard: Shard) -> bool:
    table = shard.manager.table
    invariants.check(shard.manager)
    return not table.held and not table.waiting and not shard.granted_ms


@pytest.mark.parametrize("way", WAYS)
def test_every_job_ends_once_and_nothing_is_held_at_the_end(way: str) -> None:
    world = World()
    servers = WAYS[way](world, 1 if way == "one leader" else 4, random.Random(2))  # noqa: S311 - chance from a seed
    clients = Clients(world, servers, LOAD, seed=1)
    clients.run()
    assert clients.begun == len(clients.jobs) == len(set(clients.jobs)) == LOAD.jobs
    assert all(nothing_is_left(shard) for shard in servers.shards)
    assert all(job.arrived_ms < job.locked_ms for job in clients.jobs)


@pytest.mark.parametrize("way", WAYS)
def test_a_seed_decides_everything(way: str) -> None:
    assert run(way, 1 if way == "one leader" else 4, LOAD) == run(way, 1 if way == "one leader" else 4, LOAD)
    assert run(way, 1, LOAD, seed=2) != run(way, 1, LOAD, seed=1)


@pytest.mark.parametrize("way", ["ordered", "chained"])
def test_one_shard_is_the_one_leader(way: str) -> None:
    assert run(way, 1, LOAD) == run("one leader", 1, LOAD)


def test_what_is_simulated_agrees_with_what_is_calculated() -> None:
    costs = Costs()
    alone = run("ordered", 8, Load(clients=1, jobs=2_000, resources=3))
    assert sum(alone.wait_ms) / len(alone.wait_ms) == pytest.approx(
        wait_ms(touched(3, 8), costs, chained=False), rel=0.02
    )
    crowd = Load(clients=600, jobs=6_000, resources=3)
    rate = run("ordered", 8, crowd).cycles_per_s / run("one leader", 1, crowd).cycles_per_s
    assert rate == pytest.approx(gain(3, 8, costs), rel=0.05)


def test_only_one_order_for_all_lines_keeps_large_requests_from_being_overtaken() -> None:
    mix = Mix(duration_ms=500, large_per_s=20)
    seen = {way: mixed(way, mix) for way in ("one leader", "ordered", "sequenced")}
    assert all(waits.begun == waits.ended for waits in seen.values())
    assert seen["one leader"].overtaken == seen["sequenced"].overtaken == 0
    assert seen["ordered"].overtaken > 1


def stepped(shards: int, period_ms: float | None, load: Steps = STEPS) -> tuple[Ends, bool]:
    steppers = Steppers(load, shards, period_ms, seed=3)
    ends = steppers.run()
    return ends, all(nothing_is_left(shard) for shard in steppers.shards)


@pytest.mark.parametrize(("shards", "period_ms"), [(1, None), (4, 10), (4, None)])
def test_every_transaction_gets_through_and_leaves_nothing(shards: int, period_ms: float | None) -> None:
    ends, clean = stepped(shards, period_ms)
    assert ends.begun == ends.ended == STEPS.transactions
    assert clean
    assert ends == stepped(shards, period_ms)[0]


def test_one_leader_ends_a_cycle_at_once_and_shards_when_it_is_gathered() -> None:
    leader, often, seldom, never = (stepped(*each)[0] for each in ((1, None), (4, 10), (4, 100), (4, None)))
    assert leader.at_once
    assert leader.rearrangements
    assert not leader.gathered
    assert not leader.timed_out
    assert often.gathered
    assert often.needless
    assert often.stuck_ms[len(often.stuck_ms) // 2] < seldom.stuck_ms[len(seldom.stuck_ms) // 2]
    assert never.timed_out


def test_the_cases_of_the_page() -> None:
    assert two_lines().leader == "R1 holds all, R2 waits"
    assert two_lines().shards.endswith("cycle: R1 waits for R2 waits for R1")
    assert reserved_is_held().leader == "R waits, T holds all"
    assert reserved_is_held().shards.endswith("cycle: T waits for R waits for T")
    assert inversion().leader == "urgent holds all, after 0 grants of lower priority"
    assert inversion(middles=50).shards == "urgent waits, after 50 grants of lower priority"
    assert (two_takes().leader, two_takes().shards) == ("X gets 3, Y gets 0", "X gets 2, Y gets 2: neither has 3")
