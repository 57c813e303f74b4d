"""One client's conversation with a server, without a socket and without a clock.

Calls go in and bytes come out; bytes go in and outcomes of calls come out. The shells (`aio`, `sync`) move the bytes, keep
the time, and hand each outcome to the caller that waits for it.

Matching: every command carries a `ref`, and an answer belongs to the call with its `ref`; an answer with an unknown one is
ignored. A request is known by its `ref` as long as it lives: `locked`, `released` and `error` with that `ref` are about it,
also those that nothing asked for. A request whose id is not known yet is cancelled by its `ref`: then the first `released`
with that `ref` ends the request and answers the release; where a timeout and the release cross, a second one follows and is
ignored. `release` and `extend` by id have a `ref` of their own. A lock of this client that is released by id is ended by
the answer; if it had ended before, `released` with the `ref` of the request comes first.

Connections: the server keeps the session's requests, waiting or held, while its connection is away. Every connection begins
with `hello` and a `ping`. The server answers with `welcome`, then with how the requests of the session stand, then with
`pong`. Nothing else is sent before that. What then is not known on both sides is repeated, with the same `ref`:

- requests whose end is not known, which is safe: the server executes a `ref` once;
- releases without an answer;
- a lock that the server did not mention has ended, and the message was lost: it is released by id, to be told the reason.

Locks with a watchdog are extended, and watches begin again. Other calls have failed with the connection. Where the server
does not know the session (it ended, or the server lost its memory), locks are lost, and released by id because they may still
be in the way of others; requests that wait are sent again, for the rest of their wait.

Detached locks: the client forgets the request, so it neither extends nor releases the lock, and ignores what the server
sends about it. The lock is then managed by another client.

A server that answers `unavailable` is left: it does not lead, or can't reach its store. What it refused is repeated at the
next one. `silence` decides when a server that sends nothing is asked for an answer, and when it is given up. A client that
waits for nothing, holds nothing and watches nothing sends nothing.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import Final, TypeVar

from genie.client import commands, errors, hints
from genie.client.commands import Bye, Call, Extend, Inspect, Outcome, Ping, Release, Request, State
from genie.client.pending import Keepalive, LiveRequests
from genie.client.watches import Unwatch, Watch, Watches
from genie.errors import Code, ConnectionLost, GenieError, LockLost, RequestRejected, Unavailable
from genie.protocol import messages
from genie.protocol.framing import LineReader, LineTooLong

MAX_LINE_FROM_SERVER: Final = 1 << 28
"""Bytes in one line from the server; `inspected`, `watching` and a `deadlock` with a long cycle are far below it."""

FINAL: Final = frozenset({Code.UNAUTHORIZED, Code.UNKNOWN_NAMESPACE, Code.UNSUPPORTED_PROTOCOL})
"""Codes of a refused `hello` that are reported to the callers instead of being retried."""

C = TypeVar("C", bound=Call)


class Phase(Enum):
    """The state of the connection."""

    DOWN = auto()
    HANDSHAKE = auto()
    """`hello` was sent."""
    RESUMING = auto()
    """The server tells how the session's requests stand."""
    UP = auto()


