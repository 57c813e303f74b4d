"""Common options of the commands, and one-line error messages.

An option may be set on the command line or by an environment variable. Error messages name the source of the value.
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
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import click
from click.core import ParameterSource

from genie.cli.output import print_message
from genie.client.config import DEFAULT_HOST, DEFAULT_PORT
from genie.errors import Code, GenieError, RequestRejected, Unavailable
from genie.net import is_service_link
from genie.protocol import diagnostics
from genie.protocol.limits import MAX_TIMEOUT_MS
from genie.protocol.resources import parse_resource
from genie.text import printable

MAX_PORT = 65535
VARIABLE = re.compile(r"\bGENIE_[A-Z_]+\b")
FILE_SOURCES = "genie.file_sources"
"""Key in the metadata of a click context, for a dict: by the name of a parameter, the key and the file that have set it."""


class SourcedOption(click.Option):
    """An option whose error messages name the environment variable if the value came from the variable."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the environment variable, or None if it is not set.

        A service link of Kubernetes in the variable of a port is ignored, with a warning.
        """
        value = self.read_variable(ctx)
        if value is not None and self.type.name == PortType.name and is_service_link(value):
            print_message(f"{self.envvar}={value} ignored: it is a Kubernetes service link (enableServiceLinks)")
            return None
        return value

    def read_variable(self, ctx: click.Context) -> str | None:
        """Return the value of the environment variable; None if it is not set or empty."""
        return super().resolve_envvar_value(ctx)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the name of the option, or of the environment variable that set the option."""
        return f"'{self.opts[0]}'" if ctx is None else f"'{_source(self, ctx)}'"


class EmptiableOption(SourcedOption):
    """An option for which an empty environment variable is a value. Click treats an empty variable as an unset one."""

    def read_variable(self, ctx: click.Context) -> str | None:  # noqa: ARG002 - the signature of the base
        """Return the value of the environment variable, which may be empty; None if it is not set."""
        return os.environ.get(str(self.envvar))


class InvalidArgument(click.ClickException):
    """An invalid value of an option or argument. It is printed as one line; the exit status is 2."""

    exit_code = 2


class WholeNumber(click.IntRange):
    """A whole number within bounds. Error messages always state the bounds, even for a text that is not a number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert a text to an int. Raises click.BadParameter if the text is not a whole number within the bounds."""
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"a whole number {_describe_bounds(self)} is needed, not {value!r}.", param, ctx)


class Number(click.FloatRange):
    """A number within bounds. Unlike `click.FloatRange`, this type rejects `nan`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a text to a float. Raises click.BadParameter if the text is not a number within the bounds."""
        try:
            number = float(super().convert(value, param, ctx))
        except click.BadParameter:
            number = math.nan  # rejected below, with an error that states the bounds
        if math.isnan(number):
            self.fail(f"a number {_describe_bounds(self)} is needed, not {value!r}.", param, ctx)
        return number


def _describe_bounds(range_: click.IntRange | click.FloatRange) -> str:
    """Describe the bounds of a number for an error message, e.g. `from 1 to 255`."""
    if range_.max is None:
        return f"of at least {range_.min}"
    return f"from {range_.min} to {range_.max}"


class PortType(click.ParamType[int]):
    """A port number, from `min_port` to 65535."""

    name = "port"

    def __init__(self, min_port: int = 1) -> None:
        self._min_port = min_port

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert a text to a port number. Raises click.BadParameter if the text is not a valid port number."""
        try:
            port = int(value)
        except ValueError:
            port = -1  # out of range, rejected below
        if not self._min_port <= port <= MAX_PORT:
            self.fail(f"a port is a number from {self._min_port} to {MAX_PORT}, not {value!r}.", param, ctx)
        return port


def source_of(parameter: str) -> str:
    """Return the name of the option or environment variable that set a parameter of the running command.

    If the parameter has its default value, return the name of the option. If no command is running, return `parameter`.
    """
    ctx = click.get_current_context(silent=True)
    if ctx is not None:
        for param in ctx.command.params:
            if param.name == parameter:
                return _source(param, ctx)
    return parameter


def replace_variables_by_options(message: str) -> str:
    """Replace the environment variables (`GENIE_…`) in an error message by options, or by keys of the configuration file.

    A variable is replaced only if the corresponding option was set on the command line, or in the file.
    """
    ctx = click.get_current_context(silent=True)
    if ctx is None:
        return message
    option_by_variable = {
        variable: _source(param, ctx)
        for param in ctx.command.params
        if param.name is not None
        and ctx.get_parameter_source(param.name) in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
        for variable in _variables(param)
    }
    return VARIABLE.sub(lambda match: option_by_variable.get(match[0], match[0]), message)


def token_hint(error: BaseException) -> str:
    """Return a suffix for the message of an error: where the rejected token came from.

    The suffix is empty if the error is not a rejected token.
    """
    if not isinstance(error, RequestRejected) or error.code != Code.UNAUTHORIZED:
        return ""
    path = os.environ.get("GENIE_TOKEN_FILE")
    if os.environ.get("GENIE_TOKEN"):
        return " (the token sent is that of GENIE_TOKEN)"
    if path:
        return f" (the token sent is that of GENIE_TOKEN_FILE, {path})"
    return " (no token was sent: GENIE_TOKEN and GENIE_TOKEN_FILE are not set)"


def server_hint(error: BaseException) -> str:
    """Return a suffix for the message of an error: how to start a server, if no program listens on the port."""
    if not isinstance(error, Unavailable) or "Connect call failed" not in str(error):
        return ""
    ctx = click.get_current_context(silent=True)
    params = {} if ctx is None else ctx.params
    names = "--host and --port"
    if params.get("is_local"):  # `genie status --local` reads the settings of the server
        names = "GENIE_ADMIN_HOST and GENIE_ADMIN_PORT"
    elif "admin_port" in params:
        names = "--admin-host and --admin-port"
    return f" (`genie serve` starts one; {names} choose another)"


def _source(param: click.Parameter, ctx: click.Context) -> str:
    """Return the source of a parameter: the environment variable, the key of the configuration file, or else the option."""
    if param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.DEFAULT_MAP:
        return str(ctx.meta[FILE_SOURCES][param.name])
    if param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT:
        variables = _variables(param)
        # Like click, prefer the first variable that is not empty.
        return next((variable for variable in variables if os.environ.get(variable)), variables[0])
    return param.opts[0]


def _variables(param: click.Parameter) -> list[str]:
    """Return the environment variables of a parameter."""
    if param.envvar is None:
        return []
    return [param.envvar] if isinstance(param.envvar, str) else list(param.envvar)


# -- Options of several commands --------

MAX_SECONDS = MAX_TIMEOUT_MS / 1000
RESPONSE_TIMEOUT_S = 10.0
"""How long a command that holds locks while it runs waits for a server: longer than a failover takes."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, by the convention of shells."""

