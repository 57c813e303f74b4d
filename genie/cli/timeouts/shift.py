"""`genie timeouts shift`"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import click

from genie.cli.asking import plain_errors
from genie.cli.timeouts.options import NO_TERMINAL, ledger_options, number, progress, progress_option
from genie.timeouts import Ledger
from genie.timeouts.opened import opened
from genie.timeouts.trial.shift import shift as shift_in
from genie.timeouts.trial.transfers import MOST_HOURS


@click.command()
@plain_errors
@ledger_options
@click.option("--hours", type=number, required=True, metavar="N", help="How far; back, if it is below 0.")
@progress_option(NO_TERMINAL)
def shift(url: str, ledger: Ledger, hours: float, progress_every: int) -> None:
    """Move the expiration dates of all transfers, all or none.

    So a ledger that was generated some time ago is as it was then: nothing else has expired meanwhile.
    """
    if abs(hours) > MOST_HOURS:
        raise ValueError(f"--hours {hours:g}: dates can be moved by a century at most")
    moved = asyncio.run(_shift(url, ledger, timedelta(hours=hours), progress_every))
    click.echo(f"{moved:,} transfers: their dates are moved by {hours:g} h")


async def _shift(url: str, ledger: Ledger, by: timedelta, progress_every: int) -> int:
    async with opened(url, ledger) as database:
        with progress(progress_every, "transfers") as told:
            return await shift_in(database, ledger, by, told)
