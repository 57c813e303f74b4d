"""Reading the files that an operator may replace while the server runs."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO


def read_regular_file(path: str, max_bytes: int = -1) -> tuple[bytes, int]:
    """Return the content of a file, at most `max_bytes` of it, and its mode. Never waits for another process, as a FIFO would.

    Raises OSError if the file can't be read, or is not a regular file.
    """
    with open(path, "rb", opener=open_without_waiting) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read(max_bytes), mode


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file for reading. Never waits for another process, as a FIFO would.

    Raises FileNotFoundError if there is no regular file.
    """
    try:
        file = open(path, "rb", opener=open_without_waiting)  # noqa: SIM115 - the caller closes it
    except IsADirectoryError:
        raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path)) from None
    if S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))


def open_without_waiting(path: str, flags: int) -> int:
    """Open a file as the `opener` of `open`. A FIFO without another process is an error, or has no content."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)  # Windows has no such flag
