"""`genie-ledger explain`: list the expired transfers, and what the timeout handler has done with each of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime, timedelta

import click
import orjson

from genie.cli.toolkit import WholeNumber, json_option, one_line_errors, print_json, print_lines
from genie_ledger import Ledger
from genie_ledger.cli.options import ledger_options
from genie_ledger.explain import Explained, Explanation, Progress
from genie_ledger.explain import explain as explain_in
from genie_ledger.schema import open_ledger

SUMMARY = {
    Progress.NO_HANDLER: "without a handler",
    Progress.NOT_READ: "not read yet",
    Progress.DUE: "due in the next run",
    Progress.DATE_MOVED: "with a moved date",
    Progress.DELIVERED: "delivered",
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
    help="Maximum number of transfers, the first to expire.",
)
@json_option
def explain(url: str, ledger: Ledger, limit: int, as_json: bool) -> None:
    """Show which transfers are expired now, and why.

    These are the transfers whose last state change is to a processing state and whose expiration date has passed. They
    are found without the tables of the handler. Each is shown with its progress in the handler.

    The command reads all state changes, which takes some seconds per million. It writes nothing and locks nothing.
    """
    explanation = asyncio.run(_explain(url, ledger, limit))
    for transfer in explanation.expired:
        if as_json:
            print_json(orjson.dumps(_json_fields(transfer)))
        else:
            print_lines(_describe(transfer, explanation))
    if not as_json:
        print_lines(_summarize(explanation, limit))


async def _explain(url: str, ledger: Ledger, limit: int) -> Explanation:
    async with open_ledger(url, ledger, handler_tables=False) as database:
        return await explain_in(database, ledger, limit)


def _json_fields(transfer: Explained) -> dict[str, object]:
    """Return the JSON object that `--json` prints for a transfer. A missing `deliveredDate` means: not delivered."""
    delivery_field = {} if transfer.delivered_at is None else {"deliveredDate": _utc(transfer.delivered_at)}
    return {
        "transferId": transfer.transfer_id,
        "expirationDate": _utc(transfer.expiration_date),
        "state": transfer.state,
        "stateChange": transfer.last_change_id,
        "handler": transfer.progress.value,
        **delivery_field,
    }


def _describe(transfer: Explained, explanation: Explanation) -> str:
    """Describe an expired transfer: its state, how long ago it expired, and its progress in the handler."""
    state = f"{transfer.state} since state change {transfer.last_change_id}, expired {_utc(transfer.expiration_date)}"
    age = _largest_unit(explanation.now - transfer.expiration_date)
    return f"{transfer.transfer_id}: {state} ({age} ago); {_describe_progress(transfer, explanation.segment)}"


def _describe_progress(transfer: Explained, segment: int) -> str:
    """Describe what the handler has done with a transfer, and what the handler will do next.

    `segment` is the number of the last state change that the handler has read. A transfer that was delivered earlier
    is delivered again if it has left and re-entered a processing state, or if its expiration date was changed.
    """
    delivery = "" if transfer.delivered_at is None else f"delivered {_utc(transfer.delivered_at)}"
    match transfer.progress:
        case Progress.NO_HANDLER:
            return "no handler has run on this ledger"
        case Progress.NOT_READ:
            again = f" again if it was final ({delivery})" if delivery else ""
            return f"the handler has read up to state change {segment}, a later run hands it over{again}"
        case Progress.DUE:
            return "the next run hands it over"
        case Progress.DATE_MOVED:
            again = f" again ({delivery})" if delivery else ""
            return f"its expiration date was changed, a run hands it over{again} when it has compared the dates"
        case Progress.DELIVERED:
            return f"{delivery} and not final yet"
        case Progress.MISSED:
            return (
                "missed: the handler has read past its last state change, which was committed later than "
                "--longest-transaction allows or before the transfer had a date"
            )


def _summarize(explanation: Explanation, limit: int) -> str:
    """Return the last line of the output: the number of listed transfers, in total and by progress.

    If the list has `limit` transfers, it may be incomplete. The line then counts "the first" transfers.
    """
    total = len(explanation.expired)
    counts = Counter(transfer.progress for transfer in explanation.expired)
    total_text = f"the first {total:,} expired transfers" if total >= limit else f"{total:,} expired"
    counts_text = ", ".join(f"{counts[progress]:,} {text}" for progress, text in SUMMARY.items() if counts[progress])
    return f"{total_text}: {counts_text}" if counts_text else total_text


def _utc(at: datetime) -> str:
    """Format a time in UTC as ISO 8601 with milliseconds and a `Z`."""
    return f"{at.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def _largest_unit(span: timedelta) -> str:
    """Format a duration in its largest unit, rounded down: `3 d`, `5 h`, `12 min`, `7 s`."""
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if span >= timedelta(seconds=seconds):
            return f"{span // timedelta(seconds=seconds)} {unit}"
    return f"{span.seconds} s"
