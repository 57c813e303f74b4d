"""`genie-ledger run`: find expired transfers, and deliver them to a command or to stdout as JSON lines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import orjson

from genie.cli.toolkit import (
    WholeNumber,
    command_client,
    one_line,
    one_line_errors,
    print_message,
    printable_json,
    seconds,
    server_options,
)
from genie_ledger import ExpiredTransfer, Ledger, TimeoutHandler, TimeoutRun
from genie_ledger.cli.options import ledger_options, progress_option
from genie_ledger.handler import MAX_BATCH, lock_resource
from genie_ledger.queries import MAX_UNLISTED_STATES
from genie_ledger.schema import open_ledger
from genie_ledger.status import last_change

KILL_AFTER_S = 10.0
"""Time between SIGTERM and SIGKILL when the program ends a running command."""

WAIT_REPORT_INTERVAL = timedelta(minutes=1)
"""Time between two messages that the run lock is held by another replica."""

STDOUT_FILENO = 1


class CommandDelivery:
    """Delivers each batch of expired transfers to the stdin of a shell command."""

    def __init__(self, command: str) -> None:
        if not command.strip():
            raise ValueError("--on-expired: the command must not be empty")
        self._command = command
        """A line for the shell."""
        self.last_error = ""
        """Why the last batch was rejected; empty if it was accepted."""

    async def deliver(self, expired: list[ExpiredTransfer]) -> list[str]:
        """Run the command with a batch on stdin, and return the ids of the rejected transfers.

        If the command exits with status 0, no transfer is rejected; otherwise all are. If the delivery is cancelled, the
        command is ended. The command runs in a new process group, so that signals also reach its child processes.
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
        """Write a batch to stdout. Raises BrokenPipeError if the program that reads the pipe has exited.

        A write blocks while the pipe is full. So that the program can exit during a blocked write, a daemon thread writes.
        """
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        sys.stdout.flush()

        def complete(error: OSError | None) -> None:
            """Complete the future `written`. Runs in the event loop, not in the writing thread."""
            if written.done():  # the delivery was cancelled
                return
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)

        def write() -> None:
            """Write the batch in the thread, and report the outcome to the event loop."""
            error = None
            try:
                _write_all(_json_lines(expired))
            except OSError as caught:
                error = caught
            with suppress(RuntimeError):  # the event loop may be closed: the program is exiting
                loop.call_soon_threadsafe(complete, error)

        threading.Thread(target=write, daemon=True).start()
        await written


def _json_lines(expired: Iterable[ExpiredTransfer]) -> bytes:
    """Encode transfers as JSON, one on each line."""
    return b"".join(
        printable_json(
            orjson.dumps(
                {
                    "transferId": transfer.transfer_id,
                    "expirationDate": f"{transfer.expiration_date.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z",
                    "state": transfer.state,
                }
            )
        )
        + b"\n"
        for transfer in expired
    )


def _write_all(data: bytes) -> None:
    """Write bytes to stdout. `os.write` may write only some of the bytes, so the remaining bytes are written again."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(STDOUT_FILENO, remaining) :]


def _describe_status(status: int) -> str:
    """Describe why a command failed; empty for status 0. A negative status is the number of a signal, negated."""
    if not status:
        return ""
    return f"the command ended with status {status}" if status > 0 else f"the command was ended by signal {-status}"


async def _terminate(child: Process) -> None:
    """End a command: send SIGTERM to its process group, then SIGKILL if the command still runs after `KILL_AFTER_S`.

    Returns when the command has ended.
    """
    _send_signal(child, signal.SIGTERM)
    try:
        async with asyncio.timeout(KILL_AFTER_S):
            await child.wait()
    except TimeoutError:
        _send_signal(child, signal.SIGKILL)
        await child.wait()


def _send_signal(child: Process, number: signal.Signals) -> None:
    """Send a signal to the process group of a command, unless the command has ended."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)


