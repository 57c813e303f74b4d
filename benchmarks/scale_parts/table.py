"""Common main function of the benchmark scripts: measures the chosen parts, and prints their rows."""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from scale_parts.report import Missing, Row, progress

Part = Callable[[], Iterator[Row]]
"""Yields its rows when they are measured. The first line of its docstring is its title."""


def run(description: str, *every: Part) -> int:
    """Measure the chosen parts. Returns the exit status."""
    parts = {part.__name__: part for part in every}
    parser = argparse.ArgumentParser(
        description=description,
        epilog="\n".join(f"{name:9} {_says(part)}" for name, part in parts.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", metavar="PART", nargs="*", help=f"one of {', '.join(parts)}; all without any")
    parser.add_argument("--json", action="store_true", help="one JSON list of the rows in place of the table")
    options = parser.parse_args()
    for name in options.parts:
        if name not in parts:
            parser.error(f"there is no part {name!r}; there are {', '.join(parts)}")
    for each in STOPS:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as behind `&` in a script
            signal.signal(each, _stop)
    rows: list[dict[str, Any]] = []
    for name in options.parts or parts:
        rows += _measure(parts[name], quiet=options.json)
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        missed = sum(row["met"] is False for row in rows)
        print(f"{sum(row['met'] is True for row in rows)} goals are met, {missed} are not")
    return 0 if all(row["met"] is not False for row in rows) else 1


def _measure(part: Part, *, quiet: bool) -> list[dict[str, Any]]:
    """Measure one part, and print its rows when they are measured."""
    name, rows = part.__name__, list[dict[str, Any]]()
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


def _says(part: Part) -> str:
    return (part.__doc__ or "").partition("\n")[0]


STOPS = (signal.SIGINT, signal.SIGTERM)


def _stop(number: int, _: object) -> NoReturn:
    """Exit through all `finally` blocks, which terminate the servers. A second signal is ignored."""
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    progress("")
    print("stopped", file=sys.stderr)
    raise SystemExit(128 + number)
