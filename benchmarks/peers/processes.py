"""Server processes: started on free ports, pinned to a processor, and terminated by their ids."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.peers.peer import HOST, PeerFailed, open_socket
from benchmarks.peers.stopping import defer_signals

START_S = 20.0
STOP_S = 10.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def free_port(below: int = 65_536) -> int:
    """Return a port on which no process listens."""
    while True:
        with socket.socket() as sock:
            sock.bind((HOST, 0))
            port = int(sock.getsockname()[1])
        if port < below:
            return port


ANSWER_S = 5.0
"""How long `executes` waits for an answer."""


def accepts(port: int) -> None:
    """Connect to a port. OSError if no process listens."""
    open_socket(port).close()


def executes(port: int) -> None:
    """Send a `ping` to a Genie server. OSError if it does not execute commands, for example because it does not lead yet."""
    with open_socket(port) as sock, sock.makefile("rb") as answers:
        sock.settimeout(ANSWER_S)
        sock.sendall(b'{"command":"ping"}\n')
        if b'"pong"' not in answers.readline():
            raise ConnectionError("the server executes no commands")


@contextmanager
def serving(
    command: Sequence[str],
    log: Path,
    ready: Callable[[], None],
    *,
    user: str | None = None,
    environment: Mapping[str, str] | None = None,
    stop: signal.Signals = signal.SIGTERM,
) -> Iterator[int]:
    """Start a server; yield its process id once `ready` raises no OSError. It is terminated at the
    end of the block.
    """
    with ExitStack() as ends:
        with defer_signals(), log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent, env=environment, user=user, group=user
            )
            ends.callback(_end, process, stop)
        _wait(process, ready, log)
        yield process.pid


def _end(process: subprocess.Popen[bytes], stop: signal.Signals) -> None:
    process.send_signal(stop)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], None], log: Path) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            return ready()
        except OSError:
            time.sleep(0.02)
    said = log.read_text(errors="replace").strip().splitlines()[-3:]
    raise PeerFailed(f"did not start: {' / '.join(said)}")


def pinned() -> tuple[Sequence[str], int | None, int | None]:
    """Return the command prefix that pins servers, and the processors of servers and load; None if
    there is only one.
    """
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) == 1 or shutil.which("taskset") is None:
        return (), None, None
    return ("taskset", "-c", str(processors[0])), processors[0], processors[-1]


def cpu_s(pids: Sequence[int]) -> dict[int, float]:
    """Return the CPU seconds of each of these processes, including their children."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _words(folder / "stat", behind=")")):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = list(pids)
    for pid in found:  # grows while it is walked
        found += children.get(pid, [])
    return {pid: _cpu_s(Path(f"/proc/{pid}")) for pid in found}


def busy_s() -> float:
    """Return the CPU seconds of all processors together, including those of a virtual machine's
    host.
    """
    user, nice, system, _idle, _wait, irq, softirq, steal = _words(Path("/proc/stat"))[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / TICKS_PER_S


def _cpu_s(process: Path) -> float:
    """Read the CPU seconds of a process: in nanoseconds by thread if the kernel counts them, else
    in ticks, which miss short activity.
    """
    runs = [words for thread in (process / "task").glob("*") if (words := _words(thread / "schedstat"))]
    if runs:
        return sum(int(words[0]) for words in runs) / 1e9
    fields = _words(process / "stat", behind=")")
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def _words(file: Path, behind: str = "") -> list[str]:
    """Read the fields of a file in /proc; empty if the process has ended."""
    try:
        text = file.read_text()
    except OSError:
        return []
    return (text.rpartition(behind)[2] if behind else text).split()
