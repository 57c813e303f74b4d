"""Clients that lock, work and release in a closed loop, and their statistics."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from benchmarks.sharding_parts.ways import WAYS, Job, Way
from benchmarks.sharding_parts.world import Costs, World


@dataclass(frozen=True)
class Load:
    """The parameters of clients in a closed loop: each begins its next job when it has released the
    last one.
    """

    clients: int = 64
    jobs: int = 8_000
    """Number of jobs in all."""
    resources: int = 1
    """Number of resources of each job."""
    keys: int = 1_000_000
    skew: float = 0.0
    """The exponent of Zipf's law by which keys are chosen; 0 for a uniform distribution."""
    work_ms: float = 0.0
    """Mean time for which a client holds its locks, exponentially distributed."""


@dataclass
class Outcome:
    """The results of a run, without the first fifth of the jobs."""

    begun: int = 0
    ended: int = 0
    cycles_per_s: float = 0
    wait_ms: list[float] = field(default_factory=list)
    """The time from the request to the complete grant of each job, sorted."""
    idle_ms: float = 0
    """The mean time for which a lock was held before its client could begin."""
    attempts: float = 0
    messages: float = 0
    busiest: float = 0
    """The share of the time for which the busiest shard worked."""

    def quantile(self, part: float) -> float:
        """Return a quantile of the waits, in milliseconds."""
        return self.wait_ms[min(len(self.wait_ms) - 1, int(part * len(self.wait_ms)))]


def keys_of(load: Load, chance: random.Random) -> Callable[[], tuple[str, ...]]:
    """Return a function that draws the distinct names of one job, by Zipf's law or uniformly."""
    bounds = list(accumulate(1 / rank**load.skew for rank in range(1, load.keys + 1))) if load.skew else []

    def draw() -> tuple[str, ...]:
        names: dict[str, None] = {}
        while len(names) < load.resources:
            key = bisect(bounds, chance.random() * bounds[-1]) if bounds else chance.randrange(load.keys)
            names[f"key/{key}"] = None
        return tuple(names)

    return draw


class Clients:
    """The clients of a run. `jobs` has the ended jobs, in the order of their ends."""

    def __init__(self, world: World, way: Way, load: Load, seed: int) -> None:
        self.world = world
        self.way = way
        self.load = load
        self.jobs: list[Job] = []
        self.idle_ms: list[float] = []
        self.ended_ms: list[float] = []
        self.begun = 0
        self._chance = random.Random(seed)
        self._draw = keys_of(load, self._chance)

    def run(self) -> None:
        """Start every client within the first millisecond, and run until all jobs have ended."""
        for _ in range(self.load.clients):
            self.world.after(self._chance.random(), self._next)
        self.world.run()

    def _next(self) -> None:
        if self.begun < self.load.jobs:
            self.begun += 1
            self.way.acquire(Job(self._draw()), self._locked)

    def _locked(self, job: Job) -> None:
        self.idle_ms.append(job.idle_ms() / len(job.names))
        work_ms = self._chance.expovariate(1 / self.load.work_ms) if self.load.work_ms else 0.0
        self.world.after(work_ms, self._done, job)

    def _done(self, job: Job) -> None:
        self.way.release(job)
        self.jobs.append(job)
        self.ended_ms.append(self.world.now)
        costs = self.world.costs
        self.world.after(2 * costs.hop_ms + costs.commit_ms, self._next)  # the release has been answered


def run(way: str, shards: int, load: Load, *, seed: int = 1, costs: Costs | None = None) -> Outcome:
    """Run a load on this number of shards. The same arguments give the same results."""
    world = World(costs)
    servers = WAYS[way](world, shards, random.Random(seed + 1))
    clients = Clients(world, servers, load, seed)
    clients.run()
    return outcome(clients)


def outcome(clients: Clients) -> Outcome:
    """Return the statistics of a run that has ended."""
    jobs, first = clients.jobs, len(clients.jobs) // 5
    last = len(jobs) - clients.load.clients  # the others ran while some had nothing to do any more
    seen = jobs[first:last]
    duration_ms = clients.ended_ms[last - 1] - clients.ended_ms[first - 1]
    return Outcome(
        begun=clients.begun,
        ended=len(jobs),
        cycles_per_s=len(seen) / duration_ms * 1_000,
        wait_ms=sorted(job.locked_ms - job.arrived_ms for job in seen),
        idle_ms=sum(clients.idle_ms) / len(clients.idle_ms),
        attempts=sum(job.attempts for job in jobs) / len(jobs),
        messages=sum(job.messages for job in jobs) / len(jobs),
        busiest=max(shard.busy_ms for shard in clients.way.shards) / clients.world.now,
    )
