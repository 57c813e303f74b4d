"""The living requests of a client, and when there is something to do about one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from genie.client.commands import Release, Request, State

SCAN_PAUSE = 1e-6
"""Seconds between two looks at all requests, for each: so that looking takes a small part of the time at most."""


@dataclass(slots=True)
class DueNow:
    """The locks that have outlived their hold, those to be extended, and the requests whose callers give up."""

    outlived: list[Request] = field(default_factory=list)
    renewing: list[Request] = field(default_factory=list)
    impatient: list[Request] = field(default_factory=list)


class Requests:
    """All living requests: `living` by their `ref`, and `by_id` those whose id the server has sent.

    A request that has ended, or whose lock is lost, is in neither. `patience` (seconds) is what a caller waits for a server
    that sends nothing, beyond its request's own wait. At `wake` something is due.

    A client that is sent nothing, because its connection is lost or silent, can tell by its own clock that a hold has
    ended: it ends at the server a moment earlier than here, for here it is counted from the receipt of the grant.
    """

    def __init__(self, patience: float) -> None:
        self.living: dict[str, Request] = {}
        self.by_id: dict[int, Request] = {}
        self.wake = math.inf
        self._patience = patience

    # -- where they are -----------------------------------------------------------------------------------

    def ask(self, request: Request, now: float) -> None:
        """Add a new one."""
        self.living[request.ref] = request
        self.be_patient(request, now)

    def identify(self, request: Request, id: int) -> None:
        """Note the id that the server has sent."""
        if request.id != id:
            self.by_id.pop(request.id, None)
            request.id = id
            self.by_id[id] = request

    def unknown(self, request: Request) -> None:
        """The server does not know it any more, nor its id."""
        self.by_id.pop(request.id, None)
        request.id = 0

    def be_patient(self, request: Request, now: float) -> None:
        """From now on the server may send nothing about it for its wait and `patience`."""
        request.patience_ends = now + request.wait + self._patience
        self.wake = min(self.wake, request.patience_ends)

    def start(self, request: Request, since: float, left: float | None = None) -> None:
        """A hold begins, or begins anew; `left` (seconds) of it where it began before.

        One with a watchdog wants to be extended when a third of it has passed.
        """
        span = request.hold if left is None else left
        request.deadline = since + span
        request.session_ends = math.inf
        if request.watchdog:
            request.renew_at = since + span / 3
        self._mind(request)

    def disconnected(self, session_ends: float, *, releases_were_sent: bool) -> None:
        """There is no connection. If none is made before `session_ends`, what is bound to the session may be released."""
        for request in self.living.values():
            if request.release is not None and not request.release.id:
                request.release.repeated = request.release.repeated or releases_were_sent
            elif request.bound and request.state is State.HELD:
                request.session_ends = min(request.session_ends, session_ends)
                self._mind(request)

    def forget(self, request: Request) -> None:
        """It has ended."""
        self.living.pop(request.ref, None)
        self.by_id.pop(request.id, None)

    def waiting(self) -> list[Request]:
        """Those whose callers wait for the lock."""
        return [request for request in self.living.values() if request.state is State.ASKED]

    def releases_by_ref(self) -> list[Release]:
        """The releases of those whose id is not known."""
        releases = [request.release for request in self.living.values() if request.release is not None]
        return [release for release in releases if not release.id]

    # -- time ---------------------------------------------------------------------------------------------

    def renew_all(self, now: float) -> None:
        """Extend everything that has a watchdog now: what became of the last extension is not known."""
        for request in self.by_id.values():
            if request.watchdog and request.state is State.HELD:
                request.renew_at = self.wake = now

    def due(self, now: float) -> DueNow:
        """What there is to do; `wake` is set anew."""
        due = DueNow()
        self.wake = math.inf
        for request in self.living.values():
            if request.state is State.LEAVING:
                continue
            if request.state is State.ASKED:
                if request.patience_ends <= now:
                    due.impatient.append(request)
                    continue
            elif request.ends <= now:
                due.outlived.append(request)
                continue
            elif request.renew_at <= now:
                request.renew_at = now + request.hold / 3
                due.renewing.append(request)
            self._mind(request)
        self.wake = max(self.wake, now + SCAN_PAUSE * len(self.living))
        return due

    def _mind(self, request: Request) -> None:
        if request.state is State.HELD:
            self.wake = min(self.wake, request.ends, request.renew_at)
        else:
            self.wake = min(self.wake, request.patience_ends)


# -- How a client notices a server that has stopped, or hangs, while the connection to it stands --------

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
