"""Common options of the commands, the client of their queries, and errors in one line.

An option may be set on the command line or by an environment variable; error messages name the one that was used.
"""

from __future__ import annotations

import asyncio
import functools
import io
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
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
    """An option whose errors name its environment variable if the value came from there."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the name of the option or of the variable."""
        return f"'{self.opts[0]}'" if ctx is None else f"'{_source(self, ctx)}'"


class EmptiableOption(SourcedOption):
    """An option for which an empty environment variable is a value, not the same as an unset one."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:  # noqa: ARG002 - click's signature
        """Return the value of the variable; None if it is not set."""
        return os.environ.get(str(self.envvar))


class InvalidArgument(click.ClickException):
    """A usage error, found without a server, file or database. Printed as one line; exit status 2."""

    exit_code = 2


class WholeNumber(click.IntRange):
    """A whole number within bounds. The error names the bounds, also if the text is not a number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert a text to an int within the bounds."""
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"a whole number {_describe_bounds(self)} is needed, not {value!r}.", param, ctx)


class Number(click.FloatRange):
    """A number within bounds. Unlike `click.FloatRange` it rejects `nan`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a text to a float within the bounds."""
        try:
            number = float(super().convert(value, param, ctx))
        except click.BadParameter:
            number = math.nan
        if math.isnan(number):
            self.fail(f"a number {_describe_bounds(self)} is needed, not {value!r}.", param, ctx)
        return number


def _describe_bounds(range_: click.IntRange | click.FloatRange) -> str:
    if range_.max is None:
        return f"of at least {range_.min}"
    return f"from {range_.min} to {range_.max}"


class PortType(click.ParamType[int]):
    """A port number, from `minimum` to 65535."""

    name = "port"

    def __init__(self, minimum: int = 1) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert a text to a port number."""
        try:
            port = int(value)
        except ValueError:
            port = -1
        if not self._minimum <= port <= MAX_PORT:
            self.fail(f"a port is a number from {self._minimum} to {MAX_PORT}, not {value!r}.", param, ctx)
        return port


def source_of(parameter: str) -> str:
    """Return the option or the environment variable that set a parameter of the running command.

    For a default value it is the option; outside of a command, the name of the parameter.
    """
    ctx = click.get_current_context(silent=True)
    if ctx is not None:
        for param in ctx.command.params:
            if param.name == parameter:
                return _source(param, ctx)
    return parameter


def replace_variables_by_options(message: str) -> str:
    """Replace the environment variables (`GENIE_…`) in an error message by their options, if set on the command line."""
    ctx = click.get_current_context(silent=True)
    if ctx is None:
        return message
    option_by_variable = {
        variable: param.opts[0]
        for param in ctx.command.params
        if param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
        for variable in _variables(param)
    }
    return VARIABLE.sub(lambda match: option_by_variable.get(match[0], match[0]), message)


def token_hint(error: BaseException) -> str:
    """Return a text to append to an error: where the rejected token came from. Empty for other errors."""
    if not isinstance(error, RequestRejected) or error.code != Code.UNAUTHORIZED:
        return ""
    path = os.environ.get("GENIE_TOKEN_FILE")
    if os.environ.get("GENIE_TOKEN"):
        return " (the token sent is that of GENIE_TOKEN)"
    if path:
        return f" (the token sent is that of GENIE_TOKEN_FILE, {path})"
    return " (no token was sent: GENIE_TOKEN and GENIE_TOKEN_FILE are not set)"


def _source(param: click.Parameter, ctx: click.Context) -> str:
    """Return the environment variable that set a parameter, else its option."""
    if param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT:
        variables = _variables(param)
        return next((variable for variable in variables if os.environ.get(variable)), variables[0])
    return param.opts[0]


def _variables(param: click.Parameter) -> list[str]:
    """Return the environment variables of a parameter."""
    if param.envvar is None:
        return []
    return [param.envvar] if isinstance(param.envvar, str) else list(param.envvar)


# -- Options and helpers of the commands that connect to a server --------

MAX_SECONDS = MAX_TIMEOUT_MS / 1000
INTERRUPTED = 130
"""Exit status after Ctrl-C, by the convention of shells."""

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
        type=_parse_namespace,
        metavar="NAME",
        envvar="GENIE_NAMESPACE",
        show_envvar=True,
        help="Namespace of the locks. [default: the first of the server]",
    )(command)


