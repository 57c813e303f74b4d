"""What a client has asked for, over all the connections that it makes one after another.

The server keeps what belongs to a session, queued or held, while its connection is away. Every connection begins with
`hello`, and a `ping` right behind it. The server answers with `welcome`, then with the last word on each request of the
session, then with `pong`. Nothing else is said until then, so whatever comes before the `pong` is told by itself and
answers nobody. Behind the `pong` both sides know the same, except for what was lost on its way:

- A request whose id was never told, and isn't now, has not arrived: its line is sent again, with the same `ref`. One
  that nobody waits for any more is dropped.
- A request that the server doesn't tell of, though its id is known, has ended, and the word of it was lost. It is
  released, to be told the reason. If the server doesn't know that either, a lock is lost, and what waited is asked for
  anew.
- A release whose answer was lost is sent again. So is one that nobody could send before.
- What has a watchdog is extended, and what somebody watches is watched anew. Other calls have failed with the
  connection.

While anything is due, waits, is held or watched the server is watched: `silence` says when it is asked for a word, and when it is
taken for gone. A client that wants nothing says nothing.

Where the server does not know the session (it ended, or the server keeps locks in memory and was started again), locks
that were held are lost, and what waits is asked for anew for the rest of its time. The ids they had are released, in
case that the server still holds them.

A request that is told of though nobody knows it is one of an earlier client with the same secret. If it waits nobody
waits for it, and it is released; if it is held it ends by its time, as the locks of every client that is gone.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from enum import Enum, auto

from genie.client import calls, hints, reasons
from genie.client.calls import Call, Extend, Inspect, Outcome, Ping, Release, Request, State
from genie.client.due import Due
from genie.client.requests import Requests
from genie.client.silence import Silence
from genie.client.watches import Unwatch, Watch, Watches
from genie.errors import ConnectionLost, LockLost, RequestRejected, Unavailable


class Phase(Enum):
    """How far a connection is."""

    DOWN = auto()
    GREETING = auto()
    """`hello` is out."""
    RESUMING = auto()
    """The server tells what became of the session's requests."""
    UP = auto()


