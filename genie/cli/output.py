"""Output of the commands, which print only with these functions.

Names and texts of clients and of servers are escaped, so that they cannot control the terminal.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

from genie.text import printable, printable_json


def program() -> str:
    """Return the name of the running program, with which its messages begin, unlike those of a child process."""
    ctx = click.get_current_context(silent=True)
    name = None if ctx is None else ctx.find_root().command.name
    return name or "genie"


def print_lines(*lines: str, err: bool = False) -> None:
    """Print lines to stdout, or to stderr. Raises ClickException, a one-line error, if stdout cannot be written."""
    text = "\n".join(map(printable, lines))
    if err:
        click.echo(text, err=True)
    else:
        with checked_stdout():
            click.echo(text)


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Convert an error of stdout, such as a full disk, into a ClickException, which is printed in one line."""
    try:
        yield
    except BrokenPipeError:
        raise  # click exits without a message
    except OSError as error:
        # At its exit, the interpreter flushes the buffer of stdout again. Redirect stdout, so that this flush succeeds.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.ClickException(f"cannot write the result: {error.strerror}") from None


def output_columns(*, wide: bool) -> int | None:
    """Return the width of the terminal, to which tables are wrapped. None, without a limit, for `--wide`, a pipe or a file."""
    if wide or sys.stdout is None or not sys.stdout.isatty():  # None: genie was started with a closed stdout
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
    """Print a JSON document to stdout. Raises ClickException, a one-line error, if stdout cannot be written."""
    with checked_stdout():
        click.echo(printable_json(encoded))
