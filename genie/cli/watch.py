"""`genie watch`"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

import click

from genie.cli.format import printable
from genie.cli.options import json_option, patience_option, plain_errors, server_options
from genie.client.aio import Client
from genie.client.aio_connection import AsyncConnection, TransportHandler
from genie.client.config import Address, find_token, parse_addresses
from genie.client.watches import Change
from genie.protocol import codec

STATE_COLUMNS = len("unlocked")
SESSION_TIMEOUT_S = 10.0
"""What the server keeps of a client that holds nothing and waits for nothing doesn't matter: the client's default."""


@click.command()
@click.argument("prefix")
@json_option
@server_options
@patience_option
@plain_errors
def watch(prefix: str, as_json: bool, host: str, port: int, namespace: str | None, patience: float) -> None:
    """Print who locks and unlocks resources whose names begin with PREFIX, as it happens, until Ctrl-C.

    First comes a "locked" for each lock that is held. After a lost connection, and where changes come faster than they
    are written, the difference to what was printed follows: what was locked for a moment only may be missing. An empty
    PREFIX ("") stands for all names. --json prints a line for each change.
    """
    try:
        asyncio.run(_watch(prefix, _json if as_json else _text, parse_addresses(host, port), namespace, patience))
    except BrokenPipeError:
        # Nobody reads any more, which is a way to end. What is buffered must not fail once more at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _watch(
    prefix: str, form: Callable[[Change], str], to: list[Address], namespace: str | None, patience: float
) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(_Watcher(to, namespace, connect_timeout=patience))
        reader = _Reader()
        try:
            truncated = False
            changes = client.watch(prefix)
            async for change in changes:
                if changes.truncated and not truncated:
                    _say("more is held than the server tells at once: some of it is not printed")
                truncated = changes.truncated
                click.echo(form(change))
        except asyncio.CancelledError:
            stack.pop_all()  # no polite end: it would wait for a server that may not answer, and nothing is held
            if not reader.gone:
                raise
        finally:
            reader.close()


def _text(change: Change) -> str:
    owner = "" if change.transaction is None else f" of {printable(change.transaction)}"
    return f"{change.state:{STATE_COLUMNS}}  {change.mode}:{printable(change.resource)}  {change.id}{owner}"


def _json(change: Change) -> str:
    owner = {} if change.transaction is None else {"transactionName": change.transaction}
    fields = {"state": change.state, "resource": change.resource, "mode": change.mode, "id": change.id, **owner}
    return codec.dumps(fields).decode()


def _say(text: str) -> None:
    click.echo(f"genie: {text}", err=True)


class _Reader:
    """Who reads what we print, if it is a pipe: cancels this task when it is gone, though nothing is printed."""

    def __init__(self) -> None:
        self.gone = False
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._pipe: int | None = None
        with suppress(OSError, ValueError):  # no file at all
            stdout = sys.stdout.fileno()
            if stat.S_ISFIFO(os.fstat(stdout).st_mode):
                self._loop.add_reader(stdout, self._left)  # the end that is written to has nothing else to tell
                self._pipe = stdout

    def close(self) -> None:
        """Look no longer."""
        if self._pipe is not None:
            self._loop.remove_reader(self._pipe)
            self._pipe = None

    def _left(self) -> None:
        self.close()
        self.gone = True
        if self._task is not None:
            self._task.cancel()


class _Watcher(Client):
    """A client that says when its connection is lost."""

    def __init__(self, to: list[Address], namespace: str | None, *, connect_timeout: float) -> None:
        super().__init__(to, connect_timeout=connect_timeout)
        self._connection = _WatcherConnection(to, connect_timeout, None, SESSION_TIMEOUT_S, find_token(), namespace)


class _WatcherConnection(AsyncConnection):
    def on_disconnected(self, handler: TransportHandler, why: str) -> None:
        """A connection has ended, which counts if it was the one in use."""
        was_up = self.session.up
        super().on_disconnected(handler, why)
        if was_up and not self.session.up and not self._closed:
            _say(f"the connection is lost ({why}); what changes until there is one again follows as the difference")
