"""Processes that a server starts: they do not delay its event loop, and end with their caller."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from genie.processes import run_process
from support.processes.waiting import until

ECHO = "import sys; sys.stderr.write('warning'); print(sys.stdin.read()); sys.exit(3)"
SLEEP = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"


def test_a_process_starts_without_a_fork_of_this_one() -> None:
    """A fork takes the longer the more memory this process has, and the event loop of uvloop forks."""
    forks: list[None] = []
    os.register_at_fork(before=lambda: forks.append(None))

    async def run() -> subprocess.CompletedProcess[bytes]:
        return await run_process([sys.executable, "-c", ECHO], b"input", errors=subprocess.PIPE)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(run())
    assert (result.returncode, result.stdout, result.stderr) == (3, b"input\n", b"warning")
    assert not forks


async def test_a_process_is_killed_after_its_time() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        await run_process([sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=0.1)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def read_pid(file: Path) -> int:
    return int(file.read_text() or 0) if file.exists() else 0


async def test_a_process_is_killed_with_its_caller(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    caller = asyncio.create_task(run_process([sys.executable, "-c", SLEEP, str(file)]))
    await until(lambda: read_pid(file))
    pid = read_pid(file)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await until(lambda: not is_running(pid))  # a thread waits for the end of the process


async def test_a_command_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        await run_process(["/no/such/command"])
