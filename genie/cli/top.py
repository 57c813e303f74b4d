"""`genie top`: a live view of a server, rendered to fit the terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self, TextIO

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from genie.admin.models import Edge, HotList, Node, State, Waits
from genie.cli.admin_client import AdminClient, admin_query
from genie.cli.format import Column, clip, duration, fit_table, fold, lock_text, wrap_items, wrap_words
from genie.cli.options import json_option, one_line, run_async, seconds
from genie.cli.output import print_json, print_lines
from genie.errors import GenieError
from genie.protocol import codec

MAX_READ_BYTES = 1024
"""Maximum bytes of input read at once."""


class KeyReader:
    """Calls `on_keys` with the keys that are typed on a terminal. Does nothing if `source` is not a terminal.

    The terminal is in cbreak mode: keys are read immediately, and Ctrl-C and Ctrl-Z still send signals.
    """

    def __init__(self, source: TextIO | None, on_keys: Callable[[str], None]) -> None:
        self._terminal = source.fileno() if source is not None and source.isatty() else None
        """File descriptor of the terminal. None if `source` is not a terminal."""
        self._on_keys = on_keys
        self._saved_mode: list[Any] = []
        """The mode of the terminal, which is restored at the end."""

    def __enter__(self) -> Self:
        if self._terminal is not None:
            self._saved_mode = termios.tcgetattr(self._terminal)
            self.enable()
            asyncio.get_running_loop().add_reader(self._terminal, self._read)
        return self

    def __exit__(self, *error: object) -> None:
        if self._terminal is not None:
            asyncio.get_running_loop().remove_reader(self._terminal)
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._saved_mode)

    def enable(self) -> None:
        """Set the cbreak mode. Must be called again after another program has used the terminal."""
        if self._terminal is not None:
            tty.setcbreak(self._terminal, termios.TCSANOW)

    def _read(self) -> None:
        """Pass the typed keys to `on_keys`. Stop reading if the terminal was closed."""
        assert self._terminal is not None  # noqa: S101 - the event loop calls this method only for a terminal
        try:
            keys = os.read(self._terminal, MAX_READ_BYTES)
        except OSError:
            keys = b""
        if keys:
            self._on_keys(keys.decode(errors="replace"))
        else:  # the terminal was closed
            asyncio.get_running_loop().remove_reader(self._terminal)


# -- Rendering --------

LEADER = "leader"
BOLD, DIM, ERROR = "bold", "dim", "bold red"
"""The styles of lines."""
MAX_ROWS = 20
"""Maximum number of rows of a section."""
DECIMAL_BELOW = 10
"""Rates and wait times in ms are shown with one decimal if they are below this number."""

RATES = ("grants", "releases", "waits", "timeouts", "deadlocks", "errors")
"""The fields of a server's rates, in the order in which they are shown."""

QUEUE_COLUMNS = (
    Column("RESOURCE", 0, min_width=12, preferred_width=20),
    Column("WAITING", 0, right_aligned=True),
    Column("LONGEST", 2, right_aligned=True),
    Column("HOLDER", 1, min_width=12, preferred_width=24),
    Column("ID", 5),
    Column("HELD FOR", 3, right_aligned=True),
    Column("HOLDERS", 4, right_aligned=True),
)
WAIT_COLUMNS = (
    Column("WAITER", 0, min_width=12, preferred_width=28),
    Column("ID", 6),
    Column("WAITS", 0, right_aligned=True),
    Column("BLOCKER", 0, min_width=12, preferred_width=28),
    Column("ID", 5),
    Column("MORE", 3, right_aligned=True),
    Column("RESOURCE", 0, min_width=12, preferred_width=20),
    Column("STATE", 4),
    Column("FOR", 2, right_aligned=True),
)
"""The id columns have the highest ranks, so they are dropped first on a narrow terminal. WAITER and BLOCKER contain the
transaction. If a request has none, they contain its note in parentheses, or else its id."""
CONTENTION_COLUMNS = (
    Column("RESOURCE", 0, min_width=20),
    Column("WAITED", 0, right_aligned=True),
    Column("CONFLICTS", 2, right_aligned=True),
    Column("WAITING", 1, right_aligned=True),
    Column("HOLDERS", 3, right_aligned=True),
)


