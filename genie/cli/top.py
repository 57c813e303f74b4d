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
from typing import Any, NamedTuple, Self, TextIO

import click
from msgspec import UnsetType
from rich.console import Console
from rich.live import Live
from rich.text import Text

from genie.admin.models import Edge, HotList, State, Waits
from genie.cli.admin_client import AdminClient, admin_options, decode_response, query_admin
from genie.cli.format import Column, clip, duration, fitted, wrapped
from genie.cli.options import json_option, one_line, one_line_errors, seconds, timeout_option
from genie.errors import GenieError
from genie.protocol import codec

MAX_READ_BYTES = 1024
"""Bytes of input that are read at once."""


class KeyReader:
    """Calls `pressed` with each key typed on a terminal, in cbreak mode; Ctrl-C and Ctrl-Z keep their effect.

    Does nothing if the input is not a terminal.
    """

    def __init__(self, source: TextIO | None, pressed: Callable[[str], None]) -> None:
        self._file = source.fileno() if source is not None and source.isatty() else None
        self._pressed = pressed
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        if self._file is not None:
            self._before = termios.tcgetattr(self._file)
            self.enable()
            asyncio.get_running_loop().add_reader(self._file, self._read)
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            asyncio.get_running_loop().remove_reader(self._file)
            termios.tcsetattr(self._file, termios.TCSANOW, self._before)

    def enable(self) -> None:
        """Set cbreak mode; call it again when another program has used the terminal."""
        if self._file is not None:
            tty.setcbreak(self._file, termios.TCSANOW)

    def _read(self) -> None:
        assert self._file is not None  # noqa: S101 - it is read from
        try:
            keys = os.read(self._file, MAX_READ_BYTES)
        except OSError:
            keys = b""
        if keys:
            self._pressed(keys.decode(errors="replace"))
        else:  # the terminal was closed
            asyncio.get_running_loop().remove_reader(self._file)


# -- Rendering --------

LEADER = "leader"
BOLD, DIM, BAD = "bold", "dim", "bold red"
MAX_ROWS = 20
"""Rows of a section at most."""
MAX_DECIMAL = 10
"""Rates, and waits in ms, below this are shown with one decimal."""

QUEUE_COLUMNS = (
    Column("RESOURCE", 0, least=12, preferred=20),
    Column("WAITING", 0, right=True),
    Column("LONGEST", 2, right=True),
    Column("HOLDER", 1, least=12, preferred=24),
    Column("ID", 5),
    Column("HELD FOR", 3, right=True),
    Column("HOLDERS", 4, right=True),
)
WAIT_COLUMNS = (
    Column("WAITER", 0, least=12, preferred=28),
    Column("ID", 6),
    Column("WAITS", 0, right=True),
    Column("BLOCKER", 0, least=12, preferred=28),
    Column("ID", 5),
    Column("MORE", 3, right=True),
    Column("RESOURCE", 0, least=12, preferred=20),
    Column("STATE", 4),
    Column("FOR", 2, right=True),
)
"""Ids are dropped first: transactions are known by name, and a request without one shows its id there."""
CONTENTION_COLUMNS = (
    Column("RESOURCE", 0, least=20),
    Column("WAITED", 0, right=True),
    Column("CONFLICTS", 2, right=True),
    Column("WAITING", 1, right=True),
    Column("HOLDERS", 3, right=True),
)


class Line(NamedTuple):
    """A line of the screen, and its style."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The responses of the admin port; the locks only of a leader."""

    state: State
    waits: Waits | None = None
    hot: HotList | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """A table with its title, or the `note` if it has no rows; it contains the first of `total` rows."""

    title: str
    columns: Sequence[Column]
    rows: list[list[str]]
    note: str
    total: int
    incomplete: str = ""

    def lines(self, most: int, room: int) -> Iterator[Line]:
        """Yield an empty line and the table with at most `most` rows."""
        yield Line("")
        if not self.rows:
            yield Line(clip(self.note, room), DIM)
            return
        shown = self.rows[:most]
        of = "" if len(shown) == self.total else f" ({len(shown):,} of {self.total:,})"
        yield Line(clip(f"{self.title}{of}{self.incomplete}", room), BOLD)
        header, *rows = fitted(self.columns, shown, room)
        yield Line(header, DIM)
        yield from map(Line, rows)

    @property
    def overhead(self) -> int:
        """Lines beside the rows."""
        return 3 if self.rows else 2


def render(snapshot: Snapshot, columns: int, rows: int | None, *hints: str) -> list[Line]:
    """Return at most `rows` lines (None: no limit) of at most `columns` columns. `hints` are shown at the top."""
    lines = [*_head(snapshot.state, columns, hints), *_problems(snapshot.state, columns)]
    if snapshot.waits is not None and snapshot.hot is not None:
        sections = [_lines(snapshot), _waits(snapshot.waits, snapshot.state.now), _hot(snapshot.hot)]
        if not snapshot.state.waiting and not snapshot.waits.nodes:
            del sections[1]  # it would repeat that no requests wait
        room = None if rows is None else rows - len(lines)
        for section, most in _fit(sections, room):
            lines += section.lines(most, columns)
    return lines[:rows]


