"""Text output: aligned tables, readable durations, and names with control characters escaped."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from genie.lock_modes import Mode
from genie.text import printable

GAP = "  "

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR


def remaining(row: Mapping[str, Any]) -> str:
    """Return the time until a request times out; `never` if it waits without a limit. `row` is a row of `inspect`."""
    return duration(row["expiresIn"]) if "expiresIn" in row else "never"


def duration(ms: float) -> str:
    """Format a duration with at most two units, e.g. `250 ms`, `1.5 s`, `3 min 20 s`, `2 d 4 h`.

    Up to 999 days the text has at most 11 characters. Negative durations are formatted as 0.
    """
    ms = max(0.0, ms)
    # The limits leave out durations that would be rounded up to the next unit, e.g. to `1000 ms` or `60.0 s`.
    if ms < SECOND - 0.5:
        return f"{ms:.0f} ms"
    if ms < MINUTE - SECOND / 20:
        return f"{ms / SECOND:.1f} s"
    seconds = round(ms / SECOND)
    if seconds < HOUR // SECOND:
        return f"{seconds // 60} min {seconds % 60} s"
    minutes = round(ms / MINUTE)
    if minutes < DAY // MINUTE:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(ms / HOUR)
    return f"{hours // 24} d {hours % 24} h"


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key that compares numbers in names by value: `acct/2` comes before `acct/12`.

    At the same position, a number comes before any other text.
    """
    return [
        (0, int(part), part) if part.isascii() and part.isdecimal() else (1, 0, part)
        for part in re.split("([0-9]+)", text)
        if part
    ]


def width(text: str) -> int:
    """Return the number of terminal columns that a text occupies: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(0 if _combines(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _combines(char: str) -> bool:
    """Return whether a terminal draws a character over the one before: a mark, or a vowel or final of a Hangul syllable."""
    return unicodedata.category(char) in ("Mn", "Me") or "\u1160" <= char <= "\u11ff"


def clip(text: str, columns: int) -> str:
    """Escape a text, and truncate it to `columns` terminal columns. A truncated text ends with an ellipsis."""
    text = printable(text)
    if width(text) <= columns:
        return text
    end, left = 0, columns - 1
    while (left := left - width(text[end])) >= 0:
        end += 1
    return text[:end] + "…"


def shorten(text: str, columns: int) -> str:
    """Escape a text, and shorten it to `columns` terminal columns with an ellipsis in its middle.

    Names that differ only in their ends, such as names with a UUID or a number, stay different.
    """
    text = printable(text)
    if width(text) <= columns:
        return text
    end, begin = len(text) // 2, len(text) // 2  # the widths of the parts before and after the ellipsis
    before, after = width(text[:end]), width(text[begin:])
    while before + 1 + after > columns and (end or begin < len(text)):
        if before > after:
            end -= 1
            before -= width(text[end])
        else:
            after -= width(text[begin])
            begin += 1
    return f"{text[:end]}…{text[begin:]}"


def wrap_text(text: str, columns: int) -> list[str]:
    """Escape a text, and break it into lines of at most `columns` terminal columns, also within words."""
    lines, used = [""], 0
    for char in printable(text):
        used += width(char)
        if lines[-1] and used > columns:
            lines.append("")
            used = width(char)
        lines[-1] += char
    return lines


def wrap_words(text: str, columns: int) -> list[str]:
    """Escape a text, and break it into lines of at most `columns` terminal columns: at spaces, or within longer words."""
    lines: list[str] = []
    for word in printable(text).split(" "):
        if lines and width(lines[-1]) + 1 + width(word) <= columns:
            lines[-1] += " " + word
        else:
            lines += wrap_text(word, columns)
    return lines


def fold(indent: str, text: str, columns: int | None) -> list[str]:
    """Break an indented text into lines of at most `columns` terminal columns; the further lines are indented more.

    None: no limit, the text is one line.
    """
    if columns is None:
        return [indent + printable(text)]
    first, *others = wrap_words(text, max(1, columns - len(indent) - len(GAP)))
    return [indent + first, *(indent + GAP + line for line in others)]


def request_name(id: int, transaction: str | None) -> str:
    """Return the id of a request, with its transaction: `7 of transfer-1`.

    `transaction` is None, or equal to the id, if the request has no transaction.
    """
    return str(id) if transaction in (None, str(id)) else f"{id} of {transaction}"


def lock_text(mode: str, resource: str, units: Any = None, of: Any = None) -> str:
    """Return a lock of a reply as clients write it: `exclusive:NAME`, or `2/10:NAME` for 2 of at most 10 units."""
    return f"{units}/{of}:{resource}" if mode == Mode.UNITS else f"{mode}:{resource}"


def blocker_lock(blocker: Mapping[str, Any]) -> str:
    """Return the lock that a blocker of a reply holds or waits for, as clients write it."""
    return lock_text(blocker["mode"], blocker["resource"], blocker.get("units"), blocker.get("of"))


def dot_string(*lines: str) -> str:
    r"""Return a quoted string of Graphviz with these lines. Backslashes, as in `\N`, and HTML entities are escaped."""
    text = r"\n".join(printable(line).replace("\\", r"\\").replace('"', r"\"").replace("&", "&amp;") for line in lines)
    return f'"{text}"'


def join_names(names: Sequence[str], total: int) -> str:
    """Join names with spaces, and append the number of omitted names: `a b +3`.

    `total` is the number of all names, of which `names` may contain only the first ones.
    """
    omitted = total - len(names)
    return " ".join([*map(printable, names), *([f"+{omitted}"] if omitted else [])])


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right_aligned: Sequence[int] = ()) -> list[str]:
    """Return the header and the rows as aligned lines. The columns with an index in `right_aligned` are right-aligned."""
    widths = [max(map(width, column)) for column in zip(headers, *rows, strict=True)]
    return [_align(row, widths, right_aligned) for row in (headers, *rows)]


def _align(cells: Sequence[str], widths: Sequence[int], right_aligned: Sequence[int]) -> str:
    """Return a line of a table, with the cells padded to the widths of their columns."""
    padding = [" " * (column_width - width(cell)) for cell, column_width in zip(cells, widths, strict=True)]
    padded = [
        space + cell if index in right_aligned else cell + space
        for index, (cell, space) in enumerate(zip(cells, padding, strict=True))
    ]
    return GAP.join(padded).rstrip()


MIN_WRAPPED_COLUMNS = 12
"""A column of `wrap_table` is not made narrower than this."""


def wrap_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: int | None,
    wrapped: Sequence[int],
    right_aligned: Sequence[int] = (),
) -> list[list[str]]:
    """Return the lines of the header and of each row. No text is truncated.

    If the table is wider than `columns` terminal columns, the columns with an index in `wrapped` are made narrower, and
    their texts are wrapped within them. `columns` is None for a pipe or a file: each row is one line.
    """
    cells = [[printable(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    if columns is not None:
        _narrow(widths, _table_width(widths, range(len(widths))) - columns, headers, wrapped)
    blocks = []
    for row in cells:
        texts = [
            wrap_words(cell, column_width) if index in wrapped else [cell]
            for index, (cell, column_width) in enumerate(zip(row, widths, strict=True))
        ]
        blocks.append([_align(parts, widths, right_aligned) for parts in zip_longest(*texts, fillvalue="")])
    return blocks


def _narrow(widths: list[int], excess: int, headers: Sequence[str], wrapped: Sequence[int]) -> None:
    """Reduce the widths of the columns `wrapped` by a total of `excess`, the widest first, but none below its minimum."""
    while excess > 0:
        shrinkable = [i for i in wrapped if widths[i] > max(MIN_WRAPPED_COLUMNS, width(headers[i]))]
        if not shrinkable:
            return
        widths[max(shrinkable, key=lambda i: widths[i])] -= 1
        excess -= 1


# -- Tables of a limited width: columns shrink, then the least important are dropped --------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `fit_table`."""

    header: str
    rank: int
    """If the table is too wide, the column with the highest rank is dropped first. Rank 0 is never dropped."""
    min_width: int = 0
    """Minimum width to which the column may shrink, at least the width of the header. 0: the column does not shrink."""
    right_aligned: bool = False
    preferred_width: int = 0
    """Other columns are dropped before this column shrinks below its preferred width."""