class Session:
    """The state of a client's calls, over all the connections that it makes one after another.

    `session` is the secret that the server knows this client by (None: a random one) and `session_timeout` (seconds)
    what the server keeps it for without a connection. `patience` (seconds) is what a request that waits bears a silent
    server for, beyond its own wait. `token` is said first on every connection, and so is `namespace`, which
    the server must confirm. `now` is in seconds, on any clock that doesn't go back.
    """

    def __init__(
        self,
        session: str | None = None,
        session_timeout: float = 10.0,
        patience: float = 10.0,
        token: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self.trouble: Callable[[], str] = lambda: "there is no connection"
        """Says why there is no connection."""
        secret = secrets.token_urlsafe() if session is None else session
        self._hello = calls.hello(secret, session_timeout, token, namespace)
        self._namespace = namespace
        self._denied: RequestRejected | None = None
        self._life = "" if session is None else secrets.token_urlsafe(6) + "-"
        self._phase = Phase.DOWN
        self._connection = 0
        self._refs = 0
        self._patience = patience
        self._session_timeout = session_timeout
        self._out: list[bytes] = []
        self._due = Due()
        self._requests = Requests(patience)
        hints.register(self._requests)
        self._watches = Watches()
        self._silence = Silence(patience)
        self._again: list[Release] = []

    # -- calls to bytes -----------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether calls are sent at once."""
        return self._phase is Phase.UP

    def ref(self) -> str:
        """A `ref` for a new request. An earlier client with the same secret has used others."""
        self._refs += 1
        return f"{self._life}{self._refs}"

    def send(self, call: Call, now: float) -> None:
        """Put a call's line into what is going out. Requests and releases wait for a connection; others must not."""
        if isinstance(call, Request):
            self._requests.ask(call, now)
            if self.up:
                self._silence.watch(now)
                self._ask(call, now)
        elif isinstance(call, Release) and not self.up:
            self._again.append(call)
        else:
            assert self.up, "there is no connection"  # noqa: S101 - the shells see to it
            assert isinstance(call, Release | Extend | Ping | Inspect | Watch)  # noqa: S101 - there are no others
            if isinstance(call, Extend):
                call.sent_at = now
            elif isinstance(call, Watch):
                self._watches.sent(call)
            self._silence.watch(now)
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

    def held(self, id: int) -> Request | None:
        """The lock of this client with this id; None if it holds none."""
        request = self._requests.known.get(id)
        return request if request is not None and request.state is State.HELD else None

    def abandon(self, call: Call, now: float) -> None:
        """Nobody waits for this call any more: what it asked for is released, as soon as its id is known."""
        call.waiter = None
        if isinstance(call, Request):
            self._give_up(call, now)

    def want(self, watch: Watch, now: float) -> None:
        """Somebody waits for a change of a watch that has none to take: its outcome says when to look again."""
        self._watches.want(watch)
        self._watch(now)

    def unwatch(self, watch: Watch) -> list[Outcome]:
        """Nobody wants more of a watch: it ends."""
        outcomes: list[Outcome] = []
        if self._watches.close(watch, outcomes):
            call = Unwatch(watch.prefix)
            self._due.add(call)
            self._out.append(call.line)
        return outcomes

    def outgoing(self) -> bytes:
        """What is to be sent, taken out."""
        data = b"".join(self._out)
        self._out.clear()
        return data

    @property
    def wake(self) -> float:
        """When `tick` wants to be called."""
        return min(self._requests.wake, self._silence.wake)

    @property
    def owes(self) -> bool:
        """Whether something was abandoned that is not released yet."""
        return self._due.owes or any(request.abandoned for request in self._requests.asked.values())

    # -- connections and time -----------------------------------------------------------------------------

    def connected(self) -> None:
        """There is a new connection. Nothing but the greeting is said until the server has told what it knows."""
        self._phase = Phase.GREETING
        self._connection += 1
        self._out += [self._hello, Ping().line]

    def disconnected(self, why: str, now: float) -> list[Outcome]:
        """The connection is gone: who waits for a lock goes on waiting, locks stay held, releases are sent again.

        A lock that the server releases when the session ends is lost here when it may have done so.
        """
        self._phase = Phase.DOWN
        self._requests.disconnected(now + self._session_timeout)
        self._silence.rest()
        self._out.clear()
        self._watches.disconnected()
        outcomes: list[Outcome] = []
        for call in self._due.take_all():
            if isinstance(call, Release):
                call.repeated = True
                self._again.append(call)
            elif not isinstance(call, Watch | Unwatch):
                outcomes.append((call, None, ConnectionLost(f"{why}, before the answer came")))
        return outcomes

    def closing(self, now: float) -> list[Outcome]:
        """The client is to be closed: nobody waits for a lock any more, and nobody watches."""
        outcomes: list[Outcome] = []
        self._watches.close_all(outcomes)
        for request in self._requests.waiting():
            self._give_up(request, now)
            outcomes.append((request, None, ConnectionLost("the client was closed, before the answer came")))
        return outcomes

    @property
    def denied(self) -> RequestRejected | None:
        """Why no server takes this client, since one has said so; None where one has taken it since, or none was asked."""
        return None if self._denied is None else RequestRejected(self._denied.code, self._denied.message)

    def deny(self, now: float) -> list[Outcome]:
        """No server takes this client: whoever waits is told so. What they asked for is given back when one does again."""
        if self._denied is None:
            return []
        code, message = self._denied.code, self._denied.message
        outcomes: list[Outcome] = [
            (release, None, RequestRejected(code, message)) for release in self._again if release.waiter is not None
        ]
        for watch in self._watches.all():
            self._watches.refused(watch, RequestRejected(code, message), outcomes)
        for request in self._requests.waiting():
            self._give_up(request, now)
            outcomes.append((request, None, RequestRejected(code, message)))
        return outcomes

    def closed(self, now: float) -> list[Outcome]:
        """The client was closed, and so is its connection: its session ends, and with it the locks that are bound to it."""
        why = "the client was closed"
        outcomes = self.disconnected(why, now)
        for request in list(self._requests.known.values()):
            if request.bound and request.state is State.HELD:
                self._requests.forget(request)
                self._lose(request, reasons.closed(request.id), outcomes)
        outcomes += [(release, None, ConnectionLost(f"{why}, before the answer came")) for release in self._again]
        for request in list(self._requests.asked.values()):
            self._end(request)
        return outcomes

    def tick(self, now: float) -> list[Outcome]:
        """End the holds and the waits whose time has passed, extend those with a watchdog, and set `wake` anew.

        A server that has been silent for long is asked for a word.
        """
        outcomes = self._look(now) if self._requests.wake <= now else []
        if self._silence.wake <= now:
            if not self._waits_for_word:
                self._silence.rest()
            elif self._silence.asks(now):
                self.send(Ping(), now)
        return outcomes

    @property
    def _waits_for_word(self) -> bool:
        """Whether anything is due, waits, is held or watched."""
        return bool(self._due or self._requests.asked or self._requests.known or self._watches)

    def _look(self, now: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        due = self._requests.due(now)
        for request in due.outlived:
            self._requests.forget(request)
            if not self.up or request.connection != self._connection:
                self.leave(request, now)  # a server that was down may not have counted that time
            cut_off = request.session_ends < request.deadline
            lost = reasons.cut_off(request.id) if cut_off else reasons.outlived(request.id, request.hold)
            self._lose(request, lost, outcomes)
        for request in due.renewing if self.up else ():
            self.send(Extend(request.id, request.hold, request), now)
        for request in due.impatient:
            why = "the server does not answer" if self.up else self.trouble()
            error = Unavailable(f"no word of the request within {request.wait + self._patience:g} s: {why}")
            self._give_up(request, now)
            outcomes.append((request, None, error))
        return outcomes

    # -- for what the server says -------------------------------------------------------------------------

    def _welcomed(self, resumed: bool, now: float, outcomes: list[Outcome]) -> None:
        self._phase = Phase.RESUMING
        self._denied = None
        if resumed:
            return
        for request in self._requests.asked.values():
            request.ask_anew(now)
        for request in list(self._requests.known.values()):
            if request.state is State.HELD:
                self._again.append(Release(request.id))
                self._requests.forget(request)
                self._lose(request, reasons.not_resumed(request.id), outcomes)
            elif request.state is State.QUEUED:
                self._again.append(Release(request.id))
                self._requests.ask_anew(request, now)

    def _resumed(self, now: float) -> None:
        """The server has told all that it knows of this session: calls may go on."""
        self._phase = Phase.UP
        for request in self._requests.known.values():
            if request.connection != self._connection and request.state is not State.LEAVING:
                self.send(Release(request.id), now)
        again, self._again = self._again, []
        for release in again:
            self.send(release, now)
        for request in list(self._requests.asked.values()):
            if request.abandoned:
                self._end(request)
            else:
                self._ask(request, now)
        self._requests.renew_all(now)
        self._silence.watch(now)
        self._watch(now)

    def _watch(self, now: float) -> None:
        for watch in self._watches.to_ask() if self.up else ():
            self.send(watch, now)

    def _ask(self, request: Request, now: float) -> None:
        if request.asked_at is None:
            request.asked_at = now
        self._out.append(request.line)

    def _give_up(self, request: Request, now: float) -> None:
        request.abandoned = True
        request.patience_ends = math.inf
        if request.state is State.ASKED and request.asked_at is None:
            self._end(request)
        self.leave(request, now)

    def _end(self, request: Request) -> None:
        self._requests.forget(request)
        request.state = State.ENDED

    def _lose(self, request: Request, error: LockLost, outcomes: list[Outcome]) -> None:
        request.state = State.ENDED
        request.error = error
        outcomes.append((request, None, error))
