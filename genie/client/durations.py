"""The durations of calls: a number of seconds, or a `timedelta`."""

from __future__ import annotations

import inspect
import warnings
from datetime import timedelta

from genie.protocol.limits import MAX_TIMEOUT_MS

SUSPECTED_FROM_S = 10_000
"""A number of at least this size may be meant in milliseconds, the unit of the protocol: 60000 for a minute."""

_warned_of: set[str] = set()
"""The names of the arguments for which a warning was emitted, so that it is emitted once for each."""


def to_seconds(duration: float | timedelta, name: str) -> float:
    """Return a duration in seconds. `name` is the name of the argument.

    The first plain number of `SUSPECTED_FROM_S` or more emits a UserWarning, which names both units. The caller rejects
    a number that is too great.
    """
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    if SUSPECTED_FROM_S <= duration <= MAX_TIMEOUT_MS / 1000 and name not in _warned_of:
        _warned_of.add(name)
        _warn(duration, name)
    return duration


def _warn(seconds: float, name: str) -> None:
    """Emit the warning at the line of the program that called Genie."""
    warnings.warn(
        f"{name}={seconds!r} is in seconds, that is {timedelta(seconds=seconds)}. If milliseconds are meant, "
        f"write {name}={seconds / 1000:g}; if not, write timedelta(seconds={seconds!r}), which never warns",
        UserWarning,
        stacklevel=_stack_level(),
    )


def _stack_level() -> int:
    """Return the `stacklevel` of the first frame outside of this package, counted from the caller."""
    frame = inspect.currentframe()
    level = 0
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("genie."):
        frame = frame.f_back
        level += 1
    return level
