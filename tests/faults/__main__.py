"""Injects real faults: `make soak-faults FAULTS="--seconds 600"`, `… FAULTS="kill-redis --times 20"`.

Without `--times` and `--seconds` each scenario runs once, with its full number of faults. With `--seconds` the scenarios
alternate, each time with a tenth of its faults and another seed.
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

from faults.environment import single_redis
from faults.results import Results, replace_table, table, write_json
from faults.scenarios import SCENARIOS, Scenario

SYNCED = partial(single_redis, "--appendfsync", "always")
"""The measurements use a Redis with the recommended persistence."""


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser("python -m faults", description=__doc__)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"which (default: all): {', '.join(names)}")
    parser.add_argument("--times", type=int, help="faults in each scenario (default: its full number)")
    parser.add_argument("--seconds", type=float, help="alternate between the scenarios for this time")
    parser.add_argument("--seed", default=None, help="seed of the first round (default: random)")
    parser.add_argument("--lease", type=float, default=1.0, help="lease of the servers, in seconds (1)")
    parser.add_argument("--clients", type=int, default=12, help="number of clients (12)")
    parser.add_argument("--library", type=int, default=4, help="how many of them use the Python client (4)")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--page", type=Path, help="replace the table in this page")
    parsed = parser.parse_args()
    for name in parsed.scenarios:
        if name not in names:
            parser.error(f"there is no scenario {name}; there are {', '.join(names)}")
    return parsed


class Run:
    """Runs scenarios, and collects their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.seed = options.seed or secrets.token_hex(4)
        self.selected = [
            scenario for scenario in SCENARIOS if not options.scenarios or scenario.name in options.scenarios
        ]
        self.results: dict[str, Results] = {}
        self.failed: list[str] = []
        """The arguments that reproduce each failure."""

    async def run_all(self) -> None:
        """Run the selected scenarios: once, or alternating for the given time."""
        options = self.options
        if options.seconds is None:
            for scenario in self.selected:
                await self._one(scenario, self.seed, options.times or scenario.times)
            return
        end, number = time.monotonic() + options.seconds, 0
        while time.monotonic() < end:
            scenario = self.selected[number % len(self.selected)]
            seed = f"{self.seed}-{number // len(self.selected)}" if number >= len(self.selected) else self.seed
            await self._one(scenario, seed, options.times or max(1, scenario.times // 10))
            number += 1

    async def _one(self, scenario: Scenario, seed: str, times: int) -> None:
        options = self.options
        arguments = f"{scenario.name} --times {times} --seed {seed} --lease {options.lease:g}"
        arguments += f" --clients {options.clients} --library {options.library}"
        print(f"\n{arguments}", flush=True)
        try:
            results = await scenario.play(
                seed, times, clients=options.clients, library=options.library, lease_s=options.lease, redis=SYNCED
            )
        except Exception as error:  # noqa: BLE001 - every failure is printed with its history, and the other scenarios run
            error.add_note(f'make soak-faults FAULTS="{arguments}"')
            traceback.print_exc(file=sys.stdout)
            self.failed.append(arguments)
            return
        print(results.summary(), flush=True)
        if scenario.name in self.results:
            self.results[scenario.name].add(results)
        else:
            self.results[scenario.name] = results


async def run_until_signalled(run: Run) -> None:
    """Run the scenarios; SIGTERM stops them and their processes, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await run.run_all()


def main() -> int:
    """Return 1 if a guarantee was violated, or the run was stopped."""
    run, stopped = Run(parse_options()), False
    try:
        asyncio.run(run_until_signalled(run))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped")
        stopped = True
    all_results = list(run.results.values())
    print(f"\n{table(all_results)}")
    for results in all_results:
        print(results.summary())
    if run.options.json:
        write_json(all_results, run.options.json)
    if run.options.page and not run.failed:
        replace_table(table(all_results), run.options.page)
    for arguments in run.failed:
        print(f'FAILED: make soak-faults FAULTS="{arguments}"')
    return 1 if run.failed or stopped else 0


if __name__ == "__main__":
    sys.exit(main())
