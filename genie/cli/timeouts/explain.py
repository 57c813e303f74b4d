"""`genie timeouts explain`"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime, timedelta

import click

from genie.cli.options import WholeNumber, json_option, one_line_errors
from genie.cli.timeouts.options import ledger_options
from genie.protocol import codec
from genie.timeouts import Ledger
from genie.timeouts.explain import Explained, Explanation, Progress
from genie.timeouts.explain import explain as explain_in
from genie.timeouts.schema import open_ledger

SUMMARY = {
    Progress.NO_HANDLER: "without a handler",
    Progress.NOT_READ: "not read yet",
    Progress.DUE: "due in the next run",
    Progress.DATE_MOVED: "with a moved date",
    Progress.HANDED_OVER: "handed over",
    Progress.MISSED: "missed",
}


@click.command()
@one_line_errors
@ledger_options
@click.option(
    "--limit",
    type=WholeNumber(1),
    default=100_000,
    show_default=True,
    metavar="N",
    help="How many transfers at most: those that expired first.",
)
@json_option
def explain(url: str, ledger: Ledger, limit: int, as_json: bool) -> None:
    """Show which transfers would be expired now, and why.

    These are the transfers whose last state change is in a processing state and whose date has passed, as the ledger
    itself says: the handler's tables are not needed to find them. Each is shown with what the handler does with it.

    It reads all state changes, which takes some seconds per million. It writes nothing and locks nothing.
    """
    found = asyncio.run(_explain(url, ledger, limit))
    for one in found.expired:
        click.echo(codec.dumps(_fields(one)) if as_json else _line(one, found))
    if not as_json:
        click.echo(_summary(found, limit))


async def _explain(url: str, ledger: Ledger, limit: int) -> Explanation:
    async with open_ledger(url, ledger, handler_tables=False) as database:
        return await explain_in(database, ledger, limit)


def _fields(one: Explained) -> dict[str, object]:
    handed_over = {} if one.handed_over is None else {"handedOver": _utc(one.handed_over)}
    return {
        "transferId": one.transfer_id,
        "expirationDate": _utc(one.expiration_date),
        "state": one.state,
        "stateChange": one.change,
        "handler": one.progress.value,
        **handed_over,
    }


def _line(one: Explained, found: Explanation) -> str:
    why = f"{one.state} since state change {one.change}, expired {_utc(one.expiration_date)}"
    return f"{one.transfer_id}: {why} ({_ago(found.now - one.expiration_date)} ago); {_handler(one, found.segment)}"


def _handler(one: Explained, segment: int) -> str:
    handed_over = "" if one.handed_over is None else f"handed over {_utc(one.handed_over)}"
    match one.progress:
        case Progress.NO_HANDLER:
            return "no handler has run on this ledger"
        case Progress.NOT_READ:
            read = f"the handler has read up to state change {segment}"
            return f"{read}, a run that reads on " + (
                f"hands it over again if it was final ({handed_over})" if handed_over else "hands it over"
            )
        case Progress.DUE:
            return "the next run hands it over"
        case Progress.DATE_MOVED:
            again = f" again ({handed_over})" if handed_over else ""
            return f"its date was moved, a run hands it over{again} when it has compared the dates"
        case Progress.HANDED_OVER:
            return f"{handed_over} and not final yet"
        case Progress.MISSED:
            return (
                "missed: the handler has read past its last state change, which was committed later than "
                "--longest-transaction allows or before the transfer had a date"
            )


def _summary(found: Explanation, limit: int) -> str:
    number = len(found.expired)
    counts = Counter(one.progress for one in found.expired)
    parts = ", ".join(f"{counts[progress]:,} {text}" for progress, text in SUMMARY.items() if counts[progress])
    first = f"the first {number:,} expired transfers" if number >= limit else f"{number:,} expired"
    return f"{first}: {parts}" if parts else first


def _utc(at: datetime) -> str:
    return f"{at.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def _ago(span: timedelta) -> str:
    """In its largest unit: `3 d`, `5 h`, `12 min`, `7 s`."""
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if span >= timedelta(seconds=seconds):
            return f"{span // timedelta(seconds=seconds)} {unit}"
    return f"{span.seconds} s"
