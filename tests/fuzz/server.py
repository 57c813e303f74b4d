"""Fuzzes a whole server with scenarios: `python -m fuzz.server --lines 100000` (with tests/ on the path).

A seed determines a scenario. A failing scenario is printed with its seed, and shrunk to fewer steps that still fail.
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

from fuzz.grammar import Step, make_scenario
from fuzz.harness import Harness
from fuzz.shared_model import Violation
from genie.core import Reason
from genie.errors import Code
from genie.protocol.diagnostics import FIELD_CHECKS
from genie.testing.simulation.loop import SimLoop, deterministic

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
        f"received {kind}"
        for kind in ("queued", "locked", "extended", "pong", "inspected", "welcome", "watching", "unwatched", "bye")
    ),
    "received locked with blockers",
    *(f"received event {state}" for state in ("locked", "unlocked", "lagged")),
    *(f"closed: {why}" for why in ("half-closed", "http", "too long", "full", "cut off", "stolen", "bye")),
    "leadership lost",
)
"""The coverage of a long run."""


def play(steps: Sequence[Step], coverage: Counter[str]) -> tuple[int, BaseException | None]:
    """Run a scenario; return the number of lines sent, and the failure or None."""
    loop = SimLoop()
    failures: list[BaseException] = []
    loop.set_exception_handler(
        lambda _, context: failures.append(context.get("exception") or Violation(context["message"]))
    )
    sent_lines = 0

    async def run_steps() -> None:
        nonlocal sent_lines
        harness = Harness(coverage)
        for name, *arguments in steps:
            await getattr(harness, name)(*arguments)
            sent_lines = harness.lines
            if harness.problem is not None:
                raise harness.problem

    with deterministic(loop, seed=0):  # the server limits the time that it spends on some commands
        try:
            loop.run_until_complete(run_steps())
        except Exception as error:  # noqa: BLE001 - every error is a failure
            failures.insert(0, error)
        finally:
            loop.finish()
    return sent_lines, failures[0] if failures else None


def shrink(steps: list[Step], kind: str) -> list[Step]:
    """Remove steps of a scenario, as long as it fails in the same way; return the remaining ones."""
    chunk = len(steps) // 2
    while chunk:
        start = 1  # the first step starts the server
        while start < len(steps):
            fewer = steps[:start] + steps[start + chunk :]
            if _kind(play(fewer, Counter())[1]) == kind:
                steps = fewer
            else:
                start += chunk
        chunk //= 2
    return steps


def _kind(problem: BaseException | None) -> str:
    """Classify a failure by its type and the start of its message; "" for none."""
    return "" if problem is None else f"{type(problem).__name__} {str(problem)[:12]}"


def report(seed: int, steps: list[Step], problem: BaseException) -> None:
    """Print a failure with the shrunk scenario, and the command that reproduces it."""
    print(f"\nseed {seed} fails: {problem!r}")
    shrunk = shrink(steps, _kind(problem))
    problem = play(shrunk, Counter())[1] or problem
    print(f"shrunk to {len(shrunk)} of its {len(steps)} steps:")
    for step in shrunk:
        print(f"  {step}")
    traceback.print_exception(problem)
    print(f"reproduce: PYTHONPATH=tests python -m fuzz.server --seed {seed} --scenarios 1", flush=True)


def collect_errors(problems: list[dict[str, Any]]) -> None:
    """Configure structlog so that it appends errors to the list, and logs nothing."""

    def collect(_logger: object, _name: str, event: dict[str, Any]) -> dict[str, Any]:
        problems.append(event)
        raise structlog.DropEvent

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR), processors=[collect])


def run(seed: int, lines: int, seconds: float, scenarios: int) -> int:
    """Run scenarios; return the exit status."""
    coverage: Counter[str] = Counter()
    logged: list[dict[str, Any]] = []
    collect_errors(logged)
    lines_done, scenarios_done, started_at = 0, 0, time.monotonic()
    while lines_done < lines and scenarios_done < scenarios and time.monotonic() - started_at < seconds:
        steps = make_scenario(seed + scenarios_done, SIZE)
        sent_lines, problem = play(steps, coverage)
        if problem is None and logged:
            problem = Violation(f"an error was logged: {logged[0]}")
        if problem is not None:
            report(seed + scenarios_done, steps, problem)
            return 1
        lines_done += sent_lines
        scenarios_done += 1
    took_s = time.monotonic() - started_at
    print(f"server: {lines_done} lines in {scenarios_done} scenarios from seed {seed} on, in {took_s:.1f} s")
    for kind, count in sorted(coverage.items()):
        print(f"  {count:>9}  {kind}")
    missing = [kind for kind in EXPECTED if not coverage[kind]] if lines_done >= LONG else []
    if missing:
        print(f"never observed: {', '.join(missing)}")
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
