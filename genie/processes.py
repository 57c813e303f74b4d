"""Processes that a server starts."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence


async def run_process(
    command: Sequence[str], input: bytes = b"", *, timeout_s: float | None = None, errors: int | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command, and return its output. The process is killed if the caller is cancelled, or after `timeout_s`.

    If `errors` is `subprocess.PIPE`, its error output is returned, too. If it is None, the command writes its errors to
    the error output of this process. Raises OSError if the command cannot be started, and subprocess.TimeoutExpired.

    A thread starts the process. The event loop would fork this process, which delays all clients for 20 ms for each GiB of its
    memory, and until the new process has begun.
    """
    process = await asyncio.to_thread(_start, command, errors)
    try:
        output, error_output = await asyncio.to_thread(_communicate, process, input, timeout_s)
    finally:
        if process.returncode is None:  # the caller is cancelled: the thread waits until the process has ended
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, output, error_output)


def _start(command: Sequence[str], errors: int | None) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors)  # noqa: S603 - our own modules


def _communicate(process: subprocess.Popen[bytes], input: bytes, timeout_s: float | None) -> tuple[bytes, bytes]:
    try:
        return process.communicate(input, timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
