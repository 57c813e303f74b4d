"""The live requests of a client with their timers, the lease of its session, and the keepalive of its connection."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from genie.client.commands import Extend, Lease, Release, Request, RequestState

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

    A request that has ended, or whose lock is lost, is removed. `response_timeout` (seconds) is how long a caller waits
    for a server, in addition to the queue timeout.

    The client also detects an expired lock by its own clock, because it may be disconnected. It counts the timeout from the
    time at which it sent the command that the server answered, so the lock never ends at the server before.
    """

    def __init__(self, response_timeout: float) -> None:
        self.by_ref: dict[str, Request] = {}
        self.by_id: dict[int, Request] = {}
        """The requests whose id the server has sent."""
        self.next_timer = math.inf
        """The time at which `collect_timers` must be called; inf: never."""
        self._response_timeout = response_timeout
        """Seconds that a caller waits for a server, in addition to the queue timeout."""

    # -- the index ----------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Add a new request, and start the timer after which its caller gives up.

        A reconnect does not restart it, so that the caller waits no longer than its queue timeout and the response timeout.
        """
        self.by_ref[request.ref] = request
        request.response_deadline = now + request.queue_timeout + self._response_timeout
        self.next_timer = min(self.next_timer, request.response_deadline)

    def set_id(self, request: Request, id: int) -> None:
        """Store the id that the server has assigned to a request. A request that was sent again may get another id."""
        if request.id != id:
            self.by_id.pop(request.id, None)
            request.id = id
            self.by_id[id] = request

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
        """Whether any waiting or held request is bound to the session."""
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
        self.next_timer = min(self.next_timer, request.hold_ends_at)

    def limit_hold(self, request: Request, extend: Extend) -> None:
        """Let a held lock expire earlier if an extension that is being sent shortens the lock.

        The server may execute the extension although no answer arrives.
        """
        ends_at = extend.sent_at + extend.transaction_timeout
        if request.state is RequestState.HELD and ends_at < request.expires_at:
            request.expires_at = ends_at
            request.shortened_by = extend.ref
            self.next_timer = min(self.next_timer, ends_at)

    def on_disconnected(self) -> None:
        """Mark the releases by `ref` as possibly executed, because the server may have received them."""
        for release in self.releases_by_ref():
            release.maybe_executed = True

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
        self.next_timer = math.inf
        for request in self.by_ref.values():
            if request.state is RequestState.RELEASING:  # has no timer in this class
                continue
            if request.state is RequestState.WAITING:
                if request.response_deadline <= now:
                    fired.overdue.append(request)
                    continue
            elif request.hold_ends_at <= now:
                fired.expired.append(request)
                continue
            elif request.renew_at <= now:
                request.renew_at = now + request.transaction_timeout / 3
                fired.renewing.append(request)
            self._update_next_timer(request)
        # Many timers at different times must not cause a scan for each of them.
        self.next_timer = max(self.next_timer, now + MIN_SCAN_INTERVAL_PER_REQUEST_S * len(self.by_ref))
        return fired

    def _update_next_timer(self, request: Request) -> None:
        """Make `next_timer` earlier if a timer of this request is earlier."""
        if request.state is RequestState.HELD:
            self.next_timer = min(self.next_timer, request.hold_ends_at, request.renew_at)
        else:
            self.next_timer = min(self.next_timer, request.response_deadline)


# -- The lease of the session ---------------------------------------------------------------------------

MIN_LEASE = 0.5
"""If less than this part of the session timeout remains when a bound lock is granted, the client extends the lock first: the
answer renews the lease. Otherwise the lock could be lost as soon as it is granted."""


class SessionLease(Lease):
    """The session as a lease: `ends_at` is the time until which the server certainly keeps the session.

    The server keeps a session for its timeout after the server has lost the connection. The client can't know that time:
    with a half-open connection the client notices the loss much later, or never. But the server had the connection when
    it received a command that it has answered. So each answer renews the lease, and the lease counts from the time at
    which the answered command was sent.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__(-math.inf)
        self.timeout_s = timeout
        """The session timeout."""
        self.next_timer = math.inf
        """The time at which `on_timer` must be called; inf: nothing is bound to the session, or there is no connection."""
        self._ping_interval_s: float
        """Time after which the lease is renewed by a ping. Two pings may be lost or late before the lease ends."""
        self.set_ping_interval(PING_INTERVAL_S)

    def set_ping_interval(self, seconds: float) -> None:
        """Renew the lease after this time, or after a third of the session timeout if that is shorter."""
        self._ping_interval_s = min(seconds, self.timeout_s / 3)

    def renew(self, sent_at: float) -> None:
        """Extend the lease: the server has answered a command that was sent at this time."""
        self.ends_at = max(self.ends_at, sent_at + self.timeout_s)

    def stop(self) -> None:
        """Stop the timer of the pings."""
        self.next_timer = math.inf

    def start(self, now: float) -> None:
        """Start the timer of the pings, unless it runs already, because a request is bound to the session now."""
        if self.next_timer == math.inf:
            self.next_timer = max(now, self._renewal_due_at)

    def on_timer(self, now: float) -> bool:
        """Restart the timer. Returns True if the caller must send a ping now."""
        should_ping = now >= self._renewal_due_at
        self.next_timer = now + self._ping_interval_s if should_ping else self._renewal_due_at
        return should_ping

    @property
    def _renewal_due_at(self) -> float:
        return self.ends_at - self.timeout_s + self._ping_interval_s


