"""Which option or variable a value came from, for error messages.

An option may be given on the command line or by a variable of the environment. A message that names the other one sends
its reader to the wrong place.
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
    """A usage error: a value that no server, file or database had to be asked about. One line, exit status 2."""

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


# -- What the commands that talk to a server have in common: where it is, how long it may take, errors in one line --------

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
        default=DEFAULT_HOST,
        envvar="GENIE_HOST",
        show_envvar=True,
        show_default=True,
        help="Server to ask, genies://HOST:PORT for TLS; several with commas between them.",
    )
    port = click.option(
        "--port",
        cls=SourcedOption,
        type=PortType(),
        default=DEFAULT_PORT,
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
    wrong = diagnostics.namespace_error(text)
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
    return ", ".join(map(format_address, parse_addresses(host, port)))


class Asker(Client):
    """A client that says why it waits, and where it is."""

    @property
    def address(self) -> Address | None:
        """The server that answers: the one that leads."""
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
    def trouble(self) -> str:
        """Why there is no connection; empty if there is one."""
        return "" if self._connection.session.up else self._connection.session.explain_unavailable()


def ask(host: str, port: int, namespace: str | None, patience: float, question: Callable[[Asker], Awaitable[T]]) -> T:
    """Connect, ask one thing and leave, within `patience` seconds in all; GenieError or ValueError otherwise.

    The client bounds the first connection itself, for it knows what the servers have said.
    """

    async def asking() -> T:
        end = asyncio.get_running_loop().time() + patience
        client = Asker(parse_addresses(host, port), connect_timeout=patience, namespace=namespace)
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
