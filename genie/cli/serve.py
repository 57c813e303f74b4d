"""`genie serve`: the options of the server and their validation."""

from __future__ import annotations

import errno
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click
import structlog

from genie.cli.banner import banner_lines
from genie.cli.configuration import Configuration
from genie.cli.options import (
    EmptiableOption,
    InvalidArgument,
    Number,
    PortType,
    WholeNumber,
    replace_variables_by_options,
    run_on_uvloop,
    source_of,
    variable_option,
)
from genie.cli.output import print_lines
from genie.cli.port_probe import describe_listener
from genie.config import Settings
from genie.core.lock_order.classes import parse_rules
from genie.net import parse_host_port
from genie.observability import logs
from genie.protocol.diagnostics import namespace_error
from genie.server.app import Server
from genie.server.listener import is_exposed
from genie.storage.store import UnknownFormat, UnsafeStore

log = structlog.get_logger()

_DEFAULTS = Settings().options()
PORT = PortType(min_port=0)
_ADVERTISE_HELP = (
    "HOST:PORT that clients are sent to; with TLS the host must be in the certificate. "
    "[default: the address it listens on; for 0.0.0.0 the host name, in a container its id]"
)
_REDIS_HELP = (
    "Redis that keeps the locks: redis://[user:password@]host:port/db, redis+sentinel://host,host,host/master-name or "
    "redis+cluster://host,host; rediss for TLS."
)
OTHER_OPEN_FILES = 640
"""Open files of the server other than the connections of clients. Most of them are connections to the admin port."""
Command = Callable[..., Any]
ReadSettings = Callable[[], Settings]


def _option(
    name: str, kind: click.ParamType[Any] | type[str | bool], help: str, variables: list[str] | None = None
) -> Callable[[Command], Command]:
    """Return a decorator that adds an option to `serve`. The default value is that of the setting with the same name.

    Args:
        name: the option, such as `--admin-port`.
        kind: the type of its value.
        help: the help text.
        variables: the environment variables of the option. Default: one with the name of the option, such as
            GENIE_ADMIN_PORT.

    """
    default = _DEFAULTS.get(name.removeprefix("--").replace("-", "_"))
    attributes: dict[str, Any] = {"envvar": variables} if variables else {}
    if isinstance(kind, AdminPortType):
        attributes["cls"] = EmptiableOption
    return variable_option(
        name, help, type=kind, is_flag=kind is bool, default=default, show_default=default is not None, **attributes
    )


class AdminPortType(click.ParamType[int | None]):
    """A port number, or an empty text, which disables the admin port."""

    name = "port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Convert a text to a port number, and an empty text to None."""
        if value in ("", None):
            return None
        return PORT.convert(value, param, ctx)


class NamespaceListType(click.ParamType[tuple[str, ...]]):
    """Comma-separated names of namespaces, without duplicates."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Split a text at its commas, and check each name."""
        if isinstance(value, tuple):  # the default value needs no conversion
            return value
        is_from_file = isinstance(value, list)
        names = tuple(value) if is_from_file else tuple(name.strip() for name in value.split(","))
        for name in names:
            error = namespace_error(name)
            if error is not None:
                self.fail(f"{name!r}: a namespace {error}", param, ctx)
            if names.count(name) > 1:
                self.fail(f"namespace {name!r} is listed more than once", param, ctx)
        return names


class LockOrderRulesType(click.ParamType[str | None]):
    """Rules of the lock order analysis, as a text that `parse_rules` accepts."""

    name = "rules"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | None:
        """Check the rules. A list, which the configuration file may contain, becomes a text."""
        if value is None:
            return value
        rules = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        try:
            parse_rules(rules)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return rules


