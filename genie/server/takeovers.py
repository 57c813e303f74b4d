"""Session takeovers: a newer connection sends the secret of a session that still has a connection.

One takeover is normal: a client reconnects before the server has noticed the loss of its connection. Many takeovers of one
session in a short time mean that two processes use the same secret, which is logged.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import Final

import structlog

from genie.errors import Code, RequestRejected

log = structlog.get_logger()

TAKEN_OVER: Final = RequestRejected(
    Code.SESSION_TAKEN_OVER,
    "a newer connection sent the secret of this session, so this connection is closed; if another process opened the newer "
    "connection, two processes use the same secret: give each process its own",
)
"""The last message on a connection whose session was taken over."""

MIN_LOGGED_TAKEOVERS: Final = 3
"""Minimum number of takeovers of one session within `WINDOW_MS` that is logged."""
WINDOW_MS: Final = 10_000
LOG_INTERVAL_MS: Final = 10_000
"""Minimum time in ms between two log lines, for all sessions together."""
MAX_SESSIONS: Final = 1_000
"""Maximum number of sessions whose takeovers are counted. The session with the least recent takeover is dropped."""


class Takeovers:
    """Finds the sessions that are taken over repeatedly, and logs them at a limited rate. Times are in ms."""

    def __init__(self, namespace: str) -> None:
        self._log = log.bind(namespace=namespace)
        self._recent: OrderedDict[int, tuple[float, int]] = OrderedDict()
        """The time at which the current window began, and the number of takeovers in it, by session number."""
        self._logged_at = -inf

    def record(self, session: int, notes: tuple[str | None, str | None], principal: str | None, now: float) -> None:
        """Record a takeover of the session with this number.

        `notes` are the notes of the older and the newer client.
        """
        began_at, count = self._recent.pop(session, (now, 0))
        if now - began_at > WINDOW_MS:
            began_at, count = now, 0
        self._recent[session] = began_at, count + 1
        if len(self._recent) > MAX_SESSIONS:
            self._recent.popitem(last=False)
        if count + 1 >= MIN_LOGGED_TAKEOVERS and now - self._logged_at >= LOG_INTERVAL_MS:
            self._logged_at = now
            older_note, newer_note = notes
            optional = {"older_note": older_note, "newer_note": newer_note, "principal": principal}
            self._log.warning(
                "session taken over repeatedly",
                takeovers=count + 1,
                within_ms=round(now - began_at),
                hint="two processes use the same session secret: give each process its own",
                **{name: value for name, value in optional.items() if value is not None},
            )
