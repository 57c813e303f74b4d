"""Framing: splits a stream of bytes into lines of bounded length."""

from __future__ import annotations

from collections.abc import Iterator

MAX_LINE_BYTES = 1 << 20
"""Default maximum length of a line in bytes, without the line end."""


SPLIT_BYTES = 8 << 10
"""Larger input is split into lines in parts of about this size. Each part is split when its lines are executed.
Splitting 256 KiB of short lines at once would delay other connections for too long."""

LONG_LINE_BYTES = 32 << 10
"""A line of more bytes is a slow command, because it may have thousands of names. A request of 1,024 usual names is
shorter."""

MIN_COMMAND_BYTES = 16
"""Approximate number of bytes in the shortest valid command."""

MAX_SHORT_LINES = 64
"""Maximum number of lines that are split at once if they are shorter than commands: an object for a line of 2 bytes
takes 56 bytes."""

MAX_PART_LINES = SPLIT_BYTES // MIN_COMMAND_BYTES
"""Maximum number of lines in one part of `UnsplitLines`."""


class LineTooLong(Exception):
    """A line exceeds the limit, so the rest of the stream cannot be read. `lines` are the complete lines before it."""

    def __init__(self, lines: list[bytes]) -> None:
        super().__init__("line too long")
        self.lines = lines


class LongLine:
    """A line of more than `LONG_LINE_BYTES`, marked so that the server need not measure each line that it executes."""

    __slots__ = ("line",)

    def __init__(self, line: bytes) -> None:
        self.line = line


def mark_long(lines: list[bytes]) -> list[bytes | LongLine]:
    """Return the lines, the long ones as `LongLine`."""
    return [LongLine(line) if len(line) > LONG_LINE_BYTES else line for line in lines]


class UnsplitLines:
    """Complete lines that are not split yet. The object is true while lines are left.

    The lines can be iterated one by one, or taken in parts with `split_next`, which is faster.
    """

    __slots__ = ("_data", "_part", "_start")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._start = 0
        self._part: Iterator[bytes] = iter(())

    def __bool__(self) -> bool:
        return self._start < len(self._data)

    def __iter__(self) -> UnsplitLines:
        return self

    def __next__(self) -> bytes:
        """Return the next line. Splits the next part if the current part is used up."""
        while True:
            for line in self._part:
                return line
            if not self:
                raise StopIteration
            self._part = iter(self.split_next())

    def split_next(self) -> list[bytes]:
        """Split and return the next lines: at most `MAX_PART_LINES` and `SPLIT_BYTES`, or a single line that is longer."""
        data, start = self._data, self._start
        end = data.rfind(b"\n", start, start + SPLIT_BYTES)
        if end < 0:  # one line is longer than a part
            end = data.index(b"\n", start + SPLIT_BYTES)
        lines = data[start:end].split(b"\n", MAX_PART_LINES)
        if len(lines) > MAX_PART_LINES:  # the last item is the rest, which is not split
            end -= len(lines.pop()) + 1
        self._start = end + 1
        return lines


def without_blank(lines: list[bytes]) -> list[bytes] | UnsplitLines:
    """Return the lines that are not blank. More than `MAX_SHORT_LINES` are joined again, to be split later.

    For lines that are shorter than commands on average, which take much memory as objects.
    """
    not_blank = list(filter(None, lines))
    return UnsplitLines(b"\n".join(not_blank) + b"\n") if len(not_blank) > MAX_SHORT_LINES else not_blank


class LineReader:
    """Splits a stream of bytes into lines. Buffers at most one incomplete line."""

    __slots__ = ("_limit", "partial")

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self.partial = bytearray()
        """The bytes of the incomplete last line."""

    def clear(self) -> None:
        """Drop the incomplete line."""
        self.partial = bytearray()

    def feed(self, data: bytes) -> list[bytes] | UnsplitLines:
        """Add received bytes and return all complete lines, without the LF. A CR before the LF is kept.

        The lines of large input are returned as `UnsplitLines`, to be split later. Raises LineTooLong if a line exceeds
        the limit.
        """
        if len(data) > SPLIT_BYTES and len(self.partial) + len(data) <= self._limit:  # large input: split it later
            end_of_lines = data.rfind(b"\n") + 1
            if not end_of_lines:
                self.partial += data
                return []
            complete_lines = bytes(self.partial) + data[:end_of_lines]
            self.partial = bytearray(data[end_of_lines:])
            return UnsplitLines(complete_lines)
        lines = data.split(b"\n")
        incomplete = lines.pop()
        if not incomplete and not self.partial and len(data) <= self._limit:
            return lines  # only complete lines: the usual case
        buffered_bytes = len(self.partial) + len(data)
        if lines and self.partial:
            lines[0] = bytes(self.partial) + lines[0]
            self.partial.clear()
        if buffered_bytes > self._limit:  # only then a line can be too long
            for index, line in enumerate(lines):
                if len(line) - line.endswith(b"\r") > self._limit:
                    raise LineTooLong(lines[:index])
            if len(self.partial) + len(incomplete) > self._limit + 1:  # the extra byte may be the CR of the line end
                raise LineTooLong(lines)
        self.partial += incomplete
        return lines
