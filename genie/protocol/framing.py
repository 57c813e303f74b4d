"""Bytes to lines, with a bound."""

from __future__ import annotations

MAX_LINE = 1 << 20
"""Bytes in one line, its end left out, unless configured otherwise."""


class LineTooLong(Exception):
    """A line went over the bound. The lines before it are in `lines`; nothing behind them can be read."""

    def __init__(self, lines: list[bytes]) -> None:
        super().__init__("line too long")
        self.lines = lines


class Lines:
    """Cuts a stream of bytes into lines. Holds no more than one line that is not ended yet."""

    __slots__ = ("_limit", "_rest")

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, without their ends (a CR of CRLF stays)."""
        lines = data.split(b"\n")
        rest = lines.pop()
        if not rest and not self._rest and len(data) <= self._limit:
            return lines  # whole lines and nothing else, as nearly always
        size = len(self._rest) + len(data)
        if lines and self._rest:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        if size > self._limit:
            for number, line in enumerate(lines):
                if len(line) - line.endswith(b"\r") > self._limit:
                    raise LineTooLong(lines[:number])
            if len(self._rest) + len(rest) > self._limit + 1:  # the one may be the end's \r
                raise LineTooLong(lines)
        self._rest += rest
        return lines
