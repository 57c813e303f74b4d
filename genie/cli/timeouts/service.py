"""What `genie timeouts run` does once its arguments are read."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import click

from genie.cli.asking import one_line
from genie.cli.timeouts.delivery import ToCommand, ToStdout
from genie.client.aio import connect
from genie.timeouts import Ledger, TimeoutHandler, TimeoutRun
from genie.timeouts.opened import opened
from genie.timeouts.status import last_change

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
            async with opened(order.url, order.ledger) as database:
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
        return 1 if run.refused else 0

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
        if (last // every > first // every) if run.behind else (self.was_behind and last > first):
            of = f" of {self.greatest:,}" if last <= self.greatest else ""
            _say(f"has read up to state change {last:,}{of}")
        self.was_behind = run.behind
        if run.expired:
            refused = f", {run.refused:,} not dealt with: {self.delivery.trouble}" if run.refused else ""
            _say(f"{run.expired:,} expired{refused}")

    def _signalled(self, number: int) -> None:
        """The first one counts. Behind it a command is being ended, and a commit comes to its end."""
        if self.ended_by is None and self.task is not None:
            self.ended_by = number
            self.task.cancel()


def _say(text: str) -> None:
    click.echo(f"genie: {text}", err=True)


def run(order: Order) -> int:
    """Carry out an order; returns the exit status."""
    delivery = ToStdout() if order.on_expired is None else ToCommand(order.on_expired)

    async def running() -> int:
        return await _Service(order, delivery).run()

    return asyncio.run(running())
