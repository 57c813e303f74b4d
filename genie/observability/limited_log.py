"""A limit on the lines of the log that clients can cause without authentication."""

from __future__ import annotations

import asyncio
from typing import Any, Final
from weakref import WeakKeyDictionary

import structlog

log = structlog.get_logger()

MAX_LINES: Final = 10
"""Number of lines of one event within `INTERVAL_S` that are logged."""
INTERVAL_S: Final = 10.0


class _Interval:
    """The lines of one event since its first line, for `INTERVAL_S`."""

    __slots__ = ("lines", "omitted")

    def __init__(self) -> None:
        self.lines = 0
        self.omitted = 0


_intervals: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Interval]] = WeakKeyDictionary()
"""The intervals that have not ended, by event loop and event."""


def log_limited(level: str, event: str, **fields: Any) -> None:
    """Log an event, at most `MAX_LINES` times in `INTERVAL_S`. A line at the end of the interval counts the omitted events.

    Must be called in an event loop, whose timer ends the interval.
    """
    loop = asyncio.get_running_loop()
    intervals = _intervals.setdefault(loop, {})
    interval = intervals.get(event)
    if interval is None:
        interval = intervals[event] = _Interval()
        loop.call_later(INTERVAL_S, _end, intervals, event)
    interval.lines += 1
    if interval.lines <= MAX_LINES:
        getattr(log, level)(event, **fields)
    else:
        interval.omitted += 1


def _end(intervals: dict[str, _Interval], event: str) -> None:
    """End the interval of an event, and log how many of its lines are omitted."""
    omitted = intervals.pop(event).omitted
    if omitted:
        log.warning("log entries omitted", omitted_event=event, count=omitted, interval_s=INTERVAL_S)
