"""A report as Markdown, and its insertion into a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.peers.figures import Summary
from benchmarks.peers.measure import SHAPES
from benchmarks.peers.report import Report

BEGIN = "<!-- begin: written by `python -m benchmarks.peers` -->"
END = "<!-- end -->"

DISTURBING_SHARE = 0.2
"""If other programs use more than this share of a processor, the rates say little."""
DISTURBED = (
    "**Other programs disturbed this measurement.** The rates are too low, and their differences are due to chance: "
    "compare the server CPU of a cycle, and then p50."
)

Columns = Mapping[str, Callable[[Summary], str]]


def duration(us: float) -> str:
    """Format a duration with about three digits and a unit."""
    if us < 9.95:  # noqa: PLR2004
        return f"{us:.1f} µs"
    if us < 999.5:  # noqa: PLR2004
        return f"{us:.0f} µs"
    return f"{us / 1_000:.2f} ms" if us < 10_000 else f"{us / 1_000:,.0f} ms"  # noqa: PLR2004


def percent(share: float) -> str:
    """Format a share as a percentage; only 0 is shown as 0 %."""
    return "< 1 %" if 0 < share < 0.005 else f"{share:.0%}".replace("%", " %")  # noqa: PLR2004


def rate(summary: Summary) -> str:
    """Format cycles a second, as a lower bound if the load was the limit."""
    return f"{'≥ ' if summary.load_bound else ''}{summary.rate:,.0f}"


COMMON: Columns = {
    "cycles/s": rate,
    "rounds, from to": lambda summary: f"{summary.rate_least:,.0f} to {summary.rate_most:,.0f}",
    "p50": lambda summary: duration(summary.p50_us),
    "p99": lambda summary: duration(summary.p99_us),
    "server CPU a cycle": lambda summary: duration(summary.server_us),
    "server busy": lambda summary: percent(summary.server_share),
    "load busy": lambda summary: percent(summary.load_share),
    "errors": lambda summary: f"{summary.errors:,}",
}
QUEUE: Columns = {
    "handed over": lambda summary: percent(summary.handed_over),
    "least to most served": lambda summary: percent(summary.evenness),
}


def table(columns: Columns, rows: Mapping[str, Summary]) -> str:
    """Return a table with a row for each peer."""
    lines = [["", *columns], ["---", *["--:"] * len(columns)]]
    lines += [[name, *(show(summary) for show in columns.values())] for name, summary in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markdown(report: Report) -> str:
    """Return the whole report as Markdown."""
    times = "once" if report.rounds == 1 else f"{report.rounds} times"
    parts = [
        (
            f"Measured on {report.date} on {report.machine}; {report.pinning}"
            f"{f'; the data of the servers on {report.filesystem}' if report.filesystem else ''}. "
            f"Each peer ran {times}, in turns with the others. Each time the {len(SHAPES)} loads followed each other on "
            f"the same servers, each for {report.seconds:g} s, after a warm-up of {report.warmup:g} s that is not counted. "
            f"Meanwhile the machine did other work for {percent(report.others)} of one processor (median)."
        ),
        *([DISTURBED] if report.others >= DISTURBING_SHARE else []),
        f"Versions: {', '.join(report.versions)}.",
    ]
    for shape in SHAPES:
        if rows := report.summaries(shape.slug):
            columns = {**COMMON, **QUEUE} if shape.hot else COMMON
            parts += [f"### {shape.title}", table(columns, rows)]
    if report.skipped:
        parts += [
            "Not measured, or not in every round:",
            "\n".join(f"- {name}: {reason}" for name, reason in report.skipped.items()),
        ]
    return "\n\n".join(parts) + "\n"


def put(text: str, page: Path) -> None:
    """Write the report between the marks of a page, if it has them; else as the whole page."""
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(between(old, text), encoding="utf-8")


def between(old: str, text: str) -> str:
    """Return a page with a text between its marks."""
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return text
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def errors(report: Report) -> Sequence[str]:
    """Return a line for each kind of error of the measurement."""
    return [
        f"{name}, {shape.title}: {summary.errors} errors"
        for shape in SHAPES
        for name, summary in report.summaries(shape.slug).items()
        if summary.errors
    ]
