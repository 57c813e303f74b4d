"""Options of the commands, the client that they use, and errors in one line.

An option may come from the command line or from an environment variable; error messages name the one
that was used.
"""

from __future__ import annotations

import asyncio
import functools
import io
import math
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Literal, ParamSpec, TypeVar, cast

import click
from click.core import ParameterSource

from genie.client.aio import Client
from genie.client.commands import Inspect
from genie.client.config import DEFAULT_HOST, DEFAULT_PORT, Address, format_address, parse_addresses
from genie.errors import Code, GenieError, RequestRejected, Unavailable
from genie.protocol import diagnostics
from genie.protocol.limits import MAX_TIMEOUT_MS
from genie.protocol.resources import EXCLUSIVE, SHARED

MAX_PORT = 65535
VARIABLE = re.compile(r"\bGENIE_[A-Z_]+\b")


class SourcedOption(click.Option):
    """An option whose errors name the variable instead, where the value came from the environment."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the option as written, or the variable."""
        return f"'{self.opts[0]}'" if ctx is None else f"'{_source(self, ctx)}'"


class EmptiableOption(SourcedOption):
    """An option whose variable may be empty, which differs from a variable that is not set."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:  # noqa: ARG002 - click's signature
        """Return the value of the variable; None where it is not set."""
        return os.environ.get(str(self.envvar))


class WrongValue(click.ClickException):
    """A usage error that is found without a server, file or database. One line, exit status 2."""

    exit_code = 2


class WholeNumber(click.IntRange):
    """A whole number within bounds. The error names both bounds, also where the text is no number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert to an int."""
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"a whole number {_bounds(self)} is needed, not {value!r}.", param, ctx)


class Number(click.FloatRange):
    """A number within bounds, like WholeNumber. Unlike click's own range it rejects `nan`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert to a float."""
        try:
            number = float(super().convert(value, param, ctx))
        except click.BadParameter:
            number = math.nan
        if math.isnan(number):
            self.fail(f"a number {_bounds(self)} is needed, not {value!r}.", param, ctx)
        return number


def _bounds(numbers: click.IntRange | click.FloatRange) -> str:
    if numbers.max is None:
        return f"of at least {numbers.min}"
    return f"from {numbers.min} to {numbers.max}"


