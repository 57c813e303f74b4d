"""What the commands that talk to a server have in common: where it is, how long it may take, errors in one line."""

from __future__ import annotations

import asyncio
import functools
import io
import math
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Literal, ParamSpec, TypeVar, cast

import click

from genie.cli.sources import PortType, SourcedOption, WrongValue, token_hint
from genie.client.aio import Client
from genie.client.calls import Inspect
from genie.client.reach import HOST, PORT, Address, addresses, spell
from genie.errors import GenieError, Unavailable
from genie.protocol import fields
from genie.protocol.fields import MAX_TIMEOUT_MS
from genie.protocol.resources import EXCLUSIVE, SHARED

MAX_SECONDS = MAX_TIMEOUT_MS / 1000
INTERRUPTED = 130
"""The exit status after Ctrl-C, as a shell gives it."""

T = TypeVar("T")
P = ParamSpec("P")
Command = Callable[P, T]


def server_options(command: Command[P, T]) -> Command[P, T]:
    """`--host`, `--port` and `--namespace`: the server to ask, and whose locks it is asked for."""
    host = click.option(
        "--host",
        cls=SourcedOption,
        default=HOST,
        envvar="GENIE_HOST",
        show_envvar=True,
        show_default=True,
        help="Server to ask, genies://HOST:PORT for TLS; several with commas between them.",
    )
    port = click.option(
        "--port",
        cls=SourcedOption,
        type=PortType(),
        default=PORT,
        envvar="GENIE_PORT",
        show_envvar=True,
        show_default=True,
        help="Its port.",
    )
    return host(port(namespace_option(command)))


def namespace_option(command: Command[P, T]) -> Command[P, T]:
    """`--namespace`: whose locks. None where it is not said: those of the server's first."""
    return click.option(
        "--namespace",
        cls=SourcedOption,
        type=_namespace,
        metavar="NAME",
        envvar="GENIE_NAMESPACE",
        show_envvar=True,
        help="Whose locks. [default: the server's first namespace]",
    )(command)


def _namespace(text: str) -> str:
    wrong = fields.namespace(text)
    if wrong is not None:
        raise click.BadParameter(f"it {wrong}, not {text!r}.")
    return text


def patience_option(command: Command[P, T]) -> Command[P, T]:
    """`--timeout`: how long the server may take. A port where something else listens may never answer at all."""
    return click.option(
        "--timeout",
        "patience",
        type=seconds(0.001),
        metavar="SECONDS",
        default=5,
        show_default=True,
        help="How long the server may take to answer.",
    )(command)


def json_option(command: Command[P, T]) -> Command[P, T]:
    """`--json`: for programs."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(command)


def seconds(least: float) -> Callable[[str | float], float]:
    """The type of an option in seconds. click's own ranges let `nan` pass, which no comparison stops."""

    def convert(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= MAX_SECONDS:
            raise click.BadParameter(f"{text!r} is not a number of seconds from {least:g} to {MAX_SECONDS:.3f}.")
        return value

    return convert


def bare_name(resource: str) -> str:
    """The name of a resource, whether it was written with its mode, as tables show it, or without."""
    for mode in (SHARED, EXCLUSIVE):
        if resource.startswith(mode):
            return resource[len(mode) :]
    return resource


def whereabouts(host: str, port: int) -> str:
    """The address as messages name it."""
    return ", ".join(map(spell, addresses(host, port)))


class Asker(Client):
    """A client that says why it waits, and where it is."""

    @property
    def address(self) -> Address | None:
        """The server that answers: the one that leads."""
        return self._link.address

    async def inspected(
        self,
        *,
        resource: str | None = None,
        transaction: str | None = None,
        id: int | None = None,
        limit: int | None = None,
        only: Literal["holders", "queue"] | None = None,
    ) -> dict[str, Any]:
        """Return the payload of the server's answer to `inspect` as it is on the wire: times in milliseconds."""
        return cast("dict[str, Any]", await self._link.call(Inspect(resource, transaction, id, limit, only)))

    @property
    def trouble(self) -> str:
        """Why there is no connection; empty if there is one."""
        return "" if self._link.core.up else self._link.core.trouble()


def ask(host: str, port: int, namespace: str | None, patience: float, question: Callable[[Asker], Awaitable[T]]) -> T:
    """Connect, ask one thing and leave, within `patience` seconds in all; GenieError or ValueError otherwise.

    The client bounds the first connection itself, for it knows what the servers have said.
    """

    async def asking() -> T:
        end = asyncio.get_running_loop().time() + patience
        client = Asker(addresses(host, port), connect_timeout=patience, namespace=namespace)
        try:
            async with asyncio.timeout(None) as bound, AsyncExitStack() as stack:
                await stack.enter_async_context(client)
                bound.reschedule(end)
                try:
                    return await question(client)
                except asyncio.CancelledError:
                    stack.pop_all()  # no polite end: it would wait for the same server, which doesn't answer
                    raise
        except TimeoutError:
            silent = f"{whereabouts(host, port)} does not answer within {patience:g} s"
            raise Unavailable(client.trouble or silent) from None

    return asyncio.run(asking())


@contextmanager
def as_known() -> Iterator[None]:
    """While an answer is read: say in one line that its fields are others than those of this version."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise click.ClickException(f"the server's answer is not as this version knows it: {error!r}") from None


def one_line(error: BaseException) -> str:
    """An error's text without line breaks, wherever it has come from; with where a token came from that was rejected."""
    return (" ".join(str(error).split()) or type(error).__name__) + token_hint(error)


def plain_errors(command: Command[P, T]) -> Command[P, T]:
    """Print an error as one line instead of a traceback. Exit status: 2 for a ValueError, which is a usage error; 1 for
    a GenieError; 130 after Ctrl-C.

    Names may hold characters that the terminal's encoding doesn't have: those are escaped, not a reason to fail.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            return command(*args, **kwargs)
        except GenieError as error:
            raise click.ClickException(one_line(error)) from None
        except ValueError as error:
            raise WrongValue(one_line(error)) from None
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None

    return wrapped
