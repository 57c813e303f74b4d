"""`genie replay`: runs a piece of the history through the lock manager again, step by step, or with changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import click
import msgspec

from genie.cli.format import duration, table
from genie.cli.history import UNITS_S, TimeType, format_time, history_dir_option, read_window
from genie.cli.options import WholeNumber, bare_name, namespace_option
from genie.cli.output import print_lines
from genie.cli.query import Output, output_options
from genie.config import NAMESPACE
from genie.history.records import WHY_MISSING, Gap, Line, UnreadableHistory
from genie.history.replay import Change, Diverged, Outcome, Replay, Step, TooManyRequests, UnknownState, what_if
from genie.history.segments import list_segments, recorded_terms
from genie.history.writer import namespace_directory
from genie.protocol.limits import MAX_PRIORITY, MAX_TIMEOUT_MS
from genie.text import printable

TIME_WIDTH = len("14:03:05.123")
INDENT = " " * (TIME_WIDTH + 2)
"""Indents the lines of a step below its command."""
MAX_STEPS = 10_000
WHAT_IF_HELP = "What to change, and compare."
OF_HELP = "Which requests to change."
LIMIT_HELP = "Maximum number of steps that are shown, the first."
SELECTORS = ("transaction", "resource", "client")
TIMEOUTS = {"queue-timeout": "queue_timeout_ms", "transaction-timeout": "transaction_timeout_ms"}
"""The fields of `Change` for the timeouts of `--what-if`."""


def _parse_change(text: str) -> tuple[str, Any]:
    """Return a change of `--what-if` as the name of a field of `Change`, and its value. Raises click.BadParameter."""
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):  # a text that is not a number is rejected below
        if text == "removed":
            return "remove", True
        if name == "priority" and abs(float(value)) <= MAX_PRIORITY:
            return "priority", float(value)
        if name in TIMEOUTS and value and value[-1] in UNITS_S:
            timeout_ms = float(value[:-1]) * UNITS_S[value[-1]] * 1000
            if 0 <= timeout_ms <= MAX_TIMEOUT_MS:
                return TIMEOUTS[name], timeout_ms
    raise click.BadParameter(f"{text!r}: use priority=NUMBER, queue-timeout=30s, transaction-timeout=1m or removed")


def _parse_selector(text: str) -> tuple[str, str]:
    """Parse a value of `--of`, such as `transaction=transfer-*`, into its field and pattern. Raises click.BadParameter."""
    field, _, pattern = text.partition("=")
    if field not in SELECTORS or not pattern:
        raise click.BadParameter(f"{text!r}: use transaction=PATTERN, resource=PATTERN or client=PATTERN")
    return field, pattern


@click.command()
@click.argument("resource", required=False)
@click.option("--since", type=TimeType(), metavar="TIME", help="Begin: 14:03, an ISO time, or 10m (ago).")
@click.option("--until", type=TimeType(), metavar="TIME", help="End.")
@click.option("--what-if", "changes", type=_parse_change, multiple=True, metavar="CHANGE", help=WHAT_IF_HELP)
@click.option("--of", "selectors", type=_parse_selector, multiple=True, metavar="SELECTOR", help=OF_HELP)
@click.option("--limit", type=WholeNumber(0, MAX_STEPS), default=100, show_default=True, help=LIMIT_HELP)
@output_options(wide=False)
@history_dir_option
@namespace_option
def replay(
    output: Output,
    resource: str | None,
    since: float | None,
    until: float | None,
    changes: tuple[tuple[str, Any], ...],
    selectors: tuple[tuple[str, str], ...],
    limit: int,
    history_dir: Path,
    namespace: str | None,
) -> None:
    """Repeat the recorded commands, and show each step: the queues before and after, and why a request was not granted.

    With RESOURCE, only the steps of its requests. --what-if simulates changed requests instead, and compares the outcomes:
    priority=NUMBER, queue-timeout=30s, transaction-timeout=1m or removed, for the requests that match all --of
    (transaction=PATTERN, resource=PATTERN, client=PATTERN).
    """
    if selectors and not changes:
        raise click.UsageError("--of requires --what-if: it selects the requests to change")
    if resource is not None and changes:
        raise click.UsageError(
            "--what-if simulates all resources: select the changed requests with --of resource=PATTERN"
        )
    for option, values in (("--what-if", changes), ("--of", selectors)):
        if len({field for field, _ in values}) < len(values):
            raise click.UsageError(f"{option} has two values for the same field")
    since, until = read_window(since, until)
    begin_ms = -inf if since is None else since
    end_ms = inf if until is None else until
    directory = _recorded_directory(history_dir, namespace or NAMESPACE)
    try:
        if changes:
            fields: dict[str, Any] = dict(selectors) | dict(changes)
            _compare(recorded_terms(directory, begin_ms, end_ms), begin_ms, Change(**fields), output)
        else:
            name = None if resource is None else bare_name(resource)
            _repeat(recorded_terms(directory, begin_ms, end_ms), begin_ms, name, limit, output)
    except (Diverged, UnknownState) as error:
        raise click.ClickException(_describe_failure(error)) from None
    except TooManyRequests as error:
        raise click.ClickException(f"{error} in this window: make it smaller with --since and --until") from None
    except BrokenPipeError:  # as with `| head`
        raise
    except (UnreadableHistory, OSError) as error:
        raise click.ClickException(str(error)) from None


def _recorded_directory(history_dir: Path, namespace: str) -> Path:
    """Return the folder with the history of a namespace. Raises click.ClickException if it has no files."""
    directory = namespace_directory(history_dir, namespace)
    if not list_segments(directory):
        raise click.ClickException(f"{history_dir} has no history of the namespace {namespace!r}")
    return directory


def _describe_failure(error: Diverged | UnknownState) -> str:
    """Return an error message that says at which time the replay has ended, and why."""
    if isinstance(error, Diverged):
        return f"the replay is not what is recorded at {format_time(error.at)}: {printable(str(error))}"
    return (
        f"no replay can begin at {format_time(error.at)}: {error}, because they did not fit in the history. "
        "Choose a later --since, or let the servers keep more (--history-max-mb)"
    )


def _compare(terms: Iterator[Iterator[Line]], begin_ms: float, change: Change, output: Output) -> None:
    """Simulate the recorded requests with a change from `begin_ms` on, and print the recorded and the simulated outcome.

    `terms` has the recorded lines of each leadership.
    """
    gap_count = 0

    def count_gaps(lines: Iterator[Line]) -> Iterator[Line]:
        nonlocal gap_count
        for line in lines:
            gap_count += isinstance(line, Gap)
            yield line

    recorded, simulated = what_if(count_gaps(chain.from_iterable(terms)), begin_ms, change)
    document = {"recorded": _json_outcome(recorded), "simulated": _json_outcome(simulated), "gaps": gap_count}
    output.print(document, _comparison_lines)


def _repeat(terms: Iterator[Iterator[Line]], begin_ms: float, name: str | None, limit: int, output: Output) -> None:
    """Repeat the recorded steps from `begin_ms` on, and print the first `limit` of them, or those of one resource.

    `terms` has the recorded lines of each leadership. Raises Diverged if the outcome of a step differs from the record.
    """
    steps: list[Step] = []
    total = grants = ends = 0

    def on_step(step: Step) -> None:
        nonlocal total
        if name is None or name in step.queues:
            total += 1
            if len(steps) < limit:
                steps.append(step)

    is_cut_off = False
    try:
        for term in terms:
            run = Replay(begin_ms, on_step)
            run.run(term)
            grants += run.grants
            ends += run.ends
            is_cut_off |= run.is_cut_off
    except (Diverged, UnknownState):
        if not output.as_json:
            print_lines(*_step_lines(steps, total))
        raise

    def report_lines(*_: object) -> Iterator[str]:
        yield from _step_lines(steps, total)
        if is_cut_off:
            yield "The record of a leadership ends in the middle of a step: its server was killed, or its disk was full."
        yield f"{grants:,} grants and {ends:,} ends are the same as recorded."

    document = {"steps": steps, "total": total, "grants": grants, "ends": ends}
    output.print(document, report_lines, document=msgspec.to_builtins)


def _step_lines(steps: list[Step], total: int) -> Iterator[str]:
    """Yield the lines of the first steps. `total` is the number of all steps."""
    for step in steps:
        moment = datetime.fromtimestamp(step.at / 1000).astimezone()
        yield f"{moment:%H:%M:%S.%f}"[:TIME_WIDTH] + "  " + step.command
        yield from (INDENT + line for line in step.outcome)
        for name, (before, after) in step.queues.items():
            yield INDENT + f"{name}: {' '.join(before) or 'free'} → {' '.join(after) or 'free'}"
    if total > len(steps):
        yield f"The first {len(steps):,} of {total:,} steps are shown (--limit)."


def _json_outcome(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object of an outcome. Waits are in ms."""
    return {
        "requests": outcome.requests,
        "granted": outcome.granted,
        "waited": outcome.waited,
        "wait_median": outcome.percentile(0.5),
        "wait_p99": outcome.percentile(0.99),
        "wait_max": max(outcome.waits.values(), default=0.0),
        "ended": outcome.ended,
    }


def _comparison_lines(document: dict[str, Any], *_: object) -> Iterator[str]:
    """Yield the lines of a table with the recorded and the simulated outcome. `document` is what `--json` prints."""
    outcomes = [document["recorded"], document["simulated"]]
    rows = [[name, *(f"{outcome[name]:,}" for outcome in outcomes)] for name in ("requests", "granted", "waited")]
    for label, key in (("median wait", "wait_median"), ("wait, 99 %", "wait_p99"), ("longest wait", "wait_max")):
        rows.append([label, *(duration(outcome[key]) for outcome in outcomes)])
    reasons = sorted({reason for outcome in outcomes for reason in outcome["ended"]})
    rows += (
        [f"ended: {reason}", *(f"{outcome['ended'].get(reason, 0):,}" for outcome in outcomes)] for reason in reasons
    )
    yield from table(("", "RECORDED", "WHAT IF"), rows, right_aligned=(1, 2))
    if document["gaps"]:
        yield f"Events are missing in {document['gaps']:,} places, {WHY_MISSING}."
