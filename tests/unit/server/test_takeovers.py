"""Repeated takeovers of a session are logged, at a limited rate and in bounded memory."""

from __future__ import annotations

from structlog.testing import capture_logs

from genie.server.takeovers import LOG_INTERVAL_MS, MAX_SESSIONS, WINDOW_MS, Takeovers


def test_the_third_takeover_within_the_window_is_logged_with_both_notes():
    with capture_logs() as logs:
        takeovers = Takeovers("orders")
        for now in (0.0, 1.0, 2.0):
            takeovers.record(1, ("api 1@a", "api 2@b"), "shop", now)
    assert logs == [
        {
            "event": "session taken over repeatedly",
            "log_level": "warning",
            "namespace": "orders",
            "takeovers": 3,
            "within_ms": 2,
            "hint": "two processes use the same session secret: give each process its own",
            "older_note": "api 1@a",
            "newer_note": "api 2@b",
            "principal": "shop",
        }
    ]


def test_takeovers_of_different_sessions_or_at_long_intervals_are_not_logged():
    with capture_logs() as logs:
        takeovers = Takeovers("orders")
        for number in range(10):
            takeovers.record(number, (None, None), None, 0.0)
            takeovers.record(100, (None, None), None, number * (WINDOW_MS + 1.0))
    assert logs == []


def test_the_log_has_at_most_one_line_in_an_interval():
    with capture_logs() as logs:
        takeovers = Takeovers("orders")
        for now in range(0, LOG_INTERVAL_MS * 3, 10):
            takeovers.record(now % 20, (None, None), None, float(now))
    assert len(logs) == 3


def test_the_memory_is_bounded():
    takeovers = Takeovers("orders")
    for number in range(2 * MAX_SESSIONS):
        takeovers.record(number, (None, None), None, 0.0)
    assert len(takeovers._recent) == MAX_SESSIONS
