"""The live requests of a client, with their timers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from genie.client.commands import Extend, Release, Request, RequestState

MIN_SCAN_INTERVAL_PER_REQUEST_S = 1e-6
"""Minimum time between two scans of all requests, per request. It bounds the share of CPU time that scans take."""


@dataclass(slots=True)
class TimerEvents:
    """The requests whose timers have fired, by kind of timer."""

    expired: list[Request] = field(default_factory=list)
    """Held locks whose transaction timeout has passed, or whose lease has ended."""
    renewing: list[Request] = field(default_factory=list)
    """Held locks that must be extended now, because they have a watchdog."""
    overdue: list[Request] = field(default_factory=list)
    """Waiting requests whose response deadline has passed."""


class LiveRequests:
    """The requests of a client that wait, are held, or are being released, with their timers.

    A request that has ended, or whose lock is lost, is removed.

    The client also detects an expired lock by its own clock, because it may be disconnected. It counts the timeout from the
    time at which it sent the answered command, so the lock never ends at the server before it ends at the client.
    """

    def __init__(self) -> None:
        self.by_ref: dict[str, Request] = {}
        self.by_id: dict[int, Request] = {}
        """The requests whose id the server has sent."""
        self.next_timer = math.inf
        """The time at which `collect_timers` must be called; inf: never."""

    # -- the index ----------------------------------------------------------------------------------------

    def add(self, request: Request, response_deadline: float) -> None:
        """Add a new request, whose caller gives up at the deadline. A reconnect does not move the deadline."""
        self.by_ref[request.ref] = request
        request.response_deadline = response_deadline
        self.next_timer = min(self.next_timer, response_deadline)

    def set_id(self, request: Request, new_id: int) -> None:
        """Store the id that the server assigned to a request, and drop its previous id.

        A request that is sent again may get a different id.
        """
        if request.id != new_id:
            self.by_id.pop(request.id, None)
            request.id = new_id
            self.by_id[new_id] = request

    def clear_grant(self, request: Request) -> None:
        """Reset the id and the fencing token of a waiting request to unknown (0), because the server may assign new ones."""
        self.by_id.pop(request.id, None)
        request.id = 0
        request.fence = 0

    def remove(self, request: Request) -> None:
        """Remove a request that has ended, or that was detached."""
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
        """Return the unconfirmed releases that identify their request by its `ref`, since its id is not known."""
        releases = [request.release for request in self.by_ref.values() if request.release is not None]
        return [release for release in releases if not release.id]

    # -- timers -------------------------------------------------------------------------------------------

    def start_hold(self, request: Request, since: float, remaining: float | None = None) -> None:
        """Start the expiry timer of a lock that the server has granted, extended or confirmed.

        The lock expires `remaining` seconds after `since`; None: its transaction timeout after `since`. If the lock has
        a watchdog, the client extends the lock when a third of these seconds has passed.
        """
        duration_s = request.transaction_timeout if remaining is None else remaining
        request.expires_at = since + duration_s
        if request.watchdog:
            request.renew_at = since + duration_s / 3
            self.next_timer = min(self.next_timer, request.renew_at)
        ends_at = request.hold_ends_at
        self.next_timer = min(self.next_timer, ends_at)

    def limit_hold(self, request: Request, extend: Extend) -> None:
        """Let a held lock expire earlier if an extension that is being sent shortens the lock.

        The server may execute the extension although no answer arrives.
        """
        request.last_extension = extend.ref
        ends_at = extend.sent_at + extend.transaction_timeout
        if request.state is RequestState.HELD and ends_at < request.expires_at:
            request.expires_at = ends_at
            request.shortened_by = extend.ref
            self.next_timer = min(self.next_timer, ends_at)

    def renew_all(self, now: float) -> None:
        """Make all watchdogs extend their locks now: the last extensions may have been lost with the old connection."""
        for request in self.by_id.values():
            if request.watchdog and request.state is RequestState.HELD:
                request.renew_at = now
                self.next_timer = now

    def collect_timers(self, now: float) -> TimerEvents:
        """Return the requests whose timers have fired, and compute `next_timer` from the timers that have not.

        The timer of a fired watchdog is restarted. The caller must end the expired and the overdue requests.
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
        # Many timers at different times must not cause a scan for each of them.
        self.next_timer = max(next_timer, now + MIN_SCAN_INTERVAL_PER_REQUEST_S * len(self.by_ref))
        return fired
