"""`python -m simulator.soak`: run simulations of many seeds and report the violations."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import click

from simulator.checkers import check
from simulator.cluster import Cluster
from simulator.scenario import (
    FIRST_ANY_OF_SEED,
    FIRST_BELIEF_SEED,
    FIRST_CRASH_SEED,
    FIRST_LOCK_KINDS_SEED,
    FIRST_REPLICATED_SEED,
    scenario_of,
)


def run(seed: int) -> tuple[Cluster, list[str]]:
    """Run the simulation of a seed; return the finished cluster and a description of each failure.

    Failures are the violations that the checkers find in the history, and the problems that occurred during the run.
    """
    cluster = Cluster(scenario_of(seed))
    problems = cluster.run()
    return cluster, [*check(cluster.history), *problems]


def seeds_of_all_kinds() -> Iterator[int]:
    """Yield an endless sequence of seeds, alternating between six kinds of scenarios.

    The kinds are plain scenarios, scenarios with `anyOf` requests, scenarios with three Redis servers, scenarios with
    half-open connections and clients that record which locks they consider held, scenarios with units and subtrees, and
    scenarios with a Redis that crashes.
    """
    first = 1, FIRST_ANY_OF_SEED, FIRST_REPLICATED_SEED, FIRST_BELIEF_SEED, FIRST_LOCK_KINDS_SEED, FIRST_CRASH_SEED
    for number in itertools.count():
        yield from (seed + number for seed in first)


@click.command()
@click.option("--seed", type=int, help="Run this seed only, and print its history.")
@click.option("--first", type=int, help="The first of consecutive seeds. [default: seeds of all kinds, alternating]")
@click.option("--seeds", type=int, help="How many seeds to run. [default: unlimited]")
@click.option("--seconds", type=float, help="Start no seed after this many seconds. [default: unlimited]")
@click.option("--stop", is_flag=True, help="Stop at the first failure.")
@click.option(
    "--tail", type=int, default=60, show_default=True, help="How many entries at the end of a history to print."
)
@click.option("--about", type=int, help="Print only the faults and the entries that mention this request id.")
def main(
    seed: int | None,
    first: int | None,
    seeds: int | None,
    seconds: float | None,
    stop: bool,
    tail: int,
    about: int | None,
) -> None:
    """Simulate clusters of servers, clients and Redis under faults. Exits with 1 after a violation."""
    if seed is not None:
        first, seeds = seed, 1
    started_at, failed_count = time.perf_counter(), 0
    all_seeds = seeds_of_all_kinds() if first is None else itertools.count(first)
    for number, this_seed in enumerate(itertools.islice(all_seeds, seeds), start=1):
        if seconds is not None and time.perf_counter() - started_at > seconds:
            break
        cluster, failures = run(this_seed)
        if failures or seed is not None:
            click.echo(cluster.history.tail(tail, about=about))
        for failure in failures[:10]:
            click.echo(f"*** {failure}")
        if failures:
            failed_count += 1
            click.echo(f"reproduce: python -m simulator.soak --seed {this_seed}")
            if stop:
                break
        if number % 50 == 0 or number == seeds:
            seconds_per_seed = (time.perf_counter() - started_at) / number
            click.echo(f"{number} seeds, {failed_count} failed, {seconds_per_seed:.2f} s each")
    raise SystemExit(1 if failed_count else 0)


if __name__ == "__main__":
    main()