def _parse_namespace(text: str) -> str:
    error = diagnostics.namespace_error(text)
    if error is not None:
        raise click.BadParameter(f"it {error}, not {text!r}.")
    return text


def timeout_option(command: Command[P, T]) -> Command[P, T]:
    """Add `--timeout`, the response timeout: if another program listens on the port, it may never respond."""
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
    """Return a converter for an option in seconds, from `minimum` to `MAX_SECONDS`. It rejects `nan`."""

    def to_seconds(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not minimum <= value <= MAX_SECONDS:
            raise click.BadParameter(f"{text!r} is not a number of seconds from {minimum:g} to {MAX_SECONDS:.3f}.")
        return value

    return to_seconds


def bare_name(resource: str) -> str:
    """Return the name of a resource without its mode: tables show `MODE:NAME`, and users may copy that."""
    for mode in (SHARED, EXCLUSIVE):
        if resource.startswith(mode):
            return resource[len(mode) :]
    return resource


def format_servers(host: str, port: int) -> str:
    """Return the addresses of the servers for a message."""
    return ", ".join(map(format_address, parse_addresses(host, port)))


class Querier(Client):
    """A client that exposes the address of its server, the reason of a failed connection, and raw replies."""

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
        """Return the payload of the reply to `inspect` as it is on the wire: times in milliseconds."""
        return cast("dict[str, Any]", await self._connection.call(Inspect(resource, transaction, id, limit, only)))

    @property
    def connection_error(self) -> str:
        """Why there is no connection; empty while connected."""
        return "" if self._connection.session.up else self._connection.session.explain_unavailable()


def query(
    host: str, port: int, namespace: str | None, timeout: float, operation: Callable[[Querier], Awaitable[T]]
) -> T:
    """Connect, run one operation and disconnect, within `timeout` seconds in all. GenieError or ValueError on failure."""

    async def connect_and_run() -> T:
        deadline = asyncio.get_running_loop().time() + timeout
        client = Querier(parse_addresses(host, port), connect_timeout=timeout, namespace=namespace)
        try:
            async with asyncio.timeout(None) as limit, AsyncExitStack() as stack:
                # The client itself limits the time to connect: its error contains the replies of the servers.
                await stack.enter_async_context(client)
                limit.reschedule(deadline)
                try:
                    return await operation(client)
                except asyncio.CancelledError:
                    stack.pop_all()  # do not close the client: that would wait for the server, which does not respond
                    raise
        except TimeoutError:
            no_response = f"{format_servers(host, port)} did not respond within {timeout:g} s"
            raise Unavailable(client.connection_error or no_response) from None

    return run_async(connect_and_run())


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop. Ctrl-C cancels it and raises KeyboardInterrupt.

    `asyncio.run` alone cancels the task within the signal handler, which may interrupt a callback that has just found a
    future pending and is about to set its result: asyncio then logs an InvalidStateError. Here the event loop handles
    the signal between two callbacks.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return asyncio.run(coroutine)
    interrupted = False

    async def cancel_on_interrupt() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def on_interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            if task is not None:
                task.cancel()

        loop.add_signal_handler(signal.SIGINT, on_interrupt)
        try:
            return await coroutine
        finally:
            loop.remove_signal_handler(signal.SIGINT)  # from now on Ctrl-C raises KeyboardInterrupt immediately

    try:
        return asyncio.run(cancel_on_interrupt())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise


@contextmanager
def checked_reply() -> Iterator[None]:
    """Convert the exceptions for missing or unexpected fields of a reply into an error of one line."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise click.ClickException(f"unexpected reply, the server may have another version: {error!r}") from None


def one_line(error: BaseException) -> str:
    """Return the text of an error without line breaks, with the source of a rejected token."""
    return (" ".join(str(error).split()) or type(error).__name__) + token_hint(error)


def one_line_errors(command: Command[P, T]) -> Command[P, T]:
    """Print errors of a command as one line instead of a traceback.

    Exit status: 2 for a ValueError, which is a usage error; 1 for a GenieError; 130 after Ctrl-C.
    """

    @functools.wraps(command)
    def command_with_one_line_errors(*args: P.args, **kwargs: P.kwargs) -> T:
        # Escape characters that the encoding of the terminal lacks.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            return command(*args, **kwargs)
        except GenieError as error:
            raise click.ClickException(one_line(error)) from None
        except ValueError as error:
            raise InvalidArgument(one_line(error)) from None
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None

    return command_with_one_line_errors
