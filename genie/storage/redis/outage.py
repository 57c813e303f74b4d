"""Records the interruptions of Redis that a leader or a follower observes, and logs their duration."""

from __future__ import annotations

from dataclasses import replace

from structlog.typing import FilteringBoundLogger

from genie.roles import StoreOutage
from genie.storage.redis.connection import describe_failure
from genie.storage.redis.primary import CALL_TIMEOUT_S, NoReply, is_denied
from genie.storage.redis.url import Address

LOG_INTERVAL_S = 10.0
"""During an outage, an error that does not change is logged once per interval."""


def failed_since(error: BaseException, now: float) -> float:
    """Return the event-loop time since which Redis has not answered: the start of the call after a timeout, or else `now`."""
    return now - CALL_TIMEOUT_S if isinstance(error, NoReply) else now


class OutageLog:
    """Records the current outage of Redis, which may begin while this node leads and end while this node follows."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self.failure_count = 0
        """How many operations failed because Redis was unreachable or rejected them."""
        self.current: StoreOutage | None = None
        """The current outage. None while Redis is available."""
        self._reached_at: float | None = None
        """When Redis answered for the first time after the last failure (event-loop time). None if it has not answered."""
        self._last_logged: tuple[bool, str] | None = None
        """The last failure of the current outage that was logged: whether this node led, and the error. None if none
        was."""
        self._logged_at = 0.0
        """When that failure was logged (event-loop time)."""

    def on_failure(self, error: BaseException, now: float, since: float, *, leads: bool) -> StoreOutage:
        """Count and log a failure, and return the outage to which it belongs. Times are event-loop times.

        If there is no outage, one begins, whose start is `since`. `leads` says whether this node leads. An error that
        repeats is logged every `LOG_INTERVAL_S`, or only once if a node that does not lead is denied access.
        """
        text = describe_failure(error)
        is_follower_denied = not leads and is_denied(error)
        self.failure_count += 1
        if self.current is None:
            self.current, self._last_logged = StoreOutage(since, text), None
        else:
            self.current = replace(self.current, error=text)
        self._reached_at = None
        is_repeated = (leads, text) == self._last_logged
        if is_repeated and (is_follower_denied or now - self._logged_at < LOG_INTERVAL_S):
            return self.current
        self._last_logged, self._logged_at = (leads, text), now
        if leads:
            self._log.warning("store unavailable, queueing commits", reason=text)
        elif is_follower_denied:
            hint = "check the password and the permissions of the Redis user"
            self._log.warning("store access denied, retrying slowly", reason=text, hint=hint)
        else:
            self._log.warning("store unavailable, not serving until it is back", reason=text)
        return self.current

    def on_reached(self, now: float) -> None:
        """Record that Redis has answered.

        If no further failure follows, `end` takes this time as the end of the outage.
        """
        if self.current is not None and self._reached_at is None:
            self._reached_at = now

    def end(self, address: Address | None, now: float) -> None:
        """End the outage, if there is one, and log its duration.

        `address` is the Redis that answers again, if known.
        """
        if self.current is None:
            return
        ended_at = now if self._reached_at is None else self._reached_at
        outage_ms = round((ended_at - self.current.since) * 1000)
        self.current = self._reached_at = None
        self._log.info("store available again", address=None if address is None else str(address), outage_ms=outage_ms)
