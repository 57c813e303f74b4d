"""Fuzzes a whole server with scenarios: `python -m fuzz.server --lines 100000` (with tests/ on the path).

A seed decides a scenario. A failing one is printed with its seed, and shrunk to the fewest steps that still fail.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import structlog

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.grammar import Step, plan
from fuzz.harness import Harness
from fuzz.shared_model import Violation
from genie.core import Reason
from genie.errors import Code
from genie.protocol.diagnostics import FIELD_CHECKS
from genie.testing.simulation.loop import SimLoop

SIZE = 250
"""Lines in a scenario."""

LONG = 100_000
"""Lines after which the coverage must be complete."""

UNREACHABLE_CODES = {Code.UNAUTHORIZED}
"""Codes that a server without a token never sends."""

EXPECTED = (
    *(f"sent {command}" for command in FIELD_CHECKS),
    *("sent wrong", "sent http", "sent too long", "begun", "resumed", "repeated", "quiet"),
    *("sent release by ref", "server restarted", "store unavailable"),
    *(f"received released {reason}" for reason in Reason),
    *(f"received error {code}" for code in Code if code not in UNREACHABLE_CODES),
    *(
        f"received {word}"
        for word in ("queued", "locked", "extended", "pong", "inspected", "welcome", "watching", "unwatched", "bye")
    ),
    *(f"received event {state}" for state in ("locked", "unlocked", "lagged")),
    *(f"closed: {why}" for why in ("half-closed", "http", "too long", "full", "cut off", "stolen", "bye")),
    "leadership lost",
)
"""The coverage of a long run."""


def play(steps: Sequence[Step], coverage: Counter[str]) -> tuple[int, BaseException | None]:
    """Run a scenario; return the number of lines sent, and the failure."""
    loop = SimLoop()
    problem: list[BaseException] = []
    loop.set_exception_handler(
        lambda _, context: problem.append(context.get("exception") or Violation(context["message"]))
    )
    said = [0]

    async def live() -> None:
        harness = Harness(coverage)
        for name, *arguments in steps:
            await getattr(harness, name)(*arguments)
            said[0] = harness.lines
            if harness.problem is not None:
                raise harness.problem

    try:
        loop.run_until_complete(live())
    except Exception as error:  # noqa: BLE001 - every error is a failure
        problem.insert(0, error)
    finally:
        loop.finish()
    return said[0], problem[0] if problem else None


def smaller(steps: list[Step], kind: str) -> list[Step]:
    """Shrink a scenario to the steps that are needed for the same failure."""
    chunk = len(steps) // 2
    while chunk:
        place = 1  # the first starts the server
        while place < len(steps):
            fewer = steps[:place] + steps[place + chunk :]
            if _kind(play(fewer, Counter())[1]) == kind:
                steps = fewer
            else:
                place += chunk
        chunk //= 2
    return steps


def _kind(problem: BaseException | None) -> str:
    return "" if problem is None else f"{type(problem).__name__} {str(problem)[:12]}"


def tell(seed: int, steps: list[Step], problem: BaseException) -> None:
    """Print a failure, and how to reproduce it."""
    print(f"\nseed {seed} fails: {problem!r}")
    fewest = smaller(steps, _kind(problem))
    problem = play(fewest, Counter())[1] or problem
    print(f"shrunk to {len(fewest)} of its {len(steps)} steps:")
    for step in fewest:
        print(f"  {step}")
    traceback.print_exception(problem)
    print(f"reproduce: PYTHONPATH=tests python -m fuzz.server --seed {seed} --scenarios 1", flush=True)


def quiet(problems: list[dict[str, Any]]) -> None:
    """Log errors only, and collect them."""

    def note(_logger: object, _name: str, event: dict[str, Any]) -> dict[str, Any]:
        problems.append(event)
        raise structlog.DropEvent

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR), processors=[note])


def run(seed: int, lines: int, seconds: float, scenarios: int) -> int:
    """Run scenarios; return the exit status."""
    coverage: Counter[str] = Counter()
    logged: list[dict[str, Any]] = []
    quiet(logged)
    done, lived, began = 0, 0, time.monotonic()
    while done < lines and lived < scenarios and time.monotonic() - began < seconds:
        steps = plan(seed + lived, SIZE)
        said, problem = play(steps, coverage)
        if problem is None and logged:
            problem = Violation(f"an error was logged: {logged[0]}")
        if problem is not None:
            tell(seed + lived, steps, problem)
            return 1
        done += said
        lived += 1
    print(f"server: {done} lines in {lived} scenarios from seed {seed} on, in {time.monotonic() - began:.1f} s")
    for word, count in sorted(coverage.items()):
        print(f"  {count:>9}  {word}")
    missing = [word for word in EXPECTED if not coverage[word]] if done >= LONG else []
    if missing:
        print(f"never seen: {', '.join(missing)}")
    return 1 if missing else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1 << 62, help="lines to send (default: unlimited)")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no scenario after this time")
    parser.add_argument("--scenarios", type=int, default=1 << 62, help="number of scenarios")
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario; 0: random")
    options = parser.parse_args()
    seed = options.seed or Random().randrange(1, 1 << 31)
    print(f"server: seed {seed}", flush=True)
    sys.exit(run(seed, options.lines, options.seconds, options.scenarios))


if __name__ == "__main__":
    main()
