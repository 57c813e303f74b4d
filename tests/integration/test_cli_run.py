"""`genie run` with real processes, real signals and a real server."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

from genie import Inspection, sync
from genie.protocol import messages
from support.processes.ports import free_port
from support.processes.programs import CLI, Forked, run_genie, start_genie
from support.processes.servers import WAIT_S, Genie, running_server
from support.processes.waiting import wait_until

Process = subprocess.Popen[str] | Forked
PYTHON = [sys.executable, "-uc"]
KEY_PRESSES = 10
HOLD = "import sys; print('held'); sys.stdin.read()"
"""A command that runs until its standard input ends."""
IGNORE_SIGTERM = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.environ["GENIE_LOCK_ID"])
signal.pause()
"""
IN_FOREGROUND = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command in the foreground of the terminal, as a shell does. The session must be new."""
COUNT_INTERRUPTS = """
import os, signal
EXPECTED = {signal.SIGINT, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, EXPECTED)
print(os.getpid())
interrupts = 0
while True:
    if signal.sigwait(EXPECTED) == signal.SIGINT:
        interrupts += 1
        print("INT")
    else:
        print(interrupts)
"""
"""Waits for blocked signals by sigwait(3): a signal just before a pause(2) would be missed."""
PRINT_SIGNALS = """
import os, signal
EXPECTED = {getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")}
signal.pthread_sigmask(signal.SIG_BLOCK, EXPECTED)
print(os.getpid())
while True:
    print(signal.sigwait(EXPECTED).name.removeprefix("SIG"))
"""

BLOCK_SIGCHLD = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
os.execv(sys.argv[1], sys.argv[1:])
"""


def environment(genie: Genie) -> dict[str, str]:
    return os.environ | {"GENIE_HOST": "127.0.0.1", "GENIE_PORT": str(genie.port)}


def run(genie: Genie, *args: str) -> subprocess.CompletedProcess[str]:
    return run_genie("run", *args, env=environment(genie), timeout=WAIT_S)


@contextmanager
def killed_at_end(process: Process) -> Iterator[Process]:
    """Kill the process group of a process at the end of the test, or after a timeout."""
    with process:
        alarm = threading.Timer(2 * WAIT_S, os.killpg, (process.pid, signal.SIGKILL))
        alarm.start()
        try:
            yield process
            process.wait(WAIT_S)
        finally:
            alarm.cancel()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


STREAMS = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def started(genie: Genie, args: list[str], **options: Any) -> AbstractContextManager[Process]:
    options = STREAMS | options
    return killed_at_end(subprocess.Popen(args, env=environment(genie), text=True, start_new_session=True, **options))


def running(genie: Genie, *args: str, **options: Any) -> AbstractContextManager[Process]:
    """`genie run`."""
    options = STREAMS | options
    return killed_at_end(
        start_genie("run", *args, env=environment(genie), text=True, start_new_session=True, **options)
    )


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def close_stdin_and_wait(process: Process) -> int:
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(WAIT_S)


def inspected(genie: Genie, resource: str) -> Inspection:
    with sync.connect(*genie.address) as client:
        return client.inspect(resource=resource)


def set_timeout(genie: Genie, id_: int, ms: int) -> None:
    """Change the timeout of a lock, from another connection."""
    with socket.create_connection(genie.address) as other, other.makefile("rb") as lines:
        other.sendall(messages.command("extend", id=id_, transactionTimeout=ms))
        assert b"extended" in lines.readline()


def has_waiter(genie: Genie, resource: str) -> Callable[[], bool]:
    return lambda: inspected(genie, resource).queue_total == 1


def is_free(genie: Genie, resource: str) -> bool:
    found = inspected(genie, resource)
    return not found.holders_total and not found.queue_total


def test_the_command_gets_the_id_and_fence_of_its_lock(genie: Genie) -> None:
    print_lock = (
        "import os; print(os.environ['GENIE_LOCK_ID'], os.environ['GENIE_LOCK_FENCE']); input(); raise SystemExit(7)"
    )
    with running(genie, "env", "shared:env/b", "--", *PYTHON, print_lock) as process:
        id_, fence = map(int, line(process.stdout).split())
        (holder,) = inspected(genie, "env").holders
        assert (holder.id, holder.fence) == (id_, fence)
        assert sorted(holder.resources) == ["exclusive:env", "shared:env/b"]
        process.communicate("\n", timeout=WAIT_S)
        assert process.returncode == 7
    assert is_free(genie, "env")


@pytest.mark.parametrize("options", [[], ["--keep-token"]])
def test_the_command_gets_the_token_only_if_it_is_asked_for(genie: Genie, options: list[str]) -> None:
    show = "import os; print(os.environ.get('GENIE_TOKEN'))"
    env = environment(genie) | {"GENIE_TOKEN": "the-token-of-the-caller"}
    done = run_genie("run", *options, "token", "--", *PYTHON, show, env=env, timeout=WAIT_S)
    assert done.stdout == ("the-token-of-the-caller\n" if options else "None\n"), done.stderr


def test_the_command_inherits_stdio_and_open_files(genie: Genie) -> None:
    reading, writing = os.pipe()
    program = "import os, sys; os.write(int(sys.argv[1]), b'3'); print(sys.stdin.read()); print('e', file=sys.stderr)"
    args = [*CLI, "run", "files", "--", *PYTHON, program, str(writing)]
    with os.fdopen(reading, "rb", 0) as other, started(genie, args, pass_fds=[writing]) as process:
        os.close(writing)
        assert process.communicate("in", timeout=WAIT_S) == ("in\n", "e\n")
        assert other.read() == b"3"


def test_the_exit_status_of_a_killed_command(genie: Genie) -> None:
    result = run(genie, "dies", "--", "sh", "-c", "kill -KILL $$")
    assert result.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize(("program", "status"), [("no-such-program", 127), ("/dev/null", 126)])
def test_a_command_that_cannot_be_executed(genie: Genie, program: str, status: int) -> None:
    result = run(genie, "norun", "--", program)
    assert result.returncode == status
    assert result.stderr.startswith(f"genie: {program}: ")
    assert result.stderr.count("\n") == 1
    assert is_free(genie, "norun")


def test_a_queue_timeout_names_the_blocker(genie: Genie) -> None:
    with running(genie, "taken", "--transaction", "first", "--", *PYTHON, HOLD) as holder:
        assert line(holder.stdout) == "held"
        for options, status in ((["-n"], 1), (["-w", "0"], 1), (["-w", "0.05"], 1), (["-n", "-E", "99"], 99)):
            result = run(genie, *options, "shared:taken", "--", "echo", "ran")
            assert (result.returncode, result.stdout) == (status, "")
            program = Path(PYTHON[0]).name
            assert f"'first' ({program} {holder.pid}@{socket.gethostname()}) holds exclusive:taken" in result.stderr
            assert result.stderr.count("\n") == 1
        assert close_stdin_and_wait(holder) == 0


def test_a_deadlock_is_a_conflict(genie: Genie) -> None:
    with sync.connect(*genie.address) as client:
        client.acquire("dead/a", transaction="one", transaction_timeout=WAIT_S)
        with running(genie, "dead/b", "--transaction", "two", "--", *PYTHON, HOLD) as holder:
            assert line(holder.stdout) == "held"
            with running(genie, "dead/b", "--transaction", "one", "--", *PYTHON, HOLD) as waiter:
                wait_until(has_waiter(genie, "dead/b"))
                result = run(genie, "-E", "77", "--transaction", "two", "dead/a", "--", "true")
                assert result.returncode == 77
                assert "deadlock" in result.stderr
                assert close_stdin_and_wait(holder) == 0
                assert line(waiter.stdout) == "held"
                assert close_stdin_and_wait(waiter) == 0


def test_it_waits_until_the_lock_is_granted(genie: Genie) -> None:
    with running(genie, "wait", "--", *PYTHON, HOLD) as first:
        assert line(first.stdout) == "held"
        with running(genie, "wait", "--", *PYTHON, HOLD) as second:
            wait_until(has_waiter(genie, "wait"))
            assert close_stdin_and_wait(first) == 0
            assert line(second.stdout) == "held"
            assert close_stdin_and_wait(second) == 0


def test_shared_locks_are_granted_together(genie: Genie) -> None:
    with running(genie, "shared:share", "--", *PYTHON, HOLD) as first:
        assert line(first.stdout) == "held"
        assert run(genie, "-n", "shared:share", "--", "echo", "too").stdout == "too\n"
        assert close_stdin_and_wait(first) == 0


def test_a_higher_priority_is_granted_first(genie: Genie) -> None:
    with running(genie, "prio", "--", *PYTHON, HOLD) as first:
        assert line(first.stdout) == "held"
        with running(genie, "prio", "--", *PYTHON, HOLD) as low:
            wait_until(has_waiter(genie, "prio"))
            with running(genie, "prio", "--priority", "5", "--", *PYTHON, HOLD) as high:
                wait_until(lambda: inspected(genie, "prio").queue_total == 2)
                assert close_stdin_and_wait(first) == 0
                assert line(high.stdout) == "held"
                assert close_stdin_and_wait(high) == 0
                assert line(low.stdout) == "held"
                assert close_stdin_and_wait(low) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_during_the_wait_cancels_the_request(genie: Genie, number: signal.Signals) -> None:
    with sync.connect(*genie.address) as client:
        lock = client.acquire("signalled", transaction_timeout=WAIT_S)
        with running(genie, "signalled", "--", "echo", "ran") as process:
            wait_until(has_waiter(genie, "signalled"))
            process.send_signal(number)
            assert process.communicate(timeout=WAIT_S) == ("", "")
            assert process.returncode == 128 + number
        assert inspected(genie, "signalled").queue_total == 0
        lock.release()


def test_an_ignored_signal_stays_ignored(genie: Genie) -> None:
    """As under nohup(1)."""
    with sync.connect(*genie.address) as client:
        lock = client.acquire("nohup", transaction_timeout=WAIT_S)
        ignoring = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *CLI, "run", "nohup", "--", "echo", "ran"]
        with started(genie, ignoring) as process:
            wait_until(has_waiter(genie, "nohup"))
            process.send_signal(signal.SIGHUP)
            lock.release()
            assert process.communicate(timeout=WAIT_S)[0] == "ran\n"
            assert process.returncode == 0


