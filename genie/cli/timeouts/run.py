"""Where expired transfers go: to a command, or to stdout. Each is a line of JSON."""

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

from genie.cli.options import WholeNumber, one_line, plain_errors, seconds, server_options
from genie.cli.timeouts.options import ledger_options, progress_option
from genie.client.aio import connect
from genie.protocol import codec
from genie.timeouts import ExpiredTransfer, Ledger, TimeoutHandler, TimeoutRun
from genie.timeouts.handler import MAX_BATCH
from genie.timeouts.schema import open_ledger
from genie.timeouts.status import last_change

END_S = 10.0
"""How long a command may take to end after SIGTERM, before SIGKILL."""

STDOUT = 1


class ToCommand:
    """A command of the shell, which is started for each list and reads it from its stdin."""

    def __init__(self, command: str) -> None:
        if not command.strip():
            raise ValueError("--on-expired: a command is needed, not an empty text")
        self._command = command
        self.trouble = ""
        """Why the last list was not dealt with; empty, if it was."""

    async def deliver(self, expired: list[ExpiredTransfer]) -> list[str]:
        """Run the command; returns what is not dealt with: nothing if it exits with 0, else all.

        It has a process group of its own, so all of it can be ended with us.
        """
        child = await asyncio.create_subprocess_shell(self._command, stdin=PIPE, process_group=0)
        try:
            await child.communicate(_lines(expired))
        except BaseException:
            await _end(child)
            raise
        self.trouble = _said(child.returncode or 0)
        return [one.transfer_id for one in expired] if child.returncode else []


class ToStdout:
    """The lines themselves."""

    trouble = ""

    async def deliver(self, expired: list[ExpiredTransfer]) -> None:
        """Write them. BrokenPipeError, if nobody reads any more.

        A thread writes, and nobody waits for it in the end: a reader that has stopped reading would keep us for ever.
        """
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        sys.stdout.flush()

        def done(error: OSError | None) -> None:
            if written.done():
                return
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)

        def write() -> None:
            error = None
            try:
                _write(_lines(expired))
            except OSError as caught:
                error = caught
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done, error)

        threading.Thread(target=write, daemon=True).start()
        await written


def _lines(expired: Iterable[ExpiredTransfer]) -> bytes:
    return b"".join(
        codec.dumps(
            {
                "transferId": one.transfer_id,
                "expirationDate": f"{one.expiration_date.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z",
                "state": one.state,
            }
        )
        + b"\n"
        for one in expired
    )


def _write(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(STDOUT, left) :]


def _said(status: int) -> str:
    if not status:
        return ""
    return f"the command ended with status {status}" if status > 0 else f"the command was ended by signal {-status}"


async def _end(child: Process) -> None:
    _send(child, signal.SIGTERM)
    try:
        async with asyncio.timeout(END_S):
            await child.wait()
    except TimeoutError:
        _send(child, signal.SIGKILL)
        await child.wait()


def _send(child: Process, number: signal.Signals) -> None:
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)


