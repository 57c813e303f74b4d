"""How cost grows: with locks, with waiters, with connections. Each goal is a ratio within one run, or a bound.

    python benchmarks/scale.py [PART ...] [--json]

The table says what was measured, the goal, and whether it is met. The exit status is 1 where one is not, or where a
part can't be measured here. Ratios are medians of rounds that take turns, so that a noisy machine is noisy to both:
they bear noise. The rows of timeouts, restart and memory are bounds, not ratios: times and bytes as they are. They want
a quiet machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from scale_parts.chains import chains
from scale_parts.core import crowd, cycle, handoff, three
from scale_parts.idle import idle
from scale_parts.memory import memory
from scale_parts.report import Missing, Row, progress
from scale_parts.restart import restart
from scale_parts.timeouts import timeouts

PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    part.__name__: part for part in (cycle, handoff, three, chains, crowd, timeouts, memory, restart, idle)
}


def main() -> int:
    """Measure the parts that were asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description="How cost grows: ratios and bounds, each with its goal.",
        epilog="\n".join(f"{name:9} {_says(part)}" for name, part in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", metavar="PART", nargs="*", help=f"one of {', '.join(PARTS)}; all without any")
    parser.add_argument("--json", action="store_true", help="one JSON list of the rows in place of the table")
    options = parser.parse_args()
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; there are {', '.join(PARTS)}")
    for each in STOPS:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as behind `&` in a script
            signal.signal(each, _stop)
    rows: list[dict[str, Any]] = []
    for name in options.parts or PARTS:
        rows += _measure(name, quiet=options.json)
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        missed = sum(row["met"] is False for row in rows)
        print(f"{sum(row['met'] is True for row in rows)} goals are met, {missed} are not")
    return 0 if all(row["met"] is not False for row in rows) else 1


def _measure(name: str, *, quiet: bool) -> list[dict[str, Any]]:
    """Measure one part, and print its rows as they come."""
    part, rows = PARTS[name], list[dict[str, Any]]()
    began = time.monotonic()
    if not quiet:
        print(f"{name}: {_says(part)}", flush=True)
    try:
        for row in part():
            rows.append(row.plain(name))
            progress("")
            if not quiet:
                print(row.line(), flush=True)
    except Missing as missing:
        progress("")
        rows.append({"part": name, "what": str(missing), "met": False})
        if not quiet:
            print(f"  NOT MEASURED: {missing}")
    gc.unfreeze()  # what one part has built is not there for the next
    gc.collect()
    if not quiet:
        print(f"  ({time.monotonic() - began:.0f} s)\n", flush=True)
    return rows


def _says(part: Callable[[], Iterator[Row]]) -> str:
    return (part.__doc__ or "").partition("\n")[0]


STOPS = (signal.SIGINT, signal.SIGTERM)


def _stop(number: int, _: object) -> NoReturn:
    """End by way of every `finally`: servers were started. A second signal does not disturb that."""
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    progress("")
    print("stopped", file=sys.stderr)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
