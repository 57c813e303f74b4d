"""One client's conversation with a server, without a socket and without a clock.

Calls go in and bytes come out; bytes go in and outcomes of calls come out. The shells (`aio`, `sync`) move the bytes,
keep the time, and hand each outcome to whoever waits for it. What goes out, and how it goes on over a new connection,
is in `session`; what comes in is here, and what it refuses in `refusals`.

Who an answer belongs to:
- `queued`, and an `error` with a `ref`: to the request with that `ref`, which no other request of this client has. From
  then on the request goes by its id. The `ref` of a `locked` or `released` is looked at in a resume only (there nothing
  else was asked): the answer to the `release` of another client's request carries that client's.
- `locked`: to the request that waits. One that is held already is told how much of its hold is left.
- `extended`: to the oldest extension of its id. `pong`, `inspected`, `watching`, `unwatched`: to the oldest call of
  those kinds. `event`: to every watch that it is for, whichever of them the server tells it for.
- `released`: of a request that the server has told of on this very connection it comes once unasked, and once more for
  every `release` or `extend` that finds it ended; a `release` that ends it is told once. So the first one for such a
  request is the answer only if its reason is `success` and the answer to a release is due next. What that can't be told
  from, somebody else's release a moment earlier, has the same outcome. A request that this connection has not told of
  has no unasked ones, and neither has one that has ended.
- any other `error`: to the oldest call that it can mean.
"""

from __future__ import annotations

from functools import partial

from genie.client import hints, reasons
from genie.client.calls import Extend, Inspect, Outcome, Ping, Release, Request, State
from genie.client.due import InOrder
from genie.client.refusals import Refusals
from genie.client.session import Phase
from genie.client.watches import Unwatch, Watch
from genie.protocol import messages
from genie.protocol.framing import Lines, LineTooLong

MAX_ANSWER = 1 << 28
"""Bytes in one line from the server; only an `inspected` with all its rows comes near."""


