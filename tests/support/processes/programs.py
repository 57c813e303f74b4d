"""`genie` commands as processes of their own. On Linux a process that has imported Genie forks them, which takes a fraction
of the time of starting Python anew; elsewhere each is `python -m genie.cli`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

CLI = [sys.executable, "-m", "genie.cli"]
MODULES = {"genie": "genie.cli", "genie-ledger": "genie_ledger.cli"}
"""The module of each program, which defines its `main`."""
LOADED = {
    "genie": (),
    "genie-ledger": [f"genie_ledger.cli.{name}" for name in ("explain", "run", "sample_data", "status")],
}
"""What the fork server imports for each program when it starts the first one."""
FORKS = sys.platform == "linux"
NOWHERE = {"GENIE_PORT": "1", "GENIE_ADMIN_PORT": "1"}
"""Where a command looks for a server that a test has not told it about: not at the ports of a server that really runs."""
NO_SERVERS = "GENIE_TESTS_NO_SERVERS"
"""The variable that is set while servers must not be started."""


def check_that_servers_may_start() -> None:
    """Fail in a run without servers, so that each test that starts one is marked so."""
    assert NO_SERVERS not in os.environ, "this test starts a server: give it pytest.mark.server"


def start_genie(
    *arguments: str,
    env: Mapping[str, str],
    text: bool = False,
    stdin: int | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    start_new_session: bool = False,
    program: str = "genie",
) -> subprocess.Popen[Any] | Forked:
    """Start `genie ARGUMENTS`, or another program. The options are those of `subprocess.Popen`, and the result can do the same."""
    env = NOWHERE | dict(env)
    if "serve" in arguments:
        check_that_servers_may_start()
    if not FORKS:
        return subprocess.Popen(
            [sys.executable, "-m", MODULES[program], *arguments],
            env=env,
            text=text,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=start_new_session,
        )
    return Forked(arguments, env, text, (stdin, stdout, stderr), start_new_session, program=program)


def start_script(
    script: Path, *arguments: str, load: Sequence[str] = (), **pipes: int
) -> subprocess.Popen[bytes] | Forked:
    """Start a Python script. `load` are modules that it imports, which is done only once for all that are started."""
    if not FORKS:
        return subprocess.Popen([sys.executable, str(script), *arguments], **pipes)  # type: ignore[call-overload, no-any-return]
    streams = pipes.get("stdin"), pipes.get("stdout"), pipes.get("stderr")
    return Forked(arguments, os.environ, text=False, streams=streams, session=False, script=script, load=load)


def run_genie(
    *arguments: str, env: Mapping[str, str], text: bool = True, timeout: float | None = None, program: str = "genie"
) -> subprocess.CompletedProcess[Any]:
    """Run `genie ARGUMENTS`, or another program, to its end, without input, with its output captured."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_genie(*arguments, env=env, text=text, program=program, **streams) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess([program, *arguments], process.returncode or 0, stdout, stderr)


@functools.cache
def _orders() -> socket.socket:
    """To the fork server of this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(its.fileno())],
            env=os.environ | {"PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
        )

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


class Forked:
    """A process that the fork server has started, with the methods of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        env: Mapping[str, str],
        text: bool,
        streams: tuple[int | IO[Any] | None, ...],
        session: bool,
        script: Path | None = None,
        load: Sequence[str] = (),
        program: str = "genie",
    ) -> None:
        self.args = [program if script is None else str(script), *arguments]
        self.returncode: int | None = None
        ends: list[IO[Any] | None] = []
        files: list[int] = []
        to_close: list[int] = []
        for number, stream in enumerate(streams):
            file, end = _redirected(stream, number, files, text)
            files.append(file)
            ends.append(end)
            if stream in (subprocess.PIPE, subprocess.DEVNULL):
                to_close.append(file)
        self.stdin, self.stdout, self.stderr = ends
        self._status, status = os.pipe()
        order = {
            "script": None if script is None else str(script),
            "arguments": arguments,
            "environment": dict(env),
            "folder": str(Path.cwd()),
            "session": session,
            "load": [*load, *LOADED[program]],
            "program": program,
            "module": MODULES[program],
        }
        socket.send_fds(_orders(), [json.dumps(order).encode()], [*files, status])
        for file in (*to_close, status):
            os.close(file)
        self.pid = int(self._line())
        self._lock = threading.Lock()

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._status, 1)
            assert byte, "the fork server has ended"
            line += byte
        return line

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                self.returncode = os.waitstatus_to_exitcode(int(self._line()))
                os.close(self._status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = None if end is None else end - time.monotonic()
            if timeout is not None and left is not None and left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout)
            select.select([self._status], [], [], left)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the fork server has just reaped it
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Write `input`, read both outputs to their ends, and wait for the end of the process."""
        end = None if timeout is None else time.monotonic() + timeout
        found: dict[str, Any] = {"stdout": None, "stderr": None}

        def read(name: str, stream: IO[Any]) -> None:
            with stream:
                found[name] = stream.read()

        readers = [
            threading.Thread(target=read, args=(name, stream), daemon=True)
            for name in found
            if (stream := getattr(self, name)) is not None and not stream.closed
        ]
        for reader in readers:
            reader.start()
        if self.stdin is not None and not self.stdin.closed:
            try:
                if input:
                    self.stdin.write(input)
                self.stdin.close()
            except BrokenPipeError:
                pass
        for reader in readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return found["stdout"], found["stderr"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stream in (self.stdout, self.stderr, self.stdin):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.wait()


def _redirected(stream: int | IO[Any] | None, number: int, before: list[int], text: bool) -> tuple[int, IO[Any] | None]:
    """The descriptor that becomes the process's `number`-th, and this end of it where it is a pipe."""
    if stream is None:
        return number, None
    if stream == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR), None
    if stream == subprocess.STDOUT:
        return before[1], None
    if stream != subprocess.PIPE:
        return stream if isinstance(stream, int) else stream.fileno(), None
    reading, writing = os.pipe()
    ours, its = (writing, reading) if number == 0 else (reading, writing)
    mode = "w" if number == 0 else "r"
    end = open(ours, mode, encoding="utf-8", newline=None) if text else open(ours, f"{mode}b")  # noqa: SIM115, PTH123
    return its, end