def _fit(sections: list[Section], room: int | None) -> Iterator[tuple[Section, int]]:
    """Yield the sections that fit, each with its number of rows. The last ones are dropped first."""
    wanted = [min(MAX_ROWS, len(section.rows)) for section in sections]
    if room is None:
        yield from zip(sections, wanted, strict=True)
        return
    while sections and room < sum(section.overhead + min(1, len(section.rows)) for section in sections):
        sections = sections[:-1]
    left = room - sum(section.overhead for section in sections)
    shares = [0] * len(sections)
    while left > 0 and any(share < want for share, want in zip(shares, wanted, strict=False)):
        for i, share in enumerate(shares):
            if left > 0 and share < wanted[i]:
                shares[i] += 1
                left -= 1
    yield from zip(sections, shares, strict=True)


def _head(state: State, columns: int, hints: Sequence[str]) -> Iterator[Line]:
    who = [f"genie {state.version}", state.role, f"namespace {state.namespace}", f"store {state.store}"]
    for line in wrapped([*who, f"up {duration(state.uptime)}", *hints], columns):
        yield Line(line, BOLD)
    if len(state.namespaces) > 1:
        roles = [f"{each.namespace} {each.role}" for each in state.namespaces]
        yield from map(Line, wrapped(["namespaces", *roles], columns))
    p50, p99 = (_quantile(wait) for wait in (state.wait_p50, state.wait_p99))
    numbers = [
        *[f"locks {state.locks:,}", f"held {state.held:,}", f"waiting {state.waiting:,}"],
        *[f"longest wait {duration(state.longest_wait)}", f"wait p50 {p50}", f"p99 {p99}"],
        *[f"connections {state.connections:,}", f"sessions {state.sessions:,}"],
    ]
    rates = state.rates
    each = {name: getattr(rates, name) for name in ("grants", "releases", "waits", "timeouts", "deadlocks", "errors")}
    yield from map(Line, wrapped(numbers, columns))
    yield from map(Line, wrapped([f"{name} {_rate(rate)}/s" for name, rate in each.items()], columns))


def _rate(rate: float) -> str:
    return f"{rate:.1f}" if 0 < rate < MAX_DECIMAL else f"{rate:,.0f}"


def _quantile(wait: float | None) -> str:
    return "-" if wait is None else f"{wait:.1f} ms" if wait < MAX_DECIMAL else duration(wait)


def _problems(state: State, columns: int) -> Iterator[Line]:
    problems = []
    if not state.store_available:
        problems.append("The store does not answer.")
    if state.role != LEADER:
        problems.append(
            f"This server does not lead ({state.role}), "
            + (f"{state.leader} does: query its admin port." if state.leader else "and no leader is known.")
        )
    for problem in problems:
        yield from (Line(line, BAD) for line in wrapped(problem.split(), columns, " "))


def _lines(snapshot: Snapshot) -> Section:
    """The longest queues. The hold time is only known of holders in the wait-for graph."""
    state, since = snapshot.state, {}
    if snapshot.waits is not None:
        since = {node.id: node.since for node in snapshot.waits.nodes if node.state == "held"}
    rows = [
        [
            line.resource,
            f"{line.waiting:,}",
            duration(state.now - line.since),
            "-" if line.holder is None else _label(line.holder, line.transaction_name),
            "-" if line.holder is None else str(line.holder),
            duration(state.now - since[line.holder]) if line.holder in since else "-",
            f"{line.holders:,}",
        ]
        for line in state.queues
    ]
    incomplete = "" if state.queues_complete else ", among the oldest waiters"
    return Section("Longest queues", QUEUE_COLUMNS, rows, "No requests wait.", len(rows), incomplete)


def _waits(waits: Waits, now_ms: float) -> Section:
    """The longest waits, each with its first blocker."""
    nodes = {node.id: node for node in waits.nodes}
    edges: dict[int, list[Edge]] = {}
    for edge in waits.edges:
        edges.setdefault(edge.waiter, []).append(edge)
    rows = []
    for node in sorted((node for node in waits.nodes if node.state == "queued"), key=lambda node: node.since):
        who = [_label(node.id, node.transaction_name), str(node.id), duration(now_ms - node.since)]
        if node.id not in edges:
            rows.append([*who, "-", "-", "", *node.resources[:1], *["-"] * (3 - len(node.resources[:1]))])
            continue
        first, *others = edges[node.id]
        more = max(len(others), (node.blockers_total or 0) - 1)
        blocker = nodes.get(first.blocker)
        rows.append(
            [
                *who,
                _label(first.blocker, blocker.transaction_name if blocker else None),
                str(first.blocker),
                f"+{more:,}" if more else "",
                *[f"{first.mode}:{first.resource}", first.state, duration(now_ms - first.since)],
            ]
        )
    return Section("Longest waits", WAIT_COLUMNS, rows, "No requests wait.", waits.queue_total)


def _label(id_: int, transaction: str | UnsetType | None) -> str:
    """Return the name of the transaction of a request, else its id."""
    return transaction or f"#{id_}"


