"""Rows of measurements and their goals; fair comparison of two alternatives."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")

WIDTH = 78


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table. Smaller values are better, unless `at_least`. Without a goal it is
    informative.
    """

    what: str
    value: float
    unit: str = ""
    goal: float | None = None
    at_least: bool = False
    digits: int = 2
    note: str = ""

    @property
    def met(self) -> bool | None:
        """True if the goal is met; None without a goal."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def line(self) -> str:
        """Return the row as text."""
        value = f"{self.value:,.{self.digits}f}"
        goal, met = "", ""
        if self.goal is not None:
            goal = f"{'>=' if self.at_least else '<='} {self.goal:,.{self.digits}f}"
            met = "met" if self.met else "NOT MET"
        text = f"  {self.what:<{WIDTH}} {value:>9} {self.unit:<5} {goal:>10}  {met}".rstrip()
        return f"{text}\n      {self.note}" if self.note else text

    def plain(self, part: str) -> dict[str, Any]:
        """Return the row for `--json`."""
        return {"part": part, **asdict(self), "met": self.met}


class Missing(Exception):
    """A part can't be measured on this machine: its goals count as not met."""


def progress(text: str) -> None:
    """Print progress on stderr, if that is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K  … {text}" if text else "\r\033[K", end="", file=sys.stderr, flush=True)


@contextmanager
def building() -> Iterator[None]:
    """Disable the garbage collector while something large is built, and freeze the result, as the
    server does.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def in_turns(rounds: int, *runs: Callable[[], Result]) -> list[list[Result]]:
    """Alternate the runs, so that noise of the machine affects all of them; every other round is in
    reverse order.

    Returns the results of each run.
    """
    results: list[list[Result]] = [[] for _ in runs]
    for run in runs:
        run()  # the first time is never like the others
    for number in range(rounds):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for place in order:
            results[place].append(runs[place]())
    return results


def ratio(mine: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the ratios within each round."""
    return statistics.median(one / other for one, other in zip(mine, base, strict=True))


def medians(unit: str, *results: Sequence[float]) -> str:
    """Return the values of each run, in the order of the runs, for a note."""
    return " and ".join(f"{statistics.median(result):,.2f}" for result in results) + f" {unit}"
