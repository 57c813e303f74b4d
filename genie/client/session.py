"""The client's side of the wire protocol as a sans-I/O state machine, without sockets and without a clock.

Calls go in and bytes come out; bytes go in and outcomes of calls come out. The I/O layer (`aio_connection`) transports the
bytes, calls the timers, and completes the future of each call with its outcome.

Matching: every command has a `ref`, and the reply has the same `ref`. A reply with an unknown `ref` is ignored. The `ref`
of a request identifies the request until it ends: every `locked`, `released` and `error` with this `ref` is about the
request, also if the server sends the message unsolicited. A request whose id is not known yet is cancelled by its `ref`:
the first `released` with this `ref` ends the request and is the reply to the release. If a timeout and the release cross, a
second `released` follows and is ignored. A `release` or `extend` by id has its own `ref`. The reply to a release by id ends
the lock of this client. If the lock had ended before, a `released` with the `ref` of the request arrives first.

Connections: the server keeps the waiting and held requests of a disconnected session. Every connection begins with `hello`
and a `ping`. The server replies with `welcome`, then with the state of the session's requests (resumption), then with
`pong`. The client sends nothing else before it has received `pong`. Then it sends again, with the same `ref`:

- requests without a known outcome, which is safe because the server executes a `ref` once;
- releases without a reply;
- a release by id for each lock that the resumption did not mention: the lock has ended, and the reply contains the reason.

The client then extends the locks with a watchdog, and sends the watches again. Other calls have failed with the connection.
If the session has expired, or the server has lost its state, the locks of this client are lost. The client releases these
locks by id, because the server may still hold them, and sends waiting requests again with the rest of their queue timeout.

Timeouts: `locked` may arrive long after the grant, so the timeout of a lock counts from a command of this client: from the
request, from the `hello` of a later connection, or from an extension. After a long wait too little of the timeout remains.
Then the client extends the lock first, and the request stays WAITING until the answer arrives.

Lease: the server keeps the session of a lost connection for the session timeout, and may have lost a half-open connection
long before the client notices. So a lock that is bound to the session is held only while the lease of the session lasts
(`SessionLease`): each answer renews it, from the sending of the command that was answered. A client with such a lock, or a
request for one, pings often enough.

Detached locks: the client drops the request, so it neither extends nor releases the lock, and ignores messages about it.
Another client then manages the lock.

Takeovers: if a newer connection sends the same secret, the server ends the older one with `session-taken-over`. After three
such endings in a row another process uses the secret. Then the client ends: its calls fail, and its locks are lost
(`TakeoverCount`).

The client disconnects from a server that replies `unavailable`, because the server is a follower or can't reach its store.
The rejected requests, releases and watches are sent again to the next server. A client that waits for, holds or watches
anything pings a silent server (`Keepalive`). Any other client sends nothing.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import Final, TypeVar

from genie.client import commands, errors, hints
from genie.client.commands import Bye, Call, Extend, Inspect, Outcome, Ping, Release, Request, RequestState
from genie.client.pending import MIN_LEASE, Keepalive, LiveRequests, SessionLease
from genie.client.takeover import TakeoverCount
from genie.client.watches import Unwatch, Watch, Watches
from genie.errors import Code, ConnectionLost, GenieError, LockLost, RequestRejected, Unavailable
from genie.protocol import messages
from genie.protocol.framing import LineReader, LineTooLong

MAX_LINE_FROM_SERVER: Final = 2 << 20
"""Limit of one line from the server in bytes, as the protocol advises. The longest reply, `watching`, has about half of it."""

MAX_UNKNOWN_GRANTS: Final = 1_000
"""Number of unanswered releases of locks that the client has not requested. At the next one it closes the connection."""

FINAL_HANDSHAKE_ERRORS: Final = frozenset({Code.UNAUTHORIZED, Code.UNKNOWN_NAMESPACE, Code.UNSUPPORTED_PROTOCOL})
"""Error codes in reply to `hello` that are reported to the callers, because a retry would not help."""

MIN_REMAINING: Final = 0.75
"""If less than this part of the transaction timeout remains for certain when `locked` arrives, the lock is extended before it
counts as held. So a request that waited for a quarter of the timeout costs one more round trip."""

C = TypeVar("C", bound=Call)


class Phase(Enum):
    """The state of the connection."""

    DOWN = auto()
    HANDSHAKE = auto()
    """The client has sent `hello`."""
    RESUMING = auto()
    """The client has received `welcome`; the server now sends the state of the session's requests."""
    UP = auto()


