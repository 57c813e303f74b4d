"""What came of the faults: numbers, and the table of docs/concepts/verification.md."""

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
class Figures:
    """Of one scenario, in all its rounds."""

    name: str
    title: str
    faults: int = 0
    seconds: float = 0.0
    """How long the clients were at work."""
    away_s: list[float] = field(default_factory=list)
    """From each fault to the next lock that anybody was granted."""
    back_s: list[float] = field(default_factory=list)
    """The same, from when what had failed was there again, where Genie can't be there before."""
    answer_s: list[float] = field(default_factory=list)
    """From the fault until the next leader answered, asked every 2 ms on a connection that was there before."""
    increments: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: Figures) -> None:
        """One more round of the same."""
        self.faults += other.faults
        self.seconds += other.seconds
        self.away_s += other.away_s
        self.back_s += other.back_s
        self.answer_s += other.answer_s
        self.increments += other.increments
        self.counts += other.counts

    def summary(self) -> str:
        """One line."""
        parts = [f"{self.faults} faults in {self.seconds:.0f} s"]
        for word, found in (("away", self.away_s), ("back after", self.back_s), ("answers after", self.answer_s)):
            if found:
                parts.append(f"{word} {shown(found)}")
        parts.append(f"{self.increments:,} increments")
        parts += [f"{count:,} {what}" for what, count in sorted(self.counts.items())]
        return f"{self.name}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """Three digits or so, with a unit."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def shown(found: Sequence[float]) -> str:
    """The median and the worst."""
    return f"{duration(statistics.median(found))} ({duration(max(found))})" if found else ""


def table(all_: Iterable[Figures]) -> str:
    """A row for each scenario."""
    rows = [
        ["Fault", "times", "a server answers", "a lock is granted", "since Redis is back", "increments", "late writes"],
        ["---", "--:", "--:", "--:", "--:", "--:", "--:"],
    ]
    rows += [
        [
            found.title,
            f"{found.faults:,}",
            shown(found.answer_s),
            shown(found.away_s),
            shown(found.back_s),
            f"{found.increments:,}",
            f"{found.counts['refused']:,}",
        ]
        for found in all_
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"


def put(text: str, page: Path) -> None:
    """Write it between the marks of a page."""
    old = page.read_text(encoding="utf-8")
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for a table")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def write(all_: Iterable[Figures], file: Path) -> None:
    """Every number."""
    file.write_text(json.dumps([vars(found) | {"counts": dict(found.counts)} for found in all_]), encoding="utf-8")
