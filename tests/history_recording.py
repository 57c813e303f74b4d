"""A recording of a lock manager whose steps have the times that the test chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from genie.core import Command, LockManager, Release, Request
from genie.history.recorder import Recorder, wait_of
from genie.history.writer import HistoryWriter, Retention

T0 = 1_764_000_000_000.0
ALWAYS = Retention()


class Recording:
    """A lock manager whose steps are recorded, at times that the test chooses (ms since `T0`)."""

    def __init__(self, directory: Path, redacted: tuple[str, ...] = (), manager: LockManager | None = None) -> None:
        self.manager = manager or LockManager(unix_offset_ms=T0)
        self.writer = HistoryWriter(directory, "main", "127.0.0.1:0", ALWAYS)
        self.recorder = Recorder(self.writer, self.manager, redacted, b"key")

    def step(self, command: Command, now: float) -> None:
        events = self.manager.step(command, now)
        if events:
            self.recorder.steps.append((now, events, wait_of(self.manager, events)))
        self.recorder.on_stored()

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
