"""A recording of a lock manager whose steps have the times that the test chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from genie import core
from genie.core import SUCCESS, Command, LockManager, Release, Request
from genie.history.recorder import Recorder
from genie.history.writer import HistoryWriter, Retention
from genie.protocol import codec

T0 = 1_764_000_000_000.0
ALWAYS = Retention()


class Recording:
    """A lock manager whose steps are recorded, at times that the test chooses (ms since `T0`).

    With `as_lines`, requests that are granted at once and releases are recorded as the lines of their commands, as the
    dispatcher does it; otherwise as events.
    """

    def __init__(
        self,
        directory: Path,
        redacted: tuple[str, ...] = (),
        manager: LockManager | None = None,
        *,
        as_lines: bool = False,
    ) -> None:
        self.manager = manager or LockManager(unix_offset_ms=T0)
        self.writer = HistoryWriter(directory, "main", "127.0.0.1:0", ALWAYS)
        self.recorder = Recorder(self.writer, self.manager, redacted, b"key")
        self._as_lines = as_lines

    def step(self, command: Command, now: float) -> None:
        events = self.manager.step(command, now)
        if events and self._as_lines:
            self._record_lines(command, events, now)
        elif events:
            self.recorder.on_events(events, now)
        self.recorder.on_stored()

    def _record_lines(self, command: Command, events: list[core.Event], now: float) -> None:
        first = events[0]
        if isinstance(first, core.Granted):
            self.recorder.on_granted(request_line(first.request), first.request, now)
        elif isinstance(command, Release) and isinstance(first, core.Released) and first.reason is SUCCESS:
            self.recorder.on_released(release_line(command.id), first.request, now)
            if events[1:]:
                self.recorder.on_events(events[1:], now)
        else:
            if isinstance(first, core.QueueFull):
                self.recorder.on_id_skipped()
            self.recorder.on_events(events, now)

    def request(self, now: float, *exclusive: str, **fields: Any) -> Request:
        request = Request((), exclusive, **fields)
        self.step(request, now)
        return request

    def release(self, now: float, request: Request) -> None:
        self.step(Release(request.id), now)

    def stop(self) -> None:
        self.recorder.stop()
        self.writer.join(10)
        assert not self.writer.error


def request_line(request: Request) -> bytes:
    """Return the line with which a client sends a request."""
    fields = {
        "resources": [f"exclusive:{name}" for name in request.exclusive]
        + [f"shared:{name}" for name in request.shared],
        "queueTimeout": request.queue_timeout_ms,
        "transactionTimeout": request.transaction_timeout_ms,
        "transactionName": request.transaction,
        "priority": request.priority,
        "onDisconnect": "release" if request.release_on_disconnect else "keep",
        "note": request.note,
    }
    payload = {name: value for name, value in fields.items() if value is not None}
    return codec.message("request", payload).rstrip()


def release_line(id: int) -> bytes:
    """Return the line with which a client releases a request."""
    return b' {"payload":{"id":%d}, "command":"release"}\r' % id