class Line(NamedTuple):
    """A line of the screen and its style."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The responses of the admin port that the screen shows. `waits` and `hot` are None if the server is a follower."""

    state: State
    waits: Waits | None = None
    hot: HotList | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the screen: a title and a table, or a note instead of an empty table."""

    title: str
    columns: Sequence[Column]
    rows: list[list[str]]
    """The cells of the first rows."""
    empty_note: str
    """The text that is shown if there are no rows."""
    total: int
    """Number of rows on the server."""
    title_suffix: str = ""
    """Appended to the title: says which rows the server has compared, if not all."""

    def lines(self, max_rows: int, max_width: int, *, wraps: bool) -> Iterator[Line]:
        """Yield an empty line, the title, and the table with at most `max_rows` rows.

        Long names are wrapped if `wraps` is true, otherwise they are shortened.
        """
        yield Line("")
        if not self.rows:
            yield Line(clip(self.empty_note, max_width), DIM)
            return
        shown = self.rows[:max_rows]
        count = "" if len(shown) == self.total else f" ({len(shown):,} of {self.total:,})"
        yield Line(clip(f"{self.title}{count}{self.title_suffix}", max_width), BOLD)
        header, *rows = fit_table(self.columns, shown, max_width, wraps=wraps)
        yield Line(header, DIM)
        yield from map(Line, rows)

    @property
    def overhead(self) -> int:
        """Number of lines without the rows: an empty line, and the title with the header, or the note."""
        return 3 if self.rows else 2

    @property
    def min_lines(self) -> int:
        """Number of lines with at most one row."""
        return self.overhead + min(1, len(self.rows))


def render(snapshot: Snapshot, columns: int, rows: int | None, *hints: str) -> list[Line]:
    """Return the lines of the screen.

    Args:
        snapshot: the content.
        columns: maximum width of a line in terminal columns.
        rows: maximum number of lines. None means no limit: then long names are wrapped, otherwise they are shortened.
        hints: texts at the end of the first line, such as the key to quit.

    """
    lines = [*_header_lines(snapshot.state, columns, hints), *_warning_lines(snapshot.state, columns)]
    if snapshot.waits is not None and snapshot.hot is not None:
        sections = [
            _queues_section(snapshot),
            _waits_section(snapshot.waits, snapshot.state.now),
            _hot_resources_section(snapshot.hot),
        ]
        if not snapshot.state.waiting and not snapshot.waits.nodes:
            del sections[1]  # the section of the queues already says that no requests wait
        free_lines = None if rows is None else rows - len(lines)
        for section, row_count in _share_lines(sections, free_lines):
            lines += section.lines(row_count, columns, wraps=rows is None)
    return lines[:rows]


def _share_lines(sections: list[Section], free_lines: int | None) -> Iterator[tuple[Section, int]]:
    """Yield the sections that fit on the screen, each with the number of rows to show.

    `free_lines` is the number of lines for all sections, or None without a limit. A section that is not empty needs at least
    one row. If the sections do not fit, the last sections are dropped. The sections share the remaining lines evenly, but
    no section gets more than `MAX_ROWS` rows.
    """
    if free_lines is None:
        for section in sections:
            yield section, min(MAX_ROWS, len(section.rows))
        return
    while sections and free_lines < sum(section.min_lines for section in sections):
        sections = sections[:-1]
    wanted_rows = [min(MAX_ROWS, len(section.rows)) for section in sections]
    row_counts = [0] * len(sections)
    lines_left = free_lines - sum(section.overhead for section in sections)
    while lines_left > 0 and row_counts != wanted_rows:
        for i, row_count in enumerate(row_counts):
            if lines_left > 0 and row_count < wanted_rows[i]:
                row_counts[i] += 1
                lines_left -= 1
    yield from zip(sections, row_counts, strict=True)


def _header_lines(state: State, columns: int, hints: Sequence[str]) -> Iterator[Line]:
    """Yield the first lines of the screen: version, role and uptime, then the roles, the totals, and the rates.

    The roles by namespace are shown only if the server has several namespaces. `hints` are at the end of the first line.
    """
    server = [f"genie {state.version}", state.role, f"namespace {state.namespace}", f"store {state.store}"]
    for line in wrap_items([*server, f"up {duration(state.uptime)}", *hints], columns):
        yield Line(line, BOLD)
    if len(state.namespaces) > 1:
        roles = [f"{namespace.namespace} {namespace.role}" for namespace in state.namespaces]
        yield from map(Line, wrap_items(["namespaces", *roles], columns))
    totals = [
        f"locks {state.locks:,}",
        f"held {state.held:,}",
        f"waiting {state.waiting:,}",
        f"longest wait {duration(state.longest_wait)}",
        f"wait p50 {_format_quantile(state.wait_p50)}",
        f"p99 {_format_quantile(state.wait_p99)}",
        f"connections {state.connections:,}",
        f"sessions {state.sessions:,}",
    ]
    yield from map(Line, wrap_items(totals, columns))
    rates = [f"{name} {_format_rate(getattr(state.rates, name))}/s" for name in RATES]
    yield from map(Line, wrap_items(rates, columns))


def _format_rate(per_s: float) -> str:
    return f"{per_s:.1f}" if 0 < per_s < DECIMAL_BELOW else f"{per_s:,.0f}"


def _format_quantile(wait_ms: float | None) -> str:
    """Format a quantile of the wait times. None becomes `-`: no request was granted after a wait."""
    if wait_ms is None:
        return "-"
    return f"{wait_ms:.1f} ms" if wait_ms < DECIMAL_BELOW else duration(wait_ms)


def _warning_lines(state: State, columns: int) -> Iterator[Line]:
    """Yield the lines of warnings about the store, and about a server that is not the leader."""
    warnings = []
    if state.store_unavailable_since is not None:
        began = datetime.fromtimestamp(state.store_unavailable_since / 1000, UTC)
        lasted = duration(state.now - state.store_unavailable_since)
        warnings.append(f"The store is unavailable since {began:%Y-%m-%d %H:%M:%S} UTC ({lasted}).")
    if state.locks_age:
        warnings.append(f"The numbers of locks are those of {duration(state.locks_age)} ago, when this server led.")
    if state.store_full:
        warnings.append("The store is out of memory: locks can be released, but no requests are accepted.")
    if state.role != LEADER:
        leader = f"{state.leader} is: query its admin port." if state.leader else "no leader is known."
        warnings.append(f"This server is not the leader ({state.role}); {leader}")
    for warning in warnings:
        yield from (Line(line, ERROR) for line in wrap_words(warning, columns))


def _queues_section(snapshot: Snapshot) -> Section:
    """Return the section of the longest wait queues.

    HELD FOR is `-` if the holder is not a node of the queried wait-for graph, which contains its hold time and its note.
    """
    state = snapshot.state
    holder_by_id: dict[int, Node] = {}
    if snapshot.waits is not None:
        holder_by_id = {node.id: node for node in snapshot.waits.nodes if node.state == "held"}
    rows = []
    for queue in state.queues:
        holder_cells = ["-", "-", "-"]
        if queue.holder is not None:
            holder = holder_by_id.get(queue.holder)
            held_for = "-" if holder is None else duration(state.now - holder.since)
            holder_cells = [_owner_text(queue.holder, holder, queue.transaction_name), str(queue.holder), held_for]
        waited = duration(state.now - queue.since)
        rows.append([queue.resource, f"{queue.waiting:,}", waited, *holder_cells, f"{queue.holders:,}"])
    return Section(
        "Longest queues",
        QUEUE_COLUMNS,
        rows,
        empty_note="No requests wait.",
        total=len(rows),
        title_suffix="" if state.queues_complete else ", among the oldest waiters",
    )


def _waits_section(waits: Waits, now_ms: float) -> Section:
    """Return the section of the longest waits. Each row shows the first blocker and the number of other blockers."""
    node_by_id = {node.id: node for node in waits.nodes}
    edges_by_waiter: dict[int, list[Edge]] = {}
    for edge in waits.edges:
        edges_by_waiter.setdefault(edge.waiter, []).append(edge)
    waiters = sorted((node for node in waits.nodes if node.state == "queued"), key=lambda node: node.since)
    rows = []
    for waiter in waiters:
        waiter_cells = [_owner_text(waiter.id, waiter), str(waiter.id), duration(now_ms - waiter.since)]
        edges = edges_by_waiter.get(waiter.id)
        if edges is None:  # the graph does not contain the blockers: they have ended, or were omitted
            resource = waiter.resources[0] if waiter.resources else "-"
            rows.append([*waiter_cells, "-", "-", "", resource, "-", "-"])
            continue
        first_edge, *other_edges = edges
        omitted_count = max(len(other_edges), (waiter.blockers_total or 0) - 1)
        rows.append(
            [
                *waiter_cells,
                _owner_text(first_edge.blocker, node_by_id.get(first_edge.blocker)),
                str(first_edge.blocker),
                f"+{omitted_count:,}" if omitted_count else "",
                lock_text(first_edge.mode, first_edge.resource, first_edge.units, first_edge.of),
                first_edge.state,
                duration(now_ms - first_edge.since),
            ]
        )
    return Section("Longest waits", WAIT_COLUMNS, rows, empty_note="No requests wait.", total=waits.queue_total)


def _owner_text(id_: int, node: Node | None, transaction: str | None = None) -> str:
    """Return the name of a request's transaction. Without one, return `(NOTE)`, or `#ID` if there is no note either.

    `node` is the request in the wait-for graph, or None if it is missing there.
    """
    if node is not None:
        transaction = transaction or node.transaction_name or None
    if transaction:
        return transaction
    return f"({node.note})" if node is not None and node.note else f"#{id_}"


def _hot_resources_section(hot: HotList) -> Section:
    """Return the section of the most contended resources."""
    rows = [
        [row.resource, duration(row.waited), f"{row.conflicts:,}", f"{row.waiting:,}", f"{row.holders:,}"]
        for row in hot.resources
    ]
    title, empty_note = "Hot resources (last minutes)", "No contention in the last minutes."
    return Section(title, CONTENTION_COLUMNS, rows, empty_note, total=len(rows))


# -- `genie top` --------

NO_LIMIT = 1_000_000
"""Width of the output if stdout is not a terminal: no column is dropped, and no name is shortened."""
MAX_NODES = 250
"""Number of nodes of the wait-for graph to query, enough for `MAX_ROWS` waiting requests with ten blockers each."""
SIGTERM_STATUS = 128 + signal.SIGTERM
"""Exit status after SIGTERM, by the convention of shells."""


@click.command()
@click.option("--every", type=seconds(0.1), metavar="SECONDS", default=1, show_default=True, help="Refresh interval.")
@click.option("--once", is_flag=True, help="Print one snapshot and exit. On a terminal, names are wrapped.")
@click.option("--wide", is_flag=True, help="With --once: print whole rows, however long.")
@json_option
@admin_query
def top(admin: AdminClient, every: float, once: bool, wide: bool, as_json: bool) -> None:
    """Show a live view of a server: longest queues, longest waits, hot resources. Press ? for help, and q to quit.

    Queries the admin port, and retries while it does not respond. --json prints the state of the server once.
    """
    console = Console(markup=False, highlight=False, emoji=False)
    if as_json:
        response, _ = admin.query("/api/state", State)
        print_json(codec.dumps(response))
    elif once or not console.is_terminal or console.is_dumb_terminal:
        columns = console.width if console.is_terminal and not wide else NO_LIMIT
        snapshot = admin.run(lambda: _query_snapshot(admin))
        print_lines(*(line.text for line in render(snapshot, columns, rows=None)))
    else:
        raise SystemExit(run_async(_Screen(console, admin, every).run()))


async def _query_snapshot(admin: AdminClient) -> Snapshot:
    """Query the data that the screen shows. A follower is queried only for its state."""
    _, state = await admin.fetch("/api/state", State)
    if state.role != LEADER:
        return Snapshot(state)
    _, waits = await admin.fetch("/api/waits", Waits, limit=MAX_NODES)
    _, hot = await admin.fetch("/api/hot", HotList, limit=MAX_ROWS)
    return Snapshot(state, waits, hot)


KEYS = "?: help  q: quit"
HELP = (
    ("Keys", BOLD),
    ("  ?  show or hide this help", ""),
    ("  q  quit", ""),
    ("", ""),
    ("The first line", BOLD),
    ("  version, role in the namespace, where locks are kept, time since the start", ""),
    ("Longest queues", BOLD),
    ("  resources with waiting requests; LONGEST is the oldest wait, HOLDER holds the resource", ""),
    ("Longest waits", BOLD),
    ("  requests that wait, and their first blocker: it is held, or queued ahead; MORE is the number of others", ""),
    ("Hot resources", BOLD),
    ("  where requests waited for longest in the last 5 to 10 minutes; CONFLICTS is how often they had to wait", ""),
    ("Commands for more", BOLD),
    ("  genie explain ID  why a request waits", ""),
    ("  genie release ID  end a lock, or cancel a waiting request", ""),
)
"""The lines of the help, and their styles."""


class _Screen:
    """The live view, which fills the terminal."""

    def __init__(self, console: Console, client: AdminClient, interval_s: float) -> None:
        self._console = console
        self._live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._client = client
        self._interval_s = interval_s
        self._snapshot: Snapshot | None = None
        self._snapshot_at = 0.0
        """Event-loop time at which the last snapshot was received."""
        self._is_help_shown = False
        self._error = ""
        """Why the last query failed. Empty if it has succeeded."""
        self._exit_status: asyncio.Future[int] | None = None
        """Its completion, with the exit status, ends the view. None before `run`."""

    async def run(self) -> int:
        """Show the view until the user presses q or SIGTERM arrives. Return the exit status."""
        loop = asyncio.get_running_loop()
        self._exit_status = loop.create_future()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._client)
            key_reader = stack.enter_context(KeyReader(sys.stdin, self._on_keys))
            stack.enter_context(self._live)
            handlers: dict[int, Callable[[], None]] = {
                signal.SIGWINCH: self._draw,
                signal.SIGCONT: lambda: self._resume(key_reader),
                signal.SIGTERM: lambda: self._finish(SIGTERM_STATUS),
            }
            for number, handler in handlers.items():
                loop.add_signal_handler(number, handler)
                stack.callback(loop.remove_signal_handler, number)
            self._draw()
            refreshing = loop.create_task(self._refresh_loop())
            try:
                await asyncio.wait({refreshing, self._exit_status}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                refreshing.cancel()
            return await self._exit_status if self._exit_status.done() else await refreshing

    async def _refresh_loop(self) -> int:
        """Query the server, and draw the screen, once in each interval. A failed query is retried. Never returns."""
        loop = asyncio.get_running_loop()
        while True:
            next_query_at = loop.time() + self._interval_s
            try:
                self._snapshot = await _query_snapshot(self._client)
                self._snapshot_at = loop.time()
                self._error = ""
            except GenieError as error:
                self._error = one_line(error)
            self._draw()
            await asyncio.sleep(max(0, next_query_at - loop.time()))

    def _draw(self) -> None:
        """Draw the last snapshot in the current size of the terminal, or the error if the last query failed, or the help."""
        columns, rows = self._console.size
        if self._is_help_shown:
            lines = _help_lines(columns)[:rows]
        elif self._snapshot and not self._error:
            lines = render(self._snapshot, columns, rows, KEYS)
        else:
            lines = self._status_lines(columns)
        text = Text(no_wrap=True, overflow="crop")
        for number, line in enumerate(lines):
            text.append("\n" if number else "").append(line.text, line.style)
        self._live.update(text, refresh=True)

    def _status_lines(self, columns: int) -> list[Line]:
        """Return the lines in place of a snapshot: the error of a failed query, or that the first query is running."""
        if not self._error:
            return [Line(line, BOLD) for line in wrap_items([f"querying {self._client.address}", KEYS], columns)]
        retry = f"Retrying every {self._interval_s:g} s."
        if self._snapshot:
            age_ms = (asyncio.get_running_loop().time() - self._snapshot_at) * 1000
            retry += f" Last response: {duration(age_ms)} ago."
        texts = [(self._error, ERROR), (retry, ""), (KEYS, BOLD)]
        return [Line(line, style) for text, style in texts for line in wrap_words(text, columns)]

    def _on_keys(self, keys: str) -> None:
        if "q" in keys.lower():
            self._finish(0)
        elif keys.count("?") % 2:  # two presses that are read together have no effect
            self._is_help_shown = not self._is_help_shown
            self._draw()

    def _finish(self, status: int) -> None:
        """End the view with an exit status, unless it has ended before."""
        if self._exit_status is not None and not self._exit_status.done():
            self._exit_status.set_result(status)

    def _resume(self, key_reader: KeyReader) -> None:
        """Restore the terminal mode and redraw the screen, after the process was stopped (Ctrl-Z) and continued."""
        key_reader.enable()
        self._console.set_alt_screen(True)
        self._draw()


def _help_lines(columns: int) -> list[Line]:
    """Return the lines of the help, wrapped to the width of the terminal."""
    lines = []
    for text, style in HELP:
        unindented = text.lstrip(" ")
        indent = " " * (len(text) - len(unindented))
        lines += [Line(line, style) for line in fold(indent, unindented, columns)]
    return lines
