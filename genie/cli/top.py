"""`genie top`"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from genie.admin.answers import HotList, State, Waits
from genie.cli.admin_port import AdminPort, admin_options, ask_admin, known
from genie.cli.asking import json_option, one_line, patience_option, plain_errors, seconds
from genie.cli.fitted import wrapped
from genie.cli.keys import Keys
from genie.cli.tables import duration
from genie.cli.top_picture import BAD, BOLD, LEADER, MOST, Line, Seen, picture
from genie.errors import GenieError
from genie.protocol import codec

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
        state, known(await port.get("/api/waits", NODES), Waits), known(await port.get("/api/hot", MOST), HotList)
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
