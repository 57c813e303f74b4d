"""`genie timeouts run`"""

from __future__ import annotations

from typing import Any

import click

from genie.cli.asking import plain_errors, seconds, server_options
from genie.cli.sources import WholeNumber
from genie.cli.timeouts import service
from genie.cli.timeouts.options import ledger_options, progress_option
from genie.cli.timeouts.service import Order
from genie.timeouts import Ledger
from genie.timeouts.handler import MOST_BATCH


@click.command()
@plain_errors
@ledger_options
@click.option(
    "--every",
    type=seconds(0.001),
    default=15,
    show_default=True,
    metavar="SECONDS",
    help="From the end of a run to the next. While it is behind, the next begins at once.",
)
@click.option("--once", is_flag=True, help="One run, and the end.")
@click.option(
    "--on-expired",
    metavar="COMMAND",
    help="A command of the shell: it reads expired transfers from stdin, and exits with 0 if it has dealt with all.",
)
@click.option(
    "--batch",
    type=WholeNumber(1, MOST_BATCH),
    default=100_000,
    show_default=True,
    metavar="N",
    help="State changes, and expired transfers, of a run at most.",
)
@click.option(
    "--longest-transaction",
    type=seconds(0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long a transaction of the ledger may be open; what is committed later may be missed.",
)
@click.option(
    "--lock",
    metavar="NAME",
    help="Hold exclusive:timeout-handler/NAME on the Genie server of --host in each run. "
    "Without it replicas are kept apart by a lock of the database.",
)
@progress_option("While it is behind, write a line each time that so many more state changes are read.")
@server_options
def run(url: str, ledger: Ledger, **options: Any) -> None:
    """Find expired transfers until SIGTERM.

    Each is a line of JSON: {"transferId": "…", "expirationDate": "2026-01-31T12:00:00.000Z", "state": "RESERVED"}. The
    lines go to COMMAND, which is started for each list of them, or to stdout. If COMMAND exits with anything but 0,
    the next run hands the whole list over again; so does one after a fault. What was written to stdout counts as dealt
    with.

    Of several replicas one is at work; the others wait for their next run. Messages are on stderr: how far it has come
    while it is behind, how many have expired, and what went wrong. It goes on after that, unless nothing worked from
    the beginning.

    \b
    Exit status:
      0    it was stopped by SIGTERM; with --once: the run is done, or
           another replica is at it
      1    it could not begin; nobody reads stdout any more; with --once: the
           run failed, or COMMAND has not dealt with what had expired
      2    these arguments are wrong
      128 + N  signal N came

    A COMMAND that runs when a signal comes is sent SIGTERM, and SIGKILL 10 seconds later.
    """  # noqa: D301 - click wants the character itself before a text that must keep its lines
    raise SystemExit(service.run(Order(url=url, ledger=ledger, **options)))