def test_the_end_of_the_command_is_noticed_although_its_signal_was_blocked(genie: Genie) -> None:
    with started(
        genie, [sys.executable, "-c", BLOCK_SIGCHLD, *CLI, "run", "blocked", "--", "sh", "-c", "exit 3"]
    ) as process:
        assert process.wait(WAIT_S) == 3
    assert is_free(genie, "blocked")


def test_signals_are_forwarded(genie: Genie) -> None:
    with running(genie, "pass", "--", *PYTHON, PRINT_SIGNALS) as process:
        child = int(line(process.stdout))
        for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2"):
            process.send_signal(getattr(signal, f"SIG{name}"))
            assert line(process.stdout) == name
        (holder,) = inspected(genie, "pass").holders
        with sync.connect(*genie.address) as client:
            client.release(holder.id)
        assert line(process.stdout) == "TERM"
        process.send_signal(signal.SIGUSR1)
        assert line(process.stdout) == "USR1"
        os.kill(child, signal.SIGKILL)
        assert process.wait(WAIT_S) == 124


def test_ctrl_c_reaches_the_command_once(genie: Genie) -> None:
    leader, follower = pty.openpty()
    args = [sys.executable, "-c", IN_FOREGROUND, *CLI, "run", "key", "--", *PYTHON, COUNT_INTERRUPTS]
    with started(genie, args, stdin=follower) as process:
        os.close(follower)
        child = int(line(process.stdout))
        for pressed in range(1, KEY_PRESSES + 1):  # repeatedly: two simultaneous signals may be merged into one
            os.write(leader, b"\x03")
            assert line(process.stdout) == "INT"
            process.send_signal(signal.SIGUSR1)  # sent, and so forwarded, after SIGINT
            assert line(process.stdout) == str(pressed)
        os.kill(child, signal.SIGKILL)
        assert process.wait(WAIT_S) == 128 + signal.SIGKILL
    os.close(leader)


