"""Keys that are pressed on a terminal, one by one, without a line's end and without being shown."""

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
from genie.cli.admin_client import AdminPort, admin_options, ask_admin, known
from genie.cli.format import Column, clip, duration, fitted, wrapped
from genie.cli.options import json_option, one_line, patience_option, plain_errors, seconds
from genie.errors import GenieError
from genie.protocol import codec

MAX_READ_BYTES = 1024
"""Bytes that are read at once."""


class Keys:
    """While its block runs, `pressed` is told of what is typed. Where the input is no terminal, nothing is.

    Ctrl-C and Ctrl-Z stay what they are.
    """

    def __init__(self, source: TextIO | None, pressed: Callable[[str], None]) -> None:
        self._file = source.fileno() if source is not None and source.isatty() else None
        self._pressed = pressed
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        if self._file is not None:
            self._before = termios.tcgetattr(self._file)
            self.take()
            asyncio.get_running_loop().add_reader(self._file, self._read)
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            asyncio.get_running_loop().remove_reader(self._file)
            termios.tcsetattr(self._file, termios.TCSANOW, self._before)

    def take(self) -> None:
        """Have them one by one, also where somebody else has set that back."""
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
        else:  # the terminal has gone
            asyncio.get_running_loop().remove_reader(self._file)


# -- What `genie top` shows: a picture of a server, made to fit a terminal --------

LEADER = "leader"
BOLD, DIM, BAD = "bold", "dim", "bold red"
MAX_ROWS = 20
"""Rows of a part, however tall the terminal is."""
SMALL = 10
"""Rates, and waits in ms, have a digit behind the point below this."""