class ClientSession:
    """The state of a client's calls, over all the connections that it makes one after another.

    `session` is the secret that the server knows this client by (None: a random one) and `session_timeout` (seconds)
    what the server keeps it for without a connection. `response_timeout` (seconds) is what a request that waits bears a silent
    server for, beyond its own wait. `token` and `namespace` are sent with every `hello`; the server must confirm the
    namespace. `now` is in seconds, on any clock that does not go back.

    `broken` says why this connection must end: an error of the server, a message that can't be read, or silence.
    `elsewhere` is the leader's address, where this server answered that it does not lead; empty where it does not know.
    """

    def __init__(
        self,
        session: str | None = None,
        session_timeout: float = 10.0,
        response_timeout: float = 10.0,
        token: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self.explain_unavailable: Callable[[], str] = lambda: "there is no connection"
        """Says why there is no connection."""
        self.close_reason = ""
        self.redirect: str | None = None
        secret = secrets.token_urlsafe() if session is None else session
        self._hello = commands.hello(secret, session_timeout, token, namespace)
        self._namespace = namespace
        self._rejection: RequestRejected | None = None
        self.handshake_rejection: RequestRejected | None = None
        """The final error in reply to the last `hello`; the shell resets it before each attempt."""
        self._ref_prefix = "" if session is None else secrets.token_urlsafe(6) + "-"
        self._phase = Phase.DOWN
        self._connection = 0
        self._refs = count(1)
        self._response_timeout = response_timeout
        self._session_timeout = session_timeout
        self._lines = LineReader(MAX_LINE_FROM_SERVER)
        self._out: list[bytes] = []
        self._pending: dict[str, Call] = {}
        """Calls that were sent on this connection, other than requests and their releases, by their `ref`."""
        self._requests = LiveRequests(response_timeout)
        hints.register(self._requests)
        self._watches = Watches()
        self._keepalive = Keepalive(response_timeout)
        self._deferred_releases: list[Release] = []
        """Releases by id to be sent on the next connection."""

    # -- calls to bytes -----------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether calls are sent at once."""
        return self._phase is Phase.UP

    def new_ref(self) -> str:
        """Return a new `ref`; any thread may call it. An earlier client with the same secret has used others."""
        return f"{self._ref_prefix}{next(self._refs)}"

    def send(self, call: Call, now: float) -> None:
        """Send a call. LiveRequests, and releases by id, wait for a connection; other calls need one."""
        if isinstance(call, Request):
            self._requests.add(call, now)
            if self.up:
                self._keepalive.start(now)
                self._send_request(call, now)
        elif isinstance(call, Release) and not self.up:
            self._deferred_releases.append(call)
        else:
            assert self.up, "there is no connection"  # noqa: S101 - the shells see to it
            if isinstance(call, Extend):
                call.sent_at = now
            elif isinstance(call, Watch):
                self._watches.on_sent(call)
            self._keepalive.start(now)
            self._send_with_ref(call)

    def release(self, request: Request, now: float) -> Release | None:
        """Release a request that waits or is held; None if that is done already, or it has ended."""
        if request.state is not State.WAITING and request.state is not State.HELD:
            return None
        request.state = State.RELEASING
        release = request.release = Release(request.id, request)
        if release.id:
            self.send(release, now)
        elif self.up:
            self._keepalive.start(now)
            self._out.append(release.line)
        return release

    def detach(self, request: Request, now: float) -> None:
        """Stop managing a held lock, without a message to the server. Does nothing for one that is detached already.

        ValueError if the lock is bound to the session; LockLost if it is not held any more, also where its hold has
        ended by this client's clock and `tick` has not been called since.
        """
        if request.bound:
            raise ValueError(
                f'lock {request.id} can\'t be detached: with on_disconnect="release" it ends with the session of this '
                'client; acquire it with on_disconnect="keep"'
            )
        if request.state is State.DETACHED:
            return
        if request.error is not None:
            raise errors.copy_lock_lost(request.error)
        if request.state is not State.HELD:
            raise errors.already_released(request.id)
        if not request.held(now):
            raise errors.expired_locally(request.id, request.hold)
        self._requests.remove(request)
        request.state = State.DETACHED
        request.on_lost = None

    def held(self, id: int) -> Request | None:
        """Return the lock of this client with this id; None if it holds none."""
        request = self._requests.by_id.get(id)
        return request if request is not None and request.state is State.HELD else None

    def abandon(self, call: Call, now: float) -> None:
        """Note that nothing waits for this call any more; what a request asked for is released."""
        call.waiter = None
        if isinstance(call, Request):
            self._abandon(call, now)

    def request_next(self, watch: Watch, now: float) -> None:
        """Note that the next change of a watch is waited for: its outcome says when to look again."""
        self._watches.request_next(watch)
        self._send_watches(now)

    def unwatch(self, watch: Watch) -> list[Outcome]:
        """End a watch."""
        outcomes: list[Outcome] = []
        if self._watches.close(watch, outcomes):
            self._send_with_ref(Unwatch(watch.prefix))
        return outcomes

    def data_to_send(self) -> bytes:
        """Take out what is to be sent."""
        data = b"".join(self._out)
        self._out.clear()
        return data

    @property
    def next_timer(self) -> float:
        """When `tick` is to be called."""
        return min(self._requests.next_timer, self._keepalive.next_timer)

    # -- connections and time -----------------------------------------------------------------------------

    def on_connected(self) -> None:
        """Greet the server on a new connection. Nothing else is sent before it has told how the requests stand."""
        self._phase = Phase.HANDSHAKE
        self._connection += 1
        self.close_reason = ""
        self.redirect = None
        self._lines = LineReader(MAX_LINE_FROM_SERVER)
        self._out += [self._hello, commands.RESUME]

    def on_disconnected(self, why: str, now: float) -> list[Outcome]:
        """Note that the connection is gone: requests go on waiting, locks stay held, releases are sent again.

        A lock that the server releases when the session ends is lost here when it may have done so.
        """
        self._requests.on_disconnected(now + self._session_timeout, releases_were_sent=self.up)
        self._phase = Phase.DOWN
        self._keepalive.stop()
        self._out.clear()
        self._watches.on_disconnected()
        outcomes: list[Outcome] = []
        due, self._pending = self._pending, {}
        for call in due.values():
            if isinstance(call, Release):
                call.repeated = call.request is not None
                self._deferred_releases.append(call)
            elif not isinstance(call, Watch | Unwatch):
                outcomes.append((call, None, ConnectionLost(f"{why}, before the answer came")))
        return outcomes

    def begin_close(self, now: float) -> list[Outcome]:
        """Cancel everything that waits, and end all watches: the client is to be closed. `Bye` is to be sent next."""
        outcomes: list[Outcome] = []
        self._watches.close_all(outcomes)
        for request in self._requests.waiting():
            self._abandon(request, now)
            outcomes.append((request, None, ConnectionLost("the client was closed, before the answer came")))
        return outcomes

    def finish_close(self, now: float) -> list[Outcome]:
        """End what is left: the client was closed, and so is its connection. Locks that are bound to the session end."""
        why = "the client was closed"
        outcomes = self.on_disconnected(why, now)
        left = self._deferred_releases + self._requests.releases_by_ref()
        outcomes += [(release, None, ConnectionLost(f"{why}, before the answer came")) for release in left]
        for request in list(self._requests.by_ref.values()):
            if request.state is not State.HELD:
                self._end(request)
                continue
            self._requests.remove(request)  # it is held by no session any more, and can be released by its id
            if request.bound:
                self._lose(request, errors.client_closed(request.id), outcomes)
        return outcomes

    @property
    def rejection(self) -> RequestRejected | None:
        """The final error by which a server refused this client; None where one has accepted it since, or none was asked."""
        return None if self._rejection is None else errors.copy_rejection(self._rejection)

    def end_round(self, rejections: Sequence[RequestRejected | None]) -> None:
        """Note how a round over the addresses failed: `rejections` has the final error of each attempt, or None.

        Only where all of them rejected this client it is rejected for good. A server that could not be reached, or
        failed otherwise, may accept it in the next round.
        """
        final = [error for error in rejections if error is not None]
        self._rejection = final[-1] if final and len(final) == len(rejections) else None

    def fail_callers(self, now: float) -> list[Outcome]:
        """Fail everything that waits for a server, since one has refused this client for good.

        What was asked for is released when a server accepts the client again.
        """
        if self._rejection is None:
            return []
        left = self._deferred_releases + self._requests.releases_by_ref()
        outcomes: list[Outcome] = [
            (release, None, errors.copy_rejection(self._rejection)) for release in left if release.waiter is not None
        ]
        for watch in self._watches.all():
            self._watches.on_rejected(watch, errors.copy_rejection(self._rejection), outcomes)
        for request in self._requests.waiting():
            self._abandon(request, now)
            outcomes.append((request, None, errors.copy_rejection(self._rejection)))
        return outcomes

    def on_timer(self, now: float) -> list[Outcome]:
        """End the holds and the waits whose time has passed, extend those with a watchdog, and set `wake` anew.

        A server that has sent nothing for long is pinged; one that does not answer breaks the connection.
        """
        outcomes = self._collect_timers(now) if self._requests.next_timer <= now else []
        if self._keepalive.next_timer <= now:
            if not self._expects_messages:
                self._keepalive.stop()
            elif self._keepalive.on_timer(now):
                self.send(Ping(), now)
        if self._keepalive.timed_out:
            self.close_reason = self.close_reason or "the server does not answer"
        return outcomes

    @property
    def _expects_messages(self) -> bool:
        return bool(self._pending or self._requests.by_ref or self._watches)

    def _collect_timers(self, now: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        due = self._requests.collect_timers(now)
        for request in due.expired_locally:
            if not self.up or request.connection != self._connection:
                self.send(Release(request.id), now)  # a server that was down may not have counted that time
            self._requests.remove(request)
            session_expired = request.session_ends < request.deadline
            lost = (
                errors.session_expired(request.id)
                if session_expired
                else errors.expired_locally(request.id, request.hold)
            )
            self._lose(request, lost, outcomes)
        for request in due.renewing if self.up else ():
            self.send(Extend(request.id, request.hold, request), now)
        for request in due.overdue:
            why = "the server does not answer" if self.up else self.explain_unavailable()
            waited = request.wait + self._response_timeout
            self._abandon(request, now)
            outcomes.append((request, None, Unavailable(f"no answer to the request within {waited:g} s: {why}")))
        return outcomes

    # -- bytes to outcomes --------------------------------------------------------------------------------

    def receive_data(self, data: bytes, now: float) -> list[Outcome]:
        """Return what the bytes decide. `broken` is set where the connection must end."""
        self._keepalive.on_message(now)
        try:
            lines = self._lines.feed(data)
        except LineTooLong as error:
            lines = error.lines
            self.close_reason = f"the server sent a line of more than {MAX_LINE_FROM_SERVER} bytes"
        outcomes: list[Outcome] = []
        for line in lines:
            try:
                message = messages.read(line)
            except ValueError as error:
                self.close_reason = f"the server sent a line that is no message: {line[:80]!r} ({error})"
                break
            if (
                type(message) is messages.Event
                and message.payload.state != "lagged"
                and self._phase is not Phase.HANDSHAKE
            ):
                self._watches.on_event(message.payload, outcomes)  # they are many where others are busy
            else:
                self._handle(message, now, outcomes)
        return outcomes

    def _handle(self, message: messages.Message | None, now: float, outcomes: list[Outcome]) -> None:
        match message:
            case _ if self._phase is Phase.HANDSHAKE:
                self._handle_handshake(message, now, outcomes)
            case messages.Locked():
                self._handle_locked(message.payload, now, outcomes)
            case messages.Released():
                self._handle_released(message.payload, outcomes)
            case messages.Queued():
                self._handle_queued(message.payload, now)
            case messages.Extended():
                self._handle_extended(message.payload, now, outcomes)
            case messages.Pong() if self._phase is Phase.RESUMING:
                self._finish_resumption(now)
            case messages.Pong() | messages.Inspected() | messages.Bye():
                self._handle_reply(message, outcomes)
            case messages.Watching() | messages.Unwatched() | messages.Event():
                self._handle_watch_message(message, now, outcomes)
            case messages.Error():
                self._handle_error(message.payload, outcomes)

    def _handle_handshake(self, message: messages.Message | None, now: float, outcomes: list[Outcome]) -> None:
        match message:
            case messages.Welcome() if message.payload.protocol != commands.PROTOCOL:
                self.close_reason = (
                    self.close_reason or f"it speaks protocol {message.payload.protocol}, not {commands.PROTOCOL}"
                )
            case messages.Welcome() if self._namespace not in (None, message.payload.namespace):
                served = message.payload.namespace
                self.close_reason = (
                    self.close_reason or f"it serves the namespace {served!r}, and not {self._namespace!r}"
                )
            case messages.Welcome():
                self._handle_welcome(message.payload, now, outcomes)
            case messages.Error():
                self._handle_error(message.payload, outcomes)
            case None:
                pass
            case _:
                self.close_reason = self.close_reason or "the server did not answer hello"

    def _handle_welcome(self, welcome: messages.Welcome.Payload, now: float, outcomes: list[Outcome]) -> None:
        self._phase = Phase.RESUMING
        self._rejection = None
        self._keepalive.set_interval(welcome.pingInterval / 1000)
        if welcome.resumed:
            return
        for request in list(self._requests.by_ref.values()):
            if request.state is State.WAITING:
                self._requests.clear_id(request)
                request.reissue(now)
            elif request.state is State.HELD:
                self._deferred_releases.append(Release(request.id))
                self._requests.remove(request)
                self._lose(request, errors.session_lost(request.id), outcomes)
            else:
                self._release_without_session(request, outcomes)

    def _release_without_session(self, request: Request, outcomes: list[Outcome]) -> None:
        """Go on releasing a lock by its id; a request whose id was never sent can't be, and ended with the session."""
        release = request.release
        self._requests.remove(request)
        if release is None or release.id:
            return
        if request.id:
            release.by_id(request.id)
            self._deferred_releases.append(release)
        else:
            request.state = State.ENDED
            outcomes.append((release, errors.SUCCESS, None))

    def _finish_resumption(self, now: float) -> None:
        """Send what waits for a connection: the server has told how the requests of this session stand."""
        self._phase = Phase.UP
        waiting: list[Request] = []
        for request in list(self._requests.by_ref.values()):
            if request.state is State.WAITING:
                waiting.append(request)
            elif request.release is not None:
                if not request.release.id:
                    self._out.append(request.release.line)
            elif request.connection != self._connection:
                self.send(Release(request.id), now)
        again, self._deferred_releases = self._deferred_releases, []
        for release in again:
            self.send(release, now)
        for request in waiting:
            self._requests.start_response_timer(request, now)
            self._send_request(request, now)
        self._requests.renew_all(now)
        self._keepalive.start(now)
        self._send_watches(now)

    def _handle_queued(self, queued: messages.Queued.Payload, now: float) -> None:
        """Note the id of a request; a server that supports `quiet` does not send this."""
        request = self._find_request(queued.ref)
        if request is not None:
            self._requests.set_id(request, queued.id)
            if request.state is State.WAITING:
                self._requests.start_response_timer(request, now)

    def _handle_locked(self, locked: messages.Locked.Payload, now: float, outcomes: list[Outcome]) -> None:
        request = self._find_request(locked.ref)
        if request is None:
            if locked.expiresIn is None:  # granted just now, to an earlier client with this session's secret
                self.send(Release(locked.id), now)
            return
        self._requests.set_id(request, locked.id)
        request.connection = self._connection
        request.fence = locked.fence
        if locked.resources is not None:
            request.set_chosen(locked.resources)
        left = None if locked.expiresIn is None else locked.expiresIn / 1000
        if request.state is State.WAITING:
            request.state = State.HELD
            self._requests.start_hold(request, now, left)
            outcomes.append((request, None, None))
        elif request.state is State.HELD and left is not None:
            self._requests.start_hold(request, now, left)

    def _handle_released(self, released: messages.Released.Payload, outcomes: list[Outcome]) -> None:
        call = self._pending.pop(released.ref, None) if released.ref is not None else None
        request = self._find_request(released.ref) if call is None else self._requests.by_id.get(released.id)
        if request is not None:
            self._on_request_ended(request, released, outcomes)
            if request.release is not None and not request.release.id:
                outcomes.append((request.release, released.reason, None))
        elif isinstance(call, Release) and call.request is not None:
            self._on_request_ended(call.request, released, outcomes)
        if isinstance(call, Release):
            outcomes.append((call, released.reason, None))
            if request is None and call.request is None and released.reason == errors.SUCCESS:
                self._resend_waiting()
        elif isinstance(call, Extend):
            error = None if call.request is None else call.request.error
            outcomes.append((call, None, errors.copy_lock_lost(error or errors.lock_ended(released))))

    def _resend_waiting(self) -> None:
        """Repeat all requests that wait, since one of them may have ended by a release of its id.

        The answer to that release is all that the server sends, and the ids of waiting requests are not known here.
        """
        for request in self._requests.waiting():
            if request.first_sent_at is not None:
                self._out.append(request.line)

    def _on_request_ended(self, request: Request, released: messages.Released.Payload, outcomes: list[Outcome]) -> None:
        state = request.state
        self._end(request)
        if state is State.WAITING:
            hint = partial(hints.hint, request, self._requests)
            outcomes.append((request, None, errors.not_granted(released, hint)))
        elif state is State.HELD or (request.fence and released.reason != errors.SUCCESS and request.error is None):
            # A release of ours that came too late does not undo that the lock was lost before.
            self._lose(request, errors.lock_lost(released), outcomes)

    def _handle_extended(self, extended: messages.Extended.Payload, now: float, outcomes: list[Outcome]) -> None:
        call = self._pop_pending(Extend, extended.ref)
        if call is None:
            return
        request = call.request
        if request is not None and request.state is State.HELD:
            request.hold = call.hold
            self._requests.start_hold(request, call.sent_at)
        elif request is not None and request.error is not None:
            self.send(Release(request.id), now)  # it had expired_locally its hold here while this was on its way
        outcomes.append((call, None, None))

    def _handle_reply(
        self, message: messages.Pong | messages.Inspected | messages.Bye, outcomes: list[Outcome]
    ) -> None:
        call: Call | None
        value: object = None
        match message:
            case messages.Inspected():
                call, value = self._pop_pending(Inspect, message.payload.pop("ref", None)), message.payload
            case messages.Pong():
                call = self._pop_pending(Ping, message.payload.ref)
            case messages.Bye():
                call = self._pop_pending(Bye, message.payload.ref)
        if call is not None:
            outcomes.append((call, value, None))

    def _handle_watch_message(
        self, message: messages.Watching | messages.Unwatched | messages.Event, now: float, outcomes: list[Outcome]
    ) -> None:
        match message:
            case messages.Watching():
                watch = self._pop_pending(Watch, message.payload.ref)
                if watch is not None:
                    self._watches.on_watching(watch, message.payload, outcomes)
            case messages.Unwatched():
                self._pop_pending(Unwatch, message.payload.ref)
            case messages.Event():
                self._watches.on_lagged()
                self._send_watches(now)

    # -- errors of the server -----------------------------------------------------------------------------

    def _handle_error(self, refusal: messages.Error.Payload, outcomes: list[Outcome]) -> None:
        error = errors.from_error_reply(refusal)
        unavailable = isinstance(error, Unavailable)
        if isinstance(error, RequestRejected) and error.code in FINAL and self._phase is Phase.HANDSHAKE:
            self.handshake_rejection = error
        if unavailable or not self.up:
            self.close_reason = self.close_reason or f"the server answered {error}"
            self.redirect = (refusal.leader or "") if unavailable else self.redirect
        if not self.up:
            return
        request = self._find_request(refusal.ref)
        if request is not None:
            if not unavailable:
                self._reject_request(request, error, outcomes)
            return
        call = self._pending.pop(refusal.ref, None) if refusal.ref is not None else None
        if call is not None:
            self._reject_call(call, error, outcomes)
        elif refusal.ref is None:
            # It answers no command that could be read: end all calls rather than let one wait for ever.
            self.close_reason = f"the server answered {error}"

    def _reject_request(self, request: Request, error: GenieError, outcomes: list[Outcome]) -> None:
        """A request was refused, or the release by its `ref`."""
        release = request.release
        if request.state is State.HELD or (release is not None and release.id):
            return  # no command with this `ref` is due
        self._end(request)
        if release is None:
            outcomes.append((request, None, error))
            return
        if release.repeated and _is_unknown(error):  # it was carried out on an earlier connection
            outcomes.append((release, errors.SUCCESS, None))
            return
        if request.fence and _is_unknown(error):
            self._lose(request, errors.unknown_to_server(request.id), outcomes)
        outcomes.append((release, None, error))

    def _reject_call(self, call: Call, error: GenieError, outcomes: list[Outcome]) -> None:
        again = isinstance(error, Unavailable)
        if isinstance(call, Release) and again:
            self._deferred_releases.append(call)
        elif isinstance(call, Watch):
            if not again:
                self._watches.on_rejected(call, error, outcomes)
        elif isinstance(call, Release | Extend) and _is_unknown(error):
            self._handle_unknown_id(call, error, outcomes)
        else:
            request = call.request if isinstance(call, Release) else None
            if request is not None and self._find_request(request.ref) is request:
                request.state, request.release = State.HELD, None
            outcomes.append((call, None, error))

    def _handle_unknown_id(self, call: Release | Extend, error: GenieError, outcomes: list[Outcome]) -> None:
        """The server does not know an id. A lock of this client with that id is lost."""
        ours = call.request
        if isinstance(call, Release) and call.repeated and ours is not None:
            self._end(ours)  # it was carried out on an earlier connection
            outcomes.append((call, errors.SUCCESS, None))
            return
        request = ours if isinstance(call, Release) and ours is not None else self.held(call.id)
        if request is not None and request.state is not State.ENDED:
            self._requests.remove(request)
            self._lose(request, errors.unknown_to_server(call.id), outcomes)
        is_own_lock = isinstance(call, Extend) and ours is not None
        outcomes.append((call, None, errors.unknown_to_server(call.id) if is_own_lock else error))

    # -- inside -------------------------------------------------------------------------------------------

    def _send_with_ref(self, call: Call) -> None:
        """Send a call whose answer is matched by its `ref`."""
        if not call.ref:
            call.assign_ref(self.new_ref())
        self._pending[call.ref] = call
        self._out.append(call.line)

    def _pop_pending(self, kind: type[C], ref: str | None) -> C | None:
        call = self._pending.get(ref) if ref is not None else None
        if not isinstance(call, kind):
            return None
        del self._pending[call.ref]
        return call

    def _find_request(self, ref: str | None) -> Request | None:
        return None if ref is None else self._requests.by_ref.get(ref)

    def _send_watches(self, now: float) -> None:
        for watch in self._watches.to_send() if self.up else ():
            self.send(watch, now)

    def _send_request(self, request: Request, now: float) -> None:
        if request.first_sent_at is None:
            request.first_sent_at = now
        self._out.append(request.line)

    def _abandon(self, request: Request, now: float) -> None:
        request.response_deadline = math.inf
        if request.state is State.WAITING and request.first_sent_at is None:
            self._end(request)  # no server has seen it
        self.release(request, now)

    def _end(self, request: Request) -> None:
        self._requests.remove(request)
        request.state = State.ENDED

    def _lose(self, request: Request, error: LockLost, outcomes: list[Outcome]) -> None:
        request.state = State.ENDED
        request.error = error
        outcomes.append((request, None, error))


def _is_unknown(error: GenieError) -> bool:
    return isinstance(error, RequestRejected) and error.code == Code.UNKNOWN_ID