class Core(Refusals):
    """The same, with all that the server says to it."""

    def __init__(
        self,
        session: str | None = None,
        session_timeout: float = 10.0,
        patience: float = 10.0,
        token: str | None = None,
        namespace: str | None = None,
    ) -> None:
        super().__init__(session, session_timeout, patience, token, namespace)
        self._lines = Lines(MAX_ANSWER)

    def connected(self) -> None:
        """There is a new connection, with new lines."""
        super().connected()
        self._lines = Lines(MAX_ANSWER)

    def receive(self, data: bytes, now: float) -> list[Outcome]:
        """What the bytes decide. `broken` is set where the connection must end."""
        self._silence.heard(now)
        try:
            lines = self._lines.feed(data)
        except LineTooLong as error:
            lines = error.lines
            self.broken = f"the server sent a line of more than {MAX_ANSWER} bytes"
        outcomes: list[Outcome] = []
        for line in lines:
            try:
                message = messages.read(line)
            except ValueError as error:
                self.broken = f"the server sent what is no message: {line[:80]!r} ({error})"
                break
            if (
                type(message) is messages.Event
                and message.payload.state != "lagged"
                and self._phase is not Phase.GREETING
            ):
                self._watches.happened(message.payload, outcomes)  # they are many where others are busy
            else:
                self._take(message, now, outcomes)
        return outcomes

    def tick(self, now: float) -> list[Outcome]:
        """The same, and `broken` is set where the connection must end."""
        outcomes = super().tick(now)
        if self._silence.too_long:
            self.broken = self.broken or "the server does not answer"
        return outcomes

    def _take(self, message: messages.Message | None, now: float, outcomes: list[Outcome]) -> None:
        if self._phase is Phase.GREETING:
            self._greeted(message, now, outcomes)
            return
        match message:
            case messages.Queued():
                self._queued(message.payload, now)
            case messages.Locked():
                self._locked(message.payload, now, outcomes)
            case messages.Released():
                self._released(message.payload, now, outcomes)
            case messages.Extended():
                self._extended(message.payload, now, outcomes)
            case messages.Pong():
                self._pong(now, outcomes)
            case messages.Inspected():
                self._answered(Inspect, message.payload, outcomes)
            case messages.Watching() | messages.Unwatched() | messages.Event():
                self._watched(message, now, outcomes)
            case messages.Error():
                self._refused(message.payload, now, outcomes)

    def _greeted(self, message: messages.Message | None, now: float, outcomes: list[Outcome]) -> None:
        match message:
            case messages.Welcome() if self._namespace not in (None, message.payload.namespace):
                told = message.payload.namespace
                self.broken = self.broken or f"it serves the namespace {told!r}, and not {self._namespace!r}"
            case messages.Welcome():
                self._welcomed(message.payload.resumed, now, outcomes)
            case messages.Error():
                self._refused(message.payload, now, outcomes)
            case None:
                pass
            case _:
                self.broken = self.broken or "the server did not answer hello"

    def _queued(self, told: messages.Queued.Payload, now: float) -> None:
        request = self._requests.asked.get(told.ref) if told.ref is not None else None
        if request is not None:
            self._requests.queued(request, told.id, now)
            request.connection = self._connection
            if request.abandoned:
                self.leave(request, now)
            return
        request = self._requests.known.get(told.id)
        if request is None:
            self.send(Release(told.id), now)
        elif request.state is not State.HELD:
            request.connection = self._connection
            self._requests.still_queued(request, now)

    def _locked(self, told: messages.Locked.Payload, now: float, outcomes: list[Outcome]) -> None:
        request = self._told_of(told, now)
        if request is None:
            return
        request.connection = self._connection
        if told.resources is not None:
            request.took(told.resources)
        if request.abandoned:
            self.leave(request, now)
            return
        left = None if told.expiresIn is None else told.expiresIn / 1000
        if request.state is State.QUEUED:
            request.state = State.HELD
            request.fence = told.fence
            self._requests.start(request, now, left)
            outcomes.append((request, None, None))
        elif request.state is State.HELD and left is not None:
            self._requests.start(request, now, left)

    def _told_of(self, told: messages.Locked.Payload | messages.Released.Payload, now: float) -> Request | None:
        """The living request that is meant; in a resume this may be the first that is heard of its id."""
        request = self._requests.known.get(told.id)
        if request is None and self._phase is Phase.RESUMING and told.ref is not None:
            request = self._requests.asked.get(told.ref)
            if request is not None:
                self._requests.queued(request, told.id, now)
        return request

    def _released(self, told: messages.Released.Payload, now: float, outcomes: list[Outcome]) -> None:
        request = self._told_of(told, now)
        call = self._due.first(told.id)
        unasked = request is not None and request.connection == self._connection
        if told.reason == reasons.SUCCESS and isinstance(call, Release):
            unasked = False
        if request is not None:
            self._ended(request, told, outcomes)
        if call is None or unasked:
            return
        self._due.take(told.id)
        if isinstance(call, Release):
            outcomes.append((call, told.reason, None))
        else:
            error = None if call.request is None else call.request.error
            outcomes.append((call, None, reasons.again(error or reasons.over(told))))

    def _ended(self, request: Request, told: messages.Released.Payload, outcomes: list[Outcome]) -> None:
        state = request.state
        self._end(request)
        if state is State.QUEUED:
            outcomes.append((request, None, reasons.not_granted(told, partial(hints.hint, request, self._requests))))
        elif state is State.HELD or (request.fence and told.reason != reasons.SUCCESS):
            # A release of ours that came too late does not undo that the lock was lost before.
            self._lose(request, reasons.lost(told), outcomes)

    def _extended(self, told: messages.Extended.Payload, now: float, outcomes: list[Outcome]) -> None:
        call = self._due.first(told.id)
        if not isinstance(call, Extend):
            return
        self._due.take(told.id)
        request = call.request
        if request is not None and request.state is State.HELD:
            request.hold = call.hold
            self._requests.start(request, call.sent_at)
        elif request is not None and request.error is not None:
            self.send(Release(request.id), now)  # it had outlived its hold here while this was on its way
        outcomes.append((call, None, None))

    def _answered(self, kind: type[Ping | Inspect], value: object, outcomes: list[Outcome]) -> None:
        call = self._take_next(kind)
        if call is not None:
            outcomes.append((call, value, None))

    def _take_next(self, kind: type[InOrder]) -> InOrder | None:
        call = self._due.take_next(kind)
        if call is None:
            self.broken = f"the server answered a {kind.__name__.lower()} that nobody sent"
        return call

    def _pong(self, now: float, outcomes: list[Outcome]) -> None:
        if self._phase is Phase.RESUMING:
            self._resumed(now)
        else:
            self._answered(Ping, None, outcomes)

    def _watched(
        self, message: messages.Watching | messages.Unwatched | messages.Event, now: float, outcomes: list[Outcome]
    ) -> None:
        match message:
            case messages.Watching():
                watch = self._take_next(Watch)
                if isinstance(watch, Watch):
                    self._watches.told(watch, message.payload, outcomes)
            case messages.Unwatched():
                self._take_next(Unwatch)
            case messages.Event():
                self._watches.lagged()
                self._watch(now)
