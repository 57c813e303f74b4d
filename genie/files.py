"""Reading the files that an operator may replace while the server runs."""

from __future__ import annotations

import errno
import os
from stat import S_ISREG


def read_regular_file(path: str, max_bytes: int = -1) -> tuple[bytes, int]:
    """Return the content of a file, at most `max_bytes` of it, and its mode. Never waits for another process, as a FIFO would.

    Raises OSError if the file can't be read, or is not a regular file.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read(max_bytes), mode


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no such flag
