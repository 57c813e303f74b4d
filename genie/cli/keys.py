"""Keys that are pressed on a terminal, one by one, without a line's end and without being shown."""

from __future__ import annotations

import asyncio
import os
import termios
import tty
from collections.abc import Callable
from typing import Any, Self, TextIO

MOST = 1024
"""Bytes that are read at once."""


class Keys:
    """While its block runs, `pressed` is told of what is typed. Where the input is no terminal, nothing is.

    Ctrl-C and Ctrl-Z stay what they are.
    """

    def __init__(self, source: TextIO | None, pressed: Callable[[str], None]) -> None:
        self._file = source.fileno() if source is not None and source.isatty() else None
        self._pressed = pressed
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        if self._file is not None:
            self._before = termios.tcgetattr(self._file)
            self.take()
            asyncio.get_running_loop().add_reader(self._file, self._read)
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            asyncio.get_running_loop().remove_reader(self._file)
            termios.tcsetattr(self._file, termios.TCSANOW, self._before)

    def take(self) -> None:
        """Have them one by one, also where somebody else has set that back."""
        if self._file is not None:
            tty.setcbreak(self._file, termios.TCSANOW)

    def _read(self) -> None:
        assert self._file is not None  # noqa: S101 - it is read from
        try:
            keys = os.read(self._file, MOST)
        except OSError:
            keys = b""
        if keys:
            self._pressed(keys.decode(errors="replace"))
        else:  # the terminal has gone
            asyncio.get_running_loop().remove_reader(self._file)
