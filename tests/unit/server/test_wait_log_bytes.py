"""Clients cannot fill the log with long texts of requests that wait long, or that cause deadlocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from genie.core import Context, LockManager, Request
from genie.core.events import Cycle, Wait
from genie.observability.logs import _dumps
from genie.observability.stats import Deadlock, Stats
from genie.server import monitor as monitor_module
from genie.server.monitor import MAX_LOGGED_BYTES, MAX_LOGGED_CHARACTERS, MAX_LOGGED_EVENTS, Monitor
from genie.server.pipeline import Pipeline

MAX_LINE_BYTES = 100_000
SAMPLES = 100
TEXT = "\u202e" * 500


def name(number: int) -> str:
    return f"{TEXT}{number}"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The event-loop time in s of the monitor: its attribute `s`."""
    clock = SimpleNamespace(s=0.0)
    loop = SimpleNamespace(time=lambda: clock.s, call_at=lambda *_: None)
    monkeypatch.setattr(monitor_module.asyncio, "get_running_loop", lambda: loop)
    return clock


def sample(monitor: Monitor, now: SimpleNamespace) -> list[Any]:
    """Take a sample 0.1 s after the last one, and return its lines of the log."""
    now.s += 0.1
    with capture_logs() as logs:
        monitor._sample()
    return logs


def test_the_lines_about_slow_waits_are_limited_in_bytes(now: SimpleNamespace) -> None:
    stats, manager = Stats(), LockManager()
    context = Context(note=TEXT[:256])
    names = tuple(map(name, range(10)))
    for each in names:
        manager.step(Request(exclusive=(each,), transaction=each, context=context), 0)
    pipeline = cast("Pipeline", SimpleNamespace(now=1_000_000.0, manager=manager))
    monitor = Monitor("genie", stats, None, 1.0, lambda: pipeline)

    def wait() -> None:
        for _ in range(MAX_LOGGED_EVENTS + 5):
            request = Request(exclusive=names, transaction=name(0), context=context)
            manager.step(request, 0)
            stats.recent_waiters[request.id] = request

    check_bounds(monitor, now, wait, MAX_LOGGED_EVENTS + 5)


def test_the_lines_about_deadlocks_are_limited_in_bytes(now: SimpleNamespace) -> None:
    stats = Stats()
    monitor = Monitor("genie", stats, None, 1.0, lambda: None)
    waits = tuple(Wait(name(step), 1, 2, Context(note=TEXT[:256])) for step in range(30))
    deadlock = Deadlock(0.0, 1, name(0), Cycle(tuple(map(name, range(30))), waits))

    def detect() -> None:
        stats.deadlocks.extend([deadlock] * 15)
        stats._unreported_deadlocks += 15

    check_bounds(monitor, now, detect, 15)


def check_bounds(monitor: Monitor, now: SimpleNamespace, cause_events: Any, count: int) -> None:
    """Cause `count` events before each of many samples, and check the lines of a minute, and the first ones of the next."""
    lines: list[Any] = []
    for _ in range(SAMPLES):
        cause_events()
        lines += sample(monitor, now)
    encoded = [_dumps(line) for line in lines]
    assert max(map(len, encoded)) < MAX_LINE_BYTES
    assert MAX_LOGGED_BYTES / 2 < sum(map(len, encoded)) < 1.1 * MAX_LOGGED_BYTES + MAX_LINE_BYTES
    assert max(map(len, texts(lines))) == MAX_LOGGED_CHARACTERS
    now.s += monitor_module.BYTES_INTERVAL_S
    following = sample(monitor, now)
    assert len(following) == 1, "a line counts the events without one"
    logged = sum("id" in line for line in lines)
    assert logged + sum(line.get("count", 0) for line in lines + following) == SAMPLES * count
    cause_events()
    assert "id" in sample(monitor, now)[0]


def texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for child in children for text in texts(child)]
