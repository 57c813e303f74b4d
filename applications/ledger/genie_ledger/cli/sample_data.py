"""`genie-ledger generate`, `shift` and `finalize`: write sample data, to test a timeout handler."""

from __future__ import annotations

import asyncio
import secrets
from datetime import timedelta
from typing import Any

import click

from genie.cli.toolkit import WholeNumber, one_line_errors, print_lines
from genie_ledger import Ledger
from genie_ledger.cli.options import (
    ROWS_HELP,
    ledger_options,
    parse_number,
    parse_range,
    parse_whole_range,
    progress_option,
    progress_reporter,
)
from genie_ledger.sample_data import CHUNK_SIZE, MAX_HOURS, DataSet
from genie_ledger.sample_data import finalize as finalize_in
from genie_ledger.sample_data import generate as generate_into
from genie_ledger.sample_data import shift as shift_in
from genie_ledger.schema import open_ledger


@click.command()
@one_line_errors
@ledger_options
@click.option(
    "--transfers", type=WholeNumber(1, 1_000_000_000), required=True, metavar="N", help="Number of transfers."
)
@click.option(
    "--expired",
    type=WholeNumber(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Number of transfers in processing with an expiration date in the past.",
)
@click.option(
    "--seed",
    type=int,
    metavar="N",
    help="Seed of the random generator: the same seed generates the same transfers. [default: random]",
)
@click.option(
    "--amount", type=parse_whole_range, default="1-100", show_default=True, metavar="FROM-TO", help="Amounts."
)
@click.option("--currencies", default="USD,EUR,ZAR", show_default=True, metavar="CODE,...", help="Currencies.")
@click.option(
    "--hours",
    type=parse_range,
    default="0-168",
    show_default=True,
    metavar="FROM-TO",
    help="Age of the past expiration dates, in hours. The others are as far in the future, and an hour more.",
)
@progress_option(ROWS_HELP)
def generate(url: str, ledger: Ledger, seed: int | None, currencies: str, progress_every: int, **options: Any) -> None:
    """Fill a ledger with random transfers, to test a handler.

    Most transfers are final; about one in nine is in processing and expires after an hour or later. Each has the state
    changes that lead to its state, 3.5 on average.
    """
    seed = secrets.randbelow(1_000_000_000) if seed is None else seed
    data_set = DataSet(seed=seed, currencies=tuple(currencies.split(",")), **options)
    changes = asyncio.run(_generate(url, ledger, data_set, progress_every))
    print_lines(f"{data_set.transfers:,} transfers with {changes:,} state changes; seed {seed}")


async def _generate(url: str, ledger: Ledger, data_set: DataSet, progress_every: int) -> int:
    """Create the tables if they are missing, and fill them; return the number of state changes."""
    async with open_ledger(url, ledger, create=True) as database:
        with progress_reporter(progress_every, "transfers") as report:
            return await generate_into(database, ledger, data_set, report, chunk_size=min(CHUNK_SIZE, progress_every))


# -- `genie-ledger shift` --------


@click.command()
@one_line_errors
@ledger_options
@click.option("--hours", type=parse_number, required=True, metavar="N", help="Hours to add; negative: to subtract.")
@progress_option(ROWS_HELP)
def shift(url: str, ledger: Ledger, hours: float, progress_every: int) -> None:
    """Shift the expiration dates of all transfers, in one transaction.

    Use it to restore a generated ledger of some time ago, so that no further transfers have expired since then.
    """
    if abs(hours) > MAX_HOURS:
        raise ValueError(f"--hours {hours:g}: dates can be shifted by at most a century, {MAX_HOURS} hours")
    shifted = asyncio.run(_shift(url, ledger, timedelta(hours=hours), progress_every))
    print_lines(f"{shifted:,} transfers: expiration dates shifted by {hours:g} h")


async def _shift(url: str, ledger: Ledger, by: timedelta, progress_every: int) -> int:
    """Shift the expiration dates and show the progress; return the number of transfers."""
    async with open_ledger(url, ledger) as database:
        with progress_reporter(progress_every, "transfers") as report:
            return await shift_in(database, ledger, by, report)


# -- `genie-ledger finalize` --------


@click.command()
@one_line_errors
@ledger_options
@click.option("--state", default="ABORTED", show_default=True, help="Final state to write.")
@click.option("--limit", type=WholeNumber(1), metavar="N", help="Maximum number of transfers, the first to expire.")
@click.option("--overdue", is_flag=True, help="Only transfers whose expiration date has passed.")
def finalize(url: str, ledger: Ledger, **options: Any) -> None:
    """Write a final state for the transfers in processing that the handler tracks."""
    finalized = asyncio.run(_finalize(url, ledger, **options))
    print_lines(f"{finalized:,} transfers are {options['state']}")


async def _finalize(url: str, ledger: Ledger, **options: Any) -> int:
    async with open_ledger(url, ledger) as database:
        return await finalize_in(database, ledger, **options)
