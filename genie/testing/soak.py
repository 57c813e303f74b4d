"""`python -m genie.testing.soak`: one simulated world after another, each from its seed, until one goes wrong.

`--seed N` runs one again and shows how it came to that.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from genie.testing.judges import judge
from genie.testing.plan import plan
from genie.testing.world import World


def run(seed: int) -> tuple[World, list[str]]:
    """The world of a seed, when it is over, and what was wrong with it."""
    world = World(plan(seed))
    problems = world.run()
    return world, [*judge(world.history), *problems]


def main() -> int:
    """Run worlds as the arguments say. The exit status is 1 where one went wrong."""
    parser = argparse.ArgumentParser(prog="python -m genie.testing.soak", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one, and show the end of its history")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, help="how many; for ever, if left out")
    parser.add_argument("--tail", type=int, default=60, help="how many lines of a failed history are shown")
    parser.add_argument("--about", type=int, help="only lines about this id")
    arguments = parser.parse_args()
    first = arguments.first if arguments.seed is None else arguments.seed
    count = 1 if arguments.seed is not None else arguments.seeds
    seeds = itertools.count(first) if count is None else range(first, first + count)
    began, failed = time.perf_counter(), 0
    for number, seed in enumerate(seeds, 1):
        world, problems = run(seed)
        if problems:
            failed += 1
            print(world.history.tail(arguments.tail, about=arguments.about))
            for problem in problems[:5]:
                print("***", problem)
            print(f"again: python -m genie.testing.soak --seed {seed}", flush=True)
        elif arguments.seed is not None:
            print(world.history.tail(arguments.tail, about=arguments.about))
            print(world.history.digest())
        if number % 50 == 0:
            print(f"{number} worlds, {failed} failed, {(time.perf_counter() - began) / number:.3f} s each", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
