"""How long locks are held, on this client's clock."""

from __future__ import annotations

import math

from genie.client.calls import Request, State

SCAN_PAUSE = 1e-6
"""Seconds between two looks at all locks, for each lock: so that looking takes a small part of the time at most."""


class Holds(dict[int, Request]):
    """The living requests that have an id, and when there is something to do about one of them: at `wake`.

    A lock that is told to be lost leaves it. A client that hears nothing, because its connection is lost or silent,
    can tell by its own clock that a hold has ended: it ends at the server a moment earlier than here, for here it is
    counted from the receipt of the grant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wake = math.inf

    def start(self, request: Request, since: float) -> None:
        """A hold begins, or begins anew. One with a watchdog wants to be extended when a third of it has passed."""
        request.deadline = since + request.hold
        if request.watchdog:
            request.renew_at = since + request.hold / 3
        self.mind(request)

    def mind(self, request: Request) -> None:
        """Wake for this one too."""
        self.wake = min(self.wake, request.deadline, request.renew_at)

    def renew_all(self, now: float) -> None:
        """Whatever has a watchdog wants to be extended now: nobody knows what became of the last extension."""
        for request in self.values():
            if request.watchdog and request.state is State.HELD:
                request.renew_at = self.wake = now

    def due(self, now: float) -> tuple[list[Request], list[Request]]:
        """The locks that have outlived their hold, and those that want to be extended."""
        outlived: list[Request] = []
        renewing: list[Request] = []
        self.wake = math.inf
        for request in self.values():
            if request.state is not State.HELD:
                continue
            if request.deadline <= now:
                outlived.append(request)
                continue
            if request.renew_at <= now:
                request.renew_at = now + request.hold / 3
                renewing.append(request)
            self.mind(request)
        self.wake = max(self.wake, now + SCAN_PAUSE * len(self))
        return outlived, renewing
