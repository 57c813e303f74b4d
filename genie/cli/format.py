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
"""Separates the columns of a table."""

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS


def remaining(row: Mapping[str, Any]) -> str:
    """Return the time until the request in a row of `inspect` times out, or `never` if it waits without a limit."""
    return duration(row["expiresIn"]) if "expiresIn" in row else "never"


def duration(ms: float) -> str:
    """Format a duration with at most two units, e.g. `250 ms`, `1.5 s`, `3 min 20 s`, `2 d 4 h`.

    Up to 999 days the text has at most 11 characters. Negative durations are formatted as 0.
    """
    ms = max(0.0, ms)
    # The first two limits are lower by half of the last digit, because the number is rounded: no `1000 ms`, no `60.0 s`.
    if ms < SECOND_MS - 0.5:
        return f"{ms:.0f} ms"
    if ms < MINUTE_MS - SECOND_MS / 20:
        return f"{ms / SECOND_MS:.1f} s"
    seconds = round(ms / SECOND_MS)
    if seconds < HOUR_MS // SECOND_MS:
        return f"{seconds // 60} min {seconds % 60} s"
    minutes = round(ms / MINUTE_MS)
    if minutes < DAY_MS // MINUTE_MS:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(ms / HOUR_MS)
    return f"{hours // 24} d {hours % 24} h"


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key that compares numbers in names by value: `acct/2` is before `acct/12`.

    At the same position, a number is before any other text.
    """
    key = []
    for part in re.split("([0-9]+)", text):
        if part.isascii() and part.isdecimal():
            key.append((0, int(part), part))
        elif part:
            key.append((1, 0, part))
    return key


def width(text: str) -> int:
    """Return the number of terminal columns that a text occupies."""
    return len(text) if text.isascii() else sum(map(_char_width, text))


def _char_width(char: str) -> int:
    """Return the number of terminal columns that a character occupies: two for a wide one, none for a combining one."""
    is_mark = unicodedata.category(char) in ("Mn", "Me")
    is_hangul_vowel_or_final = "\u1160" <= char <= "\u11ff"  # drawn together with the consonant before it
    if is_mark or is_hangul_vowel_or_final:
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def clip(text: str, columns: int) -> str:
    """Escape a text, and truncate it to `columns` terminal columns. A truncated text ends with an ellipsis."""
    text = printable(text)
    if width(text) <= columns:
        return text
    end = 0
    columns_left = columns - 1  # without the ellipsis
    while (columns_left := columns_left - width(text[end])) >= 0:
        end += 1
    return text[:end] + "…"


def shorten(text: str, columns: int) -> str:
    """Escape a text, and shorten it to `columns` terminal columns with an ellipsis in its middle.

    Names that differ only in their ends, such as names with a UUID or a number, stay different.
    """
    text = printable(text)
    if width(text) <= columns:
        return text
    head_end = tail_begin = len(text) // 2
    head_width, tail_width = width(text[:head_end]), width(text[tail_begin:])
    while head_width + 1 + tail_width > columns and (head_end or tail_begin < len(text)):
        if head_width > tail_width:
            head_end -= 1
            head_width -= width(text[head_end])
        else:
            tail_width -= width(text[tail_begin])
            tail_begin += 1
    return f"{text[:head_end]}…{text[tail_begin:]}"


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
    """Escape a text, and break it into lines of at most `columns` terminal columns: at spaces, and within longer words."""
    lines: list[str] = []
    for word in printable(text).split(" "):
        if lines and width(lines[-1]) + 1 + width(word) <= columns:
            lines[-1] += " " + word
        else:
            lines += wrap_text(word, columns)
    return lines


def fold(indent: str, text: str, columns: int | None) -> list[str]:
    """Escape and indent a text, and break it into lines of at most `columns` terminal columns.

    All lines but the first are indented further. If `columns` is None, the text is one line.
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
    """Return a lock in a reply as clients write it: `exclusive:NAME`, or `2/10:NAME` for 2 of at most 10 units."""
    return f"{units}/{of}:{resource}" if mode == Mode.UNITS else f"{mode}:{resource}"


def blocker_lock(blocker: Mapping[str, Any]) -> str:
    """Return the lock that a blocker in a reply holds or waits for, as clients write it."""
    return lock_text(blocker["mode"], blocker["resource"], blocker.get("units"), blocker.get("of"))


def dot_string(*lines: str) -> str:
    r"""Return lines of text as a quoted string of Graphviz. Backslashes, as in `\N`, and HTML entities are escaped."""
    escaped = [printable(line).replace("\\", r"\\").replace('"', r"\"").replace("&", "&amp;") for line in lines]
    text = r"\n".join(escaped)
    return f'"{text}"'


def join_names(names: Sequence[str], total: int) -> str:
    """Escape names, join them with spaces, and append the number of omitted names: `a b +3`.

    `total` is the number of all names, of which `names` may contain only the first ones.
    """
    parts = list(map(printable, names))
    omitted = total - len(names)
    if omitted:
        parts.append(f"+{omitted}")
    return " ".join(parts)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right_aligned: Sequence[int] = ()) -> list[str]:
    """Return the header and the rows as aligned lines. The columns with an index in `right_aligned` are right-aligned."""
    widths = [max(map(width, column)) for column in zip(headers, *rows, strict=True)]
    return [_align(row, widths, right_aligned) for row in (headers, *rows)]