def _hot(hot: HotList) -> Section:
    rows = [
        [row.resource, duration(row.waited), f"{row.conflicts:,}", f"{row.waiting:,}", f"{row.holders:,}"]
        for row in hot.resources
    ]
    return Section(
        "Hot resources (last minutes)",
        CONTENTION_COLUMNS,
        rows,
        "No contention in the last minutes.",
        len(rows),
    )


# -- `genie top` --------

COLUMNS = 100
"""Width of the output if stdout is not a terminal."""
MAX_NODES = 250
"""Nodes to query: as many waiters as can be shown, each with up to ten blockers."""
SIGTERM_STATUS = 128 + signal.SIGTERM
"""The exit status after SIGTERM, as a shell gives it."""


@click.command()
@click.option("--every", type=seconds(0.1), metavar="SECONDS", default=1, show_default=True, help="Refresh interval.")
@click.option("--once", is_flag=True, help="Print one snapshot and exit, as if stdout were not a terminal.")
@json_option
@admin_options
@timeout_option
@one_line_errors
def top(
    every: float, once: bool, as_json: bool, admin_host: str, admin_port: str, namespace: str | None, timeout: float
) -> None:
    """Show a live view of a server: longest queues, longest waits, hot resources. Press q to quit.

    Queries the admin port, and retries while it does not respond. --json prints the state of the server once.
    """
    port = AdminClient(admin_host, admin_port, namespace, timeout)
    console = Console(markup=False, highlight=False, emoji=False)
    if as_json:
        click.echo(codec.dumps(query_admin(port, _state)))
    elif once or not console.is_terminal or console.is_dumb_terminal:
        columns = console.width if console.is_terminal else COLUMNS
        for line in render(query_admin(port, _fetch), columns, None):
            click.echo(line.text)
    else:
        raise SystemExit(asyncio.run(_Screen(console, port, every).run()))


async def _state(port: AdminClient) -> Any:
    told = await port.get("/api/state")
    decode_response(told, State)
    return told


async def _fetch(port: AdminClient) -> Snapshot:
    state = decode_response(await port.get("/api/state"), State)
    if state.role != LEADER:
        return Snapshot(state)
    return Snapshot(
        state,
        decode_response(await port.get("/api/waits", MAX_NODES), Waits),
        decode_response(await port.get("/api/hot", MAX_ROWS), HotList),
    )


class _Screen:
    """The live view on the whole terminal."""

    def __init__(self, console: Console, port: AdminClient, every: float) -> None:
        self._console = console
        self._live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._port = port
        self._every = every
        self._snapshot: Snapshot | None = None
        self._snapshot_at = 0.0
        self._problems = ""
        self._end: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Refresh until a key or a signal ends it; return the exit status."""
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._port)
            keys = stack.enter_context(KeyReader(sys.stdin, self._pressed))
            stack.enter_context(self._live)
            for number, does in {
                signal.SIGWINCH: self._draw,
                signal.SIGCONT: lambda: self._resume(keys),
                signal.SIGTERM: lambda: self._finish(SIGTERM_STATUS),
            }.items():
                loop.add_signal_handler(number, does)
                stack.callback(loop.remove_signal_handler, number)
            self._draw()
            looking = loop.create_task(self._refresh_loop())
            try:
                await asyncio.wait({looking, self._end}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                looking.cancel()
            return await self._end if self._end.done() else await looking

    async def _refresh_loop(self) -> int:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._every
            try:
                self._snapshot, self._snapshot_at, self._problems = await _fetch(self._port), loop.time(), ""
            except GenieError as error:
                self._problems = one_line(error)
            self._draw()
            await asyncio.sleep(max(0, due - loop.time()))

    def _draw(self) -> None:
        columns, rows = self._console.size
        lines = (
            render(self._snapshot, columns, rows, "q: quit")
            if self._snapshot and not self._problems
            else self._status_lines(columns)
        )
        text = Text(no_wrap=True, overflow="crop")
        for number, line in enumerate(lines):
            text.append("\n" if number else "").append(line.text, line.style)
        self._live.update(text, refresh=True)

    def _status_lines(self, columns: int) -> list[Line]:
        """Return what is shown while there is no response."""
        if not self._problems:
            return [Line(line, BOLD) for line in wrapped([f"querying {self._port.where}", "q: quit"], columns)]
        again = f"Retrying every {self._every:g} s."
        if self._snapshot:
            ago = duration((asyncio.get_running_loop().time() - self._snapshot_at) * 1000)
            again += f" Last response: {ago} ago."
        told = [(self._problems, BAD), (again, ""), ("q: quit", BOLD)]
        return [Line(line, style) for text, style in told for line in wrapped(text.split(), columns, " ")]

    def _pressed(self, keys: str) -> None:
        if "q" in keys.lower():
            self._finish(0)

    def _finish(self, status: int) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(status)

    def _resume(self, keys: KeyReader) -> None:
        """Restore the screen after the process was stopped and continued."""
        keys.enable()
        self._console.set_alt_screen(True)
        self._draw()