def test_the_command_is_terminated_when_its_lock_times_out(genie: Genie) -> None:
    with running(
        genie, "--transaction-timeout", "1000", "timeout", "--", "sh", "-c", "echo held; exec sleep 1000"
    ) as process:
        assert line(process.stdout) == "held"
        (holder,) = inspected(genie, "timeout").holders
        assert 800 < holder.expires_in <= 1000
        set_timeout(genie, holder.id, 1)
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 124
    assert "longer than its transaction timeout" in stderr
    assert stderr.endswith("; sh was ended\n")
    assert stderr.count("\n") == 1
    assert is_free(genie, "timeout")


def test_a_command_that_ignores_sigterm_is_killed(genie: Genie) -> None:
    with running(genie, "--kill-after", "0.1", "deaf", "--", *PYTHON, IGNORE_SIGTERM) as process:
        with sync.connect(*genie.address) as client:
            assert client.release(int(line(process.stdout))) == "success"
        _, stderr = process.communicate(timeout=WAIT_S)  # ends when no process has these files open any more
        assert process.returncode == 124
        assert "was released by its id" in stderr
        assert stderr.count("\n") == 1


def test_a_stopped_command_is_terminated(genie: Genie) -> None:
    stops = "import os, signal; print(os.environ['GENIE_LOCK_ID'], os.getpid()); signal.raise_signal(signal.SIGSTOP)"
    with running(genie, "--kill-after", "1000", "stopped", "--", *PYTHON, stops) as process:
        id_, child = map(int, line(process.stdout).split())
        wait_until(lambda: " T " in Path(f"/proc/{child}/stat").read_text())
        with sync.connect(*genie.address) as client:
            client.release(id_)
        assert process.wait(WAIT_S) == 124


