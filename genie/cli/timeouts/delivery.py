"""Where expired transfers go: to a command, or to stdout. Each is a line of JSON."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable
from contextlib import suppress

from genie.protocol import codec
from genie.timeouts import ExpiredTransfer

END_S = 10.0
"""How long a command may take to end after SIGTERM, before SIGKILL."""

STDOUT = 1


class ToCommand:
    """A command of the shell, which is started for each list and reads it from its stdin."""

    def __init__(self, command: str) -> None:
        if not command.strip():
            raise ValueError("--on-expired: a command is needed, not an empty text")
        self._command = command
        self.trouble = ""
        """Why the last list was not dealt with; empty, if it was."""

    async def deliver(self, expired: list[ExpiredTransfer]) -> list[str]:
        """Run the command; returns what is not dealt with: nothing if it exits with 0, else all.

        It has a process group of its own, so all of it can be ended with us.
        """
        child = await asyncio.create_subprocess_shell(self._command, stdin=PIPE, process_group=0)
        try:
            await child.communicate(_lines(expired))
        except BaseException:
            await _end(child)
            raise
        self.trouble = _said(child.returncode or 0)
        return [one.transfer_id for one in expired] if child.returncode else []


class ToStdout:
    """The lines themselves."""

    trouble = ""

    async def deliver(self, expired: list[ExpiredTransfer]) -> None:
        """Write them. BrokenPipeError, if nobody reads any more.

        A thread writes, and nobody waits for it in the end: a reader that has stopped reading would keep us for ever.
        """
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        sys.stdout.flush()

        def done(error: OSError | None) -> None:
            if written.done():
                return
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)

        def write() -> None:
            error = None
            try:
                _write(_lines(expired))
            except OSError as caught:
                error = caught
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done, error)

        threading.Thread(target=write, daemon=True).start()
        await written


def _lines(expired: Iterable[ExpiredTransfer]) -> bytes:
    return b"".join(
        codec.dumps(
            {
                "transferId": one.transfer_id,
                "expirationDate": f"{one.expiration_date.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z",
                "state": one.state,
            }
        )
        + b"\n"
        for one in expired
    )


def _write(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(STDOUT, left) :]


def _said(status: int) -> str:
    if not status:
        return ""
    return f"the command ended with status {status}" if status > 0 else f"the command was ended by signal {-status}"


async def _end(child: Process) -> None:
    _send(child, signal.SIGTERM)
    try:
        async with asyncio.timeout(END_S):
            await child.wait()
    except TimeoutError:
        _send(child, signal.SIGKILL)
        await child.wait()


def _send(child: Process, number: signal.Signals) -> None:
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