# -- Keepalive: detects a server that has hung while its TCP connection stays open ------------------------

PING_INTERVAL_S = 2.0
"""Time without a message from the server after which it is pinged.

A hung leader is replaced when its lease expires, after 3 s by default. The client should reconnect at about that time,
and before a lock with a watchdog (10 s by default, of which a third may have passed) or the session ends. A shorter
interval would not help, and would cost the server more pings on each connection with a waiting call.
"""
MIN_PING_INTERVAL_S = 0.1
"""Lower bound of the interval that a server recommends."""
MAX_PING_INTERVAL_S = 5.0
"""Upper bound of the interval that a server recommends."""
PING_TIMEOUT_STEP_S = 1.0
PING_TIMEOUT_STEPS = 3
"""A pinged server is considered hung after this many steps without a message.

A leader whose store is unavailable reports it after its store timeout (2 s by default), and a busy one may take as
long to reply. A false alarm costs only a reconnect.
"""


class Keepalive:
    """The ping timer of a connection.

    The ping timeout is counted in steps, each of which starts when the one before was noticed. So a client that was
    suspended or busy reads the received messages before it considers the server hung.
    """

    def __init__(self) -> None:
        self.next_timer = math.inf
        """The time at which `on_timer` must be called; inf: the timer is stopped."""
        self.ping_interval_s = PING_INTERVAL_S
        """Seconds without a message from the server after which it is pinged."""
        self.timeout_step_s = PING_TIMEOUT_STEP_S
        """Seconds of one step of the ping timeout."""
        self._last_message_at = 0.0
        """When the last message arrived, or the timer was started, in seconds of the monotonic clock."""
        self._step_count = 0
        """Steps of the ping timeout since the last ping; 0: no reply to a ping is awaited."""

    def set_interval(self, seconds: float) -> None:
        """Set the ping interval to the seconds that the server recommends, within limits. 0 keeps the default."""
        if seconds > 0:
            self.ping_interval_s = min(max(seconds, MIN_PING_INTERVAL_S), MAX_PING_INTERVAL_S)

    def start(self, now: float) -> None:
        """Start the ping timer, unless it runs already, because the client now expects messages from the server."""
        if self.next_timer == math.inf:
            self.on_message(now)  # the interval begins now
            self.next_timer = now + self.ping_interval_s

    def on_message(self, now: float) -> None:
        """Restart the ping interval, and end a ping timeout, because the server has sent something."""
        self._last_message_at = now
        self._step_count = 0

    def stop(self) -> None:
        """Stop the ping timer: the client expects no messages, or is disconnected."""
        self.next_timer = math.inf
        self._step_count = 0

    def on_timer(self, now: float) -> bool:
        """Advance the ping timer. Returns True if the caller must send a ping now.

        After a ping, each call of this method counts one step of the ping timeout.
        """
        should_ping = False
        if self._step_count:
            self._step_count += 1
        elif now >= self._last_message_at + self.ping_interval_s:
            self._step_count = 1
            should_ping = True
        self.next_timer = (
            now + self.timeout_step_s if self._step_count else self._last_message_at + self.ping_interval_s
        )
        return should_ping

    @property
    def timed_out(self) -> bool:
        """Whether the server has sent nothing since the last ping, for the whole ping timeout."""
        return self._step_count > PING_TIMEOUT_STEPS