def fit_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], max_width: int) -> list[str]:
    """Return the header and the rows as aligned, escaped lines of at most `max_width` terminal columns.

    A table that is too wide loses its empty columns first. Then columns are dropped by rank until the preferred
    widths fit. The columns that are left get the remaining width.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    full_widths = [
        max(width(text) for text in (column.header, *(row[i] for row in cells))) for i, column in enumerate(columns)
    ]
    min_widths = [
        min(full, max(column.min_width, width(column.header))) if column.min_width else full
        for column, full in zip(columns, full_widths, strict=True)
    ]
    preferred_widths = [
        max(minimum, min(full, column.preferred_width))
        for column, minimum, full in zip(columns, min_widths, full_widths, strict=True)
    ]
    shown = list(range(len(columns)))
    if _table_width(full_widths, shown) > max_width:
        shown = [i for i in shown if not columns[i].rank or any(row[i] for row in cells)]
    while _table_width(preferred_widths, shown) > max_width and any(columns[i].rank for i in shown):
        shown.remove(max(shown, key=lambda i: columns[i].rank))
    widths = _grow(columns, shown, min_widths, targets=preferred_widths, max_width=max_width)
    widths = _grow(columns, shown, widths, targets=full_widths, max_width=max_width)
    lines = table(
        [columns[i].header for i in shown],
        [[shorten(row[i], widths[i]) for i in shown] for row in cells],
        right_aligned=[position for position, i in enumerate(shown) if columns[i].right_aligned],
    )
    return [clip(line, max_width) for line in lines]


def _grow(
    columns: Sequence[Column], shown: Sequence[int], widths: Sequence[int], targets: Sequence[int], max_width: int
) -> list[int]:
    """Return wider columns: up to their target widths, until the table is `max_width` wide.

    `shown` contains the indexes of the columns in the table. Columns of lower rank grow first, columns of equal rank
    evenly.
    """
    grown = list(widths)
    spare = max_width - _table_width(grown, shown)
    for rank in sorted({columns[i].rank for i in shown}):
        growing = [i for i in shown if columns[i].rank == rank and grown[i] < targets[i]]
        while spare > 0 and growing:
            for i in growing[:spare]:
                grown[i] += 1
                spare -= 1
            growing = [i for i in growing if grown[i] < targets[i]]
    return grown


def _table_width(widths: Sequence[int], shown: Sequence[int]) -> int:
    """Return the width of a table of the columns with the indexes `shown`, including the gaps."""
    return sum(widths[i] for i in shown) + len(GAP) * (len(shown) - 1)


def wrap_items(items: Sequence[str], max_width: int) -> list[str]:
    """Join items into lines of at most `max_width` terminal columns. An item is not broken; if too long, it is truncated."""
    lines: list[str] = []
    for item in map(printable, items):
        if lines and width(lines[-1]) + len(GAP) + width(item) <= max_width:
            lines[-1] += GAP + item
        else:
            lines.append(clip(item, max_width))
    return lines
