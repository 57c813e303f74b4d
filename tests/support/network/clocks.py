"""The clocks and timeouts of clients under test, so that results do not depend on the speed of the machine."""

from __future__ import annotations

import time

import pytest

from genie.client import clock
from genie.client.keepalive import PING_INTERVAL_S, PING_TIMEOUT_STEP_S
from genie.client.session import ClientSession
from support.processes.servers import WAIT_S

LONG_S = WAIT_S / 2
"""Longer than any operation takes, and shorter than WAIT_S, so that a `skip` of it does not end such a timeout."""

LONG_TIMEOUTS = {"connect_timeout": WAIT_S, "response_timeout": WAIT_S, "session_timeout": WAIT_S}
"""Arguments of `connect` for a client that outlives any restart of its server."""


def skip(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Advance the monotonic clock of clients and of asyncio event loops."""
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + seconds)
    suspend(monkeypatch, seconds)


def suspend(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Advance the clock of clients alone, as if the machine had been suspended: the timers of event loops do not advance."""
    now = clock.now
    monkeypatch.setattr(clock, "now", lambda: now() + seconds)


def shorten_keepalive(session: ClientSession, now: float) -> None:
    """Start the ping timer now, with a short interval and a short ping timeout, for the current connection only."""
    keepalive, stop = session.calls.keepalive, session.calls.keepalive.stop

    def restore_and_stop() -> None:
        keepalive.ping_interval_s, keepalive.timeout_step_s = PING_INTERVAL_S, PING_TIMEOUT_STEP_S
        stop()

    keepalive.ping_interval_s, keepalive.timeout_step_s = 0.25, 0.125
    keepalive.stop = restore_and_stop  # type: ignore[method-assign]
    keepalive.next_timer = now