T = TypeVar("T")
P = ParamSpec("P")
Command = Callable[P, T]


def variable_option(name: str, help: str, **attributes: Any) -> Callable[[Command[P, T]], Command[P, T]]:
    """Return a decorator that adds an option, which the variable of its name sets too: `--admin-host`, GENIE_ADMIN_HOST."""
    variable = f"GENIE_{name.removeprefix('--').replace('-', '_').upper()}"
    settings: dict[str, Any] = {"cls": SourcedOption, "envvar": variable, "show_envvar": True, **attributes}
    return click.option(name, help=help, **settings)


def server_options(command: Command[P, T]) -> Command[P, T]:
    """Add `--host`, `--port` and `--namespace`."""
    host = variable_option(
        "--host",
        "Server to connect to; genies://HOST:PORT for TLS. Separate several with commas.",
        default=DEFAULT_HOST,
        show_default=True,
    )
    port = variable_option("--port", "Port of the server.", type=PortType(), default=DEFAULT_PORT, show_default=True)
    return host(port(namespace_option(command)))


def namespace_option(command: Command[P, T]) -> Command[P, T]:
    """Add `--namespace`. The default, None, selects the first namespace of the server."""
    text = "Namespace of the locks. [default: the first of the server]"
    return variable_option("--namespace", text, type=parse_namespace, metavar="NAME")(command)


def parse_namespace(text: str) -> str:
    """Return a valid name of a namespace unchanged. Raises click.BadParameter if the name is invalid."""
    error = diagnostics.namespace_error(text)
    if error is not None:
        raise click.BadParameter(f"it {error}, not {text!r}.")
    return text


def timeout_option(command: Command[P, T]) -> Command[P, T]:
    """Add `--timeout`, the response timeout in seconds. If another program listens on the port, it may never respond."""
    text = "Response timeout of the server."
    return click.option("--timeout", type=seconds(0.001), metavar="SECONDS", default=5, show_default=True, help=text)(
        command
    )


def json_option(command: Command[P, T]) -> Command[P, T]:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def seconds(minimum: float) -> Callable[[str | float], float]:
    """Return a function that converts an option to a number of seconds from `minimum` to `MAX_SECONDS`."""

    def to_seconds(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not minimum <= value <= MAX_SECONDS:  # also rejects NaN
            raise click.BadParameter(f"{text!r} is not a number of seconds from {minimum:g} to {MAX_SECONDS:.3f}.")
        return value

    return to_seconds


def bare_name(resource: str) -> str:
    """Return the name of a resource without its mode, since users may copy `MODE:NAME` or `2/10:NAME` from a table."""
    try:
        return parse_resource(resource)[1]
    except ValueError:
        return resource


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop. Ctrl-C cancels the coroutine, and then raises KeyboardInterrupt.

    The event loop handles the first Ctrl-C between two callbacks. The second Ctrl-C raises KeyboardInterrupt
    immediately, because the event loop may be blocked, for example by a terminal that does not read.

    `asyncio.run` alone would cancel the task within a signal handler. The handler may interrupt a callback that is about
    to set the result of a future, and asyncio would then log an InvalidStateError.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    # Only the main thread can set signal handlers, and a handler that is not Python's default must be kept.
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return asyncio.run(coroutine)
    interrupted = False

    async def cancel_on_interrupt() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def on_interrupt(signum: int, frame: FrameType | None) -> None:
            """Cancel the task at the first signal; raise KeyboardInterrupt at the second one."""
            nonlocal interrupted
            if interrupted or task is None:
                signal.default_int_handler(signum, frame)
            interrupted = True
            loop.call_soon_threadsafe(task.cancel)

        signal.signal(signal.SIGINT, on_interrupt)
        try:
            return await coroutine
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        return asyncio.run(cancel_on_interrupt())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise


def run_on_uvloop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop: that of uvloop if it is installed, else that of asyncio."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.run(coroutine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, with the source of a rejected token, or how to start a missing server."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return text + token_hint(error) + server_hint(error)


def one_line_errors(command: Command[P, T]) -> Command[P, T]:
    """Decorate a command so that it prints an error as one line instead of a traceback.

    The exit status is 2 for a ValueError, which is a usage error, 1 for a GenieError, and 130 after Ctrl-C.
    """

    @functools.wraps(command)
    def command_with_one_line_errors(*args: P.args, **kwargs: P.kwargs) -> T:
        # Print an escape sequence for each character that the encoding of the terminal does not have.
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
