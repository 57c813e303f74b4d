"""Output of the commands. Names and texts of clients and of servers are escaped, so that none can control the terminal.

No other module of the commands prints.
"""

from __future__ import annotations

import click

from genie.text import printable, printable_json


def print_lines(*lines: str, err: bool = False) -> None:
    """Print lines to stdout, or to stderr."""
    click.echo("\n".join(map(printable, lines)), err=err)


def print_message(text: str) -> None:
    """Print a message of one line to stderr."""
    print_lines(f"genie: {text}", err=True)


def print_json(encoded: bytes) -> None:
    """Print a JSON document to stdout."""
    click.echo(printable_json(encoded))


def printable_message(text: str) -> str:
    """Escape an error message that may have several lines."""
    return "\n".join(map(printable, text.split("\n")))
