"""How a client notices a server that has stopped, or hangs, while the connection to it stands."""

from __future__ import annotations

import math

QUIET_S = 2.0
"""Seconds without a word after which the server is asked whether it is there.

A stopped leader is replaced when its lease is over, 3 s by default: what waits or is held should move to the next one
about then, and before the hold of a watchdog (10 s by default, of which a third may have passed) or the session ends.
Sooner would not help, and every connection on which somebody waits costs the server a `ping` so often.
"""
LEAST_QUIET_S = 0.1
"""A server that recommends less is pinged so often."""
STEP_S = 1.0
STEPS = 3
"""So many steps of so many seconds a server may take for a word after that.

A leader whose store is away says so only when its store timeout (2 s by default) has passed and it has looked at its
clock, and one that is busy may take as long. An alarm that was false costs no more than a new connection.
"""


class Silence:
    """Wants to be asked at `wake` what is to be done.

    `connect_timeout` (seconds): who bears less of a server that is to be reached bears less of one that was.

    The answer is waited for in steps, each from when the one before it was noticed. So a client that was stopped or busy
    itself, and finds at once that much time has passed, reads what has come meanwhile before it takes the server for
    gone.
    """

    def __init__(self, connect_timeout: float) -> None:
        self.wake = math.inf
        self._most_quiet_s = connect_timeout / 2
        self._quiet_s = min(QUIET_S, self._most_quiet_s)
        self._step_s = min(STEP_S, connect_timeout / 4)
        self._heard_at = 0.0
        self._steps = 0

    def set_interval(self, seconds: float) -> None:
        """Ping the server after so many seconds without a message, as it recommends; 0: as by default."""
        if seconds > 0:
            self._quiet_s = min(max(seconds, LEAST_QUIET_S), self._most_quiet_s)

    def watch(self, now: float) -> None:
        """From now on a word of the server is due, sooner or later."""
        if self.wake == math.inf:
            self.heard(now)
            self.wake = now + self._quiet_s

    def heard(self, now: float) -> None:
        """The server has said something."""
        self._heard_at = now
        self._steps = 0

    def rest(self) -> None:
        """Nothing is due any more, or there is no connection."""
        self.wake = math.inf
        self._steps = 0

    def asks(self, now: float) -> bool:
        """Whether to ask the server now; to be called at `wake`, which is set anew."""
        asks = False
        if self._steps:
            self._steps += 1
        elif now >= self._heard_at + self._quiet_s:
            self._steps = 1
            asks = True
        self.wake = now + self._step_s if self._steps else self._heard_at + self._quiet_s
        return asks

    @property
    def too_long(self) -> bool:
        """Whether the server was asked, and has said nothing for as long as it may."""
        return self._steps > STEPS
