"""Worlds of lines for a whole server, one after the other: `python -m fuzz.server --lines 100000` (with tests/ on the path).

A seed decides a world. One that goes wrong is told with its seed, and with the fewest of its steps that still go wrong.
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
from fuzz.harness import Stage
from fuzz.shared_model import Wrong
from genie.core import Reason
from genie.errors import Code
from genie.protocol.diagnostics import FIELD_CHECKS
from genie.testing.simulation.loop import SimLoop

SIZE = 250
"""Lines in a world."""

LONG = 100_000
"""Lines from which on everything must have been seen."""

UNSAID = {Code.UNAUTHORIZED}
"""Codes that a server without a token never says."""

EXPECTED = (
    *(f"say {command}" for command in FIELD_CHECKS),
    *("say wrong", "say http", "say too long", "begun", "resumed", "repeated", "quiet"),
    *("say release by ref", "a new server", "the store was away"),
    *(f"told released {reason}" for reason in Reason),
    *(f"told error {code}" for code in Code if code not in UNSAID),
    *(
        f"told {word}"
        for word in ("queued", "locked", "extended", "pong", "inspected", "welcome", "watching", "unwatched", "bye")
    ),
    *(f"told event {state}" for state in ("locked", "unlocked", "lagged")),
    *(f"closed: {why}" for why in ("half-closed", "http", "too long", "full", "cut off", "stolen", "bye")),
    "lost the lead",
)
"""What a long run must have seen."""


def play(steps: Sequence[Step], seen: Counter[str]) -> tuple[int, BaseException | None]:
    """Live a world. Returns how many lines were said, and what went wrong."""
    loop = SimLoop()
    problem: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: problem.append(context.get("exception") or Wrong(context["message"])))
    said = [0]

    async def live() -> None:
        stage = Stage(seen)
        for name, *arguments in steps:
            await getattr(stage, name)(*arguments)
            said[0] = stage.lines
            if stage.problem is not None:
                raise stage.problem

    try:
        loop.run_until_complete(live())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        problem.insert(0, error)
    finally:
        loop.finish()
    return said[0], problem[0] if problem else None


def smaller(steps: list[Step], kind: str) -> list[Step]:
    """As few of the steps as still go wrong in the same way."""
    chunk = len(steps) // 2
    while chunk:
        place = 1  # the first begins the world
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
    """What went wrong, and how to see it again."""
    print(f"\nseed {seed} goes wrong: {problem!r}")
    fewest = smaller(steps, _kind(problem))
    problem = play(fewest, Counter())[1] or problem
    print(f"so do {len(fewest)} of its {len(steps)} steps:")
    for step in fewest:
        print(f"  {step}")
    traceback.print_exception(problem)
    print(f"again: PYTHONPATH=tests python -m fuzz.server --seed {seed} --worlds 1", flush=True)


def quiet(problems: list[dict[str, Any]]) -> None:
    """Let nothing be logged but errors, and those be remembered."""

    def note(_logger: object, _name: str, event: dict[str, Any]) -> dict[str, Any]:
        problems.append(event)
        raise structlog.DropEvent

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR), processors=[note])


def run(seed: int, lines: int, seconds: float, worlds: int) -> int:
    """World after world. Returns the exit status."""
    seen: Counter[str] = Counter()
    logged: list[dict[str, Any]] = []
    quiet(logged)
    done, lived, began = 0, 0, time.monotonic()
    while done < lines and lived < worlds and time.monotonic() - began < seconds:
        steps = plan(seed + lived, SIZE)
        said, problem = play(steps, seen)
        if problem is None and logged:
            problem = Wrong(f"an error was logged: {logged[0]}")
        if problem is not None:
            tell(seed + lived, steps, problem)
            return 1
        done += said
        lived += 1
    print(f"server: {done} lines in {lived} worlds from seed {seed} on, in {time.monotonic() - began:.1f} s")
    for word, count in sorted(seen.items()):
        print(f"  {count:>9}  {word}")
    missing = [word for word in EXPECTED if not seen[word]] if done >= LONG else []
    if missing:
        print(f"never seen: {', '.join(missing)}")
    return 1 if missing else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1 << 62, help="lines to say (default: no bound)")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long")
    parser.add_argument("--worlds", type=int, default=1 << 62, help="end after so many worlds")
    parser.add_argument("--seed", type=int, default=0, help="of the first world; 0: another each time")
    options = parser.parse_args()
    seed = options.seed or Random().randrange(1, 1 << 31)
    print(f"server: seed {seed}", flush=True)
    sys.exit(run(seed, options.lines, options.seconds, options.worlds))


if __name__ == "__main__":
    main()
