"""Decorators of the commands that query a server and print the reply, as lines or as JSON.

`server_query` passes a command the argument `server`, and `output_options` passes `output`. For the commands that query
the admin port, `genie.cli.admin_client.admin_query` passes `admin`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import click

from genie.cli.options import json_option, one_line_errors, run_async, server_options, timeout_option
from genie.cli.output import output_columns, print_json, print_lines
from genie.client.aio import Client
from genie.client.commands import Inspect
from genie.client.config import Address, ClientOptions, format_address, parse_addresses
from genie.errors import Unavailable
from genie.protocol import codec

T = TypeVar("T")
Command = Callable[..., T]
Row = dict[str, Any]
"""A request, or a blocker of a request, in an `inspected` message."""
Reply = dict[str, Any]
"""The payload of an `inspected` message."""


class Querier(Client):
    """A client of the command line: it also has the server's address and build, and returns replies as on the wire."""

    @property
    def address(self) -> Address | None:
        """The address of the connected server, the leader, or None without a connection."""
        return self._connection.address

    @property
    def server(self) -> str:
        """Version and build of the server, as in the message `welcome`."""
        return self._connection.session.handshake.server

    async def inspected(
        self,
        *,
        resource: str | None = None,
        transaction: str | None = None,
        id: int | None = None,
        limit: int | None = None,
        only: Literal["holders", "queue"] | None = None,
    ) -> Reply:
        """Send the command `inspect`, and return the payload of the reply as on the wire: times in milliseconds.

        `only` restricts the reply to held requests (`holders`) or to waiting requests (`queue`).
        """
        command = Inspect(resource=resource, transaction=transaction, id=id, limit=limit, only=only)
        return cast("Reply", await self._connection.call(command))

    @property
    def connection_error(self) -> str:
        """Why the client is not connected. Empty while it is connected."""
        return "" if self._connection.session.up else self._connection.explain_unavailable()


@dataclass(frozen=True, slots=True)
class QueriedServer:
    """The server, or the cluster of servers, that the options of a command name."""

    host: str
    """One address, or several, separated by commas."""
    port: int
    """The port of the addresses without a port."""
    namespace: str | None
    timeout_s: float

    @property
    def addresses(self) -> str:
        """The addresses of the servers with their ports, separated by commas."""
        return ", ".join(map(format_address, parse_addresses(self.host, self.port)))

    def query(self, operation: Callable[[Querier], Awaitable[T]]) -> T:
        """Connect to the leader, run one operation with the client, and disconnect, all within the timeout.

        Raises GenieError if the connection or the operation fails, and ValueError for an invalid address or token.
        """
        return run_async(self._connect_and_run(operation))

    async def _connect_and_run(self, operation: Callable[[Querier], Awaitable[T]]) -> T:
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        options = ClientOptions(
            connect_timeout=self.timeout_s,
            response_timeout=self.timeout_s,
            namespace=self.namespace,
            waits_for_servers=False,
        )
        client = Querier(parse_addresses(self.host, self.port), options)
        try:
            async with asyncio.timeout(None) as time_limit, AsyncExitStack() as stack:
                # Until it is connected, the client itself limits the time: its error has the replies of the servers.
                await stack.enter_async_context(client)
                time_limit.reschedule(deadline)
                try:
                    return await operation(client)
                except asyncio.CancelledError:
                    stack.pop_all()  # closing the client would wait for the server, which does not respond
                    raise
        except TimeoutError:
            no_response = f"{self.addresses} did not respond within {self.timeout_s:g} s"
            raise Unavailable(client.connection_error or no_response) from None


def server_query(command: Command[T]) -> Command[T]:
    """Add `--host`, `--port`, `--namespace` and `--timeout`, and pass the command a `QueriedServer` as `server`.

    An error of the command is printed in one line.
    """

    @functools.wraps(command)
    def with_server(*, host: str, port: int, namespace: str | None, timeout: float, **options: Any) -> T:
        return command(server=QueriedServer(host, port, namespace, timeout), **options)

    return server_options(timeout_option(one_line_errors(with_server)))


@dataclass(frozen=True, slots=True)
class Output:
    """Prints the reply of a command, as JSON or as lines of text."""

    as_json: bool
    wide: bool = False
    """True if each row is one line. Otherwise rows are wrapped on a terminal."""

    def print(
        self,
        reply: T,
        lines: Callable[[T, float, int | None], Iterable[str]],
        document: Callable[[T], Any] = lambda reply: reply,
    ) -> None:
        """Print a reply.

        Args:
            reply: the reply.
            lines: returns the lines of text for the reply, the Unix time in ms, and the width of the terminal in columns.
                The width is None without a limit.
            document: returns the JSON document for the reply, with `--json`.

        """
        with checked_reply():
            if self.as_json:
                encoded = codec.dumps(document(reply))
            else:
                text = list(lines(reply, time.time() * 1000, output_columns(wide=self.wide)))
        if self.as_json:
            print_json(encoded)
        else:
            print_lines(*text)


def output_options(*, wide: bool) -> Callable[[Command[T]], Command[T]]:
    """Return a decorator that adds `--json`, and with `wide` also `--wide`, and passes the command an `Output` as `output`."""

    def decorate(command: Command[T]) -> Command[T]:
        @functools.wraps(command)
        def with_output(*, as_json: bool, wide: bool = False, **options: Any) -> T:
            return command(output=Output(as_json, wide), **options)

        decorated = json_option(with_output)
        return wide_option(decorated) if wide else decorated

    return decorate


def wide_option(command: Command[T]) -> Command[T]:
    """Add `--wide`. Names are never truncated: on a terminal they are wrapped within their columns."""
    text = "Print each row as one line, however long; on a terminal, rows are wrapped."
    return click.option("--wide", is_flag=True, help=text)(command)


@contextmanager
def checked_reply() -> Iterator[None]:
    """Convert the error for a missing or unexpected field of a reply into a ClickException, which is printed in one line."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise click.ClickException(f"unexpected reply, the server may have another version: {error!r}") from None
