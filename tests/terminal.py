"""A terminal for a process: what it writes there, and keys for it."""

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

from servers import WAIT_S

SEQUENCE = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")
"""What moves the cursor and sets colours."""
HOME = "\x1b[H"
"""The cursor goes to where a picture begins: what is drawn again and again begins with it."""
TAKE = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal that of the session, so that its keys are signals."""


def plain(written: str) -> str:
    return SEQUENCE.sub("", written)


class Terminal:
    """`written` is all that came so far, `before` are the modes that the process has found."""

    def __init__(self, file: int, process: subprocess.Popen[bytes], before: list[Any]) -> None:
        self.file = file
        self.process = process
        self.before = before
        self.written = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def until(self, text: str) -> str:
        """Wait until a text comes that is new; returns what came until then, without colours.

        That may end anywhere behind the text: who asks what else is shown, or is not, wants the `picture`.
        """
        return self._first(text, lambda new: [new])

    def picture(self, text: str) -> str:
        """Wait until a picture with this text is whole, which is when the next one begins; returns it."""
        return self._first(text, lambda new: new.split(HOME)[1:-1])

    def _first(self, text: str, parts: Callable[[str], list[str]]) -> str:
        began, end, more = len(self.written), time.monotonic() + WAIT_S, True
        while True:
            new = self.written[began:]
            for part in map(plain, parts(new)):
                if text in part:
                    return part
            assert more, f"ended before {text!r}: {new!r}"
            assert time.monotonic() < end, f"{text!r} did not come: {new[-2000:]!r}"
            more = self._read()

    def press(self, keys: bytes) -> None:
        os.write(self.file, keys)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def modes(self) -> list[Any]:
        """How the terminal takes keys."""
        return termios.tcgetattr(self.file)

    def set_modes(self, modes: list[Any]) -> None:
        """As somebody else would."""
        termios.tcsetattr(self.file, termios.TCSANOW, modes)

    def ended(self) -> int:
        """Wait for the end; returns the exit status."""
        status = self.process.wait(WAIT_S)
        while self._read():
            pass
        return status

    def _read(self) -> bool:
        over = self.process.poll() is not None
        if not select.select([self.file], [], [], 0 if over else 0.2)[0]:
            return not over
        try:
            new = os.read(self.file, 1 << 16)
        except OSError:  # nobody writes there any more
            return False
        self.written += self._decoder.decode(new)
        return bool(new)


@contextmanager
def terminal(
    command: Sequence[str], variables: Mapping[str, str], columns: int = 100, rows: int = 30
) -> Iterator[Terminal]:
    """A process whose terminal this is: Ctrl-C there is SIGINT for it."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        before = termios.tcgetattr(ours)
        with subprocess.Popen(
            [sys.executable, "-c", TAKE, *command],
            env=dict(variables),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        ) as process:
            try:
                yield Terminal(ours, process, before)
            finally:
                process.send_signal(signal.SIGKILL)
    finally:
        os.close(theirs)
        os.close(ours)
