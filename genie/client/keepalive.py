"""Pings to the server: `Keepalive` detects a server that has hung while its TCP connection stays open, `SessionLease` renews
the lease of the session.
"""

from __future__ import annotations

import math

from genie.client.commands import Lease

PING_INTERVAL_S = 2.0
"""Time without a message from the server after which the client sends a ping.

A hung leader is replaced when its lease expires, after 3 s by default. The client should reconnect at about that time. It
must reconnect before its session ends, or a lock with a watchdog: after 10 s by default, of which a third may have passed. A
shorter interval would only cause more pings on each connection with a waiting call.
"""
MIN_PING_INTERVAL_S = 0.1
"""Lower bound of the ping interval, if the server recommends a shorter one."""
MAX_PING_INTERVAL_S = 5.0
"""Upper bound of the ping interval, if the server recommends a longer one."""
PING_TIMEOUT_STEP_S = 1.0
"""Seconds of one step of the ping timeout."""
PING_TIMEOUT_STEPS = 3
"""A pinged server is considered hung after this number of steps without a message.

A leader whose store is unavailable reports that after its store timeout (2 s by default), and a busy leader may take as
long to reply. A false alarm costs only a reconnect.
"""


class Keepalive:
    """The ping timer of a connection. Every `now` is in seconds of the monotonic clock.

    The ping timeout is counted in steps: a call of `on_timer` ends one step and begins the next. So a client that was
    suspended or busy reads the received messages before it considers the server hung.
    """

    def __init__(self) -> None:
        self.next_timer = math.inf
        """When `on_timer` must be called, in seconds of the monotonic clock. Infinite while the timer is stopped."""
        self.ping_interval_s = PING_INTERVAL_S
        """Seconds without a message from the server after which it is pinged."""
        self.timeout_step_s = PING_TIMEOUT_STEP_S
        """Seconds of one step of the ping timeout."""
        self._last_message_at = 0.0
        """When the last message arrived, or the timer was started, in seconds of the monotonic clock."""
        self._step_count = 0
        """Steps of the ping timeout that have begun since the last ping. 0 if no reply to a ping is awaited."""

    def set_interval(self, seconds: float) -> None:
        """Set the ping interval that the server recommends, limited to an allowed range. 0 keeps the default."""
        if seconds > 0:
            self.ping_interval_s = min(max(seconds, MIN_PING_INTERVAL_S), MAX_PING_INTERVAL_S)

    def start(self, now: float) -> None:
        """Start the ping timer if it is stopped, because the client now expects messages from the server."""
        if self.next_timer == math.inf:
            self.on_message(now)  # the interval begins now
            self.next_timer = now + self.ping_interval_s

    def on_message(self, now: float) -> None:
        """Begin the ping interval again, because the server has sent something. The server also counts as not hung."""
        self._last_message_at = now
        self._step_count = 0

    def stop(self) -> None:
        """Stop the ping timer, because the client expects no messages, or is disconnected."""
        self.next_timer = math.inf
        self._step_count = 0

    def on_timer(self, now: float) -> bool:
        """Set `next_timer` again. Returns True if the caller must send a ping now.

        After a ping, each call of this method begins one step of the ping timeout.
        """
        ping_due_at = self._last_message_at + self.ping_interval_s
        is_waiting_for_pong = self._step_count > 0
        should_ping = not is_waiting_for_pong and now >= ping_due_at
        if is_waiting_for_pong or should_ping:
            self._step_count += 1
            self.next_timer = now + self.timeout_step_s
        else:
            self.next_timer = ping_due_at
        return should_ping

    @property
    def timed_out(self) -> bool:
        """True if the server has sent nothing since the last ping, for the whole ping timeout."""
        return self._step_count > PING_TIMEOUT_STEPS


# -- The lease of the session ---------------------------------------------------------------------------

MIN_LEASE_SHARE = 0.5
"""If less than this share of the session timeout remains when a bound lock is granted, the client extends the lock before
the lock counts as held: the answer renews the lease. Otherwise the lock could be lost as soon as it is granted."""


class SessionLease(Lease):
    """The session as a lease: `ends_at` is the time until which the server certainly keeps the session.

    The server keeps a session for the session timeout after the connection is lost. The client can't know when the server
    loses the connection: with a half-open connection the client notices the loss much later, or never. But the server had
    the connection when it received a command that it has answered. So each of these answers renews the lease, from the time
    at which the client sent the command: `welcome`, `pong`, `extended`, and `locked` for a bound lock.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__(-math.inf)
        self.timeout_s = timeout_s
        """The session timeout."""
        self.next_timer = math.inf
        """When `on_timer` must be called, in seconds of the monotonic clock. Infinite while nothing is bound to the session,
        or while there is no connection."""
        self._ping_interval_s: float
        """Time after which a ping renews the lease. Two pings may be lost or late before the lease ends."""
        self.set_ping_interval(PING_INTERVAL_S)

    def set_ping_interval(self, seconds: float) -> None:
        """Renew the lease by a ping after this time, or after a third of the session timeout if that is shorter."""
        self._ping_interval_s = min(seconds, self.timeout_s / 3)

    def renew(self, sent_at: float) -> None:
        """Extend the lease, because the server has answered a command that was sent at `sent_at`."""
        self.ends_at = max(self.ends_at, sent_at + self.timeout_s)

    def stop(self) -> None:
        """Stop the timer of the pings."""
        self.next_timer = math.inf

    def start(self, now: float) -> None:
        """Start the timer of the pings if it is stopped, because a request is now bound to the session."""
        if self.next_timer == math.inf:
            self.next_timer = max(now, self._renewal_due_at)

    def on_timer(self, now: float) -> bool:
        """Set `next_timer` again. Returns True if the caller must send a ping now."""
        should_ping = now >= self._renewal_due_at
        self.next_timer = now + self._ping_interval_s if should_ping else self._renewal_due_at
        return should_ping

    @property
    def _renewal_due_at(self) -> float:
        """When the next ping must renew the lease."""
        last_renewed_at = self.ends_at - self.timeout_s
        return last_renewed_at + self._ping_interval_s
