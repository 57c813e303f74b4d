"""Output of the commands, which print only with these functions.

Names and texts of clients and of servers are escaped, so that they cannot control the terminal.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress

import click

from genie.text import printable, printable_json


def program() -> str:
    """Return the name of the running program, with which its messages begin, unlike those of a child process."""
    ctx = click.get_current_context(silent=True)
    name = None if ctx is None else ctx.find_root().command.name
    return name or "genie"


def print_lines(*lines: str, err: bool = False) -> None:
    """Print lines to stdout, or to stderr."""
    click.echo("\n".join(map(printable, lines)), err=err)


def output_columns(*, wide: bool) -> int | None:
    """Return the width of the terminal, to which tables are wrapped. None, without a limit, for `--wide`, a pipe or a file."""
    if wide or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def print_message(text: str) -> None:
    """Print a message of one line to stderr, after the name of the program.

    If stderr is a closed pipe or a file on a full disk, the message is omitted, and the program continues: `genie run` must
    still end a command that has lost its locks.
    """
    with suppress(OSError):
        print_lines(f"{program()}: {text}", err=True)


def print_error(text: str) -> None:
    """Print an error to stderr. The text may have several lines, and must be escaped already."""
    click.echo(text, err=True)


def print_json(encoded: bytes) -> None:
    """Print a JSON document to stdout."""
    click.echo(printable_json(encoded))
