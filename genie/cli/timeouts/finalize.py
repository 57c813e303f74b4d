"""`genie timeouts finalize`"""

from __future__ import annotations

import asyncio
from typing import Any

import click

from genie.cli.asking import plain_errors
from genie.cli.sources import WholeNumber
from genie.cli.timeouts.options import ledger_options
from genie.timeouts import Ledger
from genie.timeouts.opened import opened
from genie.timeouts.trial.finalize import finalize as finalize_in


@click.command()
@plain_errors
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
    async with opened(url, ledger) as database:
        return await finalize_in(database, ledger, **options)
