"""Measurements of the scenarios, and the table in docs/concepts/verification.md."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BEGIN = "<!-- begin: written by `make soak-faults` -->"
END = "<!-- end -->"


@dataclass
class Results:
    """Measurements of one scenario, in all its rounds."""

    name: str
    title: str
    faults: int = 0
    seconds: float = 0.0
    """How long the clients ran."""
    grant_delays_s: list[float] = field(default_factory=list)
    """The time from each fault to the next grant of a lock."""
    recovery_delays_s: list[float] = field(default_factory=list)
    """The time from the recovery of Redis to the next grant, for faults of Redis."""
    reply_delays_s: list[float] = field(default_factory=list)
    """The time from each fault to the first reply of the next leader, which is queried every 2 ms."""
    increments: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: Results) -> None:
        """Add the measurements of another round."""
        self.faults += other.faults
        self.seconds += other.seconds
        self.grant_delays_s += other.grant_delays_s
        self.recovery_delays_s += other.recovery_delays_s
        self.reply_delays_s += other.reply_delays_s
        self.increments += other.increments
        self.counts += other.counts

    def summary(self) -> str:
        """Return the measurements as one line."""
        parts = [f"{self.faults} faults in {self.seconds:.0f} s"]
        for label, delays_s in (
            ("grant after", self.grant_delays_s),
            ("recovery after", self.recovery_delays_s),
            ("reply after", self.reply_delays_s),
        ):
            if delays_s:
                parts.append(f"{label} {format_delays(delays_s)}")
        parts.append(f"{self.increments:,} increments")
        parts += [f"{count:,} {what}" for what, count in sorted(self.counts.items())]
        return f"{self.name}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """Format a duration in ms or s."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def format_delays(delays_s: Sequence[float]) -> str:
    """Format the median and, in parentheses, the maximum."""
    return f"{duration(statistics.median(delays_s))} ({duration(max(delays_s))})" if delays_s else ""


def table(all_results: Iterable[Results]) -> str:
    """Return the Markdown table, with a row for each scenario."""
    rows = [
        ["Fault", "times", "a server answers", "a lock is granted", "since Redis is back", "increments", "late writes"],
        ["---", "--:", "--:", "--:", "--:", "--:", "--:"],
    ]
    rows += [
        [
            results.title,
            f"{results.faults:,}",
            format_delays(results.reply_delays_s),
            format_delays(results.grant_delays_s),
            format_delays(results.recovery_delays_s),
            f"{results.increments:,}",
            f"{results.counts['rejected']:,}",
        ]
        for results in all_results
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"


def replace_table(text: str, page: Path) -> None:
    """Replace the text between the markers of a page."""
    old = page.read_text(encoding="utf-8")
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the markers of the table")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def write_json(all_results: Iterable[Results], file: Path) -> None:
    """Write all measurements as JSON."""
    file.write_text(
        json.dumps([vars(results) | {"counts": dict(results.counts)} for results in all_results]), encoding="utf-8"
    )
