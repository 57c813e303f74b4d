"""The default note of a client, which shows its program, process and host to operators and to blocked clients."""

from __future__ import annotations

import os
import socket
import sys
from functools import lru_cache
from pathlib import PurePath

MAX_PROGRAM = 100
"""Characters of the program's name in a note."""
MAX_HOST = 100
"""Characters of the host's name in a note."""


def default_note(program: str | None = None) -> str:
    """Return `PROGRAM PID@HOST`, the note of this process. Without `program` it has the name of its script or module."""
    return _note_of(program, os.getpid())


@lru_cache(maxsize=1)
def _note_of(program: str | None, pid: int) -> str:
    """Return the note of a process. A forked process has another `pid`, and so another note."""
    name = _printable(_program_name() if program is None else program)[:MAX_PROGRAM]
    return f"{name} {pid}@{_printable(socket.gethostname())[:MAX_HOST]}"


def _program_name() -> str:
    """Return the name of the script, of the module after `python -m`, or of the interpreter."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    script = PurePath(sys.argv[0] if sys.argv else "").name
    return script if script not in ("", "-c", "-") else "python"


def _printable(text: str) -> str:
    """Return a text with a `?` in place of each character that can't be printed, such as control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)
