"""Small requests and a few large ones, at given rates: their waits, and how often large ones are
overtaken.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from benchmarks.sharding_parts.ways import WAYS, Job
from benchmarks.sharding_parts.world import World, home

SHARDS = 8
URGENT = 9.0


@dataclass(frozen=True)
class Mix:
    """The parameters of Poisson arrivals. There are 8 resources, each on another of 8 shards; a
    large request needs all of them.
    """

    duration_ms: float = 4_000
    small_per_s: float = 2_500
    """Arrival rate of requests for one of the resources."""
    large_per_s: float = 4
    urgent: float = 0.05
    """The share of small requests with a high priority."""
    work_ms: float = 1.0


@dataclass
class Waits:
    """The waits in milliseconds from the request to the complete grant, sorted."""

    small: list[float] = field(default_factory=list)
    urgent: list[float] = field(default_factory=list)
    large: list[float] = field(default_factory=list)
    overtaken: float = 0
    """The mean number of small requests that arrived after a large one and were granted before it.
    """
    attempts: float = 0
    """The mean number of attempts of a large request."""
    in_time: int = 0
    """The number of large requests that were granted while others still arrived."""
    begun: int = 0
    ended: int = 0


def at(waits: list[float], part: float) -> float:
    """Return a quantile of sorted values."""
    return waits[min(len(waits) - 1, int(part * len(waits)))]


def spread(shards: int) -> tuple[str, ...]:
    """Return a resource name for each shard, in their order."""
    names: dict[int, str] = {}
    for number in count():
        name = f"key/{number}"
        names.setdefault(home(name, shards), name)
        if len(names) == shards:
            break
    return tuple(names[shard] for shard in sorted(names))


def arrivals(mix: Mix, names: tuple[str, ...], seed: int) -> Iterator[tuple[float, Job, float]]:
    """Generate arrival times, jobs and their working times; the same for every algorithm."""
    chance = random.Random(seed)
    now = 0.0
    every_per_ms = (mix.small_per_s + mix.large_per_s) / 1_000
    while True:
        now += chance.expovariate(every_per_ms)
        if now > mix.duration_ms:
            return
        large = chance.random() * (mix.small_per_s + mix.large_per_s) < mix.large_per_s
        wanted = names if large else (chance.choice(names),)
        priority = URGENT if chance.random() < mix.urgent and not large else 0.0
        yield now, Job(wanted, priority), chance.expovariate(1 / mix.work_ms)


def mixed(way: str, mix: Mix, *, seed: int = 1) -> Waits:
    """Simulate the arrivals with an algorithm, until all jobs have ended."""
    world = World()
    servers = WAYS[way](world, 1 if way == "one leader" else SHARDS, random.Random(seed + 1))
    jobs: list[Job] = []
    waits = Waits()

    def begin(job: Job, work_ms: float) -> None:
        waits.begun += 1
        servers.acquire(job, lambda job: world.after(work_ms, end, job))

    def end(job: Job) -> None:
        servers.release(job)
        jobs.append(job)

    for when, job, work_ms in arrivals(mix, spread(SHARDS), seed):
        world.after(when, begin, job, work_ms)
    world.run()

    large = [job for job in jobs if len(job.names) > 1]
    for job in jobs:
        kind = waits.large if len(job.names) > 1 else waits.urgent if job.priority else waits.small
        kind.append(job.locked_ms - job.arrived_ms)
    for kind in (waits.small, waits.urgent, waits.large):
        kind.sort()
    waits.ended = len(jobs)
    waits.in_time = sum(job.locked_ms < mix.duration_ms for job in large)
    waits.attempts = sum(job.attempts for job in large) / len(large)
    # Urgent ones may pass by right, and large ones are compared with small ones only.
    small = [job for job in jobs if len(job.names) == 1 and not job.priority]
    waits.overtaken = sum(_passed(job, small) for job in large) / len(large)
    return waits


def _passed(job: Job, others: list[Job]) -> int:
    return sum(job.arrived_ms < other.arrived_ms and other.locked_ms < job.locked_ms for other in others)
