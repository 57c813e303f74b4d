"""The client's side of the wire protocol as a sans-I/O state machine, without sockets and without a clock.

Calls go in and bytes come out; bytes go in and outcomes of calls come out. The I/O layer (`aio_connection`) transports the
bytes, calls the timers, and completes the future of each call with its outcome.

The session of a client has four parts, each with a state of its own:

- `Handshake`: the state of the current connection; why it must be closed, or why the client gives up;
- `Calls`: sends the calls, matches the replies, and limits how long callers wait;
- `Requests`: grants, locks, extensions and releases;
- `Watches`: subscriptions.

`ClientSession` dispatches messages, timers, and the beginning and end of each connection to them.

The client disconnects from a server that replies `unavailable`, because the server is a follower or can't reach its store.
The rejected requests, releases and watches are sent again to the next server. A client that waits for, holds or watches
anything pings a silent server (`Keepalive`). Any other client sends nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

from genie.client import errors
from genie.client.calls import Calls
from genie.client.commands import Bye, Call, Extend, Inspect, Outcome, Ping, Release, Request
from genie.client.handshake import UP, Handshake, Phase
from genie.client.requests import Requests
from genie.client.watches import Watch, Watches
from genie.errors import ConnectionLost, GenieError, Unavailable
from genie.protocol import messages
from genie.protocol.framing import LineReader, LineTooLong

MAX_LINE_FROM_SERVER: Final = 2 << 20
"""Limit of one line from the server in bytes, as the protocol advises. The longest reply, `watching`, is half as long."""


class ClientSession:
    """The session of a client across its successive connections.

    Args:
        secret: the secret that identifies the session to the server. None stands for a random secret.
        session_timeout: seconds for which the server keeps the session of a disconnected client.
        response_timeout: seconds that a caller waits for a server. A request also waits for its queue timeout.
        namespace: the namespace of all commands, which the server must confirm. None means the server's first namespace.
        note: the note of all requests without a note of their own, or None.
        explain_unavailable: returns why there is no connection, for error messages.

    Every `now` is in seconds, on any monotonic clock. Methods return the outcomes of the calls that they complete.

    """

    def __init__(
        self,
        secret: str | None = None,
        session_timeout: float = 10.0,
        response_timeout: float = 1.0,
        namespace: str | None = None,
        note: str | None = None,
        explain_unavailable: Callable[[], str] = lambda: "there is no connection",
    ) -> None:
        self._secret = secret
        self.handshake = Handshake(session_timeout, namespace, note)
        self.calls = Calls(self.handshake, response_timeout, explain_unavailable)
        self.renew_identity()
        self.requests = Requests(self.handshake, self.calls, session_timeout)
        self.watches = Watches(self.handshake, self.calls)
        self._line_reader = LineReader(MAX_LINE_FROM_SERVER)

    def renew_identity(self) -> None:
        """Use another random secret, or if the caller has given the secret, another prefix of each `ref`.

        A process that was forked from this one has a copy of this object. With the same secret and `ref`, the server would
        take its request for one of the other process, and answer with the lock of the other process.
        """
        if self._secret is None:
            self.handshake.use_secret(secrets.token_urlsafe())
        else:
            self.handshake.use_secret(self._secret)
            # No other client with this secret uses the same `ref`.
            self.calls.ref_prefix = secrets.token_urlsafe(6) + "-"

    # -- calls to bytes -----------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """True if there is a connection with a completed handshake, so that calls are sent at once."""
        return self.handshake.phase is UP

    def send(self, call: Call, now: float) -> None:
        """Send a call other than a request, now or on the next connection."""
        if isinstance(call, Extend):
            self.requests.extend(call, now)
        elif isinstance(call, Release):
            self.requests.release_by_id(call, now)
        else:
            self.calls.send(call, now)

    def abandon(self, call: Call, now: float) -> None:
        """Drop the outcome of a call whose caller no longer waits. A request is also released."""
        self.calls.drop_caller(call)
        if isinstance(call, Request):
            self.requests.abandon(call, now)

    def unwatch(self, watch: Watch, now: float) -> list[Outcome]:
        """End a watch. Does nothing if the watch has ended before."""
        self.watches.close(watch, now)
        return self.calls.take_outcomes()

    def data_to_send(self) -> bytes:
        """Remove and return the bytes that must be sent to the server."""
        lines = self.calls.unsent_lines
        data = b"".join(lines)
        lines.clear()
        return data

    # -- connections --------------------------------------------------------------------------------------

    def on_connected(self, now: float) -> None:
        """Start the handshake on a new connection. Other commands wait until the server has resumed the session."""
        self._line_reader = LineReader(MAX_LINE_FROM_SERVER)
        self.calls.unsent_lines += self.handshake.on_connected(now)

    def on_disconnected(self, reason: str) -> list[Outcome]:
        """Handle the end of the connection.

        Requests, locks and watches are kept. Releases are sent again on the next connection. Any other call fails with
        ConnectionLost. A lock that is bound to the session is lost unless the client reconnects before its lease ends.
        """
        self.requests.on_disconnected()
        self.calls.on_disconnected(reason)
        self.watches.on_disconnected()
        if self.handshake.on_disconnected():
            self._fail_callers(self.handshake.connected_at)
            self.calls.deferred_releases = []
            self.requests.on_taken_over()
        return self.calls.take_outcomes()

    def fail_callers(self, now: float) -> list[Outcome]:
        """Fail all waiting calls if the client has ended, or all servers have rejected it for good.

        The requests of the failed calls are released when a server accepts the client again.
        """
        self._fail_callers(now)
        return self.calls.take_outcomes()

    def _fail_callers(self, now: float) -> None:
        """Fail all waiting calls with the error of `fail_callers`, if there is one. Leaves the outcomes in `calls`."""
        error = self.handshake.rejection
        if error is None:
            return
        for call in self._take_unsent_calls():
            if call.future is not None:
                self.calls.outcomes.append(Outcome(call, error=errors.copy_rejection(error)))
        for watch in self.watches.all():
            self.watches.on_rejected(watch, errors.copy_rejection(error))
        for request in self.requests.live.waiting():
            self.requests.fail(request, errors.copy_rejection(error), now)

    def _take_unsent_calls(self) -> list[Call]:
        """Return all calls that wait for a connection, except requests. The releases among them are still sent later."""
        return [*self.calls.take_deferred(), *self.calls.deferred_releases, *self.requests.live.releases_by_ref()]

    def begin_close(self, now: float) -> list[Outcome]:
        """Cancel all waiting requests, and end all watches and the locks that are bound to the session.

        Called before the client sends `bye`. The server releases the bound locks when it executes `bye`, before its answer
        arrives. So the client must not use them from now on.
        """
        self.watches.close_all()
        self.requests.lose_bound()
        for request in self.requests.live.waiting():
            self.requests.fail(request, ConnectionLost("the client was closed, before the reply arrived"), now)
        return self.calls.take_outcomes()

    def finish_close(self) -> list[Outcome]:
        """Fail the remaining calls, after the client has closed its connection.

        Locks that are not lost stay held at the server, and can be released by their ids.
        """
        reason = "the client was closed"
        outcomes = self.on_disconnected(reason)
        for call in self._take_unsent_calls():
            error = ConnectionLost(f"{reason}, before the reply arrived")
            self.calls.outcomes.append(Outcome(call, error=error))
        self.requests.on_closed()
        return outcomes + self.calls.take_outcomes()

    # -- timers -------------------------------------------------------------------------------------------

    @property
    def next_timer(self) -> float:
        """When `on_timer` must be called. Infinite if there is no timer."""
        requests, calls = self.requests, self.calls
        return min(requests.live.next_timer, requests.lease.next_timer, calls.keepalive.next_timer, calls.next_deadline)

    def on_timer(self, now: float) -> list[Outcome]:
        """Handle the timers that are due.

        Ends the calls and locks that have timed out. Extends the locks with a watchdog. Pings a server that was silent for
        too long, or if the lease must be renewed. Requests the end of the connection if the server has not replied to a ping
        in time.
        """
        requests, calls, keepalive = self.requests, self.calls, self.calls.keepalive
        calls.on_timer(now)
        if requests.live.next_timer <= now:
            requests.on_timer(now)
        should_ping = requests.lease.next_timer <= now and requests.must_renew_lease(now)
        if keepalive.next_timer <= now:
            if calls.pending or requests.live.by_ref or self.watches:
                should_ping |= keepalive.on_timer(now)
            else:  # the client waits for nothing, so the server may be silent
                keepalive.stop()
        if should_ping:
            calls.send(Ping(), now)
        if keepalive.timed_out:
            self.handshake.request_close("the server does not answer")
        return calls.take_outcomes()

    # -- bytes to outcomes --------------------------------------------------------------------------------

    def receive_data(self, data: bytes, now: float) -> list[Outcome]:
        """Process received bytes, and return the outcomes that result.

        Sets the `close_reason` of the handshake if the connection must be closed, for example after an invalid message.
        """
        self.calls.keepalive.on_message(now)
        try:
            lines = self._line_reader.feed(data)
        except LineTooLong as error:
            lines = error.lines  # the complete lines before the line that is too long
            self.handshake.close_reason = f"the server sent a line of more than {MAX_LINE_FROM_SERVER} bytes"
        for line in lines:
            try:
                message = messages.read(line)
            except ValueError as error:
                self.handshake.close_reason = f"the server sent an invalid message: {line[:80]!r} ({error})"
                break
            if self.handshake.phase is not UP:
                self._handle_message(message, now)
            elif type(message) is messages.Locked:  # the most frequent messages first, without the pattern matching
                self.requests.on_locked(message.payload, now)
            elif type(message) is messages.Released:
                self.requests.on_released(message.payload)
            elif type(message) is messages.Event and message.payload.state != "lagged":
                self.watches.on_event(message.payload)
            else:
                self._handle_message(message, now)
        return self.calls.take_outcomes()

    def _handle_message(self, message: messages.Message | None, now: float) -> None:
        """Dispatch a message by its type. None stands for a type that this version does not know, and is ignored."""
        match message:
            case _ if self.handshake.phase is Phase.HANDSHAKE:
                self._handle_hello_reply(message, now)
            case messages.Locked():
                self.requests.on_locked(message.payload, now)
            case messages.Released():
                self.requests.on_released(message.payload)
            case messages.Queued():
                self.requests.on_queued(message.payload)
            case messages.Extended():
                self.requests.on_extended(message.payload, now)
            case messages.Pong() if self.handshake.phase is Phase.RESUMING:
                self._finish_resumption(now)
            case messages.Pong() | messages.Inspected() | messages.Bye():
                self._handle_reply(message)
            case messages.Watching() | messages.Unwatched() | messages.Event():
                self.watches.on_message(message, now)
            case messages.Error():
                self._handle_error(message.payload, now)

    def _handle_reply(self, message: messages.Pong | messages.Inspected | messages.Bye) -> None:
        """Complete the call that a `pong`, `inspected` or `bye` replies to."""
        call: Call | None
        result: object = None
        match message:
            case messages.Inspected():
                ref = message.payload.pop("ref", None)
                call = inspect = self.calls.pop(Inspect, ref if isinstance(ref, str) else None)
                result = message.payload  # without `ref`
                if inspect is not None:
                    inspect.queue_total = message.payload.get("queueTotal")
            case messages.Pong():
                call = ping = self.calls.pop(Ping, message.payload.ref)
                if ping is not None:
                    self.requests.lease.renew(ping.sent_at)
            case messages.Bye():
                call = self.calls.pop(Bye, message.payload.ref)
        if call is not None:
            self.calls.outcomes.append(Outcome(call, result=result))

    def _handle_hello_reply(self, message: messages.Message | None, now: float) -> None:
        """Handle the reply to `hello`: `welcome` or an error."""
        match message:
            case messages.Welcome():
                if self.handshake.on_welcome(message.payload):
                    self._begin_resumption(message.payload, now)
            case messages.Error():
                self._handle_error(message.payload, now)
            case None:
                pass  # a message type of a newer server
            case _:
                self.handshake.request_close("the server did not answer hello")

    def _begin_resumption(self, welcome: messages.Welcome.Payload, now: float) -> None:
        """Apply a `welcome`: renew the lease. If the server does not know the session, all locks are lost."""
        keepalive, lease = self.calls.keepalive, self.requests.lease
        keepalive.set_interval(welcome.pingInterval / 1000)
        lease.set_ping_interval(keepalive.ping_interval_s)
        lease.renew(self.handshake.connected_at)
        if not welcome.resumed:
            self.requests.on_session_lost(now)

    def _finish_resumption(self, now: float) -> None:
        """Complete the handshake, now that the server has sent the state of all requests of the session.

        Sends the calls that were deferred until now: releases, waiting requests, extensions and watches.
        """
        self.handshake.phase = UP
        self.requests.on_resumed(now)
        for call in self.calls.take_deferred():
            own_lock = call.request if isinstance(call, Extend) else None
            if own_lock is None or own_lock.error is None:
                self.send(call, now)
            else:
                self.calls.outcomes.append(Outcome(call, error=errors.copy_lock_lost(own_lock.error)))
        self.calls.keepalive.start(now)
        self.requests.keep_locks(now)
        self.watches.send_needed(now)

    # -- error replies ------------------------------------------------------------------------------------

    def _handle_error(self, reply: messages.Error.Payload, now: float) -> None:
        """Handle an `error` reply: fail the call with the same `ref`.

        The connection is closed after `unavailable`, after any error during the handshake, and if the reply has no `ref`.
        After `unavailable` requests, releases and watches do not fail, but are sent again on the next connection.
        """
        error = errors.from_error_reply(reply)
        self.handshake.on_error(error, reply.leader)
        if not self.up:
            return
        request = self.requests.find(reply.ref)
        if request is not None:
            if not isinstance(error, Unavailable):
                self.requests.on_error(request, error)
            return
        call = self.calls.pop(Call, reply.ref)
        if call is not None:
            self._handle_call_error(call, error, now)
        elif reply.ref is None:
            # The server could not parse a command. The client does not know which one, so a caller would wait: reconnect.
            self.handshake.close_reason = f"the server answered: {error}"

    def _handle_call_error(self, call: Call, error: GenieError, now: float) -> None:
        """Handle an error reply to a call other than a request."""
        if isinstance(call, Release | Extend):
            self.requests.on_call_error(call, error, now)
        elif not isinstance(call, Watch):
            self.calls.outcomes.append(Outcome(call, error=error))
        elif not isinstance(error, Unavailable):
            self.watches.on_rejected(call, error)
