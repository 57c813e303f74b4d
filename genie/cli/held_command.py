"""A command that runs while locks are held: what `genie run` does once its arguments are read.

One event loop hears all that can happen (the grant, the loss of the lock, signals, the end of the command), one thing
after another, so every race has an order:

- A signal before the command is started ends us, and what was asked for is given back. Once the command is started it
  is passed on. Starting is one step of the loop: a signal in that moment is heard behind it, and so is passed on.
- What is heard between the grant and the start counts: then nothing is started.
- The command is reaped in the same loop that sends it signals, so no signal can hit a process that got its number.
- If the lock is lost when the command has just ended, nobody can tell which was first, and the status says `lost`: a
  false alarm costs a repetition, and the opposite costs what the lock was there for.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from dataclasses import dataclass

import click

from genie.cli.asking import INTERRUPTED, MAX_SECONDS, one_line
from genie.client.aio import Client, connect
from genie.client.lock import Lock
from genie.errors import GenieError, LockError, LockLost, QueueTimeout

LOST = 124
"""The lock was lost before the command had ended; the number that timeout(1) has for a command that it ends."""
WRONG = 2
"""The arguments can't be right; the number that click has for that."""
FAILED = 125
"""Genie itself failed: no server, or one that refuses the request."""
NOT_EXECUTABLE = 126
NOT_FOUND = 127
SIGNAL = 128
"""Added to the number of the signal that ended the command, or us while we waited."""

WATCHED_HOLD = 30.0
"""Seconds that an extended hold lasts beyond the last extension: what an unreachable server may be away for."""

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
FROM_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)

LOOP_TURNS = 3
"""After so many, a signal or a timeout that is due has been heard: the loop reads it, queues it, runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to run under which locks. Times in seconds; `wait` None: as long as it takes, `hold` None: extended."""

    command: tuple[str, ...]
    resources: tuple[str, ...]
    host: str
    port: int
    namespace: str | None
    wait: float | None
    hold: float | None
    transaction: str | None
    priority: float
    conflict_status: int
    kill_after: float


class HeldCommand:
    """One order, carried out once."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._task: asyncio.Task[object] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._ended = asyncio.Event()
        self._status: int | None = None
        """Decided already, whatever comes from the command."""
        self._stopped_by: int | None = None

    async def run(self) -> int:
        """Wait for the locks, run the command, give the locks back; returns the exit status."""
        self._task = asyncio.current_task()
        self._listen()
        try:
            async with connect(self._order.host, self._order.port, namespace=self._order.namespace) as client:
                await self._with_locks(client)
        except asyncio.CancelledError:
            if self._outcome() is None:
                raise
        except LockError as error:
            self._fail(error, self._order.conflict_status)
        except GenieError as error:
            self._fail(error, FAILED)
        except ValueError as error:  # the client's word on what it was asked for
            self._fail(error, WRONG)
        outcome = self._outcome()
        return FAILED if outcome is None else outcome

    # -- the locks ----------------------------------------------------------------------------------------

    async def _with_locks(self, client: Client) -> None:
        order = self._order
        while True:
            try:
                async with client.lock(
                    *order.resources,
                    transaction=order.transaction,
                    queue_timeout=MAX_SECONDS if order.wait is None else order.wait,
                    transaction_timeout=order.hold or WATCHED_HOLD,
                    watchdog=order.hold is None,
                    priority=order.priority,
                ) as lock:
                    for _ in range(LOOP_TURNS):
                        await asyncio.sleep(0)
                    if self._start(lock):
                        await self._ended.wait()
            except LockLost as lost:
                await self._lost(lost)
            except QueueTimeout:
                if order.wait is None:
                    continue  # the wire's longest wait is over, ours is not
                raise
            return

    async def _lost(self, lost: LockLost) -> None:
        self._status = LOST
        if self._child is None:
            _say(f"{one_line(lost)}; {self._order.command[0]} was not started")
        elif self._child.poll() is not None:
            _say(f"{one_line(lost)}; {self._order.command[0]} had just ended")
        else:
            _say(f"{one_line(lost)}; ending {self._order.command[0]}")
            await self._end()

    def _fail(self, error: Exception, status: int) -> None:
        if self._child is None:
            self._status = status
            _say(one_line(error))
        else:  # it ran under its locks to its end
            _say(f"the locks were not given back, they end by themselves: {one_line(error)}")

    # -- the command --------------------------------------------------------------------------------------

    def _start(self, lock: Lock) -> bool:
        """Start the command; what was open for us (`<(…)` of a shell, a make's job server) is open for it."""
        program = self._order.command[0]
        environment = os.environ | {"GENIE_LOCK_ID": str(lock.id), "GENIE_LOCK_FENCE": str(lock.fence)}
        try:
            self._child = subprocess.Popen(self._order.command, env=environment, close_fds=False)  # noqa: S603 - its purpose
        except OSError as error:
            self._status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            _say(f"{program}: {error.strerror or error}")
            return False
        return True

    async def _end(self) -> None:
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)  # one that is stopped would not hear it
        try:
            async with asyncio.timeout(self._order.kill_after):
                await self._ended.wait()
        except TimeoutError:
            self._send(signal.SIGKILL)
            await self._ended.wait()

    def _send(self, number: int) -> None:
        if self._child is not None:
            try:
                self._child.send_signal(number)
            except PermissionError:
                _say(f"{self._order.command[0]} runs as somebody else: no permission to send it signal {number}")

    def _outcome(self) -> int | None:
        if self._status is not None:
            return self._status
        if self._child is not None and self._child.returncode is not None:
            code = self._child.returncode
            return SIGNAL - code if code < 0 else code
        return None if self._stopped_by is None else SIGNAL + self._stopped_by

    # -- signals ------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or `&` in a script: leave it ignored
                loop.add_signal_handler(number, self._signalled, number)

    def _reap(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._ended.set()

    def _signalled(self, number: int) -> None:
        if self._child is not None and self._child.poll() is None:
            if not (number in FROM_KEYBOARD and _in_foreground()):
                self._send(number)
        elif self._task is not None:
            self._stopped_by = number
            self._task.cancel()


def _in_foreground() -> bool:
    """Whether a terminal sends the signals of its keys to us, and so to the command by itself.

    A second Ctrl-C means "now at once" to many programs, so the one that was pressed must not become two.
    """
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _say(text: str) -> None:
    click.echo(f"genie: {text}", err=True)


def run(order: Order) -> int:
    """Carry out an order; returns the exit status."""
    try:
        return asyncio.run(HeldCommand(order).run())
    except KeyboardInterrupt:  # before the loop listened
        return INTERRUPTED
