"""The durations of calls: a number of seconds, or a `timedelta`."""

from __future__ import annotations

import inspect
import warnings
from datetime import timedelta

from genie.protocol.limits import MAX_TIMEOUT_MS

SUSPICIOUS_S = 10_000
"""From this many seconds on, the number may have been meant in milliseconds, the unit of the protocol: 60000 for a minute."""

_warned_names: set[str] = set()
"""The names of the arguments for which a warning was emitted. Each is warned about once."""


def to_seconds(duration: float | timedelta, name: str) -> float:
    """Return a duration in seconds. `name` is the name of the argument, for the warning.

    The first number of `SUSPICIOUS_S` or more for an argument emits a UserWarning, because it may be in milliseconds. The
    range is not checked here: the caller rejects a number that is too great.
    """
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    if SUSPICIOUS_S <= duration <= MAX_TIMEOUT_MS / 1000 and name not in _warned_names:
        _warned_names.add(name)
        _warn_of_milliseconds(duration, name)
    return duration


def _warn_of_milliseconds(seconds: float, name: str) -> None:
    """Emit the warning at the line of the program that called Genie."""
    warnings.warn(
        f"{name}={seconds!r} is in seconds, that is {timedelta(seconds=seconds)}. If milliseconds are meant, "
        f"write {name}={seconds / 1000:g}; if not, write timedelta(seconds={seconds!r}), which never warns",
        UserWarning,
        stacklevel=_stack_level(),
    )


def _stack_level() -> int:
    """Return the `stacklevel` argument of `warnings.warn` for the innermost frame outside of the package `genie`."""
    frame = inspect.currentframe()
    level = 0
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("genie."):
        frame = frame.f_back
        level += 1
    return level
