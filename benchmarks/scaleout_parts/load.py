"""`genie bench own` on all namespaces of a setup at the same time, and the CPU time of the servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import orjson

from benchmarks.peers.processes import cpu_s, pinned
from benchmarks.scaleout_parts.servers import Setup, environment, on

WARM_UP_S = 0.3


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of one round. CPU is in microseconds for each cycle, of all processes of a kind
    together, and of the busiest one.
    """

    cycles_per_s: float
    server_us: float
    redis_us: float
    busiest_us: float
    p50_ms: float
    p99_ms: float
    errors: int


def _on(processor: int | None) -> Sequence[str]:
    if processor is None:
        processor = pinned()[2]
    return () if processor is None else on(processor)


def measure(setup: Setup, connections: int, depth: int, seconds: float) -> Sample:
    """Run the same load on each namespace. Times are those of the slowest namespace."""
    load = ["bench", "own", "--connections", str(connections), "--depth", str(depth), "--seconds", str(seconds)]
    command = [sys.executable, "-m", "genie.cli", *load, "--warm-up", str(WARM_UP_S), "--json"]
    pids = [[process.pid for process in kind] for kind in (setup.nodes, setup.redises)]
    before = [cpu_s(kind) for kind in pids]
    loads = [
        subprocess.Popen(
            [*_on(processor), *command, "--host", setup.hosts, "--namespace", name],
            env=environment(),
            stdout=subprocess.PIPE,
        )
        for name, processor in zip(setup.namespaces, cycle(setup.loads))
    ]
    said = [load.communicate()[0] for load in loads]
    used = [[cpu_s([pid])[pid] - early[pid] for pid in kind] for kind, early in zip(pids, before, strict=True)]
    found = [orjson.loads(text)["workloads"][0] for text in said]
    cycle_us = 1e6 / sum(each["cycles_per_s"] * (seconds + WARM_UP_S) for each in found)
    return Sample(
        cycles_per_s=sum(float(each["cycles_per_s"]) for each in found),
        server_us=sum(used[0]) * cycle_us,
        redis_us=sum(used[1]) * cycle_us,
        busiest_us=max(map(max, used)) * cycle_us,
        p50_ms=max(each["to_locked"]["p50_us"] for each in found) / 1e3,
        p99_ms=max(each["to_locked"]["p99_us"] for each in found) / 1e3,
        errors=sum(sum(each["errors"].values()) for each in found),
    )
