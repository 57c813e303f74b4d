"""A limit on the lines of the log that clients can cause without authentication."""

from __future__ import annotations

import asyncio
from typing import Any, Final
from weakref import WeakKeyDictionary

import structlog

log = structlog.get_logger()

INTERVAL_S: Final = 10.0
"""Length of the interval that begins with the first line of an event."""
MAX_LINES: Final = 10
"""Maximum number of lines of one event that are logged in an interval."""

LineCounts = dict[str, int]
"""By event, the number of lines in the current interval. Omitted lines count."""
_counts_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, LineCounts] = WeakKeyDictionary()


def log_limited(level: str, event: str, **fields: Any) -> None:
    """Log an event at most `MAX_LINES` times in `INTERVAL_S`. `level` is the name of a level, such as `warning`.

    At the end of the interval, a line has the number of omitted lines. Must be called in an event loop, whose timer
    ends the interval.
    """
    loop = asyncio.get_running_loop()
    counts = _counts_by_loop.setdefault(loop, {})
    if event not in counts:
        counts[event] = 0
        loop.call_later(INTERVAL_S, _end_interval, counts, event)
    counts[event] += 1
    if counts[event] <= MAX_LINES:
        getattr(log, level)(event, **fields)


def _end_interval(counts: LineCounts, event: str) -> None:
    """End the interval of an event, and log how many of its lines were omitted."""
    omitted_count = counts.pop(event) - MAX_LINES
    if omitted_count > 0:
        log.warning("log entries omitted", omitted_event=event, count=omitted_count, interval_s=INTERVAL_S)
