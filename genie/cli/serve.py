"""`genie serve`"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Any

import click

from genie.config import Settings
from genie.observability import logs
from genie.server.app import Server

_DEFAULTS = Settings()
Command = Callable[..., Any]


def _option(
    name: str, kind: click.ParamType[Any] | type[str], text: str, variable: str | None = None
) -> Callable[[Command], Command]:
    """An option of `serve` with its variable, `GENIE_` and its name."""
    field = name.removeprefix("--").replace("-", "_")
    return click.option(
        name,
        type=kind,
        default=getattr(_DEFAULTS, field, None),
        envvar=variable or f"GENIE_{field.upper()}",
        show_envvar=True,
        show_default=getattr(_DEFAULTS, field, None) is not None,
        help=text,
    )


@click.command()
@_option("--host", str, "Address to listen on.")
@_option("--port", click.IntRange(0, 65535), "Port to listen on; 0 takes a free one.")
@_option("--namespace", str, "Name under which the locks are kept in Redis.")
@_option("--redis-url", str, "Redis that keeps the locks: redis://[user:password@]host:port/db, rediss:// for TLS.")
@_option("--redis-host", str, "Redis that keeps the locks, in place of the URL.")
@_option("--redis-port", click.IntRange(1, 65535), "Its port. [default: 6379]")
@_option("--advertise", str, "HOST:PORT at which clients reach this server. [default: where it listens]")
@_option("--lease", click.FloatRange(0.1, 3600), "Seconds without a commit after which another server takes over.")
@_option("--log-level", click.Choice(logs.LEVELS), "What is logged.")
@_option("--log-format", click.Choice(logs.FORMATS), "auto: console on a terminal, else json.")
@_option("--max-line", click.IntRange(1024), "Bytes in one line from a client.")
@_option("--max-connections", click.IntRange(1), "Connections at the same time.")
@_option("--max-requests", click.IntRange(1), "Requests held and waiting, in all.")
@_option("--max-pending", click.IntRange(1), "Bytes of commands that may wait for Redis before no more are read.")
@_option("--max-unread", click.IntRange(1 << 16), "Bytes that a client may leave unread.")
@_option("--store-timeout-ms", click.IntRange(1), "How long Redis may take before waiting commands are refused.")
@_option("--drain-timeout-ms", click.IntRange(0), "How long a stopping server waits for its last commit.")
def serve(redis_host: str | None, redis_port: int | None, **options: Any) -> None:
    """Serve locks until SIGTERM.

    With none of the --redis options the locks are kept in memory and end with the process.
    """
    if options["redis_url"] is None and (redis_host or redis_port):
        host = redis_host or "127.0.0.1"
        options["redis_url"] = f"redis://{f'[{host}]' if ':' in host else host}:{redis_port or 6379}/0"
    settings = Settings(**options)
    logs.configure(settings.log_level, settings.log_format)
    _allow_connections(settings.max_connections)
    try:
        status = _run(settings)
    except OSError as error:
        several = "; a server listens on one address, is GENIE_HOST meant for clients?" if "," in settings.host else ""
        raise click.ClickException(f"can't serve on {settings.host}:{settings.port}: {error}{several}") from None
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    raise SystemExit(status)


def _run(settings: Settings) -> int:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.run(_serve(settings))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


async def _serve(settings: Settings) -> int:
    return await Server(settings).run()


def _allow_connections(wanted: int) -> None:
    """Each connection needs a file; the usual limit of a shell is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 64
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
