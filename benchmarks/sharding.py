"""The cost of distributing one namespace over several leaders: a simulation with real lock managers.

    python -m benchmarks.sharding [PART ...] [--seed N]

Prints the tables of docs/concepts/sharding.md. Nothing is measured: time is virtual and random numbers have a seed, so that
every run prints the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

from benchmarks.sharding_parts.arithmetic import gain, touched, wait_ms
from benchmarks.sharding_parts.cases import cases
from benchmarks.sharding_parts.deadlocks import Steps, steps
from benchmarks.sharding_parts.load import Load, Outcome, run
from benchmarks.sharding_parts.mixed import Mix, at, mixed
from benchmarks.sharding_parts.ways import WAYS
from benchmarks.sharding_parts.world import Costs

Row = Sequence[str]
Part = Callable[[int], Iterator[Row]]
"""Yields its heads, and then its rows, for a seed."""

RESOURCES = (1, 2, 3, 8)
SHARDS = 8


def reach(_: int) -> Iterator[Row]:
    """Shards touched, messages of a cycle, the wait where nothing is in the way, and the gain that the work allows."""
    costs = Costs()
    yield (
        "resources", "shards", "touched", "messages, ordered", "chained", "wait, ordered", "chained", "gain at most",
    )  # fmt: skip
    for shards in (4, 8, 16):
        for resources in RESOURCES:
            parts = touched(resources, shards)
            yield (
                f"{resources}", f"{shards}", f"{parts:.2f}", f"{4 * parts:.1f}", f"{1 + 3 * parts:.1f}",
                ms(wait_ms(parts, costs, chained=False)), ms(wait_ms(parts, costs, chained=True)),
                f"{gain(resources, shards, costs):.1f}",
            )  # fmt: skip


def capacity(seed: int) -> Iterator[Row]:
    """Cycles a second where nobody is in anybody's way: 600 clients, 8 shards; beside it the gain over one leader."""
    ways = [way for way in WAYS if way != "chained"]  # as much work as ordered
    yield ("resources", *ways)
    for resources in RESOURCES:
        load = Load(clients=600, resources=resources, jobs=6_000)
        rates = [_run(way, load, seed).cycles_per_s for way in ways]
        yield (f"{resources}", f"{rates[0]:,.0f}", *(f"{rate:,.0f} ({rate / rates[0]:.1f})" for rate in rates[1:]))


def hot(seed: int) -> Iterator[Row]:
    """64 clients, 1,000 keys, each lock is worked under for 1 ms: evenly chosen keys, and by Zipf's law; 8 shards."""
    yield ("keys", "resources", "way", "cycles/s", "wait p50", "wait p99", "held idle", "attempts")
    for skew in (0.0, 1.0):
        for resources in RESOURCES:
            for way in WAYS:
                if way == "try-lock" and skew and resources == max(RESOURCES):
                    continue  # takes longer than all other rows
                load = Load(resources=resources, jobs=2_000, keys=1_000, skew=skew, work_ms=1)
                seen = _run(way, load, seed)
                yield (
                    "Zipf" if skew else "uniform", f"{resources}", way, f"{seen.cycles_per_s:,.0f}", ms(seen.quantile(0.5)),
                    ms(seen.quantile(0.99)), ms(seen.idle_ms), f"{seen.attempts:.1f}",
                )  # fmt: skip


def large(seed: int) -> Iterator[Row]:
    """Small requests for one of 8 resources on 8 shards, and a few large ones for all of them; some small are urgent."""
    yield (
        "way", "small p50", "small p99", "urgent p50", "urgent p99", "large p50", "large, longest",
        "overtaken by", "attempts", "in time",
    )  # fmt: skip
    for way in WAYS:
        seen = mixed(way, Mix(), seed=seed)
        yield (
            way, *(ms(at(waits, part)) for waits in (seen.small, seen.urgent) for part in (0.5, 0.99)),
            ms(at(seen.large, 0.5)), ms(seen.large[-1]), f"{seen.overtaken:,.1f}", f"{seen.attempts:,.1f}",
            f"{seen.in_time} of {len(seen.large)}",
        )  # fmt: skip


def deadlocks(seed: int) -> Iterator[Row]:
    """Transactions of three steps over 8 shards, whose waits are gathered every so often."""
    yield (
        "transactions", "leaders", "collected every", "transactions/s", "aborted on arrival", "reordered", "aborted by detector",
        "of these avoidable", "of these phantom", "timed out", "blocked p50", "blocked p99",
    )  # fmt: skip
    plain, early = Steps(), Steps(queue_timeout_ms=100, early=0.5, keys=300)
    apart = Steps(queue_timeout_ms=100, early=0.5, keys=300, apart=True)
    for name, load, periods in (
        ("strict 2PL", plain, (10.0, 100.0, 1_000.0, None)),
        ("early release, 100 ms timeout", early, (10.0, 50.0)),
        ("the same, staggered views", apart, (10.0, 50.0)),
    ):
        for shards, period_ms in ((1, None), *((SHARDS, each) for each in periods)):
            if shards == 1 and load.apart:
                continue  # there is but one view
            seen = steps(load, shards, period_ms, seed=seed)
            stuck = seen.stuck_ms if shards > 1 else []
            yield (
                name, f"{shards}", "never" if period_ms is None else f"{period_ms:,.0f} ms",
                f"{seen.ended / seen.duration_ms * 1_000:,.0f}", f"{seen.at_once}", f"{seen.rearrangements}",
                f"{seen.gathered}", f"{seen.needless}", f"{seen.phantom}", f"{seen.timed_out}",
                *(ms(at(stuck, part)) if stuck else "-" for part in (0.5, 0.99)),
            )  # fmt: skip


def examples(_: int) -> Iterator[Row]:
    """Cases that one leader solves and two shards do not."""
    yield ("case", "one leader", "two shards")
    for what, case in cases():
        yield (what, case.leader, case.shards)


PARTS: Sequence[Part] = (reach, capacity, hot, large, deadlocks, examples)


def ms(time_ms: float) -> str:
    """Format a time with three significant digits."""
    return f"{time_ms:.2f} ms" if time_ms < 10 else f"{time_ms:.1f} ms" if time_ms < 100 else f"{time_ms:,.0f} ms"  # noqa: PLR2004


def _run(way: str, load: Load, seed: int) -> Outcome:
    return run(way, 1 if way == "one leader" else SHARDS, load, seed=seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the chosen parts as Markdown tables."""
    parts = {part.__name__: part for part in PARTS}
    parser = argparse.ArgumentParser("python -m benchmarks.sharding", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", metavar="PART", nargs="*", help=f"one of {', '.join(parts)}; all without any")
    parser.add_argument(
        "--seed", type=int, default=1, help="what chance begins with (default: 1, as in docs/concepts/sharding.md)"
    )
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in parts:
            parser.error(f"there is no part {name!r}; there are {', '.join(parts)}")
    for name in options.parts or parts:
        rows = parts[name](options.seed)
        heads = next(rows)
        print(f"{name}: {parts[name].__doc__}\n", flush=True)
        print(_line(heads))
        print(_line(["---" if number == 0 else "--:" for number in range(len(heads))]))
        for row in rows:
            print(_line(row), flush=True)
        print()
    return 0


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
