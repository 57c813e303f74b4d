"""`genie timeouts generate`"""

from __future__ import annotations

import asyncio
import secrets
from datetime import timedelta
from typing import Any

import click

from genie.cli.options import WholeNumber, one_line_errors
from genie.cli.timeouts.options import NO_TERMINAL, ledger_options, number, progress, progress_option, span, whole_span
from genie.timeouts import Ledger
from genie.timeouts.sample_data import CHUNK, MAX_HOURS, DataSet
from genie.timeouts.sample_data import finalize as finalize_in
from genie.timeouts.sample_data import generate as generate_into
from genie.timeouts.sample_data import shift as shift_in
from genie.timeouts.schema import open_ledger


@click.command()
@one_line_errors
@ledger_options
@click.option("--transfers", type=WholeNumber(1, 1_000_000_000), required=True, metavar="N", help="How many.")
@click.option(
    "--expired",
    type=WholeNumber(0),
    default=0,
    show_default=True,
    metavar="N",
    help="How many of them are in processing with their date in the past.",
)
@click.option(
    "--seed", type=int, metavar="N", help="The same makes the same transfers again. [default: another each time]"
)
@click.option("--amount", type=whole_span, default="1-100", show_default=True, metavar="FROM-TO", help="Their amounts.")
@click.option("--currencies", default="USD,EUR,ZAR", show_default=True, metavar="CODE,...", help="Their currencies.")
@click.option(
    "--hours",
    type=span,
    default="0-168",
    show_default=True,
    metavar="FROM-TO",
    help="How far the dates are back; those of all others are as far ahead and an hour more.",
)
@progress_option(NO_TERMINAL)
def generate(url: str, ledger: Ledger, seed: int | None, currencies: str, progress_every: int, **options: Any) -> None:
    """Fill a ledger with transfers by chance, to try a handler with.

    Most are final; about one in nine waits, and expires after an hour or later. Each has the state changes that lead
    to its state, about 3.5.
    """
    seed = secrets.randbelow(1_000_000_000) if seed is None else seed
    data_set = DataSet(seed=seed, currencies=tuple(currencies.split(",")), **options)
    changes = asyncio.run(_generate(url, ledger, data_set, progress_every))
    click.echo(f"{data_set.transfers:,} transfers with {changes:,} state changes; seed {seed}")


async def _generate(url: str, ledger: Ledger, data_set: DataSet, progress_every: int) -> int:
    async with open_ledger(url, ledger, create=True) as database:
        with progress(progress_every, "transfers") as told:
            return await generate_into(database, ledger, data_set, told, chunk=min(CHUNK, progress_every))


# -- `genie timeouts shift` --------


@click.command()
@one_line_errors
@ledger_options
@click.option("--hours", type=number, required=True, metavar="N", help="How far; back, if it is below 0.")
@progress_option(NO_TERMINAL)
def shift(url: str, ledger: Ledger, hours: float, progress_every: int) -> None:
    """Move the expiration dates of all transfers, all or none.

    So a ledger that was generated some time ago is as it was then: nothing else has expired meanwhile.
    """
    if abs(hours) > MAX_HOURS:
        raise ValueError(f"--hours {hours:g}: dates can be moved by a century at most")
    moved = asyncio.run(_shift(url, ledger, timedelta(hours=hours), progress_every))
    click.echo(f"{moved:,} transfers: their dates are moved by {hours:g} h")


async def _shift(url: str, ledger: Ledger, by: timedelta, progress_every: int) -> int:
    async with open_ledger(url, ledger) as database:
        with progress(progress_every, "transfers") as told:
            return await shift_in(database, ledger, by, told)


# -- `genie timeouts finalize` --------


@click.command()
@one_line_errors
@ledger_options
@click.option("--state", default="ABORTED", show_default=True, help="The final state.")
@click.option("--limit", type=WholeNumber(1), metavar="N", help="So many at most: those that expire first.")
@click.option("--overdue", is_flag=True, help="Only those whose date has passed.")
def finalize(url: str, ledger: Ledger, **options: Any) -> None:
    """Write a final state for the transfers that the handler has taken in.

    Those that are final already stay as they are.
    """
    done = asyncio.run(_finalize(url, ledger, **options))
    click.echo(f"{done:,} transfers are {options['state']}")


async def _finalize(url: str, ledger: Ledger, **options: Any) -> int:
    async with open_ledger(url, ledger) as database:
        return await finalize_in(database, ledger, **options)
