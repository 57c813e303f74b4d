"""Tables for people: aligned columns, readable durations, nothing that could confuse a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

GAP = "  "

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR


def remaining(row: Mapping[str, Any]) -> str:
    """How long until a request of `inspect` times out; `never` where it waits without a limit."""
    return duration(row["expiresIn"]) if "expiresIn" in row else "never"


def duration(ms: float) -> str:
    """How long something lasted or will last: two units at most, 11 characters at most for up to 999 days."""
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
    """A name as it can be shown: what would move the cursor or turn the direction of writing is escaped."""
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
    """Columns that a text takes on a terminal."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def clip(text: str, columns: int) -> str:
    """The text, cut to so many columns."""
    text = printable(text)
    if width(text) <= columns:
        return text
    while width(text) > columns - 1:
        text = text[:-1]
    return text + "…"


def fold(text: str, columns: int) -> list[str]:
    """The whole text, in lines of so many columns at most."""
    lines = [""]
    for char in printable(text):
        if lines[-1] and width(lines[-1] + char) > columns:
            lines.append("")
        lines[-1] += char
    return lines


def some(names: Sequence[str], total: int, columns: int) -> str:
    """As many names as there is room for, at least one, and how many more there are."""
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
    """Lines with every column as wide as its widest cell; the columns in `right` are aligned to the right."""
    widths = [max(map(width, column)) for column in zip(headers, *rows, strict=True)]
    lines = []
    for row in (headers, *rows):
        cells = [
            " " * (room - width(cell)) + cell if index in right else cell + " " * (room - width(cell))
            for index, (cell, room) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(GAP.join(cells).rstrip())
    return lines
