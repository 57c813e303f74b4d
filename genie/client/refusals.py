"""What the server refuses: whose call that was, and what becomes of it.

A server that says `unavailable` is left: it doesn't lead, or can't reach its store. A request or a release that it
refused so is sent again to the next one, as are those whose connection is lost. A release is never given up. That is
right however often it happens: ids are not reused, and releasing what is released does nothing. What is
watched is watched at the next one.
"""

from __future__ import annotations

from genie.client import reasons
from genie.client.calls import Call, Extend, Outcome, Release, State
from genie.client.session import Phase, Session
from genie.client.watches import Watch
from genie.errors import Code, GenieError, RequestRejected, Unavailable
from genie.protocol import messages


class Refusals(Session):
    """The same, with the server's `error`s.

    `broken` says why this connection can't go on, where the server said so, or said what can't be understood, or nothing
    for too long.
    `elsewhere` is who leads, where this server said that it does not; empty where it doesn't know.
    """

    def __init__(
        self, session: str | None, session_timeout: float, patience: float, token: str | None, namespace: str | None
    ) -> None:
        super().__init__(session, session_timeout, patience, token, namespace)
        self.broken = ""
        self.elsewhere: str | None = None

    def connected(self) -> None:
        """There is a new connection, and nothing is wrong with it yet."""
        super().connected()
        self.broken = ""
        self.elsewhere = None

    def _refused(self, told: messages.Error.Payload, now: float, outcomes: list[Outcome]) -> None:
        error = reasons.refused(told)
        unavailable = isinstance(error, Unavailable)
        if isinstance(error, RequestRejected) and error.code == Code.UNAUTHORIZED and self._phase is Phase.GREETING:
            self._denied = error
        if unavailable or not self.up:
            self.broken = self.broken or f"the server said {error}"
            self.elsewhere = (told.leader or "") if unavailable else self.elsewhere
        if not self.up:
            return
        request = None if told.ref is None else self._requests.asked.get(told.ref)
        if request is not None:
            if not unavailable:
                self._end(request)
                outcomes.append((request, None, error))
            return
        call = self._due.take_meant(told)
        if call is not None:
            self._call_refused(call, error, now, outcomes)
        elif told.ref is None and told.id is None:
            # Somebody's call was refused and we can't know whose: rather end all than let one wait for ever.
            self.broken = f"the server said {error}"

    def _call_refused(self, call: Call, error: GenieError, now: float, outcomes: list[Outcome]) -> None:
        again = isinstance(error, Unavailable)
        if again and isinstance(call, Release):
            self._again.append(call)
        elif isinstance(call, Watch):
            if not again:
                self._watches.refused(call, error, outcomes)
        elif (
            isinstance(call, Release | Extend) and isinstance(error, RequestRejected) and error.code == Code.UNKNOWN_ID
        ):
            self._forgotten(call, error, now, outcomes)
        else:
            outcomes.append((call, None, error))

    def _forgotten(self, call: Release | Extend, error: RequestRejected, now: float, outcomes: list[Outcome]) -> None:
        """The server doesn't know an id. A lock of ours is lost, unless it was released before; what waits is asked anew."""
        id_ = call.id
        request = self._requests.known.get(id_)
        ours = isinstance(call, Extend) and call.request is not None
        answer: GenieError | None = reasons.forgotten(id_) if ours else error
        if request is not None and request.state is State.QUEUED:
            self._requests.ask_anew(request, now)
            self._ask(request, now)
        elif request is not None:
            if request.state is State.LEAVING and isinstance(call, Release) and call.repeated:
                answer = None
            elif request.fence:
                self._lose(request, reasons.forgotten(id_), outcomes)
            self._end(request)
        outcomes.append((call, None if answer else reasons.SUCCESS, answer))
