"""One client's conversation with a server, without a socket and without a clock.

Calls go in and bytes come out; bytes go in and outcomes of calls come out. The shells (`aio`, `sync`) move the bytes,
keep the time, and hand each outcome to whoever waits for it.

Who an answer belongs to:
- `queued`, and an `error` with a `ref`: to the request with that `ref`, a counter's string that no other request of
  this client has. From then on the request goes by its id. The `ref` of a `locked` or `released` is not looked at: the
  answer to the `release` of another client's request carries that client's.
- `extended`: to the oldest extension of its id. `pong` and `inspected`: to the oldest ping or inspection.
- `released`: of a request of this very connection it comes once unasked, and once more for every `release` or
  `extend` that finds it ended; a `release` that ends it is told once. So the first one for a living request is the
  answer only if its reason is `success` and the answer to a release is due next. What that can't be told from,
  somebody else's release a moment earlier, has the same outcome. A request of an earlier connection has no unasked
  ones.
- any other `error`: to the oldest call that it can mean.

A release is never given up: one whose connection is lost is sent again on the next, and so is one for every request
that waited when its connection was lost, since it may have been granted in that moment. That is right however often
it happens: ids are not reused, and releasing what is released does nothing.
"""

from __future__ import annotations

from typing import Any

from genie.client import reasons
from genie.client.calls import Call, Extend, Inspect, Ping, Release, Request, State
from genie.client.due import Due
from genie.client.holds import Holds
from genie.errors import Code, ConnectionLost, GenieError, LockLost, RequestRejected, Unavailable
from genie.protocol import messages
from genie.protocol.framing import Lines, LineTooLong

MAX_ANSWER = 1 << 28
"""Bytes in one line from the server; only an `inspected` with all its rows comes near."""

Outcome = tuple[Call, Any, GenieError | None]
"""A call with its value, or its error. A second one for a `Request` means that its lock is lost."""