class PortType(click.ParamType[int]):
    """A port number, from `minimum` to 65535."""

    name = "port"

    def __init__(self, minimum: int = 1) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert to an int."""
        try:
            port = int(value)
        except ValueError:
            port = -1
        if not self._minimum <= port <= MAX_PORT:
            self.fail(f"a port is a number from {self._minimum} to {MAX_PORT}, not {value!r}.", param, ctx)
        return port


def source_of(parameter: str) -> str:
    """Return the option or the variable that the value of a parameter of the running command came from.

    The option where it has its default, and the parameter's name outside of a command.
    """
    ctx = click.get_current_context(silent=True)
    for param in () if ctx is None else ctx.command.params:
        if ctx is not None and param.name == parameter:
            return _source(param, ctx)
    return parameter


def with_sources(message: str) -> str:
    """Return the message with each GENIE_ variable replaced by its option, where that was given on the command line."""
    ctx = click.get_current_context(silent=True)
    if ctx is None:
        return message
    given = {
        variable: param.opts[0]
        for param in ctx.command.params
        if param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
        for variable in _variables(param)
    }
    return VARIABLE.sub(lambda found: given.get(found[0], found[0]), message)


def token_hint(error: BaseException) -> str:
    """Return where the rejected token came from, to be appended to the message of the error; else an empty text."""
    if not isinstance(error, RequestRejected) or error.code != Code.UNAUTHORIZED:
        return ""
    path = os.environ.get("GENIE_TOKEN_FILE")
    if os.environ.get("GENIE_TOKEN"):
        return " (the token sent is that of GENIE_TOKEN)"
    if path:
        return f" (the token sent is that of GENIE_TOKEN_FILE, {path})"
    return " (no token was sent: GENIE_TOKEN and GENIE_TOKEN_FILE are not set)"


def _source(param: click.Parameter, ctx: click.Context) -> str:
    if param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT:
        variables = _variables(param)
        return next((variable for variable in variables if os.environ.get(variable)), variables[0])
    return param.opts[0]


def _variables(param: click.Parameter) -> list[str]:
    if param.envvar is None:
        return []
    return [param.envvar] if isinstance(param.envvar, str) else list(param.envvar)


# -- Options and helpers of the commands that connect to a server --------

MAX_SECONDS = MAX_TIMEOUT_MS / 1000
INTERRUPTED = 130
"""The exit status after Ctrl-C, as a shell gives it."""

T = TypeVar("T")
P = ParamSpec("P")
Command = Callable[P, T]


def server_options(command: Command[P, T]) -> Command[P, T]:
    """Add `--host`, `--port` and `--namespace`."""
    host = click.option(
        "--host",
        cls=SourcedOption,
        default=DEFAULT_HOST,
        envvar="GENIE_HOST",
        show_envvar=True,
        show_default=True,
        help="Server to connect to; genies://HOST:PORT for TLS. Separate several with commas.",
    )
    port = click.option(
        "--port",
        cls=SourcedOption,
        type=PortType(),
        default=DEFAULT_PORT,
        envvar="GENIE_PORT",
        show_envvar=True,
        show_default=True,
        help="Port of the server.",
    )
    return host(port(namespace_option(command)))


def namespace_option(command: Command[P, T]) -> Command[P, T]:
    """Add `--namespace`. None, the default, selects the first namespace of the server."""
    return click.option(
        "--namespace",
        cls=SourcedOption,
        type=_namespace,
        metavar="NAME",
        envvar="GENIE_NAMESPACE",
        show_envvar=True,
        help="Namespace of the locks. [default: the first of the server]",
    )(command)


def _namespace(text: str) -> str:
    wrong = diagnostics.namespace_error(text)
    if wrong is not None:
        raise click.BadParameter(f"it {wrong}, not {text!r}.")
    return text


def timeout_option(command: Command[P, T]) -> Command[P, T]:
    """Add `--timeout`, the response timeout. Another program on the port might never respond."""
    return click.option(
        "--timeout",
        "timeout",
        type=seconds(0.001),
        metavar="SECONDS",
        default=5,
        show_default=True,
        help="Response timeout of the server.",
    )(command)


def json_option(command: Command[P, T]) -> Command[P, T]:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def seconds(minimum: float) -> Callable[[str | float], float]:
    """Return the type of an option in seconds. Unlike click's own ranges it rejects `nan`."""

    def convert(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not minimum <= value <= MAX_SECONDS:
            raise click.BadParameter(f"{text!r} is not a number of seconds from {minimum:g} to {MAX_SECONDS:.3f}.")
        return value

    return convert


def bare_name(resource: str) -> str:
    """Return the name of a resource that may be written with its mode, as tables show it."""
    for mode in (SHARED, EXCLUSIVE):
        if resource.startswith(mode):
            return resource[len(mode) :]
    return resource


def format_server(host: str, port: int) -> str:
    """Return the address for messages."""
    return ", ".join(map(format_address, parse_addresses(host, port)))


class Querier(Client):
    """A client that exposes its server, the reason of a failed connection, and raw replies."""

    @property
    def address(self) -> Address | None:
        """Address of the connected server, the leader."""
        return self._connection.address

    async def inspected(
        self,
        *,
        resource: str | None = None,
        transaction: str | None = None,
        id: int | None = None,
        limit: int | None = None,
        only: Literal["holders", "queue"] | None = None,
    ) -> dict[str, Any]:
        """Return the payload of the server's answer to `inspect` as it is on the handler: times in milliseconds."""
        return cast("dict[str, Any]", await self._connection.call(Inspect(resource, transaction, id, limit, only)))

    @property
    def connection_error(self) -> str:
        """Why there is no connection; empty while connected."""
        return "" if self._connection.session.up else self._connection.session.explain_unavailable()


def query(
    host: str, port: int, namespace: str | None, timeout: float, operation: Callable[[Querier], Awaitable[T]]
) -> T:
    """Connect, run one operation and disconnect, within `timeout` seconds in all. GenieError or ValueError on failure.

    The client bounds the first connection itself: its error names what the servers replied.
    """

    async def run() -> T:
        end = asyncio.get_running_loop().time() + timeout
        client = Querier(parse_addresses(host, port), connect_timeout=timeout, namespace=namespace)
        try:
            async with asyncio.timeout(None) as bound, AsyncExitStack() as stack:
                await stack.enter_async_context(client)
                bound.reschedule(end)
                try:
                    return await operation(client)
                except asyncio.CancelledError:
                    stack.pop_all()  # no orderly close: it would wait for the server that does not respond
                    raise
        except TimeoutError:
            silent = f"{format_server(host, port)} did not respond within {timeout:g} s"
            raise Unavailable(client.connection_error or silent) from None

    return asyncio.run(run())


@contextmanager
def checked_reply() -> Iterator[None]:
    """Turn missing or unexpected fields of a reply into an error in one line."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise click.ClickException(f"unexpected reply, the server may have another version: {error!r}") from None


def one_line(error: BaseException) -> str:
    """Return the text of an error without line breaks, and the source of a rejected token."""
    return (" ".join(str(error).split()) or type(error).__name__) + token_hint(error)


def one_line_errors(command: Command[P, T]) -> Command[P, T]:
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
