"""A pseudo-terminal for a process: captures its output and sends it keys."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from support.processes.servers import WAIT_S

SEQUENCE = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")
"""Escape sequences that move the cursor and set colours."""
HOME = "\x1b[H"
"""Moves the cursor to the top left corner: each repainted screen starts with it."""
SET_CONTROLLING_TERMINAL = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes stdin the controlling terminal of the session, so that Ctrl-C is a signal; then executes a command."""


def without_sequences(written: str) -> str:
    return SEQUENCE.sub("", written)


class Terminal:
    """`written` is all output so far, `initial_modes` are the modes of the terminal at the start of the process."""

    def __init__(self, file: int, process: subprocess.Popen[bytes], initial_modes: list[Any]) -> None:
        self.file = file
        self.process = process
        self.initial_modes = initial_modes
        self.written = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def until(self, text: str) -> str:
        """Wait until new output contains a text; return the output so far, without escape sequences.

        It may end anywhere after the text: use `screen` to check the rest.
        """
        return self._wait_for(text, lambda new: [new])

    def screen(self, text: str) -> str:
        """Wait until a screen with this text is complete, which is when the next one starts; return it."""
        return self._wait_for(text, lambda new: new.split(HOME)[1:-1])

    def _wait_for(self, text: str, split: Callable[[str], list[str]]) -> str:
        start, end, more = len(self.written), time.monotonic() + WAIT_S, True
        while True:
            new = self.written[start:]
            for part in map(without_sequences, split(new)):
                if text in part:
                    return part
            assert more, f"ended before {text!r}: {new!r}"
            assert time.monotonic() < end, f"{text!r} was not written: {new[-2000:]!r}"
            more = self._read()

    def press(self, keys: bytes) -> None:
        os.write(self.file, keys)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def modes(self) -> list[Any]:
        """Return the modes of the terminal, such as whether it echoes keys."""
        return termios.tcgetattr(self.file)

    def set_modes(self, modes: list[Any]) -> None:
        """Set the modes, as a shell does."""
        termios.tcsetattr(self.file, termios.TCSANOW, modes)

    def wait(self) -> int:
        """Wait for the end of the process; return the exit status."""
        status = self.process.wait(WAIT_S)
        while self._read():
            pass
        return status

    def _read(self) -> bool:
        exited = self.process.poll() is not None
        if not select.select([self.file], [], [], 0 if exited else 0.2)[0]:
            return not exited
        try:
            new = os.read(self.file, 1 << 16)
        except OSError:  # no process has it open any more
            return False
        self.written += self._decoder.decode(new)
        return bool(new)


@contextmanager
def terminal(
    command: Sequence[str], variables: Mapping[str, str], columns: int = 100, rows: int = 30
) -> Iterator[Terminal]:
    """Run a process on a pseudo-terminal, which is its controlling terminal: Ctrl-C is SIGINT for it."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        initial_modes = termios.tcgetattr(ours)
        with subprocess.Popen(
            [sys.executable, "-c", SET_CONTROLLING_TERMINAL, *command],
            env=dict(variables),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        ) as process:
            try:
                yield Terminal(ours, process, initial_modes)
            finally:
                process.send_signal(signal.SIGKILL)
    finally:
        os.close(theirs)
        os.close(ours)
