"""The living requests of a client, and when there is something to do about one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from genie.client.commands import Release, Request, State

SCAN_PAUSE = 1e-6
"""Seconds between two looks at all requests, for each: so that looking takes a small part of the time at most."""


@dataclass(slots=True)
class TimerEvents:
    """The locks that have expired_locally their hold, those to be extended, and the requests whose callers give up."""

    expired_locally: list[Request] = field(default_factory=list)
    renewing: list[Request] = field(default_factory=list)
    overdue: list[Request] = field(default_factory=list)


class LiveRequests:
    """All living requests: `living` by their `ref`, and `by_id` those whose id the server has sent.

    A request that has ended, or whose lock is lost, is in neither. `response_timeout` (seconds) is what a caller waits for a server
    that sends nothing, beyond its request's own wait. At `wake` something is due.

    A client that is sent nothing, because its connection is lost or silent, can tell by its own clock that a hold has
    ended: it ends at the server a moment earlier than here, for here it is counted from the receipt of the grant.
    """

    def __init__(self, response_timeout: float) -> None:
        self.by_ref: dict[str, Request] = {}
        self.by_id: dict[int, Request] = {}
        self.next_timer = math.inf
        self._response_timeout = response_timeout

    # -- where they are -----------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Add a new one."""
        self.by_ref[request.ref] = request
        self.start_response_timer(request, now)

    def set_id(self, request: Request, id: int) -> None:
        """Note the id that the server has sent."""
        if request.id != id:
            self.by_id.pop(request.id, None)
            request.id = id
            self.by_id[id] = request

    def clear_id(self, request: Request) -> None:
        """The server does not know it any more, nor its id."""
        self.by_id.pop(request.id, None)
        request.id = 0

    def start_response_timer(self, request: Request, now: float) -> None:
        """From now on the server may send nothing about it for its wait and `response_timeout`."""
        request.response_deadline = now + request.wait + self._response_timeout
        self.next_timer = min(self.next_timer, request.response_deadline)

    def start_hold(self, request: Request, since: float, left: float | None = None) -> None:
        """A hold begins, or begins anew; `left` (seconds) of it where it began before.

        One with a watchdog wants to be extended when a third of it has passed.
        """
        span = request.hold if left is None else left
        request.deadline = since + span
        request.session_ends = math.inf
        if request.watchdog:
            request.renew_at = since + span / 3
        self._schedule(request)

    def on_disconnected(self, session_ends: float, *, releases_were_sent: bool) -> None:
        """There is no connection. If none is made before `session_ends`, what is bound to the session may be released."""
        for request in self.by_ref.values():
            if request.release is not None and not request.release.id:
                request.release.repeated = request.release.repeated or releases_were_sent
            elif request.bound and request.state is State.HELD:
                request.session_ends = min(request.session_ends, session_ends)
                self._schedule(request)

    def remove(self, request: Request) -> None:
        """It has ended."""
        self.by_ref.pop(request.ref, None)
        self.by_id.pop(request.id, None)

    def waiting(self) -> list[Request]:
        """Those whose callers wait for the lock."""
        return [request for request in self.by_ref.values() if request.state is State.WAITING]

    def releases_by_ref(self) -> list[Release]:
        """The releases of those whose id is not known."""
        releases = [request.release for request in self.by_ref.values() if request.release is not None]
        return [release for release in releases if not release.id]

    # -- time ---------------------------------------------------------------------------------------------

    def renew_all(self, now: float) -> None:
        """Extend everything that has a watchdog now: what became of the last extension is not known."""
        for request in self.by_id.values():
            if request.watchdog and request.state is State.HELD:
                request.renew_at = self.next_timer = now

    def collect_timers(self, now: float) -> TimerEvents:
        """What there is to do; `wake` is set anew."""
        due = TimerEvents()
        self.next_timer = math.inf
        for request in self.by_ref.values():
            if request.state is State.RELEASING:
                continue
            if request.state is State.WAITING:
                if request.response_deadline <= now:
                    due.overdue.append(request)
                    continue
            elif request.ends <= now:
                due.expired_locally.append(request)
                continue
            elif request.renew_at <= now:
                request.renew_at = now + request.hold / 3
                due.renewing.append(request)
            self._schedule(request)
        self.next_timer = max(self.next_timer, now + SCAN_PAUSE * len(self.by_ref))
        return due

    def _schedule(self, request: Request) -> None:
        if request.state is State.HELD:
            self.next_timer = min(self.next_timer, request.ends, request.renew_at)
        else:
            self.next_timer = min(self.next_timer, request.response_deadline)


# -- How a client notices a server that has stopped, or hangs, while the connection to it stands --------

PING_INTERVAL_S = 2.0
"""Seconds without a word after which the server is asked whether it is there.

A stopped leader is replaced when its lease is over, 3 s by default: what waits or is held should move to the next one
about then, and before the hold of a watchdog (10 s by default, of which a third may have passed) or the session ends.
Sooner would not help, and every connection on which somebody waits costs the server a `ping` so often.
"""
MIN_PING_INTERVAL_S = 0.1
"""A server that recommends less is pinged so often."""
PING_TIMEOUT_STEP_S = 1.0
PING_TIMEOUT_STEPS = 3
"""So many steps of so many seconds a server may take for a word after that.

A leader whose store is away says so only when its store timeout (2 s by default) has passed and it has looked at its
clock, and one that is busy may take as long. An alarm that was false costs no more than a new connection.
"""


class Keepalive:
    """Wants to be asked at `wake` what is to be done.

    `connect_timeout` (seconds): who bears less of a server that is to be reached bears less of one that was.

    The answer is waited for in steps, each from when the one before it was noticed. So a client that was stopped or busy
    itself, and finds at once that much time has passed, reads what has come meanwhile before it takes the server for
    gone.
    """

    def __init__(self, connect_timeout: float) -> None:
        self.next_timer = math.inf
        self._max_ping_interval_s = connect_timeout / 2
        self._ping_interval_s = min(PING_INTERVAL_S, self._max_ping_interval_s)
        self._timeout_step_s = min(PING_TIMEOUT_STEP_S, connect_timeout / 4)
        self._last_message_at = 0.0
        self._steps = 0

    def set_interval(self, seconds: float) -> None:
        """Ping the server after so many seconds without a message, as it recommends; 0: as by default."""
        if seconds > 0:
            self._ping_interval_s = min(max(seconds, MIN_PING_INTERVAL_S), self._max_ping_interval_s)

    def start(self, now: float) -> None:
        """From now on a word of the server is due, sooner or later."""
        if self.next_timer == math.inf:
            self.on_message(now)
            self.next_timer = now + self._ping_interval_s

    def on_message(self, now: float) -> None:
        """The server has said something."""
        self._last_message_at = now
        self._steps = 0

    def stop(self) -> None:
        """Nothing is due any more, or there is no connection."""
        self.next_timer = math.inf
        self._steps = 0

    def on_timer(self, now: float) -> bool:
        """Whether to ask the server now; to be called at `wake`, which is set anew."""
        asks = False
        if self._steps:
            self._steps += 1
        elif now >= self._last_message_at + self._ping_interval_s:
            self._steps = 1
            asks = True
        self.next_timer = now + self._timeout_step_s if self._steps else self._last_message_at + self._ping_interval_s
        return asks

    @property
    def timed_out(self) -> bool:
        """Whether the server was asked, and has said nothing for as long as it may."""
        return self._steps > PING_TIMEOUT_STEPS
