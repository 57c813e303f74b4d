"""Logs that this process was paused: stopped by a signal or a debugger, suspended with its machine, or without a processor.

A leader that was paused for longer than its lease has lost its leadership, and its log would otherwise not say why.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from genie.server.machine import Machine

log = structlog.get_logger()

CHECK_INTERVAL_S = 0.25
MIN_PAUSE_S = 1.0
"""A shorter pause is not logged: the metric of the event-loop lag includes it."""


class PauseDetector:
    """Checks by a timer whether the process was paused, from its creation until `stop`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._schedule()

    def stop(self) -> None:
        """Cancel the timer."""
        self._timer.cancel()

    def _schedule(self) -> None:
        """Set the timer of the next check."""
        self._due_at, self._cpu_s = self._machine.elapsed_s() + CHECK_INTERVAL_S, time.process_time()
        self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check)

    def _check(self) -> None:
        """Log a pause if the timer fired late although the process has used little processor time since the last check."""
        late_s, used_cpu_s = self._machine.elapsed_s() - self._due_at, time.process_time() - self._cpu_s
        if late_s >= MIN_PAUSE_S and used_cpu_s < late_s / 2:
            log.warning(
                "process paused",
                paused_ms=round(late_s * 1000),
                reason="it was stopped, suspended with its machine, or got no processor time",
            )
        self._schedule()