class Core:
    """The state of a client's calls, over all the connections that it makes one after another.

    `now` is in seconds, on any clock that doesn't go back.
    """

    def __init__(self) -> None:
        self.up = False
        self.broken = ""
        """Why this connection can't go on, where the server said what can't be understood."""
        self._connection = 0
        self._refs = 0
        self._lines = Lines(MAX_ANSWER)
        self._out: list[bytes] = []
        self._due = Due()
        self._requests = Holds()
        self._again: list[Release] = []

    # -- calls to bytes -----------------------------------------------------------------------------------

    def ref(self) -> str:
        """A `ref` for a new request."""
        self._refs += 1
        return str(self._refs)

    def send(self, call: Call, now: float) -> None:
        """Put a call's line into what is going out. Without a connection a release waits for one; others must not."""
        if isinstance(call, Release) and not self.up:
            self._again.append(call)
            return
        assert self.up, "there is no connection"  # noqa: S101 - the shells see to it
        if isinstance(call, Extend):
            call.sent_at = now
        self._due.add(call)
        self._out.append(call.line)

    def leave(self, request: Request, now: float) -> Release | None:
        """Release a request that waits or is held; None if that is done already, or it has ended."""
        if request.state is not State.QUEUED and request.state is not State.HELD:
            return None
        request.state = State.LEAVING
        release = Release(request.id)
        self.send(release, now)
        return release

    def abandon(self, call: Call, now: float) -> None:
        """Nobody waits for this call any more: what it asked for is released, as soon as its id is known."""
        call.waiter = None
        if isinstance(call, Request):
            call.abandoned = True
            self.leave(call, now)

    def outgoing(self) -> bytes:
        """What is to be sent, taken out."""
        data = b"".join(self._out)
        self._out.clear()
        return data

    @property
    def wake(self) -> float:
        """When `tick` wants to be called."""
        return self._requests.wake

    @property
    def owes(self) -> bool:
        """Whether something was abandoned that is not released yet."""
        return self._due.owes

    # -- connections and time -----------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """There is a new connection. What was to be released is released on it, what has a watchdog is extended."""
        self.up = True
        self.broken = ""
        self._connection += 1
        self._lines = Lines(MAX_ANSWER)
        again, self._again = self._again, []
        for release in again:
            self.send(release, now)
        self._requests.renew_all(now)

    def disconnected(self, why: str) -> list[Outcome]:
        """The connection is gone: waiting calls fail, held locks stay, releases wait for the next connection."""
        self.up = False
        self._out.clear()
        outcomes: list[Outcome] = []
        for call in self._due.take_all():
            if isinstance(call, Release):
                self._again.append(call)
                continue
            if isinstance(call, Request):
                call.state = State.ENDED
            outcomes.append((call, None, ConnectionLost(f"{why}, before the answer came")))
        for request in [request for request in self._requests.values() if request.state is State.QUEUED]:
            del self._requests[request.id]
            request.state = State.ENDED
            self._again.append(Release(request.id))
            outcomes.append((request, None, ConnectionLost(f"{why}, while request {request.id} was waiting")))
        return outcomes

    def closed(self) -> list[Outcome]:
        """The client was closed: there will be no next connection."""
        why = "the client was closed"
        outcomes = self.disconnected(why)
        outcomes += [(release, None, ConnectionLost(f"{why}, before the answer came")) for release in self._again]
        self._again.clear()
        return outcomes

    def tick(self, now: float) -> list[Outcome]:
        """End the holds whose time has passed, extend those with a watchdog, and set `wake` anew."""
        outcomes: list[Outcome] = []
        outlived, renewing = self._requests.due(now)
        for request in outlived:
            del self._requests[request.id]
            if not self.up or request.connection != self._connection:
                self.leave(request, now)  # a server that was down may not have counted that time
            self._lose(request, reasons.outlived(request.id, request.hold), outcomes)
        for request in renewing if self.up else ():
            self.send(Extend(request, request.hold), now)
        return outcomes

    # -- bytes to outcomes --------------------------------------------------------------------------------

    def receive(self, data: bytes, now: float) -> list[Outcome]:
        """What the bytes decide. `broken` is set where they can't be understood: then the connection must end."""
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

    def _take(self, message: messages.Message | None, now: float, outcomes: list[Outcome]) -> None:
        match message:
            case messages.Queued():
                self._queued(message.payload, now)
            case messages.Locked():
                self._locked(message.payload, now, outcomes)
            case messages.Released():
                self._released(message.payload, outcomes)
            case messages.Extended():
                self._extended(message.payload, now, outcomes)
            case messages.Pong():
                self._answered(Ping, None, outcomes)
            case messages.Inspected():
                self._answered(Inspect, message.payload, outcomes)
            case messages.Error():
                self._refused(message.payload, outcomes)

    def _queued(self, told: messages.Queued.Payload, now: float) -> None:
        request = None if told.ref is None else self._due.requests.pop(told.ref, None)
        if request is None:
            return
        request.id = told.id
        request.state = State.QUEUED
        request.connection = self._connection
        self._requests[told.id] = request
        if request.abandoned:
            self.leave(request, now)

    def _locked(self, told: messages.Locked.Payload, now: float, outcomes: list[Outcome]) -> None:
        request = self._requests.get(told.id)
        if request is None or request.state is not State.QUEUED:
            return
        request.state = State.HELD
        request.fence = told.fence
        self._requests.start(request, now)
        outcomes.append((request, None, None))

    def _released(self, told: messages.Released.Payload, outcomes: list[Outcome]) -> None:
        request = self._requests.pop(told.id, None)
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
        state, request.state = request.state, State.ENDED
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

    def _refused(self, told: messages.Error.Payload, outcomes: list[Outcome]) -> None:
        error = reasons.refused(told)
        call = self._due.take_meant(told)
        if call is None:
            if told.ref is None and told.id is None:
                # Somebody's call was refused and we can't know whose: rather end all than let one wait for ever.
                self.broken = f"the server said {error}"
            return
        if isinstance(call, Request):
            call.state = State.ENDED
        elif isinstance(call, Release) and isinstance(error, Unavailable):
            if call.waiter is None:
                self._again.append(call)
                return
            self._stays(call.id)
        elif (
            isinstance(call, (Release, Extend)) and isinstance(error, RequestRejected) and error.code == Code.UNKNOWN_ID
        ):
            error = self._forgotten(call, error, outcomes)
        outcomes.append((call, None, error))

    # -- what they are made of ----------------------------------------------------------------------------

    def _lose(self, request: Request, error: LockLost, outcomes: list[Outcome]) -> None:
        request.state = State.ENDED
        request.error = error
        outcomes.append((request, None, error))

    def _stays(self, id: int) -> None:
        """A release was refused, and whoever asked for it is told and may try again."""
        request = self._requests.get(id)
        if request is not None and request.state is State.LEAVING and request.fence:
            request.state = State.HELD
            self._requests.mind(request)

    def _forgotten(self, call: Release | Extend, error: RequestRejected, outcomes: list[Outcome]) -> GenieError:
        """The server doesn't know an id. If it was a lock of ours it is lost."""
        id_ = call.id if isinstance(call, Release) else call.request.id
        request = self._requests.pop(id_, None)
        if request is not None and request.fence:
            self._lose(request, reasons.forgotten(id_), outcomes)
        return error if isinstance(call, Release) else reasons.forgotten(id_)
