"""Tables that fit: columns give way, and the least important go, until the rest has room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genie.cli.tables import GAP, clip, printable, table, width


@dataclass(frozen=True, slots=True)
class Column:
    """One column: where room is short, that of the highest `rank` goes first, and one of rank 0 never.

    A text gives way, down to its `least` columns; without any it doesn't. Other columns go before it has less than
    `preferred`, and those whose cells are all empty before any text gives way. Numbers are aligned to the `right`.
    """

    header: str
    rank: int
    least: int = 0
    right: bool = False
    preferred: int = 0


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int) -> list[str]:
    """The header and the rows as lines of at most `room` columns, safe to be shown."""
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
    """Widths that share what room is left: up to what is wanted, a lower rank first, equal ranks evenly."""
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
    """The items, or words, beside each other, in as many lines as it takes."""
    lines: list[str] = []
    for item in map(printable, items):
        if lines and width(lines[-1]) + len(gap) + width(item) <= room:
            lines[-1] += gap + item
        else:
            lines.append(clip(item, room))
    return lines


def _needed(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[i] for i in kept) + len(GAP) * (len(kept) - 1)