@click.command()
@_option("--host", str, "Address to listen on.")
@_option("--port", PORT, "Port to listen on; 0 selects a free one.")
@_option(
    "--namespaces",
    NamespaceListType(),
    "Namespaces to serve, separated by commas: each has its own leader and its own keys in Redis.",
    variables=["GENIE_NAMESPACES", "GENIE_NAMESPACE"],
)
@_option("--redis-url", str, _REDIS_HELP)
@_option("--redis-host", str, "Redis that keeps the locks, in place of the URL.")
@_option("--redis-port", PortType(), "Port of Redis, in place of the URL. [default: 6379]")
@_option("--redis-min-replicas", WholeNumber(0), "Replicas of Redis that must acknowledge each commit.")
@_option("--redis-fsync", bool, "Wait until each commit is on the disks of Redis and of these replicas (Redis 7.2).")
@_option("--redis-allow-data-loss", bool, "Start although the configuration of Redis endangers acknowledged locks.")
@_option("--advertise", str, _ADVERTISE_HELP)
@_option("--lease", Number(0.1, 3600), "Seconds without a commit after which another server takes over.")
@_option("--admin-host", str, "Address of the admin port.")
@_option(
    "--admin-port", AdminPortType(), "Admin port: metrics, health and a status page by HTTP. Leave empty for none."
)
@_option(
    "--token",
    str,
    "Access token that clients must present. Visible in the process list: prefer GENIE_TOKEN or --token-file.",
)
@_option("--token-file", str, "File with the token, or with several tokens and their permissions. Reloaded on SIGHUP.")
@_option("--tls-cert", str, "Certificate (PEM) of this server: it requires TLS.")
@_option("--tls-key", str, "Private key, if it is not in the certificate file.")
@_option("--tls-ca", str, "Certificate authorities (PEM): clients must present a certificate that one of them signed.")
@_option(
    "--reload-interval",
    Number(0),
    "Seconds after which changed token and certificate files are reloaded without SIGHUP. With 0 they are not.",
)
@_option("--insecure", bool, "Allow unauthenticated access on non-loopback addresses.")
@_option("--slow-wait", Number(0), "Seconds after which a waiting request is logged. With 0 none is logged.")
@_option("--lock-order", click.Choice(["on", "off"]), "Find locks that transactions take in both orders.")
@_option(
    "--lock-order-rules", LockOrderRulesType(), "Classes of names: PATTERN[=ordered|=ignored], separated by commas."
)
@_option(
    "--history-dir", str, "Directory for the history of all locks (`genie history`). Without it, none is recorded."
)
@_option(
    "--history-max-mb", WholeNumber(1), "Maximum size of the history of each namespace, with temporary files, in MiB."
)
@_option("--history-max-days", Number(0), "Days for which the history is kept.")
@_option("--history-redact", str, "Prefixes of names that the history has as a digest only, separated by commas.")
@_option("--log-level", click.Choice(logs.LEVELS), "Log level.")
@_option("--log-format", click.Choice(logs.FORMATS), "auto: console on a terminal, else json.")
@_option("--max-line", WholeNumber(1024), "Bytes of one line from a client.")
@_option("--max-connections", WholeNumber(1), "Connections at the same time.")
@_option("--max-connections-per-address", WholeNumber(1), "Connections from one address at the same time.")
@_option("--max-requests-per-connection", WholeNumber(1), "Held and waiting requests of one connection.")
@_option("--max-requests-per-session", WholeNumber(1), "Held and waiting requests of one session.")
@_option("--max-queue", WholeNumber(1), "Wait-queue entries of all resources.")
@_option("--max-locks", WholeNumber(1), "Locks held in all.")
@_option("--max-state", WholeNumber(1 << 20), "Bytes of all requests, sessions and watches (`genie config limits`).")
@_option(
    "--max-state-per-principal",
    WholeNumber(0),
    "Bytes of the requests, sessions and watches of one principal. 0 stands for half of --max-state.",
)
@_option(
    "--max-pending", WholeNumber(1), "Bytes of queued commands beyond which the server stops reading (back pressure)."
)
@_option("--max-partial", WholeNumber(1 << 20), "Bytes of incomplete lines, of all connections together.")
@_option(
    "--max-unread",
    WholeNumber(1 << 16),
    "Output buffer limit per connection, in bytes. A slow consumer that exceeds it is disconnected.",
)
@_option("--max-unread-total", WholeNumber(1 << 20), "Bytes that the clients of all connections have not read.")
@_option("--store-timeout-ms", WholeNumber(1), "How long a commit may take before queued commands are rejected.")
@_option("--drain-timeout-ms", WholeNumber(0), "How long a graceful shutdown waits for the last commit.")
@_option("--config", str, "File (TOML) with these settings. Options and variables take precedence. Reloaded on SIGHUP.")
@click.pass_context
def serve(ctx: click.Context, /, **options: Any) -> None:
    """Serve locks until SIGTERM.

    Without a --redis option the locks are kept in memory and end with the process.
    """
    # SIGHUP would end the process. `Server.run` unblocks it: the files may have changed since they were read.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    configuration = Configuration(ctx, options)
    settings = configuration.load()

    def read_changed_settings() -> Settings:
        return _fit_open_files(configuration.read_again())

    try:
        check_advertised(settings.advertise)
        logs.configure(settings.log_level, settings.log_format)
        settings = _fit_open_files(settings)
        read_settings = None if configuration.path is None else read_changed_settings
        status = run_on_uvloop(_serve_then_block_signals(settings, read_settings))
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {settings.host}:{settings.port}: {_explain_bind_error(error, settings)}"
        ) from None
    except (UnknownFormat, UnsafeStore) as error:
        raise click.ClickException(_describe_error(error)) from None
    except ValueError as error:
        raise InvalidArgument(_describe_error(error)) from None
    except click.ClickException as error:
        raise click.ClickException(replace_variables_by_options(error.message)) from None
    raise SystemExit(status)


