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
from typing import Any

import click

from genie.cli.options import INTERRUPTED, MAX_SECONDS, WholeNumber, one_line, plain_errors, seconds, server_options
from genie.client.aio import Client, Lock, connect
from genie.errors import GenieError, LockError, LockLost, QueueTimeout
from genie.protocol.resources import parse_resource_arg

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


def run_locked(order: Order) -> int:
    """Carry out an order; returns the exit status."""
    try:
        return asyncio.run(HeldCommand(order).run())
    except KeyboardInterrupt:  # before the loop listened
        return INTERRUPTED


# -- `genie run` --------

COMMAND = "genie.cli.run.command"


class _TwoParts(click.Command):
    """Takes what stands behind the first `--` away before click reads the rest: click knows only one open end."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, found, command = _split(args)
        ctx.meta[COMMAND] = tuple(command)
        rest = super().parse_args(ctx, own)
        if not found:
            raise click.UsageError("COMMAND is missing: write -- between the resources and the command.", ctx)
        if not any(command[:1]):
            raise click.UsageError("COMMAND is missing behind --.", ctx)
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return ["[OPTIONS]", "RESOURCE...", "--", "COMMAND [ARGUMENT]..."]


def _split(args: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in args:
        return args, False, []
    border = args.index("--")
    return args[:border], True, args[border + 1 :]


def _resource(text: str) -> str:
    try:
        return parse_resource_arg(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


@click.command(cls=_TwoParts)
@click.argument("resources", nargs=-1, required=True, type=_resource, metavar="RESOURCE...")
@click.option("-n", "--no-wait", is_flag=True, help="Don't wait: give up if the locks can't be had at once.")
@click.option(
    "-w",
    "--wait",
    type=seconds(0),
    metavar="SECONDS",
    help="Give up after so long in the queue. Without -n and -w: never.",
)
@click.option(
    "--timeout",
    "hold",
    type=seconds(0.001),
    metavar="SECONDS",
    help="Hold the locks for so long at most; COMMAND is ended when they are lost. "
    "Without it they are held for as long as COMMAND runs.",
)
@click.option("--transaction", metavar="NAME", help="The one transaction that this is a step of.")
@click.option("--priority", type=float, metavar="N", default=0, help="Higher goes first in the queue. [default: 0]")
@click.option(
    "-E",
    "--conflict-exit-code",
    "conflict_status",
    type=WholeNumber(0, 255),
    metavar="N",
    default=1,
    show_default=True,
    help="Exit status when the locks could not be had.",
)
@click.option(
    "--kill-after",
    type=seconds(0),
    metavar="SECONDS",
    default=10,
    show_default=True,
    help="How long COMMAND may take to end when the locks are lost, between SIGTERM and SIGKILL.",
)
@server_options
@click.pass_context
@plain_errors
def run(ctx: click.Context, /, no_wait: bool, wait: float | None, **options: Any) -> None:
    """Hold locks while COMMAND runs, as flock(1) does.

    RESOURCE is shared:NAME, exclusive:NAME, or a NAME without a colon, which is exclusive. All are locked at once.

    COMMAND finds GENIE_LOCK_ID and GENIE_LOCK_FENCE in its environment, and is sent the SIGTERM, SIGINT, SIGHUP,
    SIGQUIT, SIGUSR1 and SIGUSR2 that genie gets (a Ctrl-C reaches it from the terminal itself). A signal while genie
    still waits for the locks ends genie.

    \b
    Exit status: that of COMMAND (128 + N if signal N ended it), or
      1    the locks could not be had: taken, or a deadlock (-E sets another)
      2    these arguments are wrong
      124  the locks were lost before COMMAND had ended; it was sent SIGTERM,
           and SIGKILL if it went on: undo or repeat what it did
      125  genie failed: no server, or it refused the request
      126  COMMAND could not be executed
      127  COMMAND was not found
      128 + N  signal N came while genie waited

    Without --timeout, locks whose genie was killed end 30 seconds later.
    """  # noqa: D301 - click wants the character itself before a text that must keep its lines
    if no_wait and wait is not None:
        raise click.UsageError("-n does not wait and -w waits: give one of them.", ctx)
    raise SystemExit(run_locked(Order(command=ctx.meta[COMMAND], wait=0 if no_wait else wait, **options)))
