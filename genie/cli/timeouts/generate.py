"""`genie timeouts generate`"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import click

from genie.cli.asking import plain_errors
from genie.cli.sources import WholeNumber
from genie.cli.timeouts.options import (
    NO_TERMINAL,
    ledger_options,
    progress,
    progress_option,
    span,
    whole_span,
)
from genie.timeouts import Ledger
from genie.timeouts.opened import opened
from genie.timeouts.trial.generate import CHUNK
from genie.timeouts.trial.generate import generate as generate_into
from genie.timeouts.trial.transfers import DataSet


@click.command()
@plain_errors
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
    async with opened(url, ledger, create=True) as database:
        with progress(progress_every, "transfers") as told:
            return await generate_into(database, ledger, data_set, told, chunk=min(CHUNK, progress_every))
