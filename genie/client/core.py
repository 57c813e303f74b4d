"""One client's conversation with a server, without a socket and without a clock.

Calls go in and bytes come out; bytes go in and outcomes of calls come out. The shells (`aio`, `sync`) move the bytes,
keep the time, and hand each outcome to whoever waits for it. What goes out, and how it goes on over a new connection,
is in `session`; what comes in is here.

Who an answer belongs to:
- `queued`, and an `error` with a `ref`: to the request with that `ref`, which no other request of this client has. From
  then on the request goes by its id. The `ref` of a `locked` or `released` is looked at in a resume only (there nothing
  else was asked): the answer to the `release` of another client's request carries that client's.
- `locked`: to the request that waits. One that is held already is told how much of its hold is left.
- `extended`: to the oldest extension of its id. `pong` and `inspected`: to the oldest ping or inspection.
- `released`: of a request that the server has told of on this very connection it comes once unasked, and once more for
  every `release` or `extend` that finds it ended; a `release` that ends it is told once. So the first one for such a
  request is the answer only if its reason is `success` and the answer to a release is due next. What that can't be told
  from, somebody else's release a moment earlier, has the same outcome. A request that this connection has not told of
  has no unasked ones, and neither has one that has ended.
- any other `error`: to the oldest call that it can mean.

A server that says `unavailable` is left: it doesn't lead, or can't reach its store. A request or a release that it
refused so is sent again to the next one, as are those whose connection is lost. A release is never given up. That is
right however often it happens: ids are not reused, and releasing what is released does nothing.
"""

from __future__ import annotations

from genie.client import reasons
from genie.client.calls import Extend, Inspect, Ping, Release, Request, State
from genie.client.session import Outcome, Phase, Session
from genie.errors import Code, GenieError, RequestRejected, Unavailable
from genie.protocol import messages
from genie.protocol.framing import Lines, LineTooLong

MAX_ANSWER = 1 << 28
"""Bytes in one line from the server; only an `inspected` with all its rows comes near."""


class Core(Session):
    """The same, with what the server says to it.

    `broken` says why this connection can't go on, where the server said so, or said what can't be understood, or nothing
    for too long.
    `elsewhere` is who leads, where this server said that it does not; empty where it doesn't know.
    """

    def __init__(self, session: str | None = None, session_timeout: float = 10.0, patience: float = 10.0) -> None:
        super().__init__(session, session_timeout, patience)
        self.broken = ""
        self.elsewhere: str | None = None
        self._lines = Lines(MAX_ANSWER)

    def connected(self) -> None:
        """There is a new connection, with new lines."""
        super().connected()
        self.broken = ""
        self.elsewhere = None
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
            case messages.Pong() if self._phase is Phase.RESUMING:
                self._resumed(now)
            case messages.Pong():
                self._answered(Ping, None, outcomes)
            case messages.Inspected():
                self._answered(Inspect, message.payload, outcomes)
            case messages.Error():
                self._refused(message.payload, now, outcomes)

    def _greeted(self, message: messages.Message | None, now: float, outcomes: list[Outcome]) -> None:
        match message:
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
            outcomes.append((call, None, reasons.again(call.request.error or reasons.lost(told))))

    def _ended(self, request: Request, told: messages.Released.Payload, outcomes: list[Outcome]) -> None:
        state = request.state
        self._end(request)
        if state is State.QUEUED:
            outcomes.append((request, None, reasons.not_granted(told)))
        elif state is State.HELD or (request.fence and told.reason != reasons.SUCCESS):
            # A release of ours that came too late does not undo that the lock was lost before.
            self._lose(request, reasons.lost(told), outcomes)

    def _extended(self, told: messages.Extended.Payload, now: float, outcomes: list[Outcome]) -> None:
        call = self._due.first(told.id)
        if not isinstance(call, Extend):
            return
        self._due.take(told.id)
        request = call.request
        if request.state is State.HELD:
            request.hold = call.hold
            self._requests.start(request, call.sent_at)
        elif request.error is not None:
            self.send(Release(request.id), now)  # it had outlived its hold here while this was on its way
        outcomes.append((call, None, None))

    def _answered(self, kind: type[Ping | Inspect], value: object, outcomes: list[Outcome]) -> None:
        call = self._due.take_next(kind)
        if call is None:
            self.broken = f"the server answered a {kind.__name__.lower()} that nobody sent"
        else:
            outcomes.append((call, value, None))

    # -- errors -------------------------------------------------------------------------------------------

    def _refused(self, told: messages.Error.Payload, now: float, outcomes: list[Outcome]) -> None:
        error = reasons.refused(told)
        unavailable = isinstance(error, Unavailable)
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
        if call is None:
            if told.ref is None and told.id is None:
                # Somebody's call was refused and we can't know whose: rather end all than let one wait for ever.
                self.broken = f"the server said {error}"
        elif isinstance(call, Release) and unavailable:
            self._again.append(call)
        elif (
            isinstance(call, Release | Extend) and isinstance(error, RequestRejected) and error.code == Code.UNKNOWN_ID
        ):
            self._forgotten(call, error, now, outcomes)
        else:
            outcomes.append((call, None, error))

    def _forgotten(self, call: Release | Extend, error: RequestRejected, now: float, outcomes: list[Outcome]) -> None:
        """The server doesn't know an id. A lock of ours is lost, unless it was released before; what waits is asked anew."""
        id_ = call.id if isinstance(call, Release) else call.request.id
        request = self._requests.known.get(id_)
        answer: GenieError | None = error if isinstance(call, Release) else reasons.forgotten(id_)
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
