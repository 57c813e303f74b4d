"""Makes faults for as long as it is told: `make soak-faults FAULTS="--seconds 600"`, `… FAULTS="kill-redis --times 20"`.

Without `--times` and `--seconds` each scenario makes its faults in the long form, once. With `--seconds` all of them take
turns with a tenth of that, each time with another seed.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path

from faults.figures import Figures, put, table, write
from faults.scenarios import SCENARIOS, Scenario
from faults.world import alone

SYNCED = partial(alone, "--appendfsync", "always")
"""What is measured is a Redis as it should be for locks."""


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser("python -m faults", description=__doc__)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"which (default: all): {', '.join(names)}")
    parser.add_argument("--times", type=int, help="faults in each (default: as many as in the long form)")
    parser.add_argument("--seconds", type=float, help="take turns for so long")
    parser.add_argument("--seed", default=None, help="of the first round (default: a random one, which is shown)")
    parser.add_argument("--lease", type=float, default=1.0, help="of the servers, in seconds (1)")
    parser.add_argument("--clients", type=int, default=12, help="clients in all (12)")
    parser.add_argument("--library", type=int, default=4, help="so many of them are the Python client (4)")
    parser.add_argument("--json", type=Path, help="write every figure into this file")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    found = parser.parse_args()
    for name in found.scenarios:
        if name not in names:
            parser.error(f"there is no scenario {name}; there are {', '.join(names)}")
    return found


class Run:
    """Scenario after scenario."""

    def __init__(self, wanted: argparse.Namespace) -> None:
        self.wanted = wanted
        self.seed = wanted.seed or secrets.token_hex(4)
        self.chosen = [scenario for scenario in SCENARIOS if not wanted.scenarios or scenario.name in wanted.scenarios]
        self.found: dict[str, Figures] = {}
        self.failed: list[str] = []
        """How to repeat what broke a promise."""

    async def all(self) -> None:
        """All that is wanted."""
        wanted = self.wanted
        if wanted.seconds is None:
            for scenario in self.chosen:
                await self._one(scenario, self.seed, wanted.times or scenario.times)
            return
        end, number = time.monotonic() + wanted.seconds, 0
        while time.monotonic() < end:
            scenario = self.chosen[number % len(self.chosen)]
            seed = f"{self.seed}-{number // len(self.chosen)}" if number >= len(self.chosen) else self.seed
            await self._one(scenario, seed, wanted.times or max(1, scenario.times // 10))
            number += 1

    async def _one(self, scenario: Scenario, seed: str, times: int) -> None:
        wanted = self.wanted
        again = f"{scenario.name} --times {times} --seed {seed} --lease {wanted.lease:g}"
        again += f" --clients {wanted.clients} --library {wanted.library}"
        print(f"\n{again}", flush=True)
        try:
            figures = await scenario.play(
                seed, times, clients=wanted.clients, library=wanted.library, lease_s=wanted.lease, redis=SYNCED
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, it is shown with the history, and the others go on
            error.add_note(f'make soak-faults FAULTS="{again}"')
            traceback.print_exc(file=sys.stdout)
            self.failed.append(again)
            return
        print(figures.summary(), flush=True)
        if scenario.name in self.found:
            self.found[scenario.name].add(figures)
        else:
            self.found[scenario.name] = figures


async def stoppable(run: Run) -> None:
    """Run it; SIGTERM ends it as Ctrl-C does, with all that it has started."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await run.all()


def main() -> int:
    """1 where a promise was not kept, or it was stopped."""
    run, stopped = Run(options()), False
    try:
        asyncio.run(stoppable(run))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped")
        stopped = True
    all_ = list(run.found.values())
    print(f"\n{table(all_)}")
    for figures in all_:
        print(figures.summary())
    if run.wanted.json:
        write(all_, run.wanted.json)
    if run.wanted.page and not run.failed:
        put(table(all_), run.wanted.page)
    for again in run.failed:
        print(f'FAILED: make soak-faults FAULTS="{again}"')
    return 1 if run.failed or stopped else 0


if __name__ == "__main__":
    sys.exit(main())