# -- The service --------

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNAL_BASE = 128
"""The exit status is this number plus the number of the signal that ended the program. After SIGTERM the exit status is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of `genie-ledger run`. Times are in seconds."""

    url: str
    """Database of the ledger."""
    ledger: Ledger
    every: float
    """Time from the end of a run to the next run."""
    batch: int
    """Maximum number of state changes, and of expired transfers, in a run."""
    longest_transaction: float
    """Maximum age of open transactions of the ledger."""
    on_expired: str | None
    """Shell command that processes expired transfers; None: write them to stdout."""
    once: bool
    lock: str | None
    """Name of the lock to hold on a Genie server during a run; None: use a lock of the database."""
    progress_every: int
    """Number of state changes between two progress messages."""
    host: str
    """Host of the Genie server. `port` and `namespace` belong to this server, too."""
    port: int
    namespace: str | None


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class _Service:
    """One execution of `genie-ledger run`. Messages are printed on stderr."""

    options: RunOptions
    delivery: CommandDelivery | StdoutDelivery
    initial_last_change_id: int = 0
    """Id of the last state change when the service started."""
    was_lagging: bool = False
    """True if more state changes were left after the last run."""
    last_error: str = ""
    """Error of the last run, so that a repeated error is printed only once; empty if the run succeeded."""
    printed_states: set[str] = field(default_factory=set)
    """Unlisted states that were printed, so that each is printed only once."""
    waiting_since: datetime | None = None
    """When another replica was first found to hold the run lock; None if the last run had the lock."""
    wait_printed_at: datetime | None = None
    """When the last message about this wait was printed."""
    now: Callable[[], datetime] = _utc_now
    """The clock for waits, in UTC."""
    stop_signal: int | None = None
    """The signal that stops the service; None while it should run."""
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)

    async def run(self) -> int:
        """Run the handler until a signal arrives, or only once with `--once`; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            # nohup, or `&` in a script, starts the program with some signals ignored. Keep ignoring them.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        try:
            return await self._run_handler()
        except asyncio.CancelledError:
            if self.stop_signal is None:
                raise
            return 0 if self.stop_signal == signal.SIGTERM else SIGNAL_BASE + self.stop_signal

    async def _run_handler(self) -> int:
        """Connect to the Genie server, if a lock was requested, and to the ledger; then run the handler.

        With `--once` the handler runs only once, else until this task is cancelled. Returns the exit status.
        """
        options = self.options
        client = None if options.lock is None else command_client(options.host, options.port, options.namespace)
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
                self.initial_last_change_id = await last_change(database, options.ledger)
            if options.once:
                return self._run_status(await handler.run_once())
            await handler.run(self._on_run)
        return 0

    def _run_status(self, run: TimeoutRun | None) -> int:
        """Print the results of the only run, with `--once`, and return the exit status.

        `run` is None if the handler did nothing because another replica is running.
        """
        if run is None:
            print_message("another replica is running")
            return 0
        self._on_run(run)
        return 1 if run.rejected else 0

    def _on_run(self, outcome: TimeoutRun | Exception | None) -> None:
        """Print the results of a run, or its error. A repetition of the previous error is not printed again.

        `outcome` is None if the handler did nothing because another replica is running.
        """
        if isinstance(outcome, BrokenPipeError):
            raise outcome  # the program that reads stdout has exited; click then exits without a message
        if outcome is None:
            self._print_waiting()
            return
        if isinstance(outcome, TimeoutRun) and self.waiting_since is not None:
            waited_s = (self.now() - self.waiting_since).total_seconds()
            print_message(f"{self._lock_name} acquired after {waited_s:,.0f} s")
        self.waiting_since = None
        if isinstance(outcome, Exception):
            text = one_line(outcome)
            if text != self.last_error:
                print_message(text)
            self.last_error = text
        else:
            self.last_error = ""
            self._print_results(outcome)

    @property
    def _lock_name(self) -> str:
        return "run lock" if self.options.lock is None else f"lock {lock_resource(self.options.lock)}"

    def _print_waiting(self) -> None:
        """Print that another replica holds the run lock, and since when this one waits: at first, and then at most once
        for each `WAIT_REPORT_INTERVAL`.
        """
        now = self.now()
        if self.waiting_since is None:
            self.waiting_since = now
        elif self.wait_printed_at is not None and now - self.wait_printed_at < WAIT_REPORT_INTERVAL:
            return
        self.wait_printed_at = now
        print_message(
            f"{self._lock_name} is held by another replica, waiting since {self.waiting_since:%Y-%m-%dT%H:%M:%SZ}"
        )

    def _print_results(self, run: TimeoutRun) -> None:
        """Print the progress of the handler, and the number of expired transfers in a run.

        While the handler lags, the progress is printed at most once for every `progress_every` state changes. It is
        printed once more when the handler has caught up.
        """
        first, last = run.interval
        every = self.options.progress_every
        has_caught_up = self.was_lagging and last > first
        has_passed_multiple = last // every > first // every  # of `progress_every`
        is_progress_due = has_passed_multiple if run.lagging else has_caught_up
        if is_progress_due:
            total = f" of {self.initial_last_change_id:,}" if last <= self.initial_last_change_id else ""
            print_message(f"read up to state change {last:,}{total}")
        self.was_lagging = run.lagging
        self._print_unlisted(run)
        if run.expired:
            rejected = f", {run.rejected:,} rejected: {self.delivery.last_error}" if run.rejected else ""
            print_message(f"{run.expired:,} expired{rejected}")

    def _print_unlisted(self, run: TimeoutRun) -> None:
        """Print the unlisted states that a run has read for the first time. At most `MAX_UNLISTED_STATES` are printed."""
        unprinted = {state: count for state, count in run.unlisted.items() if state not in self.printed_states}
        if not unprinted or len(self.printed_states) >= MAX_UNLISTED_STATES:
            return
        self.printed_states.update(unprinted)
        states = ", ".join(f"{state} (state changes: {count:,})" for state, count in unprinted.items())
        print_message(f"neither processing nor final states, in which transfers do not expire: {states}")

    def _on_signal(self, number: int) -> None:
        """Cancel the service at the first signal.

        Later signals are ignored, so that they do not interrupt the end of a running command or of a commit.
        """
        if self.stop_signal is None and self.task is not None:
            self.stop_signal = number
            self.task.cancel()


def run_service(options: RunOptions) -> int:
    """Run the timeout handler in a new event loop until a signal arrives, or only once; return the exit status."""
    delivery = StdoutDelivery() if options.on_expired is None else CommandDelivery(options.on_expired)

    async def run_in_loop() -> int:
        # `_Service` must be constructed in the event loop: its default for `task` is the current task.
        return await _Service(options, delivery).run()

    return asyncio.run(run_in_loop())


# -- `genie-ledger run` --------


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

    Of several replicas one is active; the others wait for the run lock. Messages on stderr report the progress while
    it lags, the number of expired transfers, since when a replica waits for the run lock, and errors. Errors are
    retried, except when the start fails.

    \b
    Exit status:
      0    stopped by SIGTERM; with --once: the run is done, or another
           replica is running
      1    the start failed, or the reader of stdout has exited; with --once:
           the run or COMMAND failed
      2    invalid arguments
      128 + N  stopped by signal N

    A running COMMAND is sent SIGTERM when a signal stops genie-ledger, and SIGKILL 10 seconds later.
    """  # noqa: D301 - click needs the backspace character before a paragraph that must not be rewrapped
    raise SystemExit(run_service(RunOptions(url=url, ledger=ledger, **options)))
