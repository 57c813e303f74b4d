"""The default note of a client, which shows its program, process and host to operators and to blocked clients."""

from __future__ import annotations

import os
import socket
import sys
from functools import lru_cache
from pathlib import PurePath

MAX_PROGRAM = 100
"""Maximum number of characters of the program's name in a note."""
MAX_HOST = 100
"""Maximum number of characters of the host's name in a note."""


def default_note(program: str | None = None) -> str:
    """Return the note of this process: `PROGRAM PID@HOST`. The default for `program` is the name of its script or module."""
    return _note_of(program, os.getpid())


@lru_cache(maxsize=1)
def _note_of(program: str | None, pid: int) -> str:
    """Return the note of this process, whose id is `pid`: the key of the cache, since a forked process has another note."""
    name = _replace_unprintable(_program_name() if program is None else program)[:MAX_PROGRAM]
    host = _replace_unprintable(socket.gethostname())[:MAX_HOST]
    return f"{name} {pid}@{host}"


def _program_name() -> str:
    """Return the name of the script, of the module after `python -m`, or of the interpreter."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    script = PurePath(sys.argv[0]).name if sys.argv else ""
    has_no_script = script in ("", "-c", "-")  # for example `python -c COMMAND`
    return "python" if has_no_script else script


def _replace_unprintable(text: str) -> str:
    """Return a text with a `?` in place of each character that can't be printed, such as a control character."""
    return "".join(character if character.isprintable() else "?" for character in text)