def test_without_a_timeout_the_lock_is_extended(genie: Genie) -> None:
    short = "from genie.cli import main, run; run.WATCHDOG_TIMEOUT_S = 6; main()"
    args = [sys.executable, "-c", short, "run", "watch", "--", *PYTHON, HOLD]
    with started(genie, args) as process:
        assert line(process.stdout) == "held"
        left = [inspected(genie, "watch").holders[0].expires_in]

        def is_extended() -> bool:
            left.append(inspected(genie, "watch").holders[0].expires_in)
            return left[-1] > left[-2]

        wait_until(is_extended)
        assert close_stdin_and_wait(process) == 0


def test_the_command_is_terminated_when_the_server_is_lost() -> None:
    with (
        running_server() as server,
        running(server, "--transaction-timeout", "4", "server", "--", *PYTHON, HOLD) as process,
    ):
        assert line(process.stdout) == "held"
        server.kill()
        assert process.wait(WAIT_S) == 124


def test_it_waits_again_after_a_restart_of_the_server() -> None:
    with running_server() as genie, sync.connect(*genie.address) as client:
        lock = client.acquire("again", transaction_timeout=3600)
        with running(genie, "again", "--", *PYTHON, HOLD) as process:
            wait_until(has_waiter(genie, "again"))
            genie.kill()
            genie.start()
            assert lock.lost.wait(WAIT_S)
            assert line(process.stdout) == "held"
            assert close_stdin_and_wait(process) == 0


def test_no_server_is_one_error(genie: Genie) -> None:
    port = free_port()
    result = run(genie, "--port", str(port), "a", "--", "echo", "ran")
    assert (result.returncode, result.stdout) == (125, "")
    assert result.stderr.startswith(f"genie: no server at 127.0.0.1:{port}: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--priority", "99999999999"], ["--transaction", ""]])
def test_invalid_arguments_are_rejected_without_a_server(genie: Genie, arguments: list[str]) -> None:
    done = run(genie, *arguments, "a", "--", "true")
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
