"""What `genie bench` shows: a line while it runs, a table for people, rows for programs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from genie.bench.histogram import Histogram
from genie.bench.load import Plan, Result
from genie.bench.workloads import WORKLOADS
from genie.cli.tables import table
from genie.client.reach import spell

BUSY_PERCENT = 90
"""As it is shown. From here on the client itself is taken for what limits the result."""
QUANTILES = {"p50": 500, "p99": 990, "p99_9": 999}
"""Those that are told, by their names in JSON, in thousandths."""
HEADERS = ("FROM REQUEST TO", "P50", "P99", "P99.9", "MAX")
NUMBERS = range(1, len(HEADERS))

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
LEAST_MS_NS = 999_500
"""Shorter times are shown in µs. This one, rounded to them, would have four digits."""
CLEAR_LINE = "\r\x1b[K"


def show_progress(workload: str, past_s: float | None, cycles: int) -> None:
    """Write over the line on stderr, which must be a terminal. `past_s` None: it warms up."""
    how_far = "warming up" if past_s is None else f"{past_s:.1f} s, {cycles / past_s:,.0f} cycles/s"
    sys.stderr.write(f"{CLEAR_LINE}{workload}: {how_far}")
    sys.stderr.flush()


def end_progress() -> None:
    """Take the line away."""
    sys.stderr.write(CLEAR_LINE)
    sys.stderr.flush()


def headline(plan: Plan) -> str:
    """What is asked, and how."""
    each = "1 request" if plan.depth == 1 else f"{plan.depth:,} requests"
    return f"{spell(plan.address)}, connections: {plan.connections:,}, in flight on each: {each}"


def errors(result: Result) -> str:
    """What went wrong, and how often."""
    return ", ".join(f"{name} {count:,}" for name, count in sorted(result.tally.errors.items())) or "none"


def lines(result: Result, plan: Plan) -> list[str]:
    """A workload's result for people."""
    tally = result.tally
    busy = round(result.client_cpu_percent)
    rate = f"{result.cycles_per_s:,.0f} cycles/s ({result.cycles:,} in {result.measured_s:.1f} s)"
    fewer = ""
    if result.connections < plan.connections:
        fewer = f", connections: {result.connections:,} of {plan.connections:,}"
    limit = ", so the server may do more" if busy >= BUSY_PERCENT else ""
    found = [
        f"{result.workload}: {WORKLOADS[result.workload].title(plan.shape)}",
        f"{rate}{fewer}, errors: {errors(result)}, client CPU: {busy} %{limit}",
    ]
    rows = [
        [name, *(_time(ns) for ns in (*_quantiles(histogram), histogram.greatest_ns))]
        for name, histogram in (("locked", tally.to_locked), ("released", tally.to_released))
        if histogram.count
    ]
    if rows:
        found += table(HEADERS, rows, right=NUMBERS)
    return [found[0], *("  " + line for line in found[1:])]


def document(plan: Plan, results: list[Result], *, interrupted: bool) -> dict[str, Any]:
    """Everything for programs; units are last in the names."""
    return {
        "address": spell(plan.address),
        "settings": {
            "connections": plan.connections,
            "depth": plan.depth,
            "measure_s": plan.measure_s,
            "warm_up_s": plan.warm_up_s,
            **asdict(plan.shape),
        },
        "interrupted": interrupted,
        "workloads": [_row(result) for result in results],
    }


def _row(result: Result) -> dict[str, Any]:
    return {
        "workload": result.workload,
        "connections": result.connections,
        "measured_s": round(result.measured_s, 6),
        "cycles": result.cycles,
        "cycles_per_s": round(result.cycles_per_s, 1),
        "client_cpu_percent": round(result.client_cpu_percent, 1),
        "to_locked": _times(result.tally.to_locked),
        "to_released": _times(result.tally.to_released),
        "errors": dict(result.tally.errors),
    }


def _times(histogram: Histogram) -> dict[str, float | None]:
    found = {f"{name}_us": ns for name, ns in zip(QUANTILES, _quantiles(histogram), strict=True)}
    found["max_us"] = histogram.greatest_ns if histogram.count else None
    return {name: None if ns is None else round(ns / NS_PER_US, 1) for name, ns in found.items()}


def _quantiles(histogram: Histogram) -> list[int | None]:
    return [histogram.quantile_ns(per_mille) for per_mille in QUANTILES.values()]


def _time(ns: int | None) -> str:
    if ns is None:
        return ""
    return f"{ns / NS_PER_US:.0f} µs" if ns < LEAST_MS_NS else f"{ns / NS_PER_MS:.2f} ms"
