"""Records the interruptions of Redis that a leader or a follower observes, and logs their duration."""

from __future__ import annotations

from dataclasses import replace

from structlog.typing import FilteringBoundLogger

from genie.roles import StoreOutage
from genie.storage.redis.primary import CALL_TIMEOUT_S, NoReply, is_denied
from genie.storage.redis.url import Address

LOG_INTERVAL_S = 10.0
"""During an outage, an error that does not change is logged once per interval."""


def failed_since(error: BaseException, now: float) -> float:
    """Return the time since which Redis has not answered: the start of the call after a timeout, or else `now`."""
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
        """When Redis answered for the first time after the last failure. None if it has not answered."""
        self._logged: tuple[bool, str] | None = None
        """Whether this node led at the last failure that was logged, and its error. None if the outage has no such failure."""
        self._logged_at = 0.0

    def on_failure(self, error: BaseException, now: float, since: float, *, leads: bool) -> StoreOutage:
        """Count and log a failure, and return the outage to which it belongs. Times are event-loop times.

        The first failure begins an outage, whose start is `since`. `leads` says whether this node leads. A failure is logged
        if `leads` or the error differs from the last one. Otherwise it is logged every `LOG_INTERVAL_S`, except if
        a server that does not lead is denied access.
        """
        text, denied = str(error) or type(error).__name__, not leads and is_denied(error)
        self.failure_count += 1
        if self.current is None:
            self.current, self._logged = StoreOutage(since, text), None
        else:
            self.current = replace(self.current, error=text)
        self._reached_at = None
        if (leads, text) == self._logged and (denied or now - self._logged_at < LOG_INTERVAL_S):
            return self.current
        self._logged, self._logged_at = (leads, text), now
        if leads:
            self._log.warning("store unavailable, queueing commits", reason=text)
        elif denied:
            self._log.warning("store access denied, retrying slowly", reason=text)
        else:
            self._log.warning("store unavailable, not serving until it is back", reason=text)
        return self.current

    def on_reached(self, now: float) -> None:
        """Record that Redis has answered. The outage ends at this time if no further failure follows before `end`."""
        if self.current is not None and self._reached_at is None:
            self._reached_at = now

    def end(self, address: Address | None, now: float) -> None:
        """End the outage, if there is one, and log its duration.

        `address` is that of the Redis that answers again, if known.
        """
        if self.current is None:
            return
        ended_at = now if self._reached_at is None else self._reached_at
        outage_ms = round((ended_at - self.current.since) * 1000)
        self.current = self._reached_at = None
        self._log.info("store available again", address=None if address is None else str(address), outage_ms=outage_ms)
