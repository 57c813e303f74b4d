"""The adapter of the client under test, as a child process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from conformance.report import Failure

START_LIMIT_S: Final = 60.0
CLOSE_LIMIT_S: Final = 10.0
MAX_LINE_BYTES: Final = 1 << 24
KEPT_ERROR_LINES: Final = 15
ENDED: Final = "the process has ended"


class AdapterProcess:
    """One adapter process. It executes several cases, one after the other.

    `on_input` is called after each line of the adapter.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._call_count = 0
        self.answers: dict[int, dict[str, Any]] = {}
        """Answers by the number of their call."""
        self.events: list[dict[str, Any]] = []
        """All events of the current case that no step has taken."""
        self.watched: dict[int, dict[tuple[str, int], dict[str, Any]]] = {}
        """The locks that each watch has reported as held, by resource and id."""
        self.error_lines: deque[str] = deque(maxlen=KEPT_ERROR_LINES)
        """The end of the adapter's standard error."""
        self.broken = ""
        """Why the adapter can't be used any more; empty: it works."""
        self.record: Callable[[str], None] = lambda _: None
        """Adds a line to the transcript of the current case."""
        self.input_event = asyncio.Event()
        """Set after each line of the adapter."""

    async def start(self) -> None:
        """Start the process, unless it runs. Forget what an earlier case has received."""
        self.answers.clear()
        self.events.clear()
        self.watched.clear()
        if self._process is not None and not self.broken:
            return
        await self.stop()
        self.broken = ""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=pipe, limit=MAX_LINE_BYTES
        )
        self._tasks = [asyncio.create_task(self._read_output()), asyncio.create_task(self._read_errors())]
        await self._close_client(START_LIMIT_S)  # does nothing, but shows that the process is ready

    async def stop(self) -> None:
        """Kill the process, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        if self.broken != ENDED:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def exit(self) -> None:
        """Let the process end by `exit`; kill it if it does not."""
        process = self._process
        if process is None or self.broken:
            return await self.stop()
        self.call({"do": "exit"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await process.wait()
        return await self.stop()

    def call(self, fields: dict[str, Any]) -> int:
        """Send a call; return its number."""
        if self._process is None or self._process.stdin is None or self.broken:
            raise Failure(f"the adapter does not run: {self.broken}")
        self._call_count += 1
        line = json.dumps({"call": self._call_count} | fields, ensure_ascii=False)
        self.record(f"adapter <- {line}")
        self._process.stdin.write(line.encode() + b"\n")
        return self._call_count

    async def close_client(self) -> None:
        """Close the client after a case. An adapter that does not answer is replaced by a new one."""
        if not self.broken:
            await self._close_client(CLOSE_LIMIT_S)

    async def _close_client(self, limit_s: float) -> None:
        number = self.call({"do": "close"})
        try:
            async with asyncio.timeout(limit_s):
                while number not in self.answers and not self.broken:
                    self.input_event.clear()
                    await self.input_event.wait()
        except TimeoutError:
            self.broken = f"it did not answer close within {limit_s:g} s"

    async def _read_output(self) -> None:
        """Read the answers and events."""
        process = self._process
        if process is None or process.stdout is None:
            return
        try:
            while line := await process.stdout.readline():
                self.record(f"adapter -> {line.decode(errors='replace').strip()[:2000]}")
                self._take(json.loads(line))
                self.input_event.set()
            self.broken = ENDED
        except (ValueError, KeyError, TypeError) as error:
            self.broken = f"it wrote a line that is not valid: {error}"
        self.input_event.set()

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("event") in ("watch", "resync"):
            self._take_change(message)
        elif "event" in message:
            self.events.append(message)
        else:
            if message["call"] in self.answers:
                raise ValueError(f"the call {message['call']} was answered twice")
            if ("ok" in message) == ("error" in message):
                raise ValueError("an answer has either ok or error")
            self.answers[message["call"]] = message

    def _take_change(self, message: dict[str, Any]) -> None:
        """Apply a change, or a `resync`, to the locks that a watch has reported."""
        held = self.watched.setdefault(message["watch"], {})
        if message["event"] == "resync":
            held.clear()
            return
        change = message["change"]
        key = change["resource"], change["id"]
        if change["state"] == "locked":
            held[key] = change
        elif held.pop(key, None) is None:
            raise ValueError(f"unlocked was reported without a locked before: {message}")

    async def _read_errors(self) -> None:
        """Keep the end of standard error."""
        process = self._process
        if process is None or process.stderr is None:
            return
        with contextlib.suppress(ValueError):
            while line := await process.stderr.readline():
                self.error_lines.append(line.decode(errors="replace").rstrip())
