"""`genie history`: the recorded requests for a lock, with their waits, holds and ends, as text, JSON or a chart."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click
from msgspec import to_builtins

from genie.cli.format import DAY_MS, duration, join_names, wrap_table
from genie.cli.options import WholeNumber, bare_name, namespace_option, variable_option
from genie.cli.query import Output, output_options
from genie.config import NAMESPACE
from genie.core.special import contains
from genie.history.gantt import draw
from genie.history.records import WHY_MISSING, UnreadableHistory
from genie.history.search import MAX_REQUESTS, Entry, Query, Result, search
from genie.history.writer import namespace_directory
from genie.lock_modes import is_subtree
from genie.text import printable

HEADERS = ("ASKED", "ID", "OWNER", "MODE", "WAITED", "FOR", "HELD", "END", "FENCE")
RESOURCES = "RESOURCES"
"""The header that replaces MODE if requests for several resources are shown."""
MAX_RESOURCES = 10
"""Maximum number of resources that are shown for a request, as many as `genie inspect` lists. `--json` has all."""
NAME_INDEXES = (2, 3, 5)
"""Indexes of the columns that are wrapped on a narrow terminal."""
NUMBER_INDEXES = (4, 6, 8)
"""Indexes of the right-aligned columns."""
LIMIT_HELP = "Maximum number of requests, the latest."
UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
"""The units of a duration in seconds, by their letters."""


class ClockTime(float):
    """The last time at which a clock showed a time of day, in Unix ms, for an option without a date such as `14:03`."""


def read_window(since: float | None, until: float | None) -> tuple[float | None, float | None]:
    """Return the window of the options `--since` and `--until`, in Unix ms.

    A time of day as its end, such as `14:10`, is the first 14:10 after its begin. Raises click.UsageError if the window
    ends before it begins.
    """
    if since is None or until is None:
        return since, until
    if isinstance(until, ClockTime) and until < since:
        until += DAY_MS
    if since > until:
        raise click.UsageError(f"--since ({format_time(since)}) must not be later than --until ({format_time(until)})")
    return since, until


class TimeType(click.ParamType[float | None]):
    """A time as Unix ms: `14:03`, `14:03:05`, `2026-11-24T14:03` (local time, or with an offset), or `10m`: ten minutes ago."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        """Convert a text to Unix ms."""
        if not isinstance(value, str):
            return None if value is None else float(value)
        text = value.strip()
        try:
            if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
                seconds_ago = float(match[1]) * UNITS_S[match[2]]
                moment = datetime.now().astimezone() - timedelta(seconds=seconds_ago)  # not before the year 1
                return moment.timestamp() * 1000
            if re.fullmatch(r"\d\d:\d\d(:\d\d(\.\d+)?)?", text):
                return _last_clock_time(text)
            return datetime.fromisoformat(text).astimezone().timestamp() * 1000
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is not a time: use 14:03, 2026-11-24T14:03:05, or 10m for ten minutes ago", param, ctx
            )


def _last_clock_time(text: str) -> ClockTime:
    """Return the last time at which the local clock showed a time of day. Raises ValueError if the text is not one."""
    now = datetime.now().astimezone()
    time_of_day = datetime.fromisoformat(f"2000-01-01T{text}").time()
    moment = datetime.combine(now.date(), time_of_day).astimezone()
    if moment > now:  # shortly after midnight, `23:50` was yesterday
        moment -= timedelta(days=1)
    return ClockTime(moment.timestamp() * 1000)


T = TypeVar("T")
P = ParamSpec("P")
HOW_TO_RECORD = "a server records a history if it is started with `genie serve --history-dir FOLDER`"


def history_dir_option(command: Callable[P, T]) -> Callable[P, T]:
    """Add `--history-dir`, which must be an existing folder."""
    return variable_option(
        "--history-dir",
        "The folder in which servers record the history.",
        metavar="FOLDER",
        type=click.Path(path_type=Path),
        callback=_existing_folder,
    )(command)


def _existing_folder(ctx: click.Context, param: click.Parameter, folder: Path | None) -> Path:
    """Return the folder. Raises click.UsageError, which says how to get a history, if there is none."""
    if folder is None:
        raise click.UsageError(f"no folder: set --history-dir or GENIE_HISTORY_DIR; {HOW_TO_RECORD}", ctx)
    if not folder.is_dir():
        raise click.BadParameter(f"{str(folder)!r} is not a folder; {HOW_TO_RECORD}", ctx, param)
    return folder


@click.command()
@click.argument("resource", required=False)
@click.option("--transaction", metavar="NAME", help="Only requests of this transaction.")
@click.option("--client", metavar="NAME", help="Only requests of this principal.")
@click.option("--since", type=TimeType(), metavar="TIME", help="Begin of the window: 14:03, an ISO time, or 10m (ago).")
@click.option("--until", type=TimeType(), metavar="TIME", help="End of the window.")
@click.option("--limit", type=WholeNumber(1, MAX_REQUESTS), default=100, show_default=True, help=LIMIT_HELP)
@click.option("--svg", type=click.Path(dir_okay=False), metavar="FILE", help="Write a Gantt chart to a file.")
@output_options(wide=True)
@history_dir_option
@namespace_option
def history(
    output: Output,
    resource: str | None,
    transaction: str | None,
    client: str | None,
    since: float | None,
    until: float | None,
    limit: int,
    svg: str | None,
    history_dir: Path,
    namespace: str | None,
) -> None:
    """Show the requests for RESOURCE: who made them, how long each one waited and held, and how it ended.

    Reads the files that a server writes with --history-dir. Without filters, shows the latest requests for all resources, up
    to --limit. --json prints times in Unix ms.
    """
    since, until = read_window(since, until)
    name = None if resource is None else bare_name(resource)
    try:
        result = search(
            namespace_directory(history_dir, namespace or NAMESPACE),
            Query(name, transaction, client, since, until, limit),
        )
        if svg is not None:
            now_ms = time.time() * 1000
            chart = draw(result.requests, since, now_ms if until is None else min(until, now_ms))
            Path(svg).write_text(chart, encoding="utf-8")
    except (UnreadableHistory, OSError, UnicodeEncodeError) as error:  # the last for a name that is not UTF-8
        raise click.ClickException(str(error)) from None
    no_history = f"{history_dir} has no history of the namespace {(namespace or NAMESPACE)!r}."
    output.print(result, partial(_report, name, no_history), document=to_builtins)


def _report(resource: str | None, no_history: str, result: Result, now_ms: float, columns: int | None) -> Iterator[str]:
    """Yield the lines of the text output. `resource` is the name that the user asked for, if any.

    `no_history` is the text for a folder without a history.
    """
    if result.begins_at is None:
        yield no_history
        return
    if not result.requests:
        yield f"No request matches. The history begins at {format_time(result.begins_at)}."
        return
    have_several_resources = any(entry.mode is None for entry in result.requests)
    headers = [RESOURCES if have_several_resources and header == "MODE" else header for header in HEADERS]
    rows = [_cells(resource, entry, now_ms) for entry in result.requests]
    for lines in wrap_table(headers, rows, columns, NAME_INDEXES, NUMBER_INDEXES):
        yield from lines
    if result.more:
        yield f"Only the latest {len(result.requests):,} requests are shown (--limit)."
    if result.gaps:
        yield f"Events are missing in {result.gaps:,} places, {WHY_MISSING}."


def _cells(resource: str | None, entry: Entry, now_ms: float) -> list[str]:
    """Return the table cells of a request, in the order of `HEADERS`."""
    ended_at = now_ms if entry.last_at is None else entry.last_at
    at_least = "≥ " if entry.record_ends_at is not None else ""
    asked = f"before {format_time(entry.begins_at)}" if entry.asked_at is None else format_time(entry.asked_at)
    waited = held = waited_for = ""
    if entry.asked_at is not None and entry.granted_at != entry.asked_at:  # it was not granted at once
        if entry.granted_at is None:
            waited = at_least + duration(ended_at - entry.asked_at)
        else:
            waited = duration(entry.granted_at - entry.asked_at)
        waited_for = " ".join(blocker.transaction or str(blocker.id) for blocker in entry.waited_for)
    if entry.granted_at is not None:
        held = at_least + duration(ended_at - entry.granted_at)
    owner = entry.transaction or entry.client or "-"
    if entry.note:
        owner += f" ({entry.note})"
    return [
        asked,
        str(entry.id),
        printable(owner),
        _requested_text(resource or "", entry),
        waited,
        printable(waited_for),
        held,
        _ending_text(entry),
        str(entry.fence or ""),
    ]


def _ending_text(entry: Entry) -> str:
    """Return why a request ended, or its present state."""
    if entry.reason is not None:
        return str(entry.reason)
    if entry.record_ends_at is not None:
        return "not recorded"
    return "waits now" if entry.granted_at is None else "held now"


def _requested_text(resource: str, entry: Entry) -> str:
    """Return the mode or the units in which a request asked for `resource`, or the lock of a subtree that contains it.

    A request for several resources, of which none was queried, has all its resources instead.
    """
    if entry.mode is None:
        return join_names(entry.locks[:MAX_RESOURCES], len(entry.locks)) if entry.locks else "anyOf"
    for lock in entry.locks:
        name = bare_name(lock)
        if name == resource:
            return lock.removesuffix(f":{name}")
        if is_subtree(name) and contains(name, resource):
            return printable(lock)
    return entry.mode  # the names are redacted, or too many to be recorded


def format_time(at_ms: float) -> str:
    """Return a Unix time in ms as local date and time, with milliseconds."""
    return f"{datetime.fromtimestamp(at_ms / 1000).astimezone():%Y-%m-%d %H:%M:%S.%f}"[:-3]
