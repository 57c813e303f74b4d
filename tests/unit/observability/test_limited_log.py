"""Clients cannot fill the log with lines that cost them nothing."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from genie.observability import limited_log
from genie.observability.limited_log import MAX_LINES, log_limited
from support.processes.waiting import until


async def test_an_event_is_logged_ten_times_and_then_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_log, "INTERVAL_S", 0.05)
    with capture_logs() as logs:
        for number in range(3_000):
            log_limited("warning", "authentication failed", peer=number)
        log_limited("info", "TLS handshake failed", peer=1)
        assert len(logs) == MAX_LINES + 1
        await until(lambda: not limited_log._counts_by_loop[asyncio.get_running_loop()])
        assert logs[MAX_LINES + 1 :] == [
            {
                "event": "log entries omitted",
                "log_level": "warning",
                "omitted_event": "authentication failed",
                "count": 3_000 - MAX_LINES,
                "interval_s": 0.05,
            }
        ]
        log_limited("warning", "authentication failed", peer=0)
        assert logs[-1]["peer"] == 0
