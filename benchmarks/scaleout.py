"""The throughput of namespaces on several nodes, and the cost of waiting for replicas and disks of Redis.

    python benchmarks/scaleout.py [spread] [groups] [durable] [--rounds N] [--seconds S]

All servers are real and run all the time; the loads alternate. Figures are medians of the rounds, and ratios are medians of
the ratios of each round, which makes them robust against noise. All servers share one processor, and the load has another
if there are two. So the rates of many servers are lower than they could be: compare the CPU of a cycle. The last column is
derived from it: the rate if each process had its own processor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from redis import Redis  # noqa: E402

from benchmarks.scaleout_parts.load import Sample, measure  # noqa: E402
from benchmarks.scaleout_parts.servers import (  # noqa: E402
    Setup,
    cluster,
    names,
    node,
    redis_server,
    replicated,
    spread,
)

TWO, THREE = 2, 3
BUSY = (64, 16)
ALONE = (1, 1)


def spread_setups(stack: ExitStack, folder: Path) -> list[Setup]:
    """Measure namespaces on nodes that serve all or some of them, with one or several Redis
    servers, in relation to the first setup.
    """
    several = names(THREE)

    def made(name: str, namespaces: Sequence[str], nodes: int, masters: int) -> Setup:
        redises = cluster(stack, folder, masters) if masters > 1 else [redis_server(stack, folder)]
        url = f"redis{'+cluster' if masters > 1 else ''}://127.0.0.1:{redises[0].port}"
        return spread(Setup(name, namespaces, [node(stack, folder, url, namespaces) for _ in range(nodes)], redises))

    return [
        made("1 namespace, 1 node, 1 Redis", several[:1], 1, 1),
        made("1 namespace, 2 nodes (1 stands by), 1 Redis", several[:1], 2, 1),
        made("3 namespaces, 1 node, 1 Redis", several, 1, 1),
        made("2 namespaces, 2 nodes, 1 Redis", several[:2], 2, 1),
        made("3 namespaces, 3 nodes, 1 Redis", several, THREE, 1),
        made("3 namespaces, 3 nodes, a cluster of 3", several, THREE, THREE),
    ]


def group_setups(stack: ExitStack, folder: Path) -> list[Setup]:
    """Measure independent groups, which do not even share a processor: each has two nodes (one is a
    follower), a Redis and a load.
    """
    processors = sorted(os.sched_getaffinity(0))[:TWO]
    if len(processors) < TWO:
        raise SystemExit("groups: two processors are needed")
    groups = []
    for processor, name in zip(processors, names(TWO), strict=True):
        redis = redis_server(stack, folder, processor=processor)
        url = f"redis://127.0.0.1:{redis.port}"
        nodes = [node(stack, folder, url, [name], processor) for _ in range(TWO)]
        groups.append(spread(Setup("1 group", [name], nodes, [redis], [processor])))
    one, other = groups
    both = Setup(
        "2 groups at the same time",
        [*one.namespaces, *other.namespaces],
        [*one.nodes, *other.nodes],
        [*one.redises, *other.redises],
        processors,
    )
    return [one, replace(other, name="the other group"), both]


def durable_setups(stack: ExitStack, folder: Path) -> list[Setup]:
    """Measure one namespace for each durability setting, on a primary with two replicas."""
    found = []
    for policy in ("everysec", "always"):
        redises = replicated(stack, folder, 2, "--appendfsync", policy)
        with Redis(port=redises[0].port) as client:
            version = tuple(map(int, client.info("server")["redis_version"].split(".")[:2]))
        counts = {0: "no replica", 1: "1 replica", 2: "2 replicas"}
        ways = [(counts[count], {"GENIE_REDIS_MIN_REPLICAS": str(count)}) for count in counts]
        if version >= (7, 2):
            ways += [
                (f"{counts[count]}, fsync", {"GENIE_REDIS_MIN_REPLICAS": str(count), "GENIE_REDIS_FSYNC": "1"})
                for count in counts
            ]
        for name, variables in ways:
            namespace = f"{policy}-{name.replace(' ', '-').replace(',', '')}"
            url = f"redis://127.0.0.1:{redises[0].port}"
            nodes = [node(stack, folder, url, [namespace], **variables)]
            found.append(spread(Setup(f"appendfsync {policy}, {name}", [namespace], nodes, redises)))
    return found


def rounds(
    setups: Sequence[Setup], loads: Sequence[tuple[int, int]], number: int, seconds: float
) -> list[list[list[Sample]]]:
    """Return the samples of all rounds by setup and load. The setups alternate, in reverse order in
    every other round.
    """
    found: list[list[list[Sample]]] = [[[] for _ in loads] for _ in setups]
    for turn in range(number):
        order = list(range(len(setups)))
        for place in order if turn % 2 == 0 else reversed(order):
            for which, (connections, depth) in enumerate(loads):
                print(f"\r\033[K{turn + 1}/{number} {setups[place].name}", end="", file=sys.stderr, flush=True)
                found[place][which].append(measure(setups[place], connections, depth, seconds))
    print("\r\033[K", end="", file=sys.stderr, flush=True)
    return found


def middle(samples: Sequence[Sample], field: str) -> float:
    """Return the median of one figure of the samples."""
    return statistics.median(getattr(sample, field) for sample in samples)


def against(samples: Sequence[Sample], first: Sequence[Sample]) -> float:
    """Return the median of the ratios of the rates in each round."""
    return statistics.median(one.cycles_per_s / other.cycles_per_s for one, other in zip(samples, first, strict=True))


def possible(samples: Sequence[Sample]) -> float:
    """Return the cycles a second if each process had its own processor, as limited by the busiest
    process.
    """
    return 1e6 / middle(samples, "busiest_us")


def show_spread(setups: Sequence[Setup], found: Sequence[Sequence[Sequence[Sample]]]) -> None:
    """Print the table of nodes and the namespaces that they lead."""
    print("| | cycles/s here | ratio | CPU of a cycle, servers | Redis | possible, cycles/s | ratio |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    first = possible(found[0][0])
    for setup, (samples,) in zip(setups, found, strict=True):
        most = possible(samples)
        print(
            f"| {setup.name} | {middle(samples, 'cycles_per_s'):,.0f} | {against(samples, found[0][0]):.2f} "
            f"| {middle(samples, 'server_us'):.1f} µs | {middle(samples, 'redis_us'):.1f} µs "
            f"| {most:,.0f} | {most / first:.2f} |"
        )


def show_groups(setups: Sequence[Setup], found: Sequence[Sequence[Sequence[Sample]]]) -> None:
    """Print the table of groups."""
    print("| | cycles/s | ratio | CPU of a cycle, servers | Redis |")
    print("| --- | --: | --: | --: | --: |")
    for setup, (samples,) in zip(setups, found, strict=True):
        print(
            f"| {setup.name} | {middle(samples, 'cycles_per_s'):,.0f} | {against(samples, found[0][0]):.2f} "
            f"| {middle(samples, 'server_us'):.1f} µs | {middle(samples, 'redis_us'):.1f} µs |"
        )


def show_durable(setups: Sequence[Setup], found: Sequence[Sequence[Sequence[Sample]]]) -> None:
    """Print the table of durability settings."""
    print(
        "| | one connection: p50 | p99 | 64 connections, 16 in flight: cycles/s | ratio | CPU of a cycle, server | Redis |"
    )
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for setup, (alone, busy) in zip(setups, found, strict=True):
        print(
            f"| {setup.name} | {middle(alone, 'p50_ms'):.2f} ms | {middle(alone, 'p99_ms'):.2f} ms "
            f"| {middle(busy, 'cycles_per_s'):,.0f} | {against(busy, found[0][1]):.2f} "
            f"| {middle(busy, 'server_us'):.1f} µs | {middle(busy, 'redis_us'):.1f} µs |"
        )


def main() -> None:
    """Measure the chosen parts, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", metavar="PART", nargs="*", help="spread, groups or durable; all without any")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    parts = {
        "spread": (spread_setups, (BUSY,), show_spread),
        "groups": (group_setups, (BUSY,), show_groups),
        "durable": (durable_setups, (ALONE, BUSY), show_durable),
    }
    if unknown := set(options.parts) - set(parts):
        parser.error(f"there is no part {unknown.pop()!r}; there are {', '.join(parts)}")
    for part in options.parts or parts:
        make, loads, show = parts[part]
        with ExitStack() as stack:
            setups = make(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())))
            found = rounds(setups, loads, options.rounds, options.seconds)
        show(setups, found)
        errors = sum(sample.errors for of_setup in found for samples in of_setup for sample in samples)
        print(f"\n{errors} errors\n", flush=True)


if __name__ == "__main__":
    main()
