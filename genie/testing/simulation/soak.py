"""`python -m genie.testing.simulation.soak`: one simulated world after another, each from its seed, and what goes wrong in them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import click

from genie.testing.simulation.checkers import judge
from genie.testing.simulation.cluster import World
from genie.testing.simulation.scenario import CHOOSING, REPLICATED, plan


def run(seed: int) -> tuple[World, list[str]]:
    """The world of a seed, when it is over, and what was wrong with it."""
    world = World(plan(seed))
    problems = world.run()
    return world, [*judge(world.history), *problems]


def seeds_of_all_kinds() -> Iterator[int]:
    """Seeds without end, of the three kinds of worlds in turn: plain ones, those in which clients also take any of several
    resources, and those with three Redises and sentinels.
    """
    for number in itertools.count():
        yield from (1 + number, CHOOSING + number, REPLICATED + number)


@click.command()
@click.option("--seed", type=int, help="Run this world, and show its history.")
@click.option(
    "--first", type=int, help="The first of consecutive seeds; without it, seeds of all kinds of worlds in turn."
)
@click.option("--seeds", type=int, help="How many worlds; without this and --seconds, for ever.")
@click.option("--seconds", type=float, help="For how long.")
@click.option("--stop", is_flag=True, help="Stop at the first world that goes wrong.")
@click.option("--tail", type=int, default=60, show_default=True, help="Lines of a history that are shown.")
@click.option("--about", type=int, help="Show only what is about this id, and the faults.")
def main(
    seed: int | None,
    first: int | None,
    seeds: int | None,
    seconds: float | None,
    stop: bool,
    tail: int,
    about: int | None,
) -> None:
    """Simulate worlds of servers, clients and a Redis in which things break. Exits with 1 where something went wrong."""
    if seed is not None:
        first, seeds = seed, 1
    began, failed = time.perf_counter(), 0
    wanted = seeds_of_all_kinds() if first is None else itertools.count(first)
    for number, this in enumerate(itertools.islice(wanted, seeds), 1):
        if seconds is not None and time.perf_counter() - began > seconds:
            break
        world, problems = run(this)
        if problems or seed is not None:
            click.echo(world.history.tail(tail, about=about))
        for problem in problems[:10]:
            click.echo(f"*** {problem}")
        if problems:
            failed += 1
            click.echo(f"again: python -m genie.testing.simulation.soak --seed {this}")
            if stop:
                break
        if number % 50 == 0 or number == seeds:
            each_s = (time.perf_counter() - began) / number
            click.echo(f"{number} worlds, {failed} of them went wrong, {each_s:.2f} s each")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