def _align(cells: Sequence[str], widths: Sequence[int], right_aligned: Sequence[int]) -> str:
    """Return a line of a table, with the cells padded to the widths of their columns."""
    padded = []
    for index, (cell, column_width) in enumerate(zip(cells, widths, strict=True)):
        padding = " " * (column_width - width(cell))
        padded.append(padding + cell if index in right_aligned else cell + padding)
    return GAP.join(padded).rstrip()


MIN_WRAPPED_WIDTH = 12
"""Minimum width of a column in which `wrap_table` wraps texts, in terminal columns."""


def wrap_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: int | None,
    wrapped: Sequence[int],
    right_aligned: Sequence[int] = (),
) -> list[list[str]]:
    """Return the aligned, escaped lines of the header, and those of each row. No text is truncated.

    If the table is wider than `columns` terminal columns, the columns with an index in `wrapped` are made narrower, and
    their texts are wrapped within them. If `columns` is None, as for a pipe or a file, each row is one line.
    """
    cells = [[printable(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    if columns is not None:
        excess = _table_width(widths) - columns
        _narrow(widths, excess, headers, wrapped)
    blocks = []
    for row in cells:
        cell_lines = [
            wrap_words(cell, column_width) if index in wrapped else [cell]
            for index, (cell, column_width) in enumerate(zip(row, widths, strict=True))
        ]
        blocks.append([_align(line, widths, right_aligned) for line in zip_longest(*cell_lines, fillvalue="")])
    return blocks


def _narrow(widths: list[int], excess: int, headers: Sequence[str], wrapped: Sequence[int]) -> None:
    """Reduce the widths of the columns `wrapped` by a total of `excess`, the widest first, but none below its minimum.

    Changes `widths`.
    """
    while excess > 0:
        shrinkable = [i for i in wrapped if widths[i] > max(MIN_WRAPPED_WIDTH, width(headers[i]))]
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
    """Width to which the column may shrink, but never below the width of its header. With 0 it does not shrink."""
    right_aligned: bool = False
    preferred_width: int = 0
    """Other columns are dropped before this column shrinks below its preferred width."""


def fit_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], max_width: int, *, wraps: bool = False
) -> list[str]:
    """Return the header and the rows as aligned, escaped lines of at most `max_width` terminal columns.

    A table that is too wide loses its empty columns first. Then columns are dropped by rank until the preferred
    widths fit. The columns that are left get the remaining width. A text that is wider than its column is shortened; with
    `wraps` it continues in further lines.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    shown = [_FittedColumn(column, [row[index] for row in cells]) for index, column in enumerate(columns)]
    if _table_width([fitted.full_width for fitted in shown]) > max_width:
        shown = [fitted for fitted in shown if fitted.rank == 0 or any(fitted.texts)]
    while _table_width([fitted.preferred_width for fitted in shown]) > max_width:
        least_important = max(shown, key=lambda fitted: fitted.rank)
        if least_important.rank == 0:
            break
        shown.remove(least_important)
    _grow(shown, [fitted.preferred_width for fitted in shown], max_width)
    _grow(shown, [fitted.full_width for fitted in shown], max_width)
    fitted_rows: list[Sequence[str]] = []
    for texts in zip(*(fitted.texts for fitted in shown), strict=True):
        if wraps:
            cell_lines = [wrap_words(text, fitted.width) for text, fitted in zip(texts, shown, strict=True)]
            fitted_rows += zip_longest(*cell_lines, fillvalue="")
        else:
            fitted_rows.append([shorten(text, fitted.width) for text, fitted in zip(texts, shown, strict=True)])
    lines = table(
        [fitted.column.header for fitted in shown],
        fitted_rows,
        right_aligned=[index for index, fitted in enumerate(shown) if fitted.column.right_aligned],
    )
    return [clip(line, max_width) for line in lines]


class _FittedColumn:
    """A column of `fit_table` with its escaped texts, and the width that it gets."""

    def __init__(self, column: Column, texts: Sequence[str]) -> None:
        self.column = column
        self.rank = column.rank
        self.texts = texts
        self.full_width = max(map(width, (column.header, *texts)))
        """The width of the widest text."""
        self.width = self.full_width
        """The width of the column: at first the narrowest one, until the column grows."""
        if column.min_width:
            self.width = min(self.full_width, max(column.min_width, width(column.header)))
        self.preferred_width = max(self.width, min(self.full_width, column.preferred_width))


def _grow(shown: Sequence[_FittedColumn], target_widths: Sequence[int], max_width: int) -> None:
    """Widen columns up to their target widths, as far as the table is at most `max_width` wide.

    Columns of lower rank grow first, columns of equal rank evenly.
    """
    spare = max_width - _table_width([fitted.width for fitted in shown])
    for rank in sorted({fitted.rank for fitted in shown}):
        growing = [
            (fitted, target)
            for fitted, target in zip(shown, target_widths, strict=True)
            if fitted.rank == rank and fitted.width < target
        ]
        while spare > 0 and growing:
            for fitted, _ in growing[:spare]:
                fitted.width += 1
                spare -= 1
            growing = [(fitted, target) for fitted, target in growing if fitted.width < target]


def _table_width(widths: Sequence[int]) -> int:
    """Return the width of a table with columns of these widths, including the gaps."""
    return sum(widths) + len(GAP) * (len(widths) - 1)


def wrap_items(items: Sequence[str], max_width: int) -> list[str]:
    """Escape items, and join them into lines of at most `max_width` terminal columns. A longer item is truncated."""
    lines: list[str] = []
    for item in map(printable, items):
        if lines and width(lines[-1]) + len(GAP) + width(item) <= max_width:
            lines[-1] += GAP + item
        else:
            lines.append(clip(item, max_width))
    return lines