# -- What `genie timeouts run` does once its arguments are read --------

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNAL = 128
"""Added to the number of the signal that ended us; SIGTERM is how a service is told to stop, so after that it is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to do where. Times in seconds; `lock`: the name under which runs are held, on the Genie server there.

    `progress_every`: state changes after which the progress is written.
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
    """One order. What it says is on stderr."""

    order: Order
    delivery: ToCommand | ToStdout
    greatest: int = 0
    was_behind: bool = False
    trouble: str = ""
    """What went wrong in the last run, so that it is said once."""
    ended_by: int | None = None
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)

    async def run(self) -> int:
        """Run until a signal, or once; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or `&` in a script: leave it ignored
                loop.add_signal_handler(number, self._signalled, number)
        try:
            return await self._handle()
        except asyncio.CancelledError:
            if self.ended_by is None:
                raise
            return 0 if self.ended_by == signal.SIGTERM else SIGNAL + self.ended_by

    async def _handle(self) -> int:
        order = self.order
        client = None if order.lock is None else connect(order.host, order.port, namespace=order.namespace)
        handler = TimeoutHandler(
            order.url,
            on_expired=self.delivery.deliver,
            client=client,
            name=order.lock or "ledger",
            batch=order.batch,
            every=order.every,
            longest_transaction=order.longest_transaction,
            ledger=order.ledger,
        )
        async with AsyncExitStack() as stack:
            if client is not None:
                await stack.enter_async_context(client)
            await stack.enter_async_context(handler)
            async with open_ledger(order.url, order.ledger) as database:
                self.greatest = await last_change(database, order.ledger)
            if order.once:
                return self._once(await handler.run_once())
            await handler.run(self._told)
        return 0

    def _once(self, run: TimeoutRun | None) -> int:
        if run is None:
            _say("another replica is at it")
            return 0
        self._told(run)
        return 1 if run.rejected else 0

    def _told(self, came: TimeoutRun | Exception | None) -> None:
        if isinstance(came, BrokenPipeError):
            raise came  # nobody reads stdout any more; click ends quietly then
        if isinstance(came, Exception):
            text = one_line(came)
            if text != self.trouble:
                _say(text)
            self.trouble = text
        elif came is not None:
            self.trouble = ""
            self._show(came)

    def _show(self, run: TimeoutRun) -> None:
        first, last = run.interval
        every = self.order.progress_every
        if (last // every > first // every) if run.lagging else (self.was_behind and last > first):
            of = f" of {self.greatest:,}" if last <= self.greatest else ""
            _say(f"has read up to state change {last:,}{of}")
        self.was_behind = run.lagging
        if run.expired:
            refused = f", {run.rejected:,} not dealt with: {self.delivery.trouble}" if run.rejected else ""
            _say(f"{run.expired:,} expired{refused}")

    def _signalled(self, number: int) -> None:
        """The first one counts. Behind it a command is being ended, and a commit comes to its end."""
        if self.ended_by is None and self.task is not None:
            self.ended_by = number
            self.task.cancel()


def _say(text: str) -> None:
    click.echo(f"genie: {text}", err=True)


def run_service(order: Order) -> int:
    """Carry out an order; returns the exit status."""
    delivery = ToStdout() if order.on_expired is None else ToCommand(order.on_expired)

    async def running() -> int:
        return await _Service(order, delivery).run()

    return asyncio.run(running())


# -- `genie timeouts run` --------


@click.command()
@plain_errors
@ledger_options
@click.option(
    "--every",
    type=seconds(0.001),
    default=15,
    show_default=True,
    metavar="SECONDS",
    help="From the end of a run to the next. While it is behind, the next begins at once.",
)
@click.option("--once", is_flag=True, help="One run, and the end.")
@click.option(
    "--on-expired",
    metavar="COMMAND",
    help="A command of the shell: it reads expired transfers from stdin, and exits with 0 if it has dealt with all.",
)
@click.option(
    "--batch",
    type=WholeNumber(1, MAX_BATCH),
    default=100_000,
    show_default=True,
    metavar="N",
    help="State changes, and expired transfers, of a run at most.",
)
@click.option(
    "--longest-transaction",
    type=seconds(0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long a transaction of the ledger may be open; what is committed later may be missed.",
)
@click.option(
    "--lock",
    metavar="NAME",
    help="Hold exclusive:timeout-handler/NAME on the Genie server of --host in each run. "
    "Without it replicas are kept apart by a lock of the database.",
)
@progress_option("While it is behind, write a line each time that so many more state changes are read.")
@server_options
def run(url: str, ledger: Ledger, **options: Any) -> None:
    """Find expired transfers until SIGTERM.

    Each is a line of JSON: {"transferId": "…", "expirationDate": "2026-01-31T12:00:00.000Z", "state": "RESERVED"}. The
    lines go to COMMAND, which is started for each list of them, or to stdout. If COMMAND exits with anything but 0,
    the next run hands the whole list over again; so does one after a fault. What was written to stdout counts as dealt
    with.

    Of several replicas one is at work; the others wait for their next run. Messages are on stderr: how far it has come
    while it is behind, how many have expired, and what went wrong. It goes on after that, unless nothing worked from
    the beginning.

    \b
    Exit status:
      0    it was stopped by SIGTERM; with --once: the run is done, or
           another replica is at it
      1    it could not begin; nobody reads stdout any more; with --once: the
           run failed, or COMMAND has not dealt with what had expired
      2    these arguments are wrong
      128 + N  signal N came

    A COMMAND that runs when a signal comes is sent SIGTERM, and SIGKILL 10 seconds later.
    """  # noqa: D301 - click wants the character itself before a text that must keep its lines
    raise SystemExit(run_service(Order(url=url, ledger=ledger, **options)))
