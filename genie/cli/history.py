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

from genie.cli.format import duration, join_names, wrap_table
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
"""Resources of a request that are shown, as many as `genie inspect` lists; `--json` has all."""
WRAPPED = (2, 3, 5)
"""Indexes of the columns with names, which are wrapped on a narrow terminal."""
LIMIT_HELP = "Maximum number of requests, the latest."
DAY_MS = 86_400_000
UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class ClockTime(float):
    """A time of day without a date: the last one, as Unix ms."""


def read_window(since: float | None, until: float | None) -> tuple[float | None, float | None]:
    """Return the window of two options. `14:10` as its end is the first 14:10 after its begin.

    Raises click.UsageError if the window ends before it begins.
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
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
            return (time.time() - float(match[1]) * UNITS_S[match[2]]) * 1000
        try:
            if re.fullmatch(r"\d\d:\d\d(:\d\d(\.\d+)?)?", text):
                now = datetime.now().astimezone()
                moment = datetime.combine(now.date(), datetime.fromisoformat(f"2000-01-01T{text}").time()).astimezone()
                if moment > now:  # `23:50`, asked shortly after midnight, was yesterday
                    moment -= timedelta(days=1)
                return ClockTime(moment.timestamp() * 1000)
            return datetime.fromisoformat(text).astimezone().timestamp() * 1000
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is not a time: use 14:03, 2026-11-24T14:03:05, or 10m for ten minutes ago", param, ctx
            )


T = TypeVar("T")
P = ParamSpec("P")
HOW_TO_RECORD = "a server records a history if it is started with `genie serve --history-dir FOLDER`"


def history_dir_option(command: Callable[P, T]) -> Callable[P, T]:
    """Add `--history-dir`, a folder that exists."""
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
    except (UnreadableHistory, OSError) as error:
        raise click.ClickException(str(error)) from None
    output.print(result, partial(_report, name), document=to_builtins)


def _report(resource: str | None, result: Result, now_ms: float, columns: int | None) -> Iterator[str]:
    """Yield the lines of the text output. `resource`: that of the query."""
    if result.begins_at is None:
        yield "There is no history in this directory for this namespace."
        return
    if not result.requests:
        yield f"No request matches. The history begins at {format_time(result.begins_at)}."
        return
    several = any(entry.mode is None for entry in result.requests)
    headers = [RESOURCES if several and header == "MODE" else header for header in HEADERS]
    rows = [_cells(resource, entry, now_ms) for entry in result.requests]
    for lines in wrap_table(headers, rows, columns, WRAPPED, right_aligned=(4, 6, 8)):
        yield from lines
    if result.more:
        yield f"Only the latest {len(result.requests):,} requests are shown (--limit)."
    if result.gaps:
        yield f"Events are missing in {result.gaps:,} places, {WHY_MISSING}."


def _cells(resource: str | None, entry: Entry, now_ms: float) -> list[str]:
    """Return the table cells of a request, in the order of `HEADERS`."""
    end = now_ms if entry.last_at is None else entry.last_at
    asked = f"before {format_time(entry.begins_at)}" if entry.asked_at is None else format_time(entry.asked_at)
    waited = held = waited_for = ""
    if entry.asked_at is not None and entry.granted_at != entry.asked_at:
        waited = duration((entry.granted_at or end) - entry.asked_at)
        if entry.record_ends_at is not None and entry.granted_at is None:
            waited = f"≥ {waited}"
        waited_for = " ".join(waiter.transaction or str(waiter.id) for waiter in entry.waited_for)
    if entry.granted_at is not None:
        held = ("≥ " if entry.record_ends_at is not None else "") + duration(end - entry.granted_at)
    if entry.reason is not None:
        ending = str(entry.reason)
    elif entry.record_ends_at is not None:
        ending = "not recorded"
    else:
        ending = "waits now" if entry.granted_at is None else "held now"
    locks = entry.locks
    resources = join_names(locks[:MAX_RESOURCES], len(locks)) if locks else "anyOf"
    owner = entry.transaction or entry.client or "-"
    if entry.note:
        owner += f" ({entry.note})"
    return [
        asked,
        str(entry.id),
        printable(owner),
        resources if entry.mode is None else _lock_of(resource or "", entry) or entry.mode,
        waited,
        printable(waited_for),
        held,
        ending,
        str(entry.fence or ""),
    ]


def _lock_of(resource: str, entry: Entry) -> str | None:
    """Return the mode or the units in which a request asked for a resource; if it asked for a subtree above, its lock.

    None: the names are redacted, or there are too many, so that only the mode is known.
    """
    for lock in entry.locks:
        name = bare_name(lock)
        if name == resource:
            return lock.removesuffix(f":{name}")
        if is_subtree(name) and contains(name, resource):
            return printable(lock)
    return None


def format_time(at_ms: float) -> str:
    """Return a time with its date, local, with milliseconds."""
    return f"{datetime.fromtimestamp(at_ms / 1000).astimezone():%Y-%m-%d %H:%M:%S.%f}"[:-3]
