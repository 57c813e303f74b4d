"""`genie timeouts shift`"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import click

from genie.cli.asking import plain_errors
from genie.cli.timeouts.options import ledger_options, number
from genie.timeouts import Ledger
from genie.timeouts.opened import opened
from genie.timeouts.trial.shift import shift as shift_in
from genie.timeouts.trial.transfers import MOST_HOURS


@click.command()
@ledger_options
@click.option("--hours", type=number, required=True, metavar="N", help="How far; back, if it is below 0.")
@plain_errors
def shift(url: str, ledger: Ledger, hours: float) -> None:
    """Move the expiration dates of all transfers, all or none.

    So a ledger that was generated some time ago is as it was then: nothing else has expired meanwhile.
    """
    if abs(hours) > MOST_HOURS:
        raise ValueError(f"--hours {hours:g}: dates can be moved by a century at most")
    moved = asyncio.run(_shift(url, ledger, timedelta(hours=hours)))
    click.echo(f"{moved:,} transfers: their dates are moved by {hours:g} h")


async def _shift(url: str, ledger: Ledger, by: timedelta) -> int:
    async with opened(url, ledger) as database:
        with click.progressbar(length=1, file=sys.stderr) as bar:

            def told(moved: int, total: int) -> None:
                bar.length = total
                bar.update(moved - bar.pos)

            return await shift_in(database, ledger, by, told)
