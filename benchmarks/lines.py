"""What a handover costs as the line grows, and a cycle as the table grows: ratios within one process.

Run `make bench`. Each row is the median of several rounds that take turns, so that a noisy machine is noisy to all.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

from genie.core import LockManager, Release, Request

ROUNDS = 7
STEPS = 4_000


def line_of(waiters: int, *, shared: bool = False) -> Callable[[], float]:
    """Hand one resource over again and again, with so many in its line. Microseconds each."""
    manager = LockManager()
    names: tuple[str, ...] = ("A",)

    def ask() -> Request:
        request = Request(shared=names, exclusive=("only",)) if shared else Request(exclusive=names)
        manager.step(request, 0)
        return request

    holder = ask()
    for _ in range(waiters):
        ask()

    def handovers() -> float:
        nonlocal holder
        began = time.perf_counter()
        for _ in range(STEPS):
            events = manager.step(Release(holder.id), 0)
            holder = events[1].request  # type: ignore[union-attr]
            ask()
        return (time.perf_counter() - began) / STEPS * 1e6

    return handovers


def table_of(held: int) -> Callable[[], float]:
    """Lock and release a free resource, with so many others held. Microseconds each."""
    manager = LockManager()
    for number in range(held):
        manager.step(Request(exclusive=(f"held/{number}",)), number / 100)
    now = held / 100

    def cycles() -> float:
        began = time.perf_counter()
        for number in range(STEPS):
            request = Request(exclusive=(f"free/{number}",))
            manager.step(request, now)
            manager.step(Release(request.id), now)
        return (time.perf_counter() - began) / STEPS * 1e6

    return cycles


def compare(title: str, unit: str, runs: dict[int, Callable[[], float]]) -> None:
    """Print a row for each size: its median, and the median of its ratios to the first in the same round."""
    results: dict[int, list[float]] = {size: [] for size in runs}
    for _ in range(ROUNDS):
        for size, run in runs.items():
            results[size].append(run())
    first = next(iter(results.values()))
    print(title)
    for size, times in results.items():
        ratio = statistics.median(mine / base for mine, base in zip(times, first, strict=True))
        print(f"  {size:>9,} {unit:8}  {statistics.median(times):7.2f} us   ratio {ratio:5.2f}")


def main() -> None:
    """Print the tables."""
    gc.disable()
    compare("a handover in a line of", "waiters", {n: line_of(n) for n in (10, 1_000, 10_000, 100_000)})
    compare(
        "a handover among sharers who wait for something else",
        "waiters",
        {n: line_of(n, shared=True) for n in (10, 10_000)},
    )
    compare("a cycle beside", "held", {n: table_of(n) for n in (1_000, 100_000, 1_000_000)})


if __name__ == "__main__":
    main()