class ClientSession:
    """The session of a client across its successive connections: pending calls, requests, watches, and timers.

    Args:
        secret: the secret that identifies the session to the server. None: a random secret.
        session_timeout: seconds for which the server keeps the session of a disconnected client.
        response_timeout: seconds that a request waits for a server, beyond its queue timeout.
        namespace: sent with every `hello`; the server must confirm it. None: the server's first namespace.
        note: sent with every `hello`, as the note of all requests without one. None: no note.

    Every `now` is in seconds, on any monotonic clock.

    """

    def __init__(
        self,
        secret: str | None = None,
        session_timeout: float = 10.0,
        response_timeout: float = 1.0,
        namespace: str | None = None,
        note: str | None = None,
    ) -> None:
        self.explain_unavailable: Callable[[], str] = lambda: "there is no connection"
        """Returns why there is no connection. The I/O layer replaces this function."""
        self.close_reason = ""
        """Why the I/O layer must close the current connection, for example because the server is silent. Empty: the
        connection is fine."""
        self.redirect: str | None = None
        """The leader's address that a follower named. Empty: the follower knows no leader. None: the server has not
        replied that it is a follower."""
        self.server = ""
        """Version and build of the last server that accepted a `hello`."""
        self._make_hello = functools.partial(
            commands.make_hello,
            secrets.token_urlsafe() if secret is None else secret,
            session_timeout,
            namespace=namespace,
            note=note,
        )
        self._encoded_hello = self._make_hello()
        self._namespace = namespace
        self._rejection: RequestRejected | None = None
        """The error of the last server, if all servers rejected this client for good; else None."""
        self.handshake_rejection: RequestRejected | None = None
        """The error of the last `hello` that no retry can fix. The I/O layer resets it before each attempt."""
        self._ref_prefix = "" if secret is None else secrets.token_urlsafe(6) + "-"
        """Makes refs unique among the clients that use the same secret one after the other."""
        self._phase = Phase.DOWN
        self._connection_number = 0
        """The number of the current connection; the first connection has number 1."""
        self._connected_at = 0.0
        """When `hello` was sent on the current connection."""
        self._ref_numbers = count(1)
        self._response_timeout = response_timeout
        self._line_reader = LineReader(MAX_LINE_FROM_SERVER)
        self.unsent_lines: list[bytes] = []
        """Encoded commands that the I/O layer has not written yet."""
        self._pending: dict[str, Call] = {}
        """The calls without a reply on this connection, by their `ref`. Requests, and releases by the `ref` of a request,
        are in `_requests`."""
        self._requests = LiveRequests(response_timeout)
        hints.register(self._requests)
        self._watches = Watches()
        self._keepalive = Keepalive()
        self._lease = SessionLease(session_timeout)
        self._takeovers = TakeoverCount()
        self._deferred_releases: list[Release] = []
        """Releases by id that must be sent on the next connection."""
        self._unknown_grants: list[Release] = []
        """Releases of locks that this client has not requested. Answered ones are removed at `MAX_UNKNOWN_GRANTS`."""
        self._deferred_calls: list[Call] = []
        """Other calls that wait for the next connection: `Extend`, `Ping`, `Inspect`. A caller limits their wait."""

    # -- calls to bytes -----------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether there is a connection with a completed handshake, so that calls are sent at once."""
        return self._phase is Phase.UP

    def new_ref(self) -> str:
        """Return a new `ref`, the reference that identifies a command. Thread-safe.

        No earlier client with the same secret has used the `ref`.
        """
        return f"{self._ref_prefix}{next(self._ref_numbers)}"

    def send(self, call: Call, now: float) -> None:
        """Send a call, now or on the next connection."""
        if isinstance(call, Request):
            self._requests.add(call, now)
            if call.bound_to_session:
                call.lease = self._lease
            if self._phase is Phase.UP:
                self._send_request(call, now)
            return
        if self._phase is not Phase.UP:
            if isinstance(call, Release):
                self._deferred_releases.append(call)
            else:
                self._deferred_calls.append(call)
            return
        self._keepalive.start(now)
        self._send_with_ref(call)
        if isinstance(call, Extend | Ping):
            call.sent_at = now
            if isinstance(call, Extend) and call.request is not None:
                self._requests.limit_hold(call.request, call)
        elif isinstance(call, Watch):
            self._watches.on_sent(call)

    def release(self, request: Request, now: float) -> Release | None:
        """Release a lock, or cancel a waiting request.

        Returns:
            The call of the release, which is sent now or on the next connection; None if the request has ended, was
            detached, or is being released already.

        """
        if request.state is not RequestState.WAITING and request.state is not RequestState.HELD:
            return None
        request.state = RequestState.RELEASING
        release = request.release = Release(request.id, request)
        if release.id:
            self.send(release, now)
        elif self.up:  # the id is not known yet: the server finds the request by its `ref`
            self._keepalive.start(now)
            self.unsent_lines.append(release.line)
        return release

    def detach(self, request: Request, now: float) -> None:
        """Stop managing a held lock, without a message to the server. Does nothing for a detached lock.

        Raises:
            ValueError: if the lock is bound to the session.
            LockLost: if the lock is no longer held, or has expired on this client's clock.

        """
        if request.bound_to_session:
            raise ValueError(
                f'lock {request.id} can\'t be detached: with on_disconnect="release" it ends with the session of this '
                'client; acquire it with on_disconnect="keep"'
            )
        if request.state is RequestState.DETACHED:
            return
        if request.error is not None:
            raise errors.copy_lock_lost(request.error)
        if request.state is not RequestState.HELD:
            raise errors.already_released(request.id)
        if not request.is_held(now):
            raise errors.expired_locally(request.id, request.transaction_timeout)
        self._requests.remove(request)
        request.state = RequestState.DETACHED
        request.on_lost = None

    def find_request(self, ref: str | None) -> Request | None:
        """Return the request with this `ref` that waits, is held or is being released; None if there is none."""
        return None if ref is None else self._requests.by_ref.get(ref)

    def find_held_lock(self, id: int) -> Request | None:
        """Return the request of the lock with this id if this client holds the lock, else None."""
        request = self._requests.by_id.get(id)
        return request if request is not None and request.state is RequestState.HELD else None

    def held_requests(self) -> list[Request]:
        """Return the requests of the locks that this client holds."""
        return [request for request in self._requests.by_ref.values() if request.state is RequestState.HELD]

    def abandon(self, call: Call, now: float) -> None:
        """Handle the cancellation of a caller: the outcome of its call is dropped, and a request is released."""
        call.future = None
        if isinstance(call, Request):
            self._release_abandoned(call, now)
        elif call in self._deferred_calls:
            self._deferred_calls.remove(call)

    def request_next(self, watch: Watch, now: float) -> None:
        """Record that the consumer of a watch waits for the next change, and send the `watch` command if necessary.

        The next change, or the end of the watch, is returned later among the outcomes of a received message.
        """
        self._watches.request_next(watch)
        self._send_watches(now)

    def unwatch(self, watch: Watch) -> list[Outcome]:
        """End a watch, and unsubscribe from its prefix unless another watch has the same prefix."""
        outcomes: list[Outcome] = []
        if self._watches.close(watch, outcomes):
            self._send_with_ref(Unwatch(watch.prefix))
        return outcomes

    def data_to_send(self) -> bytes:
        """Return the bytes that must be sent to the server, and clear the output buffer."""
        data = b"".join(self.unsent_lines)
        self.unsent_lines.clear()
        return data

    @property
    def next_timer(self) -> float:
        """The time at which `on_timer` must be called; inf: never."""
        return min(self._requests.next_timer, self._keepalive.next_timer, self._lease.next_timer)

    # -- connections and timers ---------------------------------------------------------------------------

    def on_connected(self, now: float) -> None:
        """Start the handshake on a new connection. Other commands wait until the server has resumed the session."""
        self._phase = Phase.HANDSHAKE
        self._connected_at = now
        self._connection_number += 1
        self.close_reason = ""
        self.redirect = None
        self._line_reader = LineReader(MAX_LINE_FROM_SERVER)
        self.unsent_lines += [self._encoded_hello, commands.RESUMPTION_PING]

    def on_disconnected(self, reason: str) -> list[Outcome]:
        """Handle the end of the connection. Returns the outcomes of the calls that fail with it.

        Requests, locks and watches are kept. Releases are sent again on the next connection. Any other call fails with
        ConnectionLost. A lock that is bound to the session is lost unless the client reconnects before its lease ends.
        """
        if self.up:  # else the releases of this connection were not sent yet
            self._requests.on_disconnected()
        self._phase = Phase.DOWN
        self._keepalive.stop()
        self._lease.stop()
        self.unsent_lines.clear()
        self._watches.on_disconnected()
        outcomes: list[Outcome] = []
        pending, self._pending = self._pending, {}
        for call in pending.values():
            if isinstance(call, Release):
                call.maybe_executed = call.request is not None  # matters only for a request of this client
                self._deferred_releases.append(call)
            elif not isinstance(call, Watch | Unwatch):
                outcomes.append(Outcome(call, error=ConnectionLost(f"{reason}, before the reply arrived")))
        if self._takeovers.on_disconnected():
            self._end_taken_over(outcomes)
        return outcomes

    @property
    def has_ended(self) -> bool:
        """Whether the client must not connect again, because other processes use its session."""
        return self._takeovers.error is not None

    def _end_taken_over(self, outcomes: list[Outcome]) -> None:
        """Fail all calls and locks: another process uses the session, so it is unknown what happens to them."""
        outcomes += self.fail_callers(self._connected_at)
        self._deferred_releases = []
        for request in list(self._requests.by_ref.values()):
            self._requests.remove(request)
            if request.state is RequestState.HELD:
                self._mark_lost(request, errors.session_taken_over(request.id), outcomes)
            request.state = RequestState.ENDED

    def begin_close(self, now: float) -> list[Outcome]:
        """Cancel all waiting requests and end all watches, before the client that is being closed sends `bye`.

        Locks that are bound to the session are lost now: the server releases them when it executes the `bye`, and the answer
        arrives later.
        """
        outcomes: list[Outcome] = []
        self._watches.close_all(outcomes)
        self._lose_bound_locks(outcomes)
        for request in self._requests.waiting():
            self._release_abandoned(request, now)
            outcomes.append(Outcome(request, error=ConnectionLost("the client was closed, before the reply arrived")))
        return outcomes

    def finish_close(self) -> list[Outcome]:
        """Fail the remaining calls, after the client has closed its connection. Locks that are not lost stay held at the server.

        Such a lock can be released by its id.
        """
        reason = "the client was closed"
        outcomes = self.on_disconnected(reason)
        calls = self._deferred_calls + self._deferred_releases + self._requests.releases_by_ref()
        outcomes += [Outcome(call, error=ConnectionLost(f"{reason}, before the reply arrived")) for call in calls]
        self._deferred_calls = []
        self._lose_bound_locks(outcomes)
        for request in list(self._requests.by_ref.values()):
            self._requests.remove(request)
            if request.state is not RequestState.HELD:
                request.state = RequestState.ENDED
        return outcomes

    def _lose_bound_locks(self, outcomes: list[Outcome]) -> None:
        """End all locks that are bound to the session, because the client is closed."""
        for request in self.held_requests():
            if request.bound_to_session:
                self._requests.remove(request)
                self._mark_lost(request, errors.client_closed(request.id), outcomes)

    @property
    def rejection(self) -> RequestRejected | None:
        """The error that ended the client, or with which all servers rejected it in the last round of attempts, or None."""
        error = self._takeovers.error or self._rejection
        return None if error is None else errors.copy_rejection(error)

    def use_token(self, token: str | None) -> None:
        """Send a token with the next `hello`, for authentication. Raises ValueError if it is too long."""
        self._encoded_hello = self._make_hello(token=token)

    def on_round_failed(self, rejections: Sequence[RequestRejected | None]) -> None:
        """Record a failed round of connection attempts.

        `rejections` has one entry for each attempt: the error with which the server rejected the client for good, or
        None for any other failure. The client gives up only if every server rejected it for good, because any other
        server may accept the client in the next round.
        """
        is_rejected_by_all = bool(rejections) and None not in rejections
        self._rejection = rejections[-1] if is_rejected_by_all else None

    def fail_callers(self, now: float) -> list[Outcome]:
        """Fail all waiting calls if the client has ended, or all servers have rejected it for good; else do nothing.

        The requests of the failed calls are released when a server accepts the client again.
        """
        error = self.rejection
        if error is None:
            return []
        calls = self._deferred_calls + self._deferred_releases + self._requests.releases_by_ref()
        outcomes: list[Outcome] = [
            Outcome(call, error=errors.copy_rejection(error)) for call in calls if call.future is not None
        ]
        self._deferred_calls = []
        for watch in self._watches.all():
            self._watches.on_rejected(watch, errors.copy_rejection(error), outcomes)
        for request in self._requests.waiting():
            self._release_abandoned(request, now)
            outcomes.append(Outcome(request, error=errors.copy_rejection(error)))
        return outcomes

    def on_timer(self, now: float) -> list[Outcome]:
        """Handle the timers that are due, and return the outcomes of calls and locks that have timed out.

        Extends the locks with a watchdog, and pings a server that was silent for too long, or whose answer renews the
        lease. Sets `close_reason` if the server has not replied to a ping in time.
        """
        outcomes = self._handle_request_timers(now) if self._requests.next_timer <= now else []
        should_ping = False
        if self._lease.next_timer <= now:
            if self._requests.needs_lease:
                should_ping = self._lease.on_timer(now)
            else:
                self._lease.stop()
        if self._keepalive.next_timer <= now:
            if self._expects_messages:
                should_ping |= self._keepalive.on_timer(now)
            else:
                self._keepalive.stop()
        if should_ping:
            self.send(Ping(), now)
        if self._keepalive.timed_out:
            self._request_close("the server does not answer")
        return outcomes

    @property
    def _expects_messages(self) -> bool:
        """Whether the client waits for, holds or watches anything, so that it must notice a silent server."""
        return bool(self._pending or self._requests.by_ref or self._watches)

    def _handle_request_timers(self, now: float) -> list[Outcome]:
        """Handle the fired timers of all requests: expired locks, watchdogs, and callers that have waited too long."""
        outcomes: list[Outcome] = []
        fired = self._requests.collect_timers(now)
        for request in fired.expired:
            session_ended = request.lease.ends_at < request.expires_at
            confirmed = self.up and request.connection_number == self._connection_number
            if session_ended or not confirmed or request.shortened_by in self._pending:
                # The server may hold the lock longer than this client: it may still have the session, or this connection
                # has not confirmed the lock, and the server's clock stops during an outage, or it may not have executed the
                # extension that shortens the lock. So the lock is also released at the server.
                self.send(Release(request.id), now)
            self._requests.remove(request)
            if session_ended:
                error: LockLost = errors.session_expired(request.id)
            else:
                error = errors.expired_locally(request.id, request.transaction_timeout)
            self._mark_lost(request, error, outcomes)
        for request in fired.renewing if self.up else ():
            self.send(Extend(request.id, request.transaction_timeout, request), now)
        for request in fired.overdue:
            reason = "the server does not answer" if self.up else self.explain_unavailable()
            timeout = request.queue_timeout + self._response_timeout
            self._release_abandoned(request, now)
            outcomes.append(
                Outcome(request, error=Unavailable(f"no answer to the request within {timeout:g} s: {reason}"))
            )
        return outcomes

    # -- bytes to outcomes --------------------------------------------------------------------------------

    def receive_data(self, data: bytes, now: float) -> list[Outcome]:
        """Process received bytes, and return the resulting outcomes of calls.

        Sets `close_reason` if the connection must be closed, for example after an invalid message.
        """
        self._keepalive.on_message(now)
        try:
            lines = self._line_reader.feed(data)
        except LineTooLong as error:
            lines = error.lines  # the complete lines before the one that is too long
            self.close_reason = f"the server sent a line of more than {MAX_LINE_FROM_SERVER} bytes"
        outcomes: list[Outcome] = []
        for line in lines:
            try:
                message = messages.read(line)
            except ValueError as error:
                self.close_reason = f"the server sent an invalid message: {line[:80]!r} ({error})"
                break
            if self._phase is not Phase.UP:
                self._handle_message(message, now, outcomes)
            elif type(message) is messages.Locked:  # the most frequent messages first, without the pattern matching
                self.handle_locked(message.payload, now, outcomes)
            elif type(message) is messages.Released:
                self._handle_released(message.payload, outcomes)
            elif type(message) is messages.Event and message.payload.state != "lagged":
                self._watches.on_event(message.payload, outcomes)
            else:
                self._handle_message(message, now, outcomes)
        return outcomes

    def _handle_message(self, message: messages.Message | None, now: float, outcomes: list[Outcome]) -> None:
        """Dispatch a message by its type. None, a message that this version does not know, is ignored."""
        match message:
            case _ if self._phase is Phase.HANDSHAKE:
                self._handle_handshake(message, now, outcomes)
            case messages.Locked():
                self.handle_locked(message.payload, now, outcomes)
            case messages.Released():
                self._handle_released(message.payload, outcomes)
            case messages.Queued():
                self._handle_queued(message.payload)
            case messages.Extended():
                self._handle_extended(message.payload, now, outcomes)
            case messages.Pong() if self._phase is Phase.RESUMING:
                outcomes += self._finish_resumption(now)
            case messages.Pong() | messages.Inspected() | messages.Bye():
                self._handle_reply(message, outcomes)
            case messages.Watching() | messages.Unwatched() | messages.Event():
                self._handle_watch_message(message, now, outcomes)
            case messages.Error():
                self._handle_error(message.payload, outcomes)

    def _handle_handshake(self, message: messages.Message | None, now: float, outcomes: list[Outcome]) -> None:
        """Handle the reply to `hello`: a `welcome` with this client's protocol version and namespace, or an error."""
        match message:
            case messages.Welcome() if message.payload.protocol != commands.PROTOCOL:
                self._reject_server(
                    Code.UNSUPPORTED_PROTOCOL,
                    f"the server speaks protocol {message.payload.protocol}, not {commands.PROTOCOL}",
                )
            case messages.Welcome() if self._namespace not in (None, message.payload.namespace):
                served = message.payload.namespace
                self._reject_server(
                    Code.UNKNOWN_NAMESPACE, f"the server serves the namespace {served!r}, not {self._namespace!r}"
                )
            case messages.Welcome():
                self._handle_welcome(message.payload, now, outcomes)
            case messages.Error():
                self._handle_error(message.payload, outcomes)
            case None:
                pass  # an unknown message of a newer server
            case _:
                self._request_close("the server did not answer hello")

    def _handle_welcome(self, welcome: messages.Welcome.Payload, now: float, outcomes: list[Outcome]) -> None:
        """Start the resumption of the session.

        If the server does not know the session, its granted locks are lost. Waiting requests will be sent again with the
        rest of their queue timeout. Unconfirmed releases will be sent again by id.
        """
        self._phase = Phase.RESUMING
        self._rejection = None
        self.server = welcome.server
        self._keepalive.set_interval(welcome.pingInterval / 1000)
        self._lease.set_ping_interval(self._keepalive.ping_interval_s)
        self._lease.renew(self._connected_at)
        if welcome.resumed:
            return
        for request in list(self._requests.by_ref.values()):
            if request.state is RequestState.WAITING:
                if request.fence:  # granted, and not extended yet
                    self._deferred_releases.append(Release(request.id))
                self._requests.clear_grant(request)
                request.reencode(now)
            elif request.state is RequestState.HELD:
                self._lose_unreported(request, outcomes)
            else:  # the release of the request is not confirmed yet
                self._release_without_session(request, outcomes)

    def _lose_unreported(self, request: Request, outcomes: list[Outcome]) -> None:
        """End a lock that the server has not reported. The lock is also released, as the server may hold it without a session."""
        self._deferred_releases.append(Release(request.id))
        self._requests.remove(request)
        self._mark_lost(request, errors.session_lost(request.id), outcomes)

    def _release_without_session(self, request: Request, outcomes: list[Outcome]) -> None:
        """Continue a release on a server that lost the session, and with it the `ref` of the request.

        The request is released by its id. A request whose id is not known has ended with the session, so its release
        has succeeded.
        """
        release = request.release
        self._requests.remove(request)
        if release is None or release.id:  # a release by id needs no `ref`, and will be sent again unchanged
            return
        if request.id:
            release.use_id(request.id)
            self._deferred_releases.append(release)
        else:
            request.state = RequestState.ENDED
            outcomes.append(Outcome(release, result=errors.SUCCESS))

    def _finish_resumption(self, now: float) -> list[Outcome]:
        """Complete the handshake, now that the server has sent the state of all requests of the session.

        Sends the calls that were deferred until now: releases, waiting requests, extensions and watches. Returns the
        outcomes of calls that need not be sent.
        """
        self._phase = Phase.UP
        outcomes: list[Outcome] = []
        waiting: list[Request] = []
        for request in list(self._requests.by_ref.values()):
            if request.state is RequestState.WAITING:
                waiting.append(request)
            elif request.release is not None:
                if not request.release.id:  # a release by `ref`; releases by id are in `_deferred_releases`
                    self.unsent_lines.append(request.release.line)
            elif request.connection_number != self._connection_number:
                self._lose_unreported(request, outcomes)
        deferred, self._deferred_releases = self._deferred_releases, []
        for release in deferred:
            self.send(release, now)
        for request in waiting:
            if request.connection_number == self._connection_number:  # granted, but too little of the timeout remains
                self._extend_granted(request, now)
            else:
                self._requests.clear_grant(request)  # the server may execute the request as a new one
                self._send_request(request, now)
        outcomes += self._send_deferred_calls(now)
        self._requests.renew_all(now)
        self._keepalive.start(now)
        if self._requests.needs_lease:
            self._lease.start(now)
        self._send_watches(now)
        return outcomes

    def _send_deferred_calls(self, now: float) -> list[Outcome]:
        """Send the calls that have waited for this connection. Returns the outcomes of extensions of locks that were lost."""
        outcomes: list[Outcome] = []
        calls, self._deferred_calls = self._deferred_calls, []
        for call in calls:
            lost = call.request.error if isinstance(call, Extend) and call.request is not None else None
            if lost is None:
                self.send(call, now)
            else:
                outcomes.append(Outcome(call, error=errors.copy_lock_lost(lost)))
        return outcomes

    def _handle_queued(self, queued: messages.Queued.Payload) -> None:
        """Store the id of a waiting request. Servers that support the `quiet` mode do not send `queued`."""
        request = self.find_request(queued.ref)
        if request is not None:
            self._requests.set_id(request, queued.id)

    def handle_locked(self, locked: messages.Locked.Payload, now: float, outcomes: list[Outcome]) -> None:
        """Handle `locked`: the grant of a request or, during a resumption, the remaining time of a held lock.

        A new lock is released if no request of this client has its `ref`. If too little of the timeout of a new lock
        remains, the lock is extended now, or at the end of the resumption. `genie.otel` replaces this method.
        """
        request = self._requests.by_ref.get(locked.ref or "")
        if request is None:
            if locked.expiresIn is None:  # not a resumption: the grant is for an earlier client with the same secret
                self._release_unknown(locked.id, now)
            return
        self._requests.set_id(request, locked.id)
        request.connection_number = self._connection_number
        request.fence = locked.fence
        if locked.resources is not None:
            request.set_chosen(locked.resources)
        remaining_s = request.transaction_timeout if locked.expiresIn is None else locked.expiresIn / 1000
        if request.state is RequestState.WAITING:
            # `locked` may be late, for example from a server that was paused. But the server granted the lock, or computed
            # `expiresIn`, after it had received the `hello` of this connection and the request.
            since = max(self._connected_at, request.first_sent_at or 0.0)
            lasts = since + remaining_s - now >= request.transaction_timeout * MIN_REMAINING
            if request.bound_to_session:
                self._lease.renew(since)
                lasts = lasts and self._lease.ends_at - now >= self._lease.timeout_s * MIN_LEASE
            if lasts:
                self._hold(request, since, remaining_s, outcomes)
            elif self.up:
                self._extend_granted(request, now)
        elif request.state is RequestState.HELD and locked.expiresIn is not None and not self.up:
            self._requests.start_hold(request, self._connected_at, remaining_s)  # the resumption confirms the lock

    def _release_unknown(self, id: int, now: float) -> None:
        """Release a lock that this client has not requested. Close the connection if too many releases are not answered.

        The server would make the client keep a release for each `locked`.
        """
        if self.close_reason:
            return
        if len(self._unknown_grants) >= MAX_UNKNOWN_GRANTS:
            unanswered = {*self._pending.values(), *self._deferred_releases}
            self._unknown_grants = [release for release in self._unknown_grants if release in unanswered]
        if len(self._unknown_grants) >= MAX_UNKNOWN_GRANTS:
            self._request_close(f"the server sent more than {MAX_UNKNOWN_GRANTS} locks that were not requested")
            return
        release = Release(id)
        self._unknown_grants.append(release)
        self.send(release, now)

    def _hold(self, request: Request, since: float, remaining_s: float, outcomes: list[Outcome]) -> None:
        """Complete a waiting request: its lock is held, and ends `remaining_s` seconds after `since`."""
        request.state = RequestState.HELD
        self._requests.start_hold(request, since, remaining_s)
        outcomes.append(Outcome(request))

    def _extend_granted(self, request: Request, now: float) -> None:
        """Extend the lock of a request that was granted after a long wait. The request stays WAITING until the answer."""
        self.send(Extend(request.id, request.transaction_timeout, request), now)

    def _handle_released(self, released: messages.Released.Payload, outcomes: list[Outcome]) -> None:
        """Handle `released`: a request has ended, or had ended before this client released or extended it by its id.

        The message has the `ref` of the request, or the `ref` of the release or extension. Completes the request, and
        the release or extension, if a caller waits for them.
        """
        call = self._pending.pop(released.ref, None) if released.ref is not None else None
        request = self.find_request(released.ref) if call is None else self._requests.by_id.get(released.id)
        if request is not None:
            self._on_request_ended(request, released, outcomes)
            if request.release is not None and not request.release.id:  # a release by `ref` has no other reply
                outcomes.append(Outcome(request.release, result=released.reason))
        elif isinstance(call, Release) and call.request is not None:
            self._on_request_ended(call.request, released, outcomes)
        if isinstance(call, Release):
            outcomes.append(Outcome(call, result=released.reason))
            if request is None and call.request is None and released.reason == errors.SUCCESS:
                self._resend_waiting()  # the released id was unknown here, and may belong to a waiting request
            call.request = None  # else the two objects refer to each other, and wait for the garbage collector
        elif isinstance(call, Extend):  # the lock had ended before the extension
            error = None if call.request is None else call.request.error
            outcomes.append(Outcome(call, error=errors.copy_lock_lost(error or errors.lock_ended(released))))

    def _resend_waiting(self) -> None:
        """Send all waiting requests again, because the id that was just released may belong to one of them.

        In `quiet` mode the client does not know the ids of its waiting requests, and the server does not notify it of
        the released request. When the request is sent again, the server replies with `released` to its `ref`.
        """
        for request in self._requests.waiting():
            if request.first_sent_at is not None:
                self.unsent_lines.append(request.line)

    def _on_request_ended(self, request: Request, released: messages.Released.Payload, outcomes: list[Outcome]) -> None:
        """Handle the end of a request by the server: a waiting request fails, a held lock is lost."""
        state = request.state
        self._mark_ended(request)
        if state is RequestState.WAITING:
            find_hint = partial(hints.self_blocking_hint, request, self._requests)
            outcomes.append(Outcome(request, error=errors.not_granted_error(released, find_hint)))
            return
        # A granted lock may have ended before the server executed this client's release. Then its owner had lost it.
        lost_before_release = request.fence and released.reason != errors.SUCCESS and request.error is None
        if state is RequestState.HELD or lost_before_release:
            self._mark_lost(request, errors.lock_lost(released), outcomes)

    def _handle_extended(self, extended: messages.Extended.Payload, now: float, outcomes: list[Outcome]) -> None:
        """Restart the expiry timer of an extended lock, unless a later extension that shortens the lock has no answer yet.

        The client counts the new timeout from the time at which it sent `extend`. The server counts from a later time, so
        the lock never ends at the server before it ends on this client's clock.
        """
        call = self._pop_pending(Extend, extended.ref)
        if call is None:
            return
        self._lease.renew(call.sent_at)
        request = call.request
        if request is not None and request.state is RequestState.WAITING:
            if now < min(call.sent_at + call.transaction_timeout, request.lease.ends_at):
                self._hold(request, call.sent_at, call.transaction_timeout, outcomes)
            else:  # the answer was late, too
                self._extend_granted(request, now)
        elif request is not None and request.state is RequestState.HELD:
            request.transaction_timeout = call.transaction_timeout
            if request.shortened_by not in self._pending:
                self._requests.start_hold(request, call.sent_at)
        elif request is not None and request.error is not None:
            self.send(Release(request.id), now)  # the lock had expired on this client's clock before the reply
        outcomes.append(Outcome(call))

    def _handle_reply(
        self, message: messages.Pong | messages.Inspected | messages.Bye, outcomes: list[Outcome]
    ) -> None:
        """Complete the call that a `pong`, `inspected` or `bye` is the reply to."""
        call: Call | None
        result: object = None
        match message:
            case messages.Inspected():
                call = self._pop_pending(Inspect, message.payload.pop("ref", None))
                result = message.payload  # without `ref`
            case messages.Pong():
                call = ping = self._pop_pending(Ping, message.payload.ref)
                if ping is not None:
                    self._lease.renew(ping.sent_at)
            case messages.Bye():
                call = self._pop_pending(Bye, message.payload.ref)
        if call is not None:
            outcomes.append(Outcome(call, result=result))

    def _handle_watch_message(
        self, message: messages.Watching | messages.Unwatched | messages.Event, now: float, outcomes: list[Outcome]
    ) -> None:
        """Handle the reply to a `watch` or `unwatch`, or the event `lagged`: the server has ended all subscriptions."""
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

    # -- error replies ------------------------------------------------------------------------------------

    def _handle_error(self, reply: messages.Error.Payload, outcomes: list[Outcome]) -> None:
        """Handle an `error` reply: fail the call with the same `ref`.

        The connection is closed after `unavailable`, after any error during the handshake, and if the reply has no `ref`.
        After `unavailable` requests, releases and watches do not fail, but are sent again on the next connection.
        """
        error = errors.from_error_reply(reply)
        unavailable = isinstance(error, Unavailable)
        if (
            isinstance(error, RequestRejected)
            and error.code in FINAL_HANDSHAKE_ERRORS
            and self._phase is Phase.HANDSHAKE
        ):
            self.handshake_rejection = error
        if isinstance(error, RequestRejected) and error.code == Code.SESSION_TAKEN_OVER and error.ref is None:
            self._takeovers.on_taken_over()
        if unavailable or not self.up:
            self._request_close(f"the server answered {error}")
            if unavailable:
                self.redirect = reply.leader or ""
        if not self.up:
            return
        request = self.find_request(reply.ref)
        if request is not None:
            if not unavailable:
                self._handle_request_error(request, error, outcomes)
            return
        call = self._pending.pop(reply.ref, None) if reply.ref is not None else None
        if call is not None:
            self._handle_call_error(call, error, outcomes)
        elif reply.ref is None:
            # The server could not parse a command. It is unknown which command, and its caller would wait: reconnect.
            self.close_reason = f"the server answered {error}"

    def _handle_request_error(self, request: Request, error: GenieError, outcomes: list[Outcome]) -> None:
        """Handle an error reply with the `ref` of a request: the server rejected the request, or its release by `ref`."""
        release = request.release
        if request.state is RequestState.HELD or (release is not None and release.id):
            return  # every command with this `ref` has had its reply before
        self._mark_ended(request)
        if release is None:
            outcomes.append(Outcome(request, error=error))
            return
        if release.maybe_executed and is_unknown_id(error):  # the server executed it on an earlier connection
            outcomes.append(Outcome(release, result=errors.SUCCESS))
            return
        if request.fence and is_unknown_id(error):
            self._mark_lost(request, errors.unknown_to_server(request.id), outcomes)
        outcomes.append(Outcome(release, error=error))

    def _handle_call_error(self, call: Call, error: GenieError, outcomes: list[Outcome]) -> None:
        """Handle an error reply to a call other than a request.

        After `unavailable`, releases and watches are sent again to the next server, and a granted request is extended
        there. Any other error fails the call, and a lock whose release was rejected counts as held again.
        """
        will_retry = isinstance(error, Unavailable)
        if isinstance(call, Release) and will_retry:
            self._deferred_releases.append(call)
        elif isinstance(call, Watch):
            if not will_retry:
                self._watches.on_rejected(call, error, outcomes)
        elif isinstance(call, Extend) and call.request is not None and call.request.state is RequestState.WAITING:
            if not will_retry:
                self._fail_unextended(call.request, error, outcomes)
        elif isinstance(call, Release | Extend) and is_unknown_id(error):
            self._handle_unknown_id(call, error, outcomes)
        else:
            request = call.request if isinstance(call, Release) else None
            if request is not None and self.find_request(request.ref) is request:  # the lock is still held
                request.state = RequestState.HELD
                request.release = None
            outcomes.append(Outcome(call, error=error))

    def _fail_unextended(self, request: Request, error: GenieError, outcomes: list[Outcome]) -> None:
        """Fail a granted request whose extension was rejected, so that it is unknown how long its lock will be held."""
        self._mark_ended(request)
        if is_unknown_id(error):
            error = errors.unknown_to_server(request.id)
        else:
            self._send_with_ref(Release(request.id))
        outcomes.append(Outcome(request, error=error))

    def _handle_unknown_id(self, call: Release | Extend, error: GenieError, outcomes: list[Outcome]) -> None:
        """Handle the error that the server does not know the id of a release or extension.

        A lock of this client with this id is lost. There is one exception: if the same release was sent before, on a
        connection that was lost, the server has executed the release then. So the release has succeeded.
        """
        own_request = call.request
        if isinstance(call, Release) and call.maybe_executed and own_request is not None:
            self._mark_ended(own_request)
            outcomes.append(Outcome(call, result=errors.SUCCESS))
            return
        # A lock can also be released or extended by its id alone. Then this client may hold the lock with this id.
        is_own_release = isinstance(call, Release) and own_request is not None
        request = own_request if is_own_release else self.find_held_lock(call.id)
        if request is not None and request.state is not RequestState.ENDED:
            self._requests.remove(request)
            self._mark_lost(request, errors.unknown_to_server(call.id), outcomes)
        is_own_extension = isinstance(call, Extend) and own_request is not None
        outcomes.append(Outcome(call, error=errors.unknown_to_server(call.id) if is_own_extension else error))

    # -- helpers ------------------------------------------------------------------------------------------

    def _request_close(self, reason: str) -> None:
        """Make the I/O layer close the connection. `close_reason` keeps the first reason of several calls."""
        self.close_reason = self.close_reason or reason

    def _reject_server(self, code: Code, reason: str) -> None:
        """Make the I/O layer close a connection to a server that this client can never use."""
        self.handshake_rejection = RequestRejected(code, reason)
        self._request_close(reason)

    def _send_with_ref(self, call: Call) -> None:
        """Send a call, with a new `ref` if it has none, and register the call under its `ref` to match the reply."""
        if not call.ref:
            call.assign_ref(self.new_ref())
        self._pending[call.ref] = call
        self.unsent_lines.append(call.line)

    def _pop_pending(self, kind: type[C], ref: str | None) -> C | None:
        """Remove and return the pending call with the `ref` of a reply; None if no call of this kind has the `ref`."""
        call = self._pending.get(ref) if ref is not None else None
        if not isinstance(call, kind):
            return None
        del self._pending[call.ref]
        return call

    def _send_watches(self, now: float) -> None:
        """Send the `watch` commands of all watches that need a snapshot, if there is a connection."""
        for watch in self._watches.to_send() if self.up else ():
            self.send(watch, now)

    def _send_request(self, request: Request, now: float) -> None:
        """Send a request for the first time, or again with the same `ref`."""
        self._keepalive.start(now)
        if request.bound_to_session:
            self._lease.start(now)
        if request.first_sent_at is None:
            request.first_sent_at = now
        self.unsent_lines.append(request.line)

    def _release_abandoned(self, request: Request, now: float) -> None:
        """Release a request whose caller no longer waits. A request that was never sent ends without a release."""
        request.response_deadline = math.inf
        if request.state is RequestState.WAITING and request.first_sent_at is None:
            self._mark_ended(request)
        self.release(request, now)  # does nothing for an ended request

    def _mark_ended(self, request: Request) -> None:
        """Remove a request that has ended."""
        self._requests.remove(request)
        request.state = RequestState.ENDED

    def _mark_lost(self, request: Request, error: LockLost, outcomes: list[Outcome]) -> None:
        """End a granted request with an error. The outcome notifies the owner of the lock."""
        request.state = RequestState.ENDED
        request.error = error
        outcomes.append(Outcome(request, error=error))


def is_unknown_id(error: GenieError) -> bool:
    """Return whether an error reply means that the server does not know the id or `ref` of a command."""
    return isinstance(error, RequestRejected) and error.code == Code.UNKNOWN_ID
