"""A recording of a lock manager whose steps have the times that the test chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from genie import core
from genie.access import Principal
from genie.core import Command, Context, LockManager, Release, Request
from genie.history import records
from genie.history.recorder import Recorder
from genie.history.redaction import Redaction
from genie.history.retention import Retention
from genie.history.writer import DroppedWrites, HistoryWriter

T0 = 1_764_000_000_000.0
ALWAYS = Retention()
PRINCIPALS = {name: Principal(name) for name in ("billing", "reports")}


class Recording:
    """A lock manager whose steps are recorded, at times that the test chooses (ms since `T0`).

    With `as_lines`, requests and releases are recorded as the lines of their commands, as the dispatcher does it; otherwise
    as events.
    """

    def __init__(
        self,
        directory: Path,
        redacted: tuple[str, ...] = (),
        manager: LockManager | None = None,
        *,
        as_lines: bool = False,
        retention: Retention = ALWAYS,
    ) -> None:
        self.manager = manager or LockManager(unix_offset_ms=T0)
        self.writer = HistoryWriter(directory, "main", "127.0.0.1:0", retention)
        self.recorder = Recorder(self.writer, self.manager, Redaction(redacted, b"key"))
        for _ in self.recorder.write_snapshot():
            pass
        self._as_lines = as_lines

    def step(self, command: Command, now: float) -> None:
        principal = command.context.principal if isinstance(command, Request) else None
        lines = self.recorder.begin_turn(now, principal and PRINCIPALS[principal]) if self._as_lines else []
        events = self.manager.step(command, now)
        first, others = events[0] if events else None, events
        if self._as_lines and isinstance(first, core.Granted):
            lines.append(records.command_line(first.request))
            others = []
        elif self._as_lines and isinstance(command, Release) and isinstance(first, core.Released):
            lines.append(release_line(command.id))
            others = events[1:]
        elif isinstance(first, core.QueueFull | core.GraphFull):
            self.recorder.on_id_skipped(now)
        if others:
            line = records.command_line(command) if self._as_lines and isinstance(command, Request) else None
            self.recorder.on_events(others, now, line)
        self.recorder.on_stored()

    def request(
        self, now: float, *exclusive: str, principal: str | None = None, note: str | None = None, **fields: Any
    ) -> Request:
        request = Request((), exclusive, context=Context(principal, note), **fields)
        self.step(request, now)
        return request

    def release(self, now: float, request: Request) -> None:
        self.step(Release(request.id), now)

    def drop_write(self, now: float) -> None:
        """Do as if a write had been dropped."""
        self.writer._dropped_by_loop = DroppedWrites(1, T0 + now)

    def stop(self) -> None:
        self.recorder.stop()
        self.writer.join(120)
        assert self.writer._closed.is_set(), "the thread still writes, or archives"
        assert not self.writer._has_failed


def release_line(id: int) -> bytes:
    """Return the line with which a client releases a request."""
    return b' {"payload":{"id":%d}, "command":"release"}\r' % id
