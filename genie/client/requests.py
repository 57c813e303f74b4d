"""The living requests of a client, and when there is something to do about one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from genie.client.calls import Request, State

SCAN_PAUSE = 1e-6
"""Seconds between two looks at all requests, for each: so that looking takes a small part of the time at most."""


@dataclass(slots=True)
class DueNow:
    """The locks that have outlived their hold, those to be extended, and the requests whose callers give up."""

    outlived: list[Request] = field(default_factory=list)
    renewing: list[Request] = field(default_factory=list)
    impatient: list[Request] = field(default_factory=list)


class Requests:
    """`asked`: by their `ref`, those whose id was not told yet. `known`: by their id, those that wait or are held.

    A request that has ended, or that is told to be lost, is in neither. `patience` (seconds) is what a caller waits
    for a word of the server beyond its request's own wait. At `wake` something is due.

    A client that hears nothing, because its connection is lost or silent, can tell by its own clock that a hold has
    ended: it ends at the server a moment earlier than here, for here it is counted from the receipt of the grant.
    """

    def __init__(self, patience: float) -> None:
        self.asked: dict[str, Request] = {}
        self.known: dict[int, Request] = {}
        self.wake = math.inf
        self._patience = patience

    # -- where they are -----------------------------------------------------------------------------------

    def ask(self, request: Request, now: float) -> None:
        """A new one: its id is to be told."""
        self.asked[request.ref] = request
        self._be_patient(request, now)

    def queued(self, request: Request, id: int, now: float) -> None:
        """Its id is told, by which it goes from now on."""
        del self.asked[request.ref]
        request.id = id
        request.state = State.QUEUED
        self.known[id] = request
        self.still_queued(request, now)

    def still_queued(self, request: Request, now: float) -> None:
        """The server has said that it waits, and will say when it has waited for long enough."""
        if not request.abandoned:
            self._be_patient(request, now)

    def ask_anew(self, request: Request, now: float) -> None:
        """The server knows nothing of one that waited: it is asked for again, for the rest of its wait."""
        self.forget(request)
        request.ask_anew(now)
        self.asked[request.ref] = request

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

    def disconnected(self, session_ends: float) -> None:
        """There is no connection. If none is made before then, the server may have released what is bound to the session."""
        for request in self.known.values():
            if request.bound and request.state is State.HELD:
                request.session_ends = min(request.session_ends, session_ends)
                self._mind(request)

    def forget(self, request: Request) -> None:
        """It has ended."""
        if request.id:
            self.known.pop(request.id, None)
        else:
            self.asked.pop(request.ref, None)

    def waiting(self) -> list[Request]:
        """Those that somebody waits for."""
        return [
            request
            for request in chain(self.asked.values(), self.known.values())
            if request.state in {State.ASKED, State.QUEUED} and not request.abandoned
        ]

    # -- time ---------------------------------------------------------------------------------------------

    def renew_all(self, now: float) -> None:
        """Whatever has a watchdog wants to be extended now: nobody knows what became of the last extension."""
        for request in self.known.values():
            if request.watchdog and request.state is State.HELD:
                request.renew_at = self.wake = now

    def due(self, now: float) -> DueNow:
        """What there is to do; `wake` is set anew."""
        due = DueNow()
        self.wake = math.inf
        for request in self._timed():
            if request.state is not State.HELD:
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
        self.wake = max(self.wake, now + SCAN_PAUSE * (len(self.known) + len(self.asked)))
        return due

    def _timed(self) -> Iterator[Request]:
        return (
            request for request in chain(self.asked.values(), self.known.values()) if request.state is not State.LEAVING
        )

    def _be_patient(self, request: Request, now: float) -> None:
        request.patience_ends = now + request.wait + self._patience
        self.wake = min(self.wake, request.patience_ends)

    def _mind(self, request: Request) -> None:
        if request.state is State.HELD:
            self.wake = min(self.wake, request.ends, request.renew_at)
        else:
            self.wake = min(self.wake, request.patience_ends)
