"""`genie store`: check, export and import a namespace in Redis, without a server."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import click
import structlog
from msgspec import to_builtins

from genie.cli.lazy_group import HelpfulGroup
from genie.cli.options import (
    InvalidArgument,
    PortType,
    json_option,
    one_line_errors,
    parse_namespace,
    run_async,
    variable_option,
)
from genie.cli.output import checked_stdout, print_json, print_lines
from genie.config import NAMESPACE
from genie.net import format_host_port
from genie.protocol import codec
from genie.storage.redis.check import Report, check_namespace
from genie.storage.redis.connection import RedisFailure
from genie.storage.redis.primary import is_denied
from genie.storage.redis.transfer import TransferError, decode_export, export_namespace, import_namespace

UNAVAILABLE = 2
"""Exit status if Redis is unavailable. It is that of an invalid option, because the operation has not begun."""

T = TypeVar("T")


@click.group(cls=HelpfulGroup)
def store() -> None:
    """Check, back up and restore a namespace in Redis."""


class _Unavailable(click.ClickException):
    """Redis is unavailable, or rejects the user."""

    exit_code = UNAVAILABLE


def redis_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add the options that choose a Redis and a namespace, and pass the command `url` and `namespace`.

    A failure of Redis is printed in one line, with the exit status 2.
    """

    @variable_option("--redis-url", "Redis of the namespace, as for `genie serve`.")
    @variable_option("--redis-host", "Redis of the namespace, in place of the URL. [default: 127.0.0.1]")
    @variable_option("--redis-port", "Port of Redis, in place of the URL. [default: 6379]", type=PortType())
    @variable_option(
        "--namespace", "Namespace of the locks.", type=parse_namespace, default=NAMESPACE, show_default=True
    )
    @one_line_errors
    @functools.wraps(command)
    def with_redis(
        redis_url: str | None, redis_host: str | None, redis_port: int | None, namespace: str, **options: Any
    ) -> T:
        if redis_url is None:
            redis_url = f"redis://{format_host_port(redis_host or '127.0.0.1', redis_port or 6379)}/0"
        # Log to stderr, because an export may be written to stdout.
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr), cache_logger_on_first_use=False)
        try:
            return command(url=redis_url, namespace=namespace, **options)
        except TransferError as error:
            raise click.ClickException(str(error)) from None
        except RedisFailure as error:
            if is_denied(error):
                raise _Unavailable(f"Redis denied access: {error}") from None
            raise _Unavailable(f"Redis is unavailable: {error} (--redis-url chooses another)") from None

    return with_redis


# -- genie store check --------------------------------------------------------------------------------


@store.command()
@json_option
@redis_options
def check(as_json: bool, url: str, namespace: str) -> None:
    """Check a namespace without changing it. Servers can keep running.

    Exit status: 0 if the namespace is sound, 1 if it is not, 2 if Redis is unavailable or has no such namespace.
    """
    report = run_async(check_namespace(url, namespace))
    if report is None:
        raise InvalidArgument(f"Redis has no namespace {namespace!r}")
    if as_json:
        print_json(codec.dumps(to_builtins(report)))
    else:
        print_lines(*_report_lines(report))
    raise SystemExit(0 if report.sound else 1)


def _report_lines(report: Report) -> Iterator[str]:
    """Yield the lines of the text output: what is stored, the findings, and the result."""
    sizes = report.sizes
    yield f"namespace   {report.namespace}, format version {report.version or 'unknown'}"
    if report.epoch is not None:
        leader = report.leader
        leader_text = "has resigned" if leader is None else f"{leader.address}, lease {leader.lease_ms / 1000:g} s"
        yield f"leader      {leader_text}, epoch {report.epoch}"
        log_memory = _memory_text(sizes.log_memory)
        yield f"log         entries: {sizes.log_entries:,}, {sizes.log_bytes:,} bytes{log_memory}, up to {report.position}"
        state_memory = _memory_text(sizes.state_memory)
        yield f"checkpoint  {_count(sizes.state_records, 'record')}{state_memory}, at {report.checkpoint}"
        yield f"requests    held: {sizes.held:,}, waiting: {sizes.waiting:,}, retained replies: {sizes.retained_replies:,}"
    for state in report.abandoned_states:
        yield f"note        abandoned state {state}, which the next leader deletes"
    for finding in report.findings:
        yield f"FINDING     {finding.part}: {finding.message}"
    if report.omitted_findings:
        yield f"FINDING     and {report.omitted_findings:,} more"
    yield "sound" if report.sound else "NOT SOUND"


def _count(number: int, noun: str) -> str:
    """Return a number and a noun, which gets an `s` if the number is not 1: `2 records`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _memory_text(size_bytes: int | None) -> str:
    """Return the memory of a key in parentheses, or an empty text if Redis did not report it."""
    return "" if size_bytes is None else f" ({size_bytes:,} in memory)"


# -- genie store export -------------------------------------------------------------------------------


@store.command(name="export")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), default="-")
@redis_options
def export(file: Path, url: str, namespace: str) -> None:
    """Write a namespace as JSON lines to FILE, or to standard output.

    Servers can keep running: the file has the state of the namespace at one moment. An existing FILE is replaced only by
    a complete one.
    """
    header, lines = run_async(export_namespace(url, namespace))
    with _open_output(file) as output:
        output.writelines(lines)
    if str(file) != "-":
        print_lines(f"exported {header.namespace} at {header.position} to {file}", err=True)


@contextmanager
def _open_output(file: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `file` at the end of the block. For `-`, open the standard output.

    After an error in the block, `file` is unchanged.
    """
    if str(file) == "-":
        if sys.stdout is None:  # genie was started with a closed stdout
            raise click.ClickException("cannot write the result: the standard output is closed")
        with checked_stdout():
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        return
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as output:
            try:
                yield output
                output.flush()
                os.fsync(output.fileno())
                Path(output.name).replace(file)
            except BaseException:
                with suppress(OSError):
                    Path(output.name).unlink()
                raise
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror or error}") from None


# -- genie store import -------------------------------------------------------------------------------


@store.command(name="import")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), default="-")
@click.option("--replace", is_flag=True, help="Delete the locks that the namespace has.")
@redis_options
def import_(file: Path, replace: bool, url: str, namespace: str) -> None:
    """Write an export, FILE or the standard input, to a namespace that no server leads.

    The namespace must be empty, unless --replace is given. Stop its servers first. Afterwards the first server that is
    started leads the namespace, with the locks of the file.
    """
    if str(file) == "-" and sys.stdin is None:  # genie was started with a closed stdin
        raise InvalidArgument("cannot read the export: the standard input is closed")
    try:
        with click.open_file(str(file), "rb") as lines:
            header, state = decode_export(lines)
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror or error}") from None
    epoch, replaced_count = run_async(import_namespace(url, namespace, header, state, replace=replace))
    message = f"imported {_count(len(state.changes), 'record')} into {namespace}, epoch {epoch}"
    if replaced_count:
        message += f", replaced {_count(replaced_count, 'record')}"
    print_lines(message, err=True)
