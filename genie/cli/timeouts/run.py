"""`genie timeouts run`: find expired transfers, and deliver them to a command or to stdout as JSON lines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import click

from genie.cli.options import WholeNumber, one_line, one_line_errors, seconds, server_options
from genie.cli.timeouts.options import ledger_options, progress_option
from genie.client.aio import connect
from genie.protocol import codec
from genie.timeouts import ExpiredTransfer, Ledger, TimeoutHandler, TimeoutRun
from genie.timeouts.handler import MAX_BATCH
from genie.timeouts.schema import open_ledger
from genie.timeouts.status import last_change

KILL_AFTER_S = 10.0
"""Time between SIGTERM and SIGKILL when a command is ended."""

STDOUT_FILENO = 1


class CommandDelivery:
    """Delivers each batch of expired transfers to the stdin of a shell command."""

    def __init__(self, command: str) -> None:
        if not command.strip():
            raise ValueError("--on-expired: the command must not be empty")
        self._command = command
        self.last_error = ""
        """Why the last batch was rejected; empty if it was accepted."""

    async def deliver(self, expired: list[ExpiredTransfer]) -> list[str]:
        """Run the command; return the rejected transfer ids: none if it exits with 0, else all.

        The command has its own process group, so that all its processes can be ended.
        """
        child = await asyncio.create_subprocess_shell(self._command, stdin=PIPE, process_group=0)
        try:
            await child.communicate(_json_lines(expired))
        except BaseException:
            await _terminate(child)
            raise
        self.last_error = _describe_status(child.returncode or 0)
        return [transfer.transfer_id for transfer in expired] if child.returncode else []


class StdoutDelivery:
    """Writes each batch of expired transfers to stdout."""

    last_error = ""
    """Always empty: a written batch counts as accepted."""

    async def deliver(self, expired: list[ExpiredTransfer]) -> None:
        """Write the batch. BrokenPipeError if the reader of the pipe has exited.

        A daemon thread does the blocking write: if the reader stops reading, genie can still exit.
        """
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        sys.stdout.flush()

        def complete(error: OSError | None) -> None:
            """Complete the future `written`, in the event loop."""
            if written.done():  # the delivery was cancelled
                return
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)

        def write() -> None:
            error = None
            try:
                _write_all(_json_lines(expired))
            except OSError as caught:
                error = caught
            with suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(complete, error)

        threading.Thread(target=write, daemon=True).start()
        await written


def _json_lines(expired: Iterable[ExpiredTransfer]) -> bytes:
    """Encode transfers as JSON, one on each line."""
    return b"".join(
        codec.dumps(
            {
                "transferId": transfer.transfer_id,
                "expirationDate": f"{transfer.expiration_date.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z",
                "state": transfer.state,
            }
        )
        + b"\n"
        for transfer in expired
    )


def _write_all(data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(STDOUT_FILENO, remaining) :]


def _describe_status(status: int) -> str:
    if not status:
        return ""
    return f"the command ended with status {status}" if status > 0 else f"the command was ended by signal {-status}"


async def _terminate(child: Process) -> None:
    """Send SIGTERM to the process group of a command, and SIGKILL if the command still runs after `KILL_AFTER_S`."""
    _send_signal(child, signal.SIGTERM)
    try:
        async with asyncio.timeout(KILL_AFTER_S):
            await child.wait()
    except TimeoutError:
        _send_signal(child, signal.SIGKILL)
        await child.wait()


def _send_signal(child: Process, number: signal.Signals) -> None:
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)


# -- The service --------

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNAL_BASE = 128
"""Added to the number of the signal that ended this process, except for SIGTERM, the regular stop: its status is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of the command. Times in seconds.

    `lock`: name of the lock on the Genie server at `host` that is held during a run, or None. `progress_every`: number
    of state changes between two progress messages.
    """

    url: str
    ledger: Ledger
    every: float
    batch: int
    longest_transaction: float
    on_expired: str | None
    once: bool
    lock: str | None
    progress_every: int
    host: str
    port: int
    namespace: str | None


@dataclass(slots=True)
class _Service:
    """One execution of `genie timeouts run`. It prints messages on stderr."""

    options: RunOptions
    delivery: CommandDelivery | StdoutDelivery
    last_change: int = 0
    """Number of the last state change at the start."""
    was_lagging: bool = False
    last_error: str = ""
    """Error of the last run, so that a repeated error is printed once."""
    stop_signal: int | None = None
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)

    async def run(self) -> int:
        """Run until a signal, or once; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or `&` in a script: leave it ignored
                loop.add_signal_handler(number, self._on_signal, number)
        try:
            return await self._run_handler()
        except asyncio.CancelledError:
            if self.stop_signal is None:
                raise
            return 0 if self.stop_signal == signal.SIGTERM else SIGNAL_BASE + self.stop_signal

    async def _run_handler(self) -> int:
        """Connect to Genie and to the ledger, then run the handler, once or forever; return the exit status."""
        options = self.options
        client = None if options.lock is None else connect(options.host, options.port, namespace=options.namespace)
        handler = TimeoutHandler(
            options.url,
            on_expired=self.delivery.deliver,
            client=client,
            name=options.lock or "ledger",
            batch=options.batch,
            every=options.every,
            longest_transaction=options.longest_transaction,
            ledger=options.ledger,
        )
        async with AsyncExitStack() as stack:
            if client is not None:
                await stack.enter_async_context(client)
            await stack.enter_async_context(handler)
            async with open_ledger(options.url, options.ledger) as database:
                self.last_change = await last_change(database, options.ledger)
            if options.once:
                return self._run_status(await handler.run_once())
            await handler.run(self._on_run)
        return 0

    def _run_status(self, run: TimeoutRun | None) -> int:
        """Return the exit status after the only run; None: another replica is running."""
        if run is None:
            _print_message("another replica is running")
            return 0
        self._on_run(run)
        return 1 if run.rejected else 0

    def _on_run(self, outcome: TimeoutRun | Exception | None) -> None:
        """Print the outcome of a run: its results, or a new error; None: another replica is running."""
        if isinstance(outcome, BrokenPipeError):
            raise outcome  # the reader of stdout has exited; click exits without a message
        if isinstance(outcome, Exception):
            text = one_line(outcome)
            if text != self.last_error:
                _print_message(text)
            self.last_error = text
        elif outcome is not None:
            self.last_error = ""
            self._print_results(outcome)

    def _print_results(self, run: TimeoutRun) -> None:
        """Print the progress while the handler lags and when it has caught up, and the number of expired transfers."""
        first, last = run.interval
        every = self.options.progress_every
        caught_up = self.was_lagging and last > first
        if (last // every > first // every) if run.lagging else caught_up:
            total = f" of {self.last_change:,}" if last <= self.last_change else ""
            _print_message(f"read up to state change {last:,}{total}")
        self.was_lagging = run.lagging
        if run.expired:
            rejected = f", {run.rejected:,} rejected: {self.delivery.last_error}" if run.rejected else ""
            _print_message(f"{run.expired:,} expired{rejected}")

    def _on_signal(self, number: int) -> None:
        """Stop at the first signal; later ones are ignored while a command is ended or a commit completes."""
        if self.stop_signal is None and self.task is not None:
            self.stop_signal = number
            self.task.cancel()


def _print_message(text: str) -> None:
    click.echo(f"genie: {text}", err=True)


def run_service(options: RunOptions) -> int:
    """Run the timeout handler until a signal, or once; return the exit status."""
    delivery = StdoutDelivery() if options.on_expired is None else CommandDelivery(options.on_expired)

    async def run_in_loop() -> int:  # the service needs the running task
        return await _Service(options, delivery).run()

    return asyncio.run(run_in_loop())


# -- `genie timeouts run` --------


@click.command()
@one_line_errors
@ledger_options
@click.option(
    "--every",
    type=seconds(0.001),
    default=15,
    show_default=True,
    metavar="SECONDS",
    help="Time from the end of a run to the next. While the handler lags, the next run starts immediately.",
)
@click.option("--once", is_flag=True, help="Exit after one run.")
@click.option(
    "--on-expired",
    metavar="COMMAND",
    help="Shell command that reads expired transfers from stdin, and exits with 0 if it has processed all.",
)
@click.option(
    "--batch",
    type=WholeNumber(1, MAX_BATCH),
    default=100_000,
    show_default=True,
    metavar="N",
    help="Maximum number of state changes, and of expired transfers, in a run.",
)
@click.option(
    "--longest-transaction",
    type=seconds(0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Maximum age of open transactions of the ledger; changes that are committed later may be missed.",
)
@click.option(
    "--lock",
    metavar="NAME",
    help="Hold exclusive:timeout-handler/NAME on the Genie server of --host in each run. "
    "Without it, replicas use a lock of the database.",
)
@progress_option("While the handler lags, print a line each time it has read this many state changes.")
@server_options
def run(url: str, ledger: Ledger, **options: Any) -> None:
    """Find expired transfers until SIGTERM.

    Each is a line of JSON: {"transferId": "…", "expirationDate": "2026-01-31T12:00:00.000Z", "state": "RESERVED"}. The
    lines go to COMMAND, which is started for each batch, or to stdout. If COMMAND fails, or after a fault, the next run
    delivers the whole batch again. What was written to stdout counts as processed.

    Of several replicas one is active; the others wait for their next run. Messages on stderr report the progress while
    it lags, the number of expired transfers, and errors. Errors are retried, except when the start fails.

    \b
    Exit status:
      0    stopped by SIGTERM; with --once: the run is done, or another
           replica is running
      1    the start failed, or the reader of stdout has exited; with --once:
           the run or COMMAND failed
      2    invalid arguments
      128 + N  stopped by signal N

    A running COMMAND is sent SIGTERM when a signal stops genie, and SIGKILL 10 seconds later.
    """  # noqa: D301 - click needs the backspace character before a paragraph that must not be rewrapped
    raise SystemExit(run_service(RunOptions(url=url, ledger=ledger, **options)))
