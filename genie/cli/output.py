"""Output of the commands. Names and texts of clients and of servers are escaped, so that none can control the terminal.

No other module of the commands prints.
"""

from __future__ import annotations

import shutil
import sys

import click

from genie.text import printable, printable_json


def program() -> str:
    """Return the name of the running program, which begins each message. So a message of a child process looks different."""
    ctx = click.get_current_context(silent=True)
    return (ctx is not None and ctx.find_root().command.name) or "genie"


def print_lines(*lines: str, err: bool = False) -> None:
    """Print lines to stdout, or to stderr."""
    click.echo("\n".join(map(printable, lines)), err=err)


def output_columns(*, wide: bool) -> int | None:
    """Return the width of the terminal, to which tables are wrapped. None, without a limit: a pipe, a file, or `--wide`."""
    return None if wide or not sys.stdout.isatty() else shutil.get_terminal_size().columns


def print_message(text: str) -> None:
    """Print a message of one line to stderr."""
    print_lines(f"{program()}: {text}", err=True)


def print_error(text: str) -> None:
    """Print an error to stderr, which may have several lines and is already escaped."""
    click.echo(text, err=True)


def print_json(encoded: bytes) -> None:
    """Print a JSON document to stdout."""
    click.echo(printable_json(encoded))
