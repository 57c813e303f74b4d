"""The timer of the next deadline of requests and sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from math import ceil, inf

from genie.core import LockManager
from genie.core.deadlines import Deadlines


class ExpiryTimer:
    """Fires at the earliest deadline, or at once if grants are pending or `waiting_events` is not empty.

    `clock` returns the lock manager's time in ms.
    """

    __slots__ = ("_clock", "_events", "_loop", "_manager", "_timer", "at", "request_deadlines", "session_deadlines")

    def __init__(
        self, manager: LockManager, session_deadlines: Deadlines, waiting_events: Sized, clock: Callable[[], float]
    ) -> None:
        self.request_deadlines = manager.deadlines
        self.session_deadlines = session_deadlines
        self.at = inf
        """The lock manager's time (ms) at which the timer fires. Infinite if it is not set."""
        self._manager = manager
        self._events = waiting_events
        """The watch events that wait for the next batch."""
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def set(self, on_expiry: Callable[[], None]) -> None:
        """Call `on_expiry` at the earliest deadline, unless the timer fires earlier anyway.

        The timer is not cancelled when a request ends before its deadline: it then fires and finds nothing to expire.
        """
        deadline = min(self.request_deadlines.next, self.session_deadlines.next)
        if self._manager.pending_grants or self._events:
            deadline = self.request_deadlines.soonest = 0.0  # the timer must be set again if it fires during a commit
        if deadline < self.at:
            self.cancel()
            self.at = deadline
            delay_s = max(0, ceil(deadline - self._clock())) / 1000  # in whole ms, which is what uvloop's timers count
            self._timer = self._loop.call_later(delay_s, self._fire, on_expiry)

    def cancel(self) -> None:
        """Cancel the timer, if it is set."""
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self, on_expiry: Callable[[], None]) -> None:
        self._timer, self.at = None, inf
        on_expiry()
