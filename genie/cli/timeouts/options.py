"""What the commands on a ledger have in common: where it is, what it calls things, pairs of numbers, progress."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from genie.cli.options import WholeNumber
from genie.timeouts import FINAL_STATES, PROCESSING_STATES, Ledger

MOST = 1e9

OPTIONS = {"processing_states": "--processing", "final_states": "--final", "time_zone": "--time-zone"}
"""Parameters of `Ledger` that its errors begin with, and their options."""

PROGRESS_ROWS = 5_000
"""Rows after which the progress is written where there is no terminal: `debug` of the document's data set."""

NO_TERMINAL = "Where stderr is no terminal, write a line each time that so many more rows are done."


def ledger_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--database`, `--name`, `--processing`, `--final` and `--time-zone`; the command gets a `url` and a `ledger`."""

    @click.option(
        "--database",
        required=True,
        envvar="GENIE_DATABASE",
        show_envvar=True,
        metavar="URL",
        help="The ledger's: sqlite:///FILE, postgresql://USER:PASSWORD@HOST/NAME or mysql://USER:PASSWORD@HOST/NAME.",
    )
    @click.option(
        "--name",
        "names",
        multiple=True,
        metavar="OURS=THEIRS",
        help="What the ledger calls a table or a column, where it has a name of its own: "
        "transfer=payments, transfer.transferId=id. Repeatable.",
    )
    @click.option(
        "--processing",
        multiple=True,
        metavar="STATE",
        help="A state in which a transfer can expire; repeatable, instead of the default. "
        f"[default: {', '.join(PROCESSING_STATES)}]",
    )
    @click.option(
        "--final",
        multiple=True,
        metavar="STATE",
        help="A state in which it is not waited for any more; repeatable, instead of the default. "
        f"[default: {', '.join(FINAL_STATES)}]",
    )
    @click.option(
        "--time-zone",
        default="UTC",
        show_default=True,
        metavar="NAME",
        help="The time zone in which the ledger writes expiration dates: Africa/Nairobi.",
    )
    @functools.wraps(command)
    def wrapped(
        database: str,
        names: tuple[str, ...],
        processing: tuple[str, ...],
        final: tuple[str, ...],
        time_zone: str,
        **options: Any,
    ) -> Any:
        own_names = dict(_pair(name) for name in names)
        try:
            ledger = Ledger(
                names=own_names,
                processing_states=processing or PROCESSING_STATES,
                final_states=final or FINAL_STATES,
                time_zone=time_zone,
            )
        except ValueError as error:
            parameter, colon, message = str(error).partition(": ")
            raise ValueError(f"{OPTIONS.get(parameter, parameter)}{colon}{message}") from None
        return command(url=database, ledger=ledger, **options)

    return wrapped


def _pair(name: str) -> tuple[str, str]:
    ours, _, theirs = name.partition("=")
    if not ours or not theirs:
        raise ValueError(f"--name {name}: it must be OURS=THEIRS, as in transfer.transferId=id")
    return ours, theirs


def number(text: str | float) -> float:
    """The type of an option that is any number of hours."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= MOST:
        raise click.BadParameter(f"{text!r} is not a number.")
    return value


def span(text: str) -> tuple[float, float]:
    """The type of an option from one number to another: `0-168`."""
    least, dash, most = text.partition("-")
    if not dash:
        raise click.BadParameter(f"{text!r} is not like 1-100.")
    return number(least), number(most)


def whole_span(text: str) -> tuple[int, int]:
    """The same in whole numbers."""
    least, most = span(text)
    if not (least.is_integer() and most.is_integer()):
        raise click.BadParameter(f"{text!r} must be whole numbers.")
    return int(least), int(most)


def progress_option(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--progress`, after how many rows the progress is written; `what` says when."""
    return click.option(
        "--progress",
        "progress_every",
        type=WholeNumber(1),
        default=PROGRESS_ROWS,
        show_default=True,
        metavar="ROWS",
        help=what,
    )


@contextmanager
def progress(every: int, rows: str) -> Iterator[Callable[[int, int], None]]:
    """Show on stderr how many `rows` are done, of how many: call what this yields with both numbers.

    On a terminal it is a bar, else a line each time that `every` more rows are done.
    """
    if not sys.stderr.isatty():
        written = 0

        def write_line(done: int, of: int) -> None:
            nonlocal written
            if done // every > written // every:
                click.echo(f"genie: {done:,} of {of:,} {rows}", err=True)
                written = done

        yield write_line
        return
    with click.progressbar(length=1, file=sys.stderr) as bar:

        def told(done: int, of: int) -> None:
            bar.length = of
            bar.update(done - bar.pos)

        yield told