LINES = (
    Column("RESOURCE", 0, least=12, preferred=20),
    Column("WAITING", 0, right=True),
    Column("LONGEST", 2, right=True),
    Column("HOLDER", 1, least=12, preferred=24),
    Column("ID", 5),
    Column("HELD FOR", 3, right=True),
    Column("HOLDERS", 4, right=True),
)
WAITS = (
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
"""Ids go first where room is short: operators know transactions by their names, and a request without has its id there."""
HOT = (
    Column("RESOURCE", 0, least=20),
    Column("WAITED", 0, right=True),
    Column("CONFLICTS", 2, right=True),
    Column("WAITING", 1, right=True),
    Column("HOLDERS", 3, right=True),
)


class Line(NamedTuple):
    """A line of the screen. Its text is shown as it is; the style is one of the above."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the admin port told; the locks only of a server that leads."""

    state: State
    waits: Waits | None = None
    hot: HotList | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A table with its title, or the `note` where it has no rows. There are `total` rows, of which it has the first."""

    title: str
    columns: Sequence[Column]
    rows: list[list[str]]
    note: str
    total: int
    incomplete: str = ""

    def lines(self, most: int, room: int) -> Iterator[Line]:
        """At most so many rows, behind an empty line."""
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
    def beside_rows(self) -> int:
        """Lines that are no rows."""
        return 3 if self.rows else 2


def picture(seen: Seen, columns: int, rows: int | None, *hints: str) -> list[Line]:
    """Lines of at most so many columns, and at most `rows` of them if that is given. `hints` stand at the top."""
    lines = [*_head(seen.state, columns, hints), *_trouble(seen.state, columns)]
    if seen.waits is not None and seen.hot is not None:
        parts = [_lines(seen), _waits(seen.waits, seen.state.now), _hot(seen.hot)]
        if not seen.state.waiting and not seen.waits.nodes:
            del parts[1]  # it would say once more that nobody waits
        room = None if rows is None else rows - len(lines)
        for part, most in _shares(parts, room):
            lines += part.lines(most, columns)
    return lines[:rows]


def _shares(parts: list[Part], room: int | None) -> Iterator[tuple[Part, int]]:
    """The parts for which there is room, and how many rows each has. The last ones go first."""
    wanted = [min(MAX_ROWS, len(part.rows)) for part in parts]
    if room is None:
        yield from zip(parts, wanted, strict=True)
        return
    while parts and room < sum(part.beside_rows + min(1, len(part.rows)) for part in parts):
        parts = parts[:-1]
    left = room - sum(part.beside_rows for part in parts)
    shares = [0] * len(parts)
    while left > 0 and any(share < want for share, want in zip(shares, wanted, strict=False)):
        for i, share in enumerate(shares):
            if left > 0 and share < wanted[i]:
                shares[i] += 1
                left -= 1
    yield from zip(parts, shares, strict=True)


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
    return f"{rate:.1f}" if 0 < rate < SMALL else f"{rate:,.0f}"


def _quantile(wait: float | None) -> str:
    return "-" if wait is None else f"{wait:.1f} ms" if wait < SMALL else duration(wait)


def _trouble(state: State, columns: int) -> Iterator[Line]:
    troubles = []
    if not state.store_available:
        troubles.append("The store does not answer.")
    if state.role != LEADER:
        troubles.append(
            f"This server does not lead ({state.role}), "
            + (f"{state.leader} does: ask the admin port there." if state.leader else "and knows of none that does.")
        )
    for trouble in troubles:
        yield from (Line(line, BAD) for line in wrapped(trouble.split(), columns, " "))


def _lines(seen: Seen) -> Part:
    """The longest lines. How long a holder holds is known of those that stand in somebody's way."""
    state, since = seen.state, {}
    if seen.waits is not None:
        since = {node.id: node.since for node in seen.waits.nodes if node.state == "held"}
    rows = [
        [
            line.resource,
            f"{line.waiting:,}",
            duration(state.now - line.since),
            "-" if line.holder is None else _called(line.holder, line.transaction_name),
            "-" if line.holder is None else str(line.holder),
            duration(state.now - since[line.holder]) if line.holder in since else "-",
            f"{line.holders:,}",
        ]
        for line in state.queues
    ]
    incomplete = "" if state.queues_complete else ", of those who came first"
    return Part("Longest lines", LINES, rows, "Nobody waits.", len(rows), incomplete)


def _waits(waits: Waits, now_ms: float) -> Part:
    """Who waits longest, each with the first that is in its way."""
    nodes = {node.id: node for node in waits.nodes}
    edges: dict[int, list[Edge]] = {}
    for edge in waits.edges:
        edges.setdefault(edge.waiter, []).append(edge)
    rows = []
    for node in sorted((node for node in waits.nodes if node.state == "queued"), key=lambda node: node.since):
        who = [_called(node.id, node.transaction_name), str(node.id), duration(now_ms - node.since)]
        if node.id not in edges:
            rows.append([*who, "-", "-", "", *node.resources[:1], *["-"] * (3 - len(node.resources[:1]))])
            continue
        first, *others = edges[node.id]
        more = max(len(others), (node.blockers_total or 0) - 1)
        blocker = nodes.get(first.blocker)
        rows.append(
            [
                *who,
                _called(first.blocker, blocker.transaction_name if blocker else None),
                str(first.blocker),
                f"+{more:,}" if more else "",
                *[f"{first.mode}:{first.resource}", first.state, duration(now_ms - first.since)],
            ]
        )
    return Part("Who waits longest, and for whom", WAITS, rows, "Nobody waits.", waits.queue_total)


def _called(id_: int, transaction: str | UnsetType | None) -> str:
    """A request by the name of its transaction, else by its id."""
    return transaction or f"#{id_}"


def _hot(hot: HotList) -> Part:
    rows = [
        [row.resource, duration(row.waited), f"{row.conflicts:,}", f"{row.waiting:,}", f"{row.holders:,}"]
        for row in hot.resources
    ]
    return Part("Hot within the last minutes", HOT, rows, "Nothing was fought for within the last minutes.", len(rows))


# -- `genie top` --------

COLUMNS = 100
"""What a line fits into where there is no terminal."""
NODES = 250
"""Requests that are asked for: those that can be shown, each with at most ten that are in its way, and some more."""
TERMINATED = 128 + signal.SIGTERM
"""The exit status after SIGTERM, as a shell gives it."""


@click.command()
@click.option(
    "--every", type=seconds(0.1), metavar="SECONDS", default=1, show_default=True, help="How often to look anew."
)
@click.option("--once", is_flag=True, help="Print one picture and end, as where the output is no terminal.")
@json_option
@admin_options
@patience_option
@plain_errors
def top(
    every: float, once: bool, as_json: bool, admin_host: str, admin_port: str, namespace: str | None, patience: float
) -> None:
    """Show what a server does, as it does it: the longest lines, who waits for whom, what is fought for. q ends it.

    Asks the admin port. While there is no answer it says why, and goes on when there is one. --json prints the state
    of the server once.
    """
    port = AdminPort(admin_host, admin_port, namespace, patience)
    console = Console(markup=False, highlight=False, emoji=False)
    if as_json:
        click.echo(codec.dumps(ask_admin(port, _state)))
    elif once or not console.is_terminal or console.is_dumb_terminal:
        columns = console.width if console.is_terminal else COLUMNS
        for line in picture(ask_admin(port, _look), columns, None):
            click.echo(line.text)
    else:
        raise SystemExit(asyncio.run(_Screen(console, port, every).run()))


async def _state(port: AdminPort) -> Any:
    told = await port.get("/api/state")
    known(told, State)
    return told


async def _look(port: AdminPort) -> Seen:
    state = known(await port.get("/api/state"), State)
    if state.role != LEADER:
        return Seen(state)
    return Seen(
        state, known(await port.get("/api/waits", NODES), Waits), known(await port.get("/api/hot", MAX_ROWS), HotList)
    )


class _Screen:
    """The whole terminal, until it is given back."""

    def __init__(self, console: Console, port: AdminPort, every: float) -> None:
        self._console = console
        self._live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._port = port
        self._every = every
        self._seen: Seen | None = None
        self._seen_at = 0.0
        self._trouble = ""
        self._end: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Show until somebody ends it; returns the exit status."""
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._port)
            keys = stack.enter_context(Keys(sys.stdin, self._pressed))
            stack.enter_context(self._live)
            for number, does in {
                signal.SIGWINCH: self._draw,
                signal.SIGCONT: lambda: self._again(keys),
                signal.SIGTERM: lambda: self._finish(TERMINATED),
            }.items():
                loop.add_signal_handler(number, does)
                stack.callback(loop.remove_signal_handler, number)
            self._draw()
            looking = loop.create_task(self._keep_looking())
            try:
                await asyncio.wait({looking, self._end}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                looking.cancel()
            return await self._end if self._end.done() else await looking

    async def _keep_looking(self) -> int:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._every
            try:
                self._seen, self._seen_at, self._trouble = await _look(self._port), loop.time(), ""
            except GenieError as error:
                self._trouble = one_line(error)
            self._draw()
            await asyncio.sleep(max(0, due - loop.time()))

    def _draw(self) -> None:
        columns, rows = self._console.size
        lines = (
            picture(self._seen, columns, rows, "q: end") if self._seen and not self._trouble else self._excuse(columns)
        )
        text = Text(no_wrap=True, overflow="crop")
        for number, line in enumerate(lines):
            text.append("\n" if number else "").append(line.text, line.style)
        self._live.update(text, refresh=True)

    def _excuse(self, columns: int) -> list[Line]:
        """Instead of a picture."""
        if not self._trouble:
            return [Line(line, BOLD) for line in wrapped([f"asking {self._port.where}", "q: end"], columns)]
        again = f"Trying again every {self._every:g} s."
        if self._seen:
            ago = duration((asyncio.get_running_loop().time() - self._seen_at) * 1000)
            again += f" The last answer came {ago} ago."
        told = [(self._trouble, BAD), (again, ""), ("q: end", BOLD)]
        return [Line(line, style) for text, style in told for line in wrapped(text.split(), columns, " ")]

    def _pressed(self, keys: str) -> None:
        if "q" in keys.lower():
            self._finish(0)

    def _finish(self, status: int) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(status)

    def _again(self, keys: Keys) -> None:
        """Somebody had stopped this process, and used the terminal meanwhile."""
        keys.take()
        self._console.set_alt_screen(True)
        self._draw()
