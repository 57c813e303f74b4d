"""Common options of the commands on a ledger, converters for number ranges, and progress output."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from genie.cli.toolkit import WholeNumber, print_message
from genie_ledger import Ledger
from genie_ledger.cli.ledger_file import read_ledger

MAX_NUMBER = 1e9

PROGRESS_ROWS = 5_000
"""Default number of rows between two progress lines. Only used if stderr is not a terminal."""

ROWS_HELP = "If stderr is not a terminal, print a progress line each time this many rows are done."


def ledger_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--database` and `--config` to a command.

    The command receives two arguments instead of these options: `url`, the database, and `ledger`, a `Ledger`.
    """

    @click.option(
        "--database",
        required=True,
        envvar="GENIE_DATABASE",
        show_envvar=True,
        metavar="URL",
        help="Database of the ledger: sqlite:///FILE, postgresql://USER:PASSWORD@HOST/NAME or mysql://USER:PASSWORD@HOST/NAME.",
    )
    @click.option(
        "--config",
        envvar="GENIE_CONFIG",
        show_envvar=True,
        metavar="FILE",
        help="File (TOML) whose section [ledger] has the names of tables and columns, the states, and the time zone of "
        "this ledger. [default: those of Mojaloop]",
    )
    @functools.wraps(command)
    def command_with_ledger(database: str, config: str | None, **options: Any) -> Any:
        """Read the ledger from the file, and call the command with the ledger."""
        return command(url=database, ledger=Ledger() if config is None else read_ledger(config), **options)

    return command_with_ledger


def parse_number(text: str | float) -> float:
    """Convert the text of an option to a number from -10^9 to 10^9. Raises click.BadParameter for other texts."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= MAX_NUMBER:  # also rejects NaN
        raise click.BadParameter(f"{text!r} is not a number from {-MAX_NUMBER:g} to {MAX_NUMBER:g}.")
    return value


def parse_range(text: str) -> tuple[float, float]:
    """Convert the text of an option, e.g. `0-168`, to the first and the last number of a range."""
    start, dash, end = text.partition("-")
    if not dash:
        raise click.BadParameter(f"{text!r} is not a range FROM-TO, as 1-100.")
    return parse_number(start), parse_number(end)


def parse_whole_range(text: str) -> tuple[int, int]:
    """Convert the text of an option, e.g. `1-100`, to the first and the last whole number of a range."""
    start, end = parse_range(text)
    if not (start.is_integer() and end.is_integer()):
        raise click.BadParameter(f"{text!r} is not a range of whole numbers.")
    return int(start), int(end)


def progress_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds `--progress`, the number of rows between two progress lines, to a command."""
    return click.option(
        "--progress",
        "progress_every",
        type=WholeNumber(1),
        default=PROGRESS_ROWS,
        show_default=True,
        metavar="ROWS",
        help=help_text,
    )


@contextmanager
def progress_reporter(every: int, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback, `report(done, total)`, that shows the number of processed rows on stderr.

    If stderr is a terminal, the callback draws a progress bar. Otherwise it prints a line whenever `every` more rows are
    done. `unit` is the name of the rows in that line, e.g. `transfers`.
    """
    if not sys.stderr.isatty():
        reported = 0

        def print_line(done: int, total: int) -> None:
            nonlocal reported
            if done // every > reported // every:  # a multiple of `every` was passed since the last line
                print_message(f"{done:,} of {total:,} {unit}")
                reported = done

        yield print_line
        return
    with click.progressbar(length=1, file=sys.stderr) as bar:

        def draw_bar(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield draw_bar
