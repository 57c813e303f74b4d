"""The live requests of a client, with their timers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from genie.client.commands import Extend, Release, Request, RequestState

MIN_SCAN_INTERVAL_PER_REQUEST_S = 1e-6
"""Minimum time between two scans of all requests, for each request. It limits the share of CPU time that scans take."""


@dataclass(slots=True)
class TimerEvents:
    """The requests whose timers have fired, by kind of timer."""

    expired: list[Request] = field(default_factory=list)
    """Held locks whose transaction timeout has passed, or whose lease has ended."""
    renewing: list[Request] = field(default_factory=list)
    """Held locks that their watchdog must extend now."""
    overdue: list[Request] = field(default_factory=list)
    """Waiting requests whose response deadline has passed."""


class LiveRequests:
    """The requests of a client that wait, are held, or are being released, with their timers.

    Times are in seconds of the monotonic clock. The client detects an expired lock by this clock, because it may be
    disconnected. It counts the timeout of a lock from the time at which it sent the answered command. So the lock never
    ends at the server before it ends at the client.
    """

    def __init__(self) -> None:
        self.by_ref: dict[str, Request] = {}
        self.by_id: dict[int, Request] = {}
        """The requests whose id the server has sent."""
        self.next_timer = math.inf
        """When `collect_timers` must be called. Infinite if there is no timer."""

    # -- the index ----------------------------------------------------------------------------------------

    def add(self, request: Request, response_deadline: float) -> None:
        """Add a new request, whose caller gives up at `response_deadline`, even if the client reconnects in between."""
        self.by_ref[request.ref] = request
        request.response_deadline = response_deadline
        self.next_timer = min(self.next_timer, response_deadline)

    def set_id(self, request: Request, new_id: int) -> None:
        """Store the id that the server assigned to a request. A request that is sent again may get another id."""
        if request.id != new_id:
            self.by_id.pop(request.id, None)
            request.id = new_id
            self.by_id[new_id] = request

    def clear_grant(self, request: Request) -> None:
        """Forget the id and the fencing token of a waiting request, because the server may assign new ones."""
        self.by_id.pop(request.id, None)
        request.id = 0
        request.fence = 0

    def remove(self, request: Request) -> None:
        """Remove a request that has ended, whose lock is lost, or that was detached."""
        self.by_ref.pop(request.ref, None)
        self.by_id.pop(request.id, None)

    def waiting(self) -> list[Request]:
        """Return the requests that are neither granted nor released yet."""
        return [request for request in self.by_ref.values() if request.state is RequestState.WAITING]

    @property
    def needs_lease(self) -> bool:
        """True if any waiting or held request is bound to the session."""
        return any(
            request.bound_to_session
            for request in self.by_ref.values()
            if request.state in (RequestState.WAITING, RequestState.HELD)
        )

    def releases_by_ref(self) -> list[Release]:
        """Return the unconfirmed releases that have the `ref` of their request, because its id is not known."""
        releases = [request.release for request in self.by_ref.values() if request.release is not None]
        return [release for release in releases if not release.id]

    # -- timers -------------------------------------------------------------------------------------------

    def start_hold(self, request: Request, since: float, remaining: float | None = None) -> None:
        """Start the expiry timer of a lock that the server has granted, extended or confirmed.

        The lock expires `remaining` seconds after `since`. None stands for its transaction timeout. If the lock has a
        watchdog, the client extends the lock when a third of these seconds has passed.
        """
        duration_s = request.transaction_timeout if remaining is None else remaining
        request.expires_at = since + duration_s
        if request.watchdog:
            request.renew_at = since + duration_s / 3
            self.next_timer = min(self.next_timer, request.renew_at)
        self.next_timer = min(self.next_timer, request.expires_at, request.lease.ends_at)

    def limit_hold(self, request: Request, extend: Extend) -> None:
        """Expire a held lock earlier on this client's clock if an extension that is being sent shortens the lock.

        The client does not wait for the answer, because the server may execute the extension even if no answer arrives.
        """
        request.last_extension = extend.ref
        ends_at = extend.sent_at + extend.transaction_timeout
        if request.state is RequestState.HELD and ends_at < request.expires_at:
            request.expires_at = ends_at
            request.shortened_by = extend.ref
            self.next_timer = min(self.next_timer, ends_at)

    def renew_all(self, now: float) -> None:
        """Make all watchdogs extend their locks now, because extensions may have been lost with the earlier connection."""
        for request in self.by_id.values():
            if request.watchdog and request.state is RequestState.HELD:
                request.renew_at = now
                self.next_timer = now

    def collect_timers(self, now: float) -> TimerEvents:
        """Return the requests whose timers have fired, and set `next_timer` to the earliest of the other timers.

        The timer of a watchdog that has fired is restarted. The caller must end the expired and the overdue requests.
        """
        fired = TimerEvents()
        next_timer = math.inf
        for request in self.by_ref.values():
            if request.state is RequestState.WAITING:
                if request.response_deadline <= now:
                    fired.overdue.append(request)
                else:
                    next_timer = min(next_timer, request.response_deadline)
            elif request.state is RequestState.HELD:
                if request.hold_ends_at <= now:
                    fired.expired.append(request)
                    continue
                if request.renew_at <= now:
                    request.renew_at = now + request.transaction_timeout / 3
                    fired.renewing.append(request)
                next_timer = min(next_timer, request.hold_ends_at, request.renew_at)
            # A RELEASING request has no timer here.
        earliest_scan_at = now + MIN_SCAN_INTERVAL_PER_REQUEST_S * len(self.by_ref)  # one scan for several timers
        self.next_timer = max(next_timer, earliest_scan_at)
        return fired
