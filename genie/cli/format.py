"""Text output: aligned tables, readable durations, and names with control characters escaped."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GAP = "  "

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR


def remaining(row: Mapping[str, Any]) -> str:
    """Return the time until a request of `inspect` times out; `never` if it waits without a limit."""
    return duration(row["expiresIn"]) if "expiresIn" in row else "never"


def duration(ms: float) -> str:
    """Format a duration with at most two units; at most 11 characters for up to 999 days."""
    ms = max(0.0, ms)
    if ms < SECOND - 0.5:
        return f"{ms:.0f} ms"
    if ms < MINUTE - SECOND / 20:
        return f"{ms / SECOND:.1f} s"
    for unit, name, part, part_name in ((MINUTE, "min", SECOND, "s"), (HOUR, "h", MINUTE, "min")):
        parts = round(ms / part)
        per_unit = unit // part
        if parts < 60 * per_unit and (unit is MINUTE or parts < 24 * per_unit):
            return f"{parts // per_unit} {name} {parts % per_unit} {part_name}"
    hours = round(ms / HOUR)
    return f"{hours // 24} d {hours % 24} h"


def printable(text: str) -> str:
    """Escape characters that would move the cursor or change the writing direction."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key by which numbers in names count by value: acct/2 before acct/12."""
    return [
        (0, int(part), part) if part.isascii() and part.isdecimal() else (1, 0, part)
        for part in re.split("([0-9]+)", text)
        if part
    ]


def width(text: str) -> int:
    """Return the number of terminal columns of a text."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def clip(text: str, columns: int) -> str:
    """Truncate a text to a number of columns."""
    text = printable(text)
    if width(text) <= columns:
        return text
    while width(text) > columns - 1:
        text = text[:-1]
    return text + "…"


def fold(text: str, columns: int) -> list[str]:
    """Break a text into lines of at most `columns` columns."""
    lines = [""]
    for char in printable(text):
        if lines[-1] and width(lines[-1] + char) > columns:
            lines.append("")
        lines[-1] += char
    return lines


def some(names: Sequence[str], total: int, columns: int) -> str:
    """Join as many names as fit, at least one, and add the number of the others."""
    shown: list[str] = []
    for name in names:
        left = total - len(shown) - 1
        more = f" +{left}" if left else ""
        used = width(" ".join([*shown, printable(name)])) + len(more)
        if shown and used > columns:
            break
        shown.append(printable(name) if used <= columns else clip(name, columns - len(more)))
    left = total - len(shown)
    return " ".join(shown) + (f" +{left}" if left else "")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table; the columns in `right` are right-aligned."""
    widths = [max(map(width, column)) for column in zip(headers, *rows, strict=True)]
    lines = []
    for row in (headers, *rows):
        cells = [
            " " * (room - width(cell)) + cell if index in right else cell + " " * (room - width(cell))
            for index, (cell, room) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(GAP.join(cells).rstrip())
    return lines


# -- Tables of a given width: columns shrink, then the least important are dropped --------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `fitted`. If the table is too wide, the column of the highest `rank` is dropped first, rank 0 never.

    A text column can shrink to `least` columns; without `least` it keeps its width. Other columns are
    dropped before it shrinks below `preferred`, and empty columns before any column shrinks.
    """

    header: str
    rank: int
    least: int = 0
    right: bool = False
    preferred: int = 0


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int) -> list[str]:
    """Return the header and the rows as lines of at most `room` columns, escaped."""
    cells = [[printable(cell) for cell in row] for row in rows]
    natural = [
        max(width(text) for text in (column.header, *(row[i] for row in cells))) for i, column in enumerate(columns)
    ]
    least = [
        min(size, max(column.least, width(column.header))) if column.least else size
        for column, size in zip(columns, natural, strict=True)
    ]
    preferred = [
        max(size, min(whole, column.preferred)) for column, size, whole in zip(columns, least, natural, strict=True)
    ]
    kept = list(range(len(columns)))
    if _needed(natural, kept) > room:
        kept = [i for i in kept if not columns[i].rank or any(row[i] for row in cells)]
    while _needed(preferred, kept) > room and any(columns[i].rank for i in kept):
        kept.remove(max(kept, key=lambda i: columns[i].rank))
    widths = _grown(columns, kept, least, preferred, room)
    widths = _grown(columns, kept, widths, natural, room)
    lines = table(
        [columns[i].header for i in kept],
        [[clip(row[i], widths[i]) for i in kept] for row in cells],
        [place for place, i in enumerate(kept) if columns[i].right],
    )
    return [clip(line, room) for line in lines]


def _grown(
    columns: Sequence[Column], kept: Sequence[int], widths: Sequence[int], wanted: Sequence[int], room: int
) -> list[int]:
    """Distribute the spare room up to the wanted widths: lower ranks first, equal ranks evenly."""
    grown = list(widths)
    spare = room - _needed(grown, kept)
    for rank in sorted({columns[i].rank for i in kept}):
        growing = [i for i in kept if columns[i].rank == rank and grown[i] < wanted[i]]
        while spare > 0 and growing:
            for i in growing[:spare]:
                grown[i] += 1
                spare -= 1
            growing = [i for i in growing if grown[i] < wanted[i]]
    return grown


def wrapped(items: Sequence[str], room: int, gap: str = GAP) -> list[str]:
    """Wrap items into lines of at most `room` columns."""
    lines: list[str] = []
    for item in map(printable, items):
        if lines and width(lines[-1]) + len(gap) + width(item) <= room:
            lines[-1] += gap + item
        else:
            lines.append(clip(item, room))
    return lines


def _needed(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[i] for i in kept) + len(GAP) * (len(kept) - 1)