def _describe_error(error: Exception) -> str:
    """Return the message of an error. It names the options or the keys of the file in place of environment variables."""
    return replace_variables_by_options(str(error))


def _explain_bind_error(error: OSError, settings: Settings) -> str:
    """Return why the server could not listen on its port. If the port is in use, the text names the program that uses it."""
    if error.errno == errno.EADDRINUSE:
        listener = describe_listener(settings.host, settings.port)
        if listener:
            return f"{listener} listens there already; {source_of('port')} chooses the port"
        return error.strerror or str(error)
    if "," in settings.host:
        return f"{error}; a server listens on one address, only clients use a list in {source_of('host')}"
    return str(error)


def check_advertised(address: str | None) -> None:
    """Raise ValueError if the advertised address is not a host and a port, because clients connect to it as it is."""
    if address is None:
        return
    try:
        host, port = parse_host_port(address)
    except ValueError:
        host, port = "", None
    if not host or port is None or any(character in host for character in "[]/, "):
        raise ValueError(f"GENIE_ADVERTISE: must be one HOST:PORT or [IPv6]:PORT, not {address!r}")


async def _serve_then_block_signals(settings: Settings, read_settings: ReadSettings | None) -> int:
    """Run `_serve`. Further signals are blocked afterwards, so that they do not change the exit status of the process."""
    try:
        return await _serve(settings, read_settings)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGINT, signal.SIGTERM})


async def _serve(settings: Settings, read_settings: ReadSettings | None) -> int:
    """Run the server and its admin port until the server stops. Return the exit status.

    `read_settings` reads the settings again when the server reloads its configuration file. None if there is no file.
    """
    server = Server(settings, read_settings=read_settings, describe_error=_describe_error)
    if server.access.allows_anonymous:
        check_exposure(settings)
    admin = None
    if settings.admin.port is not None:
        # Imported here, because no other command needs it, and before clients can connect, because this takes half a second.
        from genie.admin import AdminServer  # noqa: PLC0415

        admin = AdminServer(server)
    # Bind the main port before the admin port: if the server runs already, both are in use, and the error names the first.
    listening = server.bind_address()
    if admin is None:
        _print_banner(settings, listening, None)
        return await server.run()
    try:
        await admin.start()
    except OSError as error:
        server.release_address()
        port = settings.admin.port
        raise click.ClickException(
            f"cannot listen on the admin port {settings.admin.host}:{port}: {error}; set GENIE_ADMIN_PORT, empty to disable it"
        ) from None
    try:
        _print_banner(settings, listening, admin.address)
        return await server.run()
    finally:
        await admin.stop()


def _print_banner(settings: Settings, listening: tuple[str, int], admin_listening: tuple[str, int] | None) -> None:
    """Print the banner if the output is a terminal, unless the log format is JSON. A file gets only log lines."""
    if sys.stdout.isatty() and settings.log_format != "json":
        print_lines(*banner_lines(settings, listening, admin_listening))


def check_exposure(settings: Settings) -> None:
    """Check the addresses of a server that requires no authentication.

    If an address is reachable from other machines, raises ValueError, or with the setting `insecure` logs a warning.
    """
    host_by_variable = {"GENIE_HOST": settings.host}
    if settings.admin.port is not None:
        host_by_variable["GENIE_ADMIN_HOST"] = settings.admin.host
    for variable, host in host_by_variable.items():
        try:
            exposed = is_exposed(host)
        except OSError:
            continue  # the host cannot be resolved: binding the port raises an error for it
        if exposed and not settings.insecure:
            raise ValueError(
                f"{variable}={host} would allow unauthenticated access from other machines: set GENIE_TOKEN or "
                "GENIE_TOKEN_FILE (or GENIE_TLS_CA), or GENIE_INSECURE=1 to allow it"
            )
        if exposed:
            log.warning(
                "unauthenticated access allowed",
                host=host,
                hint="every client that reaches this address has full access: set GENIE_TOKEN, or set "
                f"{variable} to a loopback address",
            )


def _fit_open_files(settings: Settings) -> Settings:
    """Raise this process's soft limit of open files, often 1,024 by default, so that the server can accept its connections.

    The soft limit is not raised above the hard limit. If that is too low, return settings with fewer connections: otherwise
    clients could use up the files that the server needs for Redis and for health checks.
    """
    max_connections = settings.limits.max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + OTHER_OPEN_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return settings
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    permitted = min(max_connections, max(soft - OTHER_OPEN_FILES, soft // 2))
    return replace(settings, limits=replace(settings.limits, max_connections=permitted))
