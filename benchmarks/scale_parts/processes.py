"""Real servers on free ports of the loopback interface, each in a separate process, which is always
terminated by its id.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scale_parts.report import Missing

WAIT_S = 60.0
"""Timeout of a server's replies; not a measurement."""


class Process:
    """The process of a server, if it runs. Its output is written to a file, which is printed if it
    does not start.
    """

    def __init__(self, command: Sequence[str], ping: bytes, port: int, folder: Path) -> None:
        self.port = port
        self._command = command
        self._ping = ping
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, and wait until it replies to a ping."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=_environment(), stdout=log, stderr=log)
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), WAIT_S) as sock:
                    sock.sendall(self._ping)
                    if sock.recv(256):
                        return
            except OSError:
                time.sleep(0.005)
        raise Missing(f"{self._command[0]} did not start: {self._log.read_text()[-500:]}")

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None, "it runs"  # noqa: S101
        return self._process.pid

    def kill(self) -> None:
        """Kill the process, which is as abrupt as a power failure."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def resident_bytes(self) -> int:
        """Return the resident memory of the process, in bytes."""
        return int(self._status("status", "VmRSS:")) * 1024

    def cpu_s(self) -> float:
        """Return the CPU time of the process, in seconds."""
        after_name = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")

    def _status(self, name: str, key: str) -> str:
        try:
            return Path(f"/proc/{self.pid}/{name}").read_text().split(key)[1].split()[0]
        except FileNotFoundError:
            raise Missing("the memory of a process is read from /proc, which is not here") from None


@contextmanager
def genie(redis: Process | None = None) -> Iterator[Process]:
    """A `genie serve` process, with its locks in memory or in a Redis."""
    port = _free_port()
    command = [sys.executable, "-m", "genie.cli", "serve", "--port", str(port), "--admin-port", ""]
    command += ["--max-connections-per-address", "20000"]
    if redis is not None:
        command += ["--redis-url", f"redis://127.0.0.1:{redis.port}/0"]
    with _running(lambda folder: Process(command, PING, port, folder)) as process:
        yield process


@contextmanager
def redis_server() -> Iterator[Process]:
    """A redis-server as the documentation recommends: append-only, synced once a second."""
    program = shutil.which("redis-server")
    if program is None:
        raise Missing("there is no redis-server on the path")
    port = _free_port()

    def make(folder: Path) -> Process:
        where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        kept = ["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"]
        return Process([program, *where, *kept], REDIS_PING, port, folder)

    with _running(make) as process:
        yield process


PING = b'{"command":"ping","payload":{}}\n'
REDIS_PING = b"PING\r\n"


@contextmanager
def _running(make: Callable[[Path], Process]) -> Iterator[Process]:
    with tempfile.TemporaryDirectory(prefix="genie-scale-") as folder:
        process = make(Path(folder))
        try:
            process.start()
            yield process
        finally:
            process.kill()


def allow_files(wanted: int) -> None:
    """Raise the limit of open files to what is needed. Missing if the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else hard
    if most < wanted:
        raise Missing(f"{wanted:,} open files are needed and the hard limit is {hard:,}: raise `ulimit -Hn`")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _environment() -> dict[str, str]:
    """Return the environment without variables that would change the servers' settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GENIE_")}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
