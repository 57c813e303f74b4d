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
"""The name of an environment variable in a message."""
FILE_SOURCES = "genie.file_sources"
"""Key of a dict in the metadata of a click context. The dict contains, by the name of each parameter that the configuration
file has set, the source for error messages: `KEY in FILE`."""


class SourcedOption(click.Option):
    """An option whose error messages name the environment variable if it has set the value."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the environment variable, or None if it is not set.

        If the variable of a port is a service link of Kubernetes, a warning is printed, and None is returned.
        """
        value = self.read_variable(ctx)
        if value is not None and self.type.name == PortType.name and is_service_link(value):
            print_message(f"{self.envvar}={value} ignored: it is a Kubernetes service link (enableServiceLinks)")
            return None
        return value

    def read_variable(self, ctx: click.Context) -> str | None:
        """Return the value of the environment variable, or None if it is not set or empty."""
        return super().resolve_envvar_value(ctx)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the name of the option, or of the environment variable that set the option."""
        return f"'{self.opts[0]}'" if ctx is None else f"'{_source(self, ctx)}'"


class EmptiableOption(SourcedOption):
    """An option for which an empty environment variable is a value. Click treats an empty variable as an unset one."""

    def read_variable(self, ctx: click.Context) -> str | None:  # noqa: ARG002 - the signature of the base
        """Return the value of the environment variable, which may be empty, or None if it is not set."""
        return os.environ.get(str(self.envvar))


class InvalidArgument(click.ClickException):
    """An invalid value of an option or argument. The message is printed in one line, and the exit status is 2."""

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


def _describe_bounds(number_type: click.IntRange | click.FloatRange) -> str:
    """Describe the bounds of a number for an error message, e.g. `from 1 to 255`."""
    if number_type.max is None:
        return f"of at least {number_type.min}"
    return f"from {number_type.min} to {number_type.max}"


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
    """Return what set a parameter of the running command: the option, the environment variable, or the key of the file.

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
    replacements: dict[str, str] = {}
    for param in ctx.command.params:
        source = None if param.name is None else ctx.get_parameter_source(param.name)
        if source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP):
            replacements |= dict.fromkeys(_variables(param), _source(param, ctx))
    return VARIABLE.sub(lambda match: replacements.get(match[0], match[0]), message)


def token_hint(error: BaseException) -> str:
    """Return a suffix for an error message that says where the rejected token came from.

    The suffix is empty if the error has another cause.
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
    """Return a suffix for an error message that says how to start a server or choose another one.

    The suffix is empty unless the connection was refused, because no program listens on the port.
    """
    was_refused = isinstance(error, Unavailable) and "Connect call failed" in str(error)
    if not was_refused:
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
    source = None if param.name is None else ctx.get_parameter_source(param.name)
    if source is ParameterSource.DEFAULT_MAP:
        return str(ctx.meta[FILE_SOURCES][param.name])
    if source is ParameterSource.ENVIRONMENT:
        variables = _variables(param)
        set_variables = [variable for variable in variables if os.environ.get(variable)]
        return (set_variables or variables)[0]  # click, too, reads the first variable that is not empty
    return param.opts[0]


def _variables(param: click.Parameter) -> list[str]:
    """Return the environment variables of a parameter."""
    if param.envvar is None:
        return []
    return [param.envvar] if isinstance(param.envvar, str) else list(param.envvar)


# -- Options of several commands --------

MAX_SECONDS = MAX_TIMEOUT_MS / 1000
"""The longest timeout of the protocol."""
RESPONSE_TIMEOUT_S = 10.0
"""Response timeout of a command that holds locks while it runs: longer than a failover takes."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, by the convention of shells."""

T = TypeVar("T")
P = ParamSpec("P")
Command = Callable[P, T]


def variable_option(name: str, help: str, **attributes: Any) -> Callable[[Command[P, T]], Command[P, T]]:
    """Return a decorator that adds an option and its environment variable, such as `--admin-host` and GENIE_ADMIN_HOST.

    `attributes` are further arguments of `click.option`.
    """
    variable = f"GENIE_{name.removeprefix('--').replace('-', '_').upper()}"
    defaults: dict[str, Any] = {"cls": SourcedOption, "envvar": variable, "show_envvar": True}
    return click.option(name, help=help, **defaults | attributes)


def server_options(command: Command[P, T]) -> Command[P, T]:
    """Add `--host`, `--port` and `--namespace`."""
    host_option = variable_option(
        "--host",
        "Server to connect to; genies://HOST:PORT for TLS. Separate several with commas.",
        default=DEFAULT_HOST,
        show_default=True,
    )
    port_option = variable_option(
        "--port", "Port of the server.", type=PortType(), default=DEFAULT_PORT, show_default=True
    )
    return host_option(port_option(namespace_option(command)))


def namespace_option(command: Command[P, T]) -> Command[P, T]:
    """Add `--namespace`. The default, None, selects the first namespace of the server."""
    help_text = "Namespace of the locks. [default: the first of the server]"
    return variable_option("--namespace", help_text, type=parse_namespace, metavar="NAME")(command)


def parse_namespace(text: str) -> str:
    """Return the name of a namespace unchanged. Raises click.BadParameter if the name is invalid."""
    error = diagnostics.namespace_error(text)
    if error is not None:
        raise click.BadParameter(f"it {error}, not {text!r}.")
    return text


def timeout_option(command: Command[P, T]) -> Command[P, T]:
    """Add `--timeout`, the response timeout in seconds."""
    return click.option(
        "--timeout",
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
    """Return the name of a resource without its mode: of `MODE:NAME`, `2/10:NAME` or `NAME`."""
    try:
        return parse_resource(resource)[1]
    except ValueError:
        return resource


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop. Ctrl-C cancels the coroutine, and then raises KeyboardInterrupt.

    The event loop handles the first Ctrl-C between two callbacks. The second Ctrl-C raises KeyboardInterrupt
    immediately, because the event loop may be blocked, for example by a terminal that does not read.

    `asyncio.run` alone would cancel the task within the signal handler. That may interrupt a callback that is about to set
    the result of a future, and asyncio would then log an InvalidStateError.
    """
    can_set_handler = threading.current_thread() is threading.main_thread()
    is_default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not (can_set_handler and is_default_handler):  # any other handler is kept
        return asyncio.run(coroutine)
    interrupted = False

    async def cancel_on_interrupt() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def on_interrupt(signum: int, frame: FrameType | None) -> None:
            """Cancel the task at the first signal. Raise KeyboardInterrupt at the second one."""
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
    """Run a coroutine in a new event loop: of uvloop if it is installed, else of asyncio."""
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.run(coroutine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, with a hint for a rejected token or a server that does not run."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return text + token_hint(error) + server_hint(error)


def one_line_errors(command: Command[P, T]) -> Command[P, T]:
    """Decorate a command so that it prints an error in one line instead of a traceback.

    The exit status is 1 for a GenieError, 2 for a ValueError, which is a usage error, and 130 after Ctrl-C.
    """

    @functools.wraps(command)
    def command_with_one_line_errors(*args: P.args, **kwargs: P.kwargs) -> T:
        # A character that the encoding of the terminal does not have is printed as an escape sequence.
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
