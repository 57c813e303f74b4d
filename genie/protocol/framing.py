"""Bytes to lines, with a bound."""

from __future__ import annotations

from collections.abc import Iterator

MAX_LINE_BYTES = 1 << 20
"""Bytes in one line, its end left out, unless configured otherwise."""


SPLIT_BYTES = 8 << 10
"""Bytes that are split into lines at once, more or less. Of more than that the rest is split when its turn comes: 256 KiB
of short lines would take longer than others should wait."""

MIN_COMMAND_BYTES = 16
"""Bytes, more or less, in the shortest line that is a command."""


class LineTooLong(Exception):
    """A line went over the bound. The lines before it are in `lines`; nothing behind them can be read."""

    def __init__(self, lines: list[bytes]) -> None:
        super().__init__("line too long")
        self.lines = lines


class UnsplitLines:
    """Lines with their ends, not split yet: an iterator, or to be cut into parts, which is faster. False when none is left."""

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
        while True:
            for line in self._part:
                return line
            if not self:
                raise StopIteration
            self._part = iter(self.split_next())

    def split_next(self) -> list[bytes]:
        """The next lines: about `SPLIT_BYTES`, or one line that is longer."""
        data, start = self._data, self._start
        end = data.rfind(b"\n", start, start + SPLIT_BYTES)
        if end < 0:
            end = data.index(b"\n", start + SPLIT_BYTES)
        self._start = end + 1
        return data[start:end].split(b"\n")


class LineReader:
    """Cuts a stream of bytes into lines. Holds no more than one line that is not ended yet."""

    __slots__ = ("_limit", "partial")

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self.partial = bytearray()
        """The line that is not ended yet."""

    def clear(self) -> None:
        """Drop the line that is not ended yet."""
        self.partial = bytearray()

    def feed(self, data: bytes) -> list[bytes] | UnsplitLines:
        """The lines that these bytes complete, without their ends (a CR of CRLF stays)."""
        if len(data) > SPLIT_BYTES and len(self.partial) + len(data) <= self._limit:
            end = data.rfind(b"\n") + 1
            if not end:
                self.partial += data
                return []
            whole = bytes(self.partial) + data[:end]
            self.partial = bytearray(data[end:])
            return UnsplitLines(whole)
        lines = data.split(b"\n")
        rest = lines.pop()
        if not rest and not self.partial and len(data) <= self._limit:
            return lines  # whole lines and nothing else, as nearly always
        size = len(self.partial) + len(data)
        if lines and self.partial:
            lines[0] = bytes(self.partial) + lines[0]
            self.partial.clear()
        if size > self._limit:
            for number, line in enumerate(lines):
                if len(line) - line.endswith(b"\r") > self._limit:
                    raise LineTooLong(lines[:number])
            if len(self.partial) + len(rest) > self._limit + 1:  # the one may be the end's \r
                raise LineTooLong(lines)
        self.partial += rest
        return lines
