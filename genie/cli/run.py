"""`genie run`: run a command while locks are held.

One event loop handles every event (the grant, the loss of the lock, signals, the exit of the
command), so races are resolved as follows:

- A signal before the command is started ends genie, which releases its request. After the start,
  genie forwards signals to the command. A signal that arrives during the start is handled after the
  start, and is forwarded.
- A signal, or the loss of the lock, between the grant and the start prevents the start.
- One event loop both sends signals to the command and reaps the command. So no signal can reach
  another process that reuses the pid of the command.
- If the lock is lost when the command has just ended, the order of the two events is unknown. The
  exit status is then `LOST`. The user may repeat completed work, but never relies on work that was
  done without the lock.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePath
from typing import Any

import click

from genie.cli.options import (
    INTERRUPTED,
    MAX_SECONDS,
    RESPONSE_TIMEOUT_S,
    WholeNumber,
    one_line,
    one_line_errors,
    seconds,
    server_options,
)
from genie.cli.output import print_message
from genie.client.aio import Client, Lock
from genie.client.config import ClientOptions, parse_addresses
from genie.client.note import default_note
from genie.errors import GenieError, LockError, LockLost, QueueTimeout
from genie.lock_modes import is_subtree
from genie.protocol.resources import parse_resource, parse_resource_arg

LOST = 124
"""Exit status if a lock was lost before the command ended, as of timeout(1)."""
USAGE_ERROR = 2
"""Exit status for invalid arguments, as of click."""
FAILED = 125
"""Exit status if genie failed: no server, or the request was rejected."""
NOT_EXECUTABLE = 126
NOT_FOUND = 127
SIGNAL_BASE = 128
"""Added to the number of the signal that ended the command, or that ended genie before it started the command."""

WATCHDOG_TIMEOUT_S = 30.0
"""Transaction timeout of locks without a maximum hold time. They are extended, so they are lost only if no server can be
reached for this time."""

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
KEYBOARD_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
"""The signals that a terminal sends for Ctrl-C and Ctrl-\\."""

LOOP_ITERATIONS = 3
"""Event-loop iterations after which a pending signal or timeout has been read, queued and handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The command to run and the locks that it needs. Times are in seconds."""

    command: tuple[str, ...]
    """The program and its arguments."""
    resources: tuple[str, ...]
    host: str
    port: int
    namespace: str | None
    queue_timeout: float | None
    """None for a request that waits without a limit."""
    max_hold: float | None
    """Maximum hold time. If it is None, the locks are extended while the command runs."""
    transaction: str | None
    priority: float
    note: str | None = None
    """The default has the name of the program, the process id of genie, and the host."""
    conflict_status: int
    """Exit status if the locks were not granted."""
    kill_after: float
    """Time between SIGTERM and SIGKILL when the locks are lost."""
    keep_token: bool = False
    """True if the command inherits GENIE_TOKEN, the access token of its caller."""


class LockedCommand:
    """Runs a command while its locks are held."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._task: asyncio.Task[object] | None = None
        """The task of `run`, which a signal before the start cancels."""
        self._child_process: subprocess.Popen[bytes] | None = None
        """The process of the command. None before the start."""
        self._child_ended = asyncio.Event()
        """Set when the command has ended."""
        self._failure_status: int | None = None
        """Exit status for an error of genie, which takes precedence over the exit status of the command. None without one."""
        self._stop_signal: int | None = None
        """The signal that ended genie before the command was started, or None."""

    async def run(self) -> int:
        """Wait for the locks, run the command, and release the locks. Return the exit status."""
        self._task = asyncio.current_task()
        self._handle_signals()
        try:
            async with self._make_client() as client:
                await self._run_with_locks(client)
        except asyncio.CancelledError:
            if self._exit_status() is None:  # `_on_signal` did not request this cancellation
                raise
        except LockError as error:
            self._fail(error, status=self._options.conflict_status)
        except GenieError as error:
            self._fail(error, status=FAILED)
        except ValueError as error:  # the client rejected the arguments
            self._fail(error, status=USAGE_ERROR)
        status = self._exit_status()
        return FAILED if status is None else status

    def _make_client(self) -> Client:
        """Return a client for the options. Raises ValueError if an option is invalid."""
        options = self._options
        note = options.note
        if note is None:
            note = default_note(PurePath(options.command[0]).name)
        client_options = ClientOptions(
            response_timeout=RESPONSE_TIMEOUT_S, namespace=options.namespace, note=note, waits_for_servers=False
        )
        return Client(parse_addresses(options.host, options.port), client_options)

    # -- the locks ----------------------------------------------------------------------------------------

    async def _run_with_locks(self, client: Client) -> None:
        """Acquire the locks, start the command, and wait until the command ends.

        If a lock is lost, the command is ended. Without a queue timeout of the user, a request that times out is repeated.
        """
        options = self._options
        queue_timeout_s = MAX_SECONDS if options.queue_timeout is None else options.queue_timeout
        while True:
            try:
                async with client.lock(
                    *options.resources,
                    transaction=options.transaction,
                    queue_timeout=timedelta(seconds=queue_timeout_s),
                    transaction_timeout=timedelta(seconds=options.max_hold or WATCHDOG_TIMEOUT_S),
                    watchdog=options.max_hold is None,
                    priority=options.priority,
                ) as lock:
                    # Signals and lock losses that arrived before the grant must be handled before the start.
                    for _ in range(LOOP_ITERATIONS):
                        await asyncio.sleep(0)
                    if self._start(lock):
                        await self._child_ended.wait()
                        await lock.release()  # raises an error that the end of the block would only log
            except LockLost as error:
                await self._on_lock_lost(error)
            except QueueTimeout:
                if options.queue_timeout is None:
                    continue  # the protocol limits queue timeouts to `MAX_SECONDS`: queue again
                raise
            return

    async def _on_lock_lost(self, error: LockLost) -> None:
        """Set the exit status, end the command if it is running, and print the reason.

        The reason is printed last, because a terminal or a pipe that accepts no output blocks genie.
        """
        self._failure_status = LOST
        if self._child_process is None:
            consequence = "was not started"
        elif self._child_process.poll() is not None:
            consequence = "had just ended"
        else:
            await self._terminate_child()
            consequence = "was ended"
        print_message(f"{one_line(error)}; {self._options.command[0]} {consequence}")

    def _fail(self, error: Exception, status: int) -> None:
        """Print an error, and set the exit status if the command was not started.

        If it was started, it has ended while the locks were held, and only their release has failed. Then genie exits with
        the status of the command.
        """
        if self._child_process is None:
            self._failure_status = status
            print_message(one_line(error))
        else:
            print_message(f"the locks were not released and will time out: {one_line(error)}")

    # -- the command --------------------------------------------------------------------------------------

    def _start(self, lock: Lock) -> bool:
        """Start the command, and return True. If it could not be executed, print the reason, and return False.

        The command inherits open files, because the process substitution of shells, `<(…)`, and the job server of make
        pass file descriptors to it.
        """
        program = self._options.command[0]
        environment = os.environ | {"GENIE_LOCK_ID": str(lock.id), "GENIE_LOCK_FENCE": str(lock.fence)}
        if not self._options.keep_token:
            environment.pop("GENIE_TOKEN", None)
        try:
            self._child_process = subprocess.Popen(self._options.command, env=environment, close_fds=False)  # noqa: S603 - the user's command
        except OSError as error:
            self._failure_status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            print_message(f"{program}: {error.strerror or error}")
            return False
        return True

    async def _terminate_child(self) -> None:
        """End the command: send SIGTERM, then SIGKILL if the command still runs after `kill_after` seconds.

        Returns when the command has ended.
        """
        self._send_signal(signal.SIGTERM)
        self._send_signal(signal.SIGCONT)  # a stopped process handles SIGTERM only after it continues
        try:
            async with asyncio.timeout(self._options.kill_after):
                await self._child_ended.wait()
        except TimeoutError:
            self._send_signal(signal.SIGKILL)
            await self._child_ended.wait()

    def _send_signal(self, number: int) -> None:
        """Send a signal to the command if it was started. Print a message if this is not permitted."""
        if self._child_process is None:
            return
        try:
            self._child_process.send_signal(number)
        except PermissionError:
            print_message(f"{self._options.command[0]} runs as another user: no permission to send it signal {number}")

    def _exit_status(self) -> int | None:
        """Return the exit status of genie, or None if there was no error, no completed command and no signal.

        The status for an error of genie takes precedence over the exit status of the command, which takes precedence over
        the status for a signal before the start.
        """
        if self._failure_status is not None:
            return self._failure_status
        if self._child_process is not None and self._child_process.returncode is not None:
            return_code = self._child_process.returncode
            ended_by_signal = return_code < 0  # then it is the negated number of the signal
            return SIGNAL_BASE - return_code if ended_by_signal else return_code
        return None if self._stop_signal is None else SIGNAL_BASE + self._stop_signal

    # -- signals ------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        """Install handlers for SIGCHLD and for the signals to forward."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        # The program that started genie may have blocked SIGCHLD. Genie would inherit this, and never notice that the
        # command has ended.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for number in FORWARDED_SIGNALS:
            # nohup, or `&` in a script, starts genie with some signals ignored. These stay ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)

    def _reap(self) -> None:
        """Handle SIGCHLD: if the command has ended, read its exit status, and wake the waiting task."""
        if self._child_process is not None and self._child_process.poll() is not None:
            self._child_ended.set()

    def _on_signal(self, number: int) -> None:
        """Forward a signal to the running command. If the command is not running, cancel the task, which ends genie."""
        is_running = self._child_process is not None and self._child_process.poll() is None
        if is_running:
            sent_by_terminal = number in KEYBOARD_SIGNALS and _is_in_foreground()  # to the command as well
            if not sent_by_terminal:
                self._send_signal(number)
        elif self._task is not None:
            self._stop_signal = number
            self._task.cancel()


