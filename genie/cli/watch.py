"""`genie watch`: the changes of locks whose names have a prefix."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

import click

from genie.cli.format import lock_text
from genie.cli.options import json_option, one_line_errors, run_async, server_options, timeout_option
from genie.cli.output import print_json, print_lines, print_message
from genie.client.aio import Client
from genie.client.aio_connection import AsyncConnection, TransportHandler
from genie.client.config import Address, ClientOptions, parse_addresses
from genie.client.watches import Change
from genie.protocol import codec

STATE_WIDTH = len("unlocked")


@click.command()
@click.argument("prefix")
@json_option
@server_options
@timeout_option
@one_line_errors
def watch(prefix: str, as_json: bool, host: str, port: int, namespace: str | None, timeout: float) -> None:
    """Print locks and unlocks of resources whose names start with PREFIX, as they happen, until Ctrl-C.

    The output starts with a "locked" for each held lock. After a lost connection, or when changes arrive faster than
    they are written, only the difference to the previous output is printed: short locks may be missing. An empty
    PREFIX ("") selects all names. --json prints one line for each change.
    """
    watching = _watch(
        prefix,
        print_change=_print_json if as_json else _print_text,
        addresses=parse_addresses(host, port),
        namespace=namespace,
        connect_timeout=timeout,
    )
    try:
        run_async(watching)
    except BrokenPipeError:
        # The program that reads the pipe has exited. Redirect stdout, so that the flush at the end of the process succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _watch(
    prefix: str,
    *,
    print_change: Callable[[Change], None],
    addresses: list[Address],
    namespace: str | None,
    connect_timeout: float,
) -> None:
    """Print each change until the task is cancelled. `connect_timeout` is in seconds.

    If stdout is a pipe, the function also returns when the program that reads the pipe has exited.
    """
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(_Watcher(addresses, namespace, connect_timeout=connect_timeout))
        pipe = _PipeMonitor()
        try:
            was_truncated = False
            changes = client.watch(prefix)
            async for change in changes:
                if changes.truncated and not was_truncated:
                    print_message("the server may not have listed all held locks: the output may be incomplete")
                was_truncated = changes.truncated
                print_change(change)
        except asyncio.CancelledError:
            stack.pop_all()  # closing the client would wait for the server; this client has no locks to release
            if not pipe.reader_exited:
                raise
        finally:
            pipe.close()


def _print_text(change: Change) -> None:
    """Print a change as a line: `locked    exclusive:a  7 of transfer-1`."""
    lock = lock_text(change.mode, change.resource, change.units, change.of)
    owner = "" if change.transaction is None else f" of {change.transaction}"
    print_lines(f"{change.state:{STATE_WIDTH}}  {lock}  {change.id}{owner}")


def _print_json(change: Change) -> None:
    """Print a change as a JSON object, without the fields that are None."""
    fields = {
        "state": change.state,
        "resource": change.resource,
        "mode": change.mode,
        "units": change.units,
        "of": change.of,
        "id": change.id,
        "transactionName": change.transaction,
    }
    print_json(codec.dumps({name: value for name, value in fields.items() if value is not None}))


class _PipeMonitor:
    """Cancels the current task when the program that reads stdout through a pipe exits, even if nothing is printed.

    If stdout is not a pipe, the monitor does nothing.
    """

    def __init__(self) -> None:
        self.reader_exited = False
        """True after the program has exited."""
        self._task = asyncio.current_task()
        """The task to cancel when the program exits."""
        self._loop = asyncio.get_running_loop()
        self._pipe: int | None = None
        """File descriptor of the pipe while it is monitored. None if stdout is not a pipe, and after `close`."""
        with suppress(AttributeError, OSError, ValueError):  # stdout may be closed, or have no file descriptor
            stdout = sys.stdout.fileno()
            if stat.S_ISFIFO(os.fstat(stdout).st_mode):
                # The event loop reports the write end of a pipe as readable when the read end is closed.
                self._loop.add_reader(stdout, self._on_reader_exited)
                self._pipe = stdout

    def close(self) -> None:
        """Stop monitoring the pipe. May be called several times."""
        if self._pipe is not None:
            self._loop.remove_reader(self._pipe)
            self._pipe = None

    def _on_reader_exited(self) -> None:
        self.close()
        self.reader_exited = True
        if self._task is not None:
            self._task.cancel()


class _Watcher(Client):
    """A client that prints a message when its connection is lost."""

    def __init__(self, addresses: list[Address], namespace: str | None, *, connect_timeout: float) -> None:
        options = ClientOptions(connect_timeout=connect_timeout, namespace=namespace, waits_for_servers=False)
        super().__init__(addresses, options)
        self._connection = _WatcherConnection(addresses, options)


class _WatcherConnection(AsyncConnection):
    """A connection that prints a message when it is lost after its handshake."""

    def on_disconnected(self, handler: TransportHandler, reason: str) -> None:
        """Handle the end of a connection. Print a message if it had completed its handshake, unless the client is closing."""
        was_up = self.session.up
        super().on_disconnected(handler, reason)
        if was_up and not self.session.up and not self._closed:
            print_message(f"connection lost ({reason}); changes are printed once it is restored")