def _is_in_foreground() -> bool:
    """Return whether genie, and so its command, is in the foreground process group of its terminal.

    A terminal sends SIGINT and SIGQUIT to the whole foreground process group, so the command receives these signals
    without forwarding. Forwarding them would deliver one key press twice, and many programs abort at a second Ctrl-C.
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


def run_locked(options: RunOptions) -> int:
    """Run a command in a new event loop while its locks are held. Return the exit status of genie."""
    try:
        return asyncio.run(LockedCommand(options).run())
    except KeyboardInterrupt:  # before the signal handlers were installed
        return INTERRUPTED


# -- `genie run` --------

COMMAND_KEY = "genie.cli.run.command"
"""Key of the arguments after `--` in the metadata of a click context."""


class _RunCommand(click.Command):
    """A click command that accepts `RESOURCE... -- COMMAND...`.

    A click command can have only one variadic argument. So click parses the arguments before the first `--`, and the
    arguments after it are stored in the context.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Let click parse the arguments before `--`, and store the command after it in the context."""
        separator_index = args.index("--") if "--" in args else len(args)
        command = args[separator_index + 1 :]
        ctx.meta[COMMAND_KEY] = tuple(command)
        remaining = super().parse_args(ctx, args[:separator_index])
        if separator_index == len(args):
            raise click.UsageError("COMMAND is missing: put -- between the resources and the command.", ctx)
        if not command or not command[0]:
            raise click.UsageError("COMMAND is missing after --.", ctx)
        return remaining

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return ["[OPTIONS]", "RESOURCE...", "--", "COMMAND [ARGUMENT]..."]


def _parse_resource(text: str) -> str:
    """Return a resource as `MODE:NAME` or `2/10:NAME`. Raises click.BadParameter if the text is invalid."""
    try:
        return parse_resource_arg(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


_SECOND_MODE = re.compile("(shared|exclusive|[0-9]+/[0-9]+):")
_WILDCARD = re.compile(r"(^|/)\*+(/|$)|\*\*$")
"""A part of only asterisks, or two asterisks at the end of a name."""


def _warn_of_plain_name(resource: str) -> None:
    """Print a warning if a resource is one plain name, but looks like a name with a second mode or a wildcard."""
    name = parse_resource(resource)[1]
    if _SECOND_MODE.match(name):
        print_message(f"{resource} locks the name {name!r}: a resource has only one mode")
    elif _WILDCARD.search(name) and not is_subtree(name):
        print_message(f"{resource} locks one plain name: only a name that ends in /** means all names below it")


@click.command(cls=_RunCommand)
@click.argument("resources", nargs=-1, required=True, type=_parse_resource, metavar="RESOURCE...")
@click.option("-n", "--no-wait", is_flag=True, help="Fail if the locks cannot be granted immediately.")
@click.option(
    "-w", "--wait", type=seconds(0), metavar="SECONDS", help="Queue timeout. Without -n and -w there is none."
)
@click.option(
    "--transaction-timeout",
    "max_hold",
    type=seconds(0.001),
    metavar="SECONDS",
    help="Maximum hold time; COMMAND is ended when the locks are lost. "
    "Without it the locks are held while COMMAND runs.",
)
@click.option("--transaction", metavar="NAME", help="Transaction of the request.")
@click.option(
    "--priority", type=float, metavar="N", default=0, help="Higher priorities are granted first. [default: 0]"
)
@click.option(
    "--note",
    metavar="TEXT",
    help="Who holds the locks, for operators and for others that wait; empty for none. "
    "[default: COMMAND, process and host]",
)
@click.option(
    "-E",
    "--conflict-exit-code",
    "conflict_status",
    type=WholeNumber(0, 255),
    metavar="N",
    default=1,
    show_default=True,
    help="Exit status if the locks were not granted.",
)
@click.option(
    "--kill-after",
    type=seconds(0),
    metavar="SECONDS",
    default=10,
    show_default=True,
    help="Time between SIGTERM and SIGKILL when the locks are lost.",
)
@click.option(
    "--keep-token",
    is_flag=True,
    help="Leave GENIE_TOKEN in the environment of COMMAND, which then has your permissions.",
)
@server_options
@click.pass_context
@one_line_errors
def run(ctx: click.Context, /, no_wait: bool, wait: float | None, **options: Any) -> None:
    """Hold locks while COMMAND runs, as flock(1) does.

    RESOURCE is shared:NAME, exclusive:NAME, or a NAME without a colon, which is exclusive. 1/4:NAME locks one unit of a
    resource of which at most 4 units may be in use. A NAME that ends in /** means all names below it. All resources are
    granted together.

    COMMAND gets GENIE_LOCK_ID and GENIE_LOCK_FENCE in its environment. SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and
    SIGUSR2 are forwarded to COMMAND. Ctrl-C reaches COMMAND directly from the terminal. A signal while genie waits for
    the locks ends genie.

    \b
    Exit status: that of COMMAND (128 + N if signal N ended it), or
      1    the locks were not granted: timeout or deadlock (-E sets another)
      2    invalid arguments
      124  the locks were lost before COMMAND ended; it was sent SIGTERM,
           and SIGKILL if it continued: undo or repeat its work
      125  genie failed: no server, or the request was rejected
      126  COMMAND could not be executed
      127  COMMAND was not found
      128 + N  signal N came while genie waited

    If genie itself is killed by SIGKILL, COMMAND continues. Without --transaction-timeout, the locks then time out
    after 30 seconds.
    """  # noqa: D301 - click needs the backspace character before a paragraph that must not be rewrapped
    if no_wait and wait is not None:
        raise click.UsageError("-n and -w are mutually exclusive: use only one.", ctx)
    for resource in options["resources"]:
        _warn_of_plain_name(resource)
    run_options = RunOptions(command=ctx.meta[COMMAND_KEY], queue_timeout=0 if no_wait else wait, **options)
    raise SystemExit(run_locked(run_options))
