"""The requests of a client across its connections: sends, extends and releases them, and handles the server's messages.

The `ref` of a request identifies the request until it ends: every `locked`, `released` and `error` with this `ref` is about
the request, also if the server sends the message unsolicited. A request whose id is not known yet is cancelled by its `ref`:
the first `released` with this `ref` ends the request and is the reply to the release. If a timeout and the release cross, a
second `released` follows and is ignored. A `release` or `extend` by id has its own `ref`. The reply to a release by id ends
the lock of this client. If the lock had ended before, a `released` with the `ref` of the request arrives first.

Connections: the server keeps the waiting and held requests of a disconnected session, and sends their state at the beginning
of the next connection (resumption). Then the client sends again, with the same `ref`:

- requests without a known outcome, which is safe because the server executes a `ref` once;
- releases without a reply;
- a release by id for each lock that the resumption did not mention: the lock has ended, and the reply contains the reason.

The client then extends the locks with a watchdog. If the session has expired, or the server has lost its state, the locks of
this client are lost. The client releases these locks by id, because the server may still hold them, and sends waiting requests
again with the rest of their queue timeout.

Timeouts: `locked` may arrive long after the grant, so the timeout of a lock counts from a command of this client: from the
request, from the `hello` of a later connection, or from an extension. After a long wait too little of the timeout remains.
Then the client extends the lock first, and the request stays WAITING until the answer arrives.

Lease: the server keeps the session of a lost connection for the session timeout, and may have lost a half-open connection
long before the client notices. So a lock that is bound to the session is held only while the lease of the session lasts
(`SessionLease`): each answer renews it, from the sending of the command that was answered. A client with such a lock, or a
request for one, pings often enough.

Detached locks: the client drops the request, so it neither extends nor releases the lock, and ignores messages about it.
Another client then manages the lock.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Final

from genie.client import errors, hints
from genie.client.calls import Calls
from genie.client.commands import Extend, Inspect, Outcome, Release, Request, RequestState
from genie.client.handshake import UP, Handshake
from genie.client.keepalive import MIN_LEASE_SHARE, SessionLease
from genie.client.live_requests import LiveRequests
from genie.errors import Code, GenieError, LockLost, RequestRejected, Unavailable
from genie.protocol import messages

MAX_UNKNOWN_GRANTS: Final = 1_000
"""Maximum number of unanswered releases of locks that the client has not requested. A further one closes the connection."""

MIN_REMAINING_SHARE: Final = 0.75
"""If less than this share of the transaction timeout certainly remains when `locked` arrives, the lock is extended before it
counts as held. So a request that waited for a quarter of the timeout costs one more round trip."""

WAITING: Final = RequestState.WAITING
HELD: Final = RequestState.HELD
ENDED: Final = RequestState.ENDED


class Requests:
    """The requests of one session. `session_timeout` is in seconds, every `now` in seconds of the monotonic clock."""

    def __init__(self, handshake: Handshake, calls: Calls, session_timeout: float) -> None:
        self.live = LiveRequests()
        self.lease = SessionLease(session_timeout)
        self._handshake = handshake
        self._calls = calls
        self._unknown_grants: list[Release] = []
        """Releases of locks that this client has not requested. When there are `MAX_UNKNOWN_GRANTS`, the answered ones are
        removed."""
        hints.register(self.live)

    # -- calls of the client --------------------------------------------------------------------------------

    def send(self, request: Request, now: float) -> None:
        """Send a request, now or on the next connection."""
        self.live.add(request, now + request.queue_timeout + self._calls.response_timeout)
        if request.bound_to_session:
            request.lease = self.lease
        if self._handshake.phase is UP:
            self._send(request, now)

    def extend(self, extend: Extend, now: float) -> None:
        """Send an extension, now or on the next connection."""
        self._calls.send(extend, now)
        if self._handshake.phase is UP and extend.request is not None:
            self.live.limit_hold(extend.request, extend)

    def release(self, request: Request, now: float) -> Release | None:
        """Release a lock, or cancel a waiting request.

        Returns:
            The call of the release, which is sent now or on the next connection. None if the request has ended, was
            detached, or is being released already.

        """
        if request.state is not WAITING and request.state is not HELD:
            return None
        request.state = RequestState.RELEASING
        release = request.release = Release(request.id, request)
        if release.id:
            self._calls.send(release, now)
        elif self._handshake.phase is UP:  # the id is not known yet: the server finds the request by its `ref`
            self._calls.keepalive.start(now)
            self._calls.unsent_lines.append(release.line)
        return release

    def release_by_id(self, release: Release, now: float) -> None:
        """Release a request of any client by its id, now or on the next connection.

        In `quiet` mode the client does not know the ids of its waiting requests, and the server does not notify the client that it
        has released its own request. So if a waiting request is released, all waiting requests of this client must be sent again.
        An inspect shows whether the released request waits.
        """
        is_waiting_for_grants = any(request.state is WAITING for request in self.live.by_ref.values())
        if self._handshake.phase is UP and release.id not in self.live.by_id and is_waiting_for_grants:
            release.query = Inspect(id=release.id, only="queue")
            self._calls.send(release.query, now)
        self._calls.send(release, now)
        lock = self.find_held(release.id)
        if lock is not None:  # the server may grant it to another client before the answer arrives
            self._lose(lock, errors.released_by_id(release.id))

    def abandon(self, request: Request, now: float) -> None:
        """Release a request whose caller no longer waits. A request that was never sent ends without a release."""
        request.response_deadline = math.inf
        was_never_sent = request.state is WAITING and request.first_sent_at is None
        if was_never_sent:
            self._end(request)
        else:
            self.release(request, now)

    def fail(self, request: Request, error: GenieError, now: float) -> None:
        """Fail the caller of a waiting request, and release the request."""
        self.abandon(request, now)
        self._calls.outcomes.append(Outcome(request, error=error))

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
        if request.state is not HELD:
            raise errors.already_released(request.id)
        if not request.is_held(now):
            raise errors.expired_locally(request.id, request.transaction_timeout)
        self.live.remove(request)
        request.state = RequestState.DETACHED
        request.on_lost = None

    def find(self, ref: str | None) -> Request | None:
        """Return the live request with this `ref`, or None."""
        return None if ref is None else self.live.by_ref.get(ref)

    def find_held(self, id: int) -> Request | None:
        """Return the request of the lock with this id if this client holds the lock, else None."""
        request = self.live.by_id.get(id)
        return request if request is not None and request.state is HELD else None

    def held(self) -> list[Request]:
        """Return the requests of the locks that this client holds."""
        return [request for request in self.live.by_ref.values() if request.state is HELD]

    # -- the end of the session -----------------------------------------------------------------------------

    def lose_bound(self) -> None:
        """End all locks that are bound to the session, because the client is closed."""
        for request in self.held():
            if request.bound_to_session:
                self._lose(request, errors.client_closed(request.id))

    def on_closed(self) -> None:
        """End all requests, because the client is closed. Locks that are not bound to the session stay held at the server."""
        self.lose_bound()
        for request in list(self.live.by_ref.values()):
            self.live.remove(request)
            if request.state is not HELD:  # a lock that is still held is not lost
                request.state = ENDED

    def on_taken_over(self) -> None:
        """End all requests, and lose all locks: another process uses the session, and may release them at any time."""
        for request in list(self.live.by_ref.values()):
            if request.state is HELD:
                self._lose(request, errors.session_taken_over(request.id))
            else:
                self._end(request)

    # -- a new connection -----------------------------------------------------------------------------------

    def on_disconnected(self) -> None:
        """Handle the end of the connection. Requests and locks are kept."""
        self.lease.stop()
        were_releases_sent = self._handshake.phase is UP
        if were_releases_sent:
            for release in self.live.releases_by_ref():
                release.maybe_executed = True

    def on_session_lost(self, now: float) -> None:
        """Handle a `welcome` from a server that does not know the session: its granted locks are lost.

        Waiting requests will be sent again with the rest of their queue timeout. Unconfirmed releases will be sent again
        by id.
        """
        for request in list(self.live.by_ref.values()):
            if request.state is WAITING:
                if request.fence:  # granted, and not extended yet
                    self._calls.deferred_releases.append(Release(request.id))
                self.live.clear_grant(request)
                request.reencode(now)
            elif request.state is HELD:
                self._lose_unreported(request)
            else:  # the release of the request is not confirmed yet
                self._release_without_session(request)

    def _lose_unreported(self, request: Request) -> None:
        """Handle the loss of a lock that is not in the server's state report.

        The lock is also released, because the server may still hold it without its session.
        """
        self._calls.deferred_releases.append(Release(request.id))
        self._lose(request, errors.session_lost(request.id))

    def _release_without_session(self, request: Request) -> None:
        """Continue a release on a server that has lost the session, and so does not know the `ref` of the request.

        The request is released by its id. A request whose id is not known has ended with the session, so its release
        has succeeded.
        """
        release = request.release
        self.live.remove(request)
        if release is None or release.id:  # a release by id needs no `ref`, and will be sent again unchanged
            return
        if request.id:
            release.use_id(request.id)
            self._calls.deferred_releases.append(release)
        else:
            request.state = ENDED
            self._calls.outcomes.append(Outcome(release, result=errors.SUCCESS))

    def on_resumed(self, now: float) -> None:
        """Send releases and waiting requests, now that the server has sent the state of all requests of the session."""
        calls, connection_number = self._calls, self._handshake.connection_number
        waiting: list[Request] = []
        for request in list(self.live.by_ref.values()):
            if request.state is WAITING:
                waiting.append(request)
            elif request.release is not None:
                if not request.release.id:  # a release by `ref`; releases by id are in `deferred_releases`
                    calls.unsent_lines.append(request.release.line)
            elif request.connection_number != connection_number:
                self._lose_unreported(request)
        deferred, calls.deferred_releases = calls.deferred_releases, []
        for release in deferred:
            calls.send(release, now)
        for request in waiting:
            if request.connection_number == connection_number:  # granted, but too little of the timeout remains
                self._renew(request, now)
            else:
                self.live.clear_grant(request)  # the server may execute the request as a new one
                self._send(request, now)

    def keep_locks(self, now: float) -> None:
        """Extend the locks with a watchdog, and start the timer that renews the lease. Called after the resumption."""
        self.live.renew_all(now)
        if self.live.needs_lease:
            self.lease.start(now)

    # -- timers ---------------------------------------------------------------------------------------------

    def on_timer(self, now: float) -> None:
        """Handle the fired timers of all requests: expired locks, watchdogs, and callers that have waited too long."""
        fired = self.live.collect_timers(now)
        for request in fired.expired:
            self._expire(request, now)
        if self._handshake.phase is UP:
            for request in fired.renewing:
                self._renew(request, now)
        for request in fired.overdue:
            timeout_s = request.queue_timeout + self._calls.response_timeout
            error = self._calls.no_answer_error(f"no answer to the request within {timeout_s:g} s")
            self.fail(request, error, now)

    def _expire(self, request: Request, now: float) -> None:
        """Lose a lock that has expired on this client's clock. Release it if the server may hold it for longer."""
        handshake = self._handshake
        # If the lease has ended first, the server may still have the session, and hold the lock.
        session_ended = request.lease.ends_at < request.expires_at
        # The clock of a server stops during its outage. So only a lock that the server has confirmed since then, on the
        # current connection, does not end later at the server.
        is_confirmed = handshake.phase is UP and request.connection_number == handshake.connection_number
        # The server may not have executed the extension that shortens the lock.
        is_shortening_pending = request.shortened_by in self._calls.pending
        if session_ended or not is_confirmed or is_shortening_pending:
            self._calls.send(Release(request.id), now)
        if session_ended:
            self._lose(request, errors.session_expired(request.id))
        else:
            self._lose(request, errors.expired_locally(request.id, request.transaction_timeout))

    def must_renew_lease(self, now: float) -> bool:
        """Restart or stop the timer of the lease, which has fired. Returns True if a ping must renew the lease now."""
        if self.live.needs_lease:
            return self.lease.on_timer(now)
        self.lease.stop()
        return False

    # -- messages of the server -----------------------------------------------------------------------------

    def on_queued(self, queued: messages.Queued.Payload) -> None:
        """Store the id of a waiting request. Only servers without the `quiet` mode send `queued`."""
        request = self.find(queued.ref)
        if request is not None:
            self.live.set_id(request, queued.id)

    def on_locked(self, locked: messages.Locked.Payload, now: float) -> None:
        """Handle `locked`: the grant of a request or, during a resumption, the remaining time of a held lock.

        If no request of this client has the `ref`, a new lock is released. If too little of the timeout of a new lock
        remains, the lock is extended before it counts as held: now, or at the end of the resumption. `genie.otel` replaces
        this method.
        """
        request = self.live.by_ref.get(locked.ref or "")
        if request is None:
            if locked.expiresIn is None:  # not a resumption: an earlier client with the same secret requested the lock
                self._release_unknown(locked.id, now)
            return
        handshake = self._handshake
        self.live.set_id(request, locked.id)
        request.connection_number = handshake.connection_number
        request.fence = locked.fence
        if locked.resources is not None:
            request.set_chosen(locked.resources)
        remaining_s = request.transaction_timeout if locked.expiresIn is None else locked.expiresIn / 1000
        if request.state is WAITING:
            self._on_granted(request, remaining_s, now)
        elif request.state is HELD and locked.expiresIn is not None and handshake.phase is not UP:
            self.live.start_hold(request, handshake.connected_at, remaining_s)  # the resumption confirms the lock

    def _on_granted(self, request: Request, remaining_s: float, now: float) -> None:
        """Hold the lock of a waiting request that was granted, or extend it if too little of its timeout or lease remains.

        The server has granted the lock, or computed `remaining_s`, after it had received the `hello` of this connection and
        the request. So the remaining time counts from then: `locked` may be late, for example from a server that was paused.
        """
        since = max(self._handshake.connected_at, request.first_sent_at or 0.0)
        remains_long_enough = since + remaining_s - now >= request.transaction_timeout * MIN_REMAINING_SHARE
        if request.bound_to_session:
            self.lease.renew(since)
            lease_remaining_s = self.lease.ends_at - now
            remains_long_enough &= lease_remaining_s >= self.lease.timeout_s * MIN_LEASE_SHARE
        if remains_long_enough:
            self._hold(request, since, remaining_s)
        elif self._handshake.phase is UP:  # otherwise the lock is extended at the end of the resumption
            self._renew(request, now)

    def _release_unknown(self, id: int, now: float) -> None:
        """Release a lock that this client has not requested. Close the connection if too many releases are not answered.

        Otherwise a defective server could fill the memory of the client with releases.
        """
        if self._handshake.close_reason:
            return
        if len(self._unknown_grants) >= MAX_UNKNOWN_GRANTS:
            unanswered = {*self._calls.pending.values(), *self._calls.deferred_releases}
            self._unknown_grants = [release for release in self._unknown_grants if release in unanswered]
        if len(self._unknown_grants) >= MAX_UNKNOWN_GRANTS:
            self._handshake.request_close(
                f"the server sent more than {MAX_UNKNOWN_GRANTS} locks that were not requested"
            )
            return
        release = Release(id)
        self._unknown_grants.append(release)
        self._calls.send(release, now)

    def _hold(self, request: Request, since: float, remaining_s: float) -> None:
        """Complete a waiting request: its lock is held, and ends `remaining_s` seconds after `since`."""
        request.state = HELD
        self.live.start_hold(request, since, remaining_s)
        self._calls.outcomes.append(Outcome(request))

    def _renew(self, request: Request, now: float) -> None:
        """Extend a lock by its transaction timeout. A granted request that is WAITING stays in this state until the answer."""
        self.extend(Extend(request.id, request.transaction_timeout, request), now)

    def on_released(self, released: messages.Released.Payload) -> None:
        """Handle `released`: a request has ended, or had ended before this client released or extended it by its id.

        The message has the `ref` of the request, or of the release or extension by id that it answers. Completes the request,
        and the release or extension, if a caller waits for them.
        """
        call = self._calls.pending.pop(released.ref or "", None)
        if isinstance(call, Release):
            self._on_release_answered(call, released)
            return
        request = self.find(released.ref) if call is None else self.live.by_id.get(released.id)
        if request is not None:
            self._on_ended(request, released)
        if isinstance(call, Extend):  # the lock had ended before the extension
            error = None if call.request is None else call.request.error
            error = errors.copy_lock_lost(error or errors.lock_ended(released))
            self._calls.outcomes.append(Outcome(call, error=error))
        elif call is not None:  # a defective server answers another command: its caller still waits
            self._calls.pending[call.ref] = call

    def _on_release_answered(self, release: Release, released: messages.Released.Payload) -> None:
        """Handle the reply to a release by id: the request with this id has ended."""
        request = self.live.by_id.get(released.id) or release.request
        if request is not None:
            self._on_ended(request, released)
        self._calls.outcomes.append(Outcome(release, result=released.reason))
        may_be_waiting = release.query is not None and release.query.queue_total != 0
        if request is None and released.reason == errors.SUCCESS and may_be_waiting:
            self._resend_waiting()
        release.request = None  # else only the garbage collector can free the two objects, which refer to each other

    def _resend_waiting(self) -> None:
        """Send all waiting requests again, because the request that was just released by its id may be one of them.

        When this request is sent again, the server replies with `released`. So it does for the releases that were sent before,
        which need not send the requests again.
        """
        for call in self._calls.pending.values():
            if isinstance(call, Release):
                call.query = None
        for request in self.live.waiting():
            if request.first_sent_at is not None:
                self._calls.unsent_lines.append(request.line)

    def _on_ended(self, request: Request, released: messages.Released.Payload) -> None:
        """Handle the end of a request: a waiting request fails, a held lock is lost, and a release by `ref` is completed."""
        state = request.state
        self._end(request)
        if state is WAITING:
            find_hint = partial(hints.self_blocking_hint, request, self.live)
            error = errors.not_granted_error(released, find_hint)
            self._calls.outcomes.append(Outcome(request, error=error))
            return
        # If a granted lock ended for another reason than this client's release, it was lost before the release.
        lost_before_release = request.fence and released.reason != errors.SUCCESS and request.error is None
        if state is HELD or lost_before_release:
            self._lose(request, errors.lock_lost(released))
        if request.release is not None and not request.release.id:  # a release by `ref` has no other reply
            self._calls.outcomes.append(Outcome(request.release, result=released.reason))

    def on_extended(self, extended: messages.Extended.Payload, now: float) -> None:
        """Handle `extended`: restart the expiry timer of the lock.

        The client counts the new timeout from the time at which it sent `extend`. The server counts from a later time, so
        the lock never ends at the server before it ends on this client's clock. The server may also have executed later
        extensions whose answers are still to come, so the lock must not end after the shortest of them.
        """
        call = self._calls.pop(Extend, extended.ref)
        if call is None:
            return
        self.lease.renew(call.sent_at)
        if call.request is not None:
            self._on_own_lock_extended(call.request, call, now)
        self._calls.outcomes.append(Outcome(call))

    def _on_own_lock_extended(self, request: Request, call: Extend, now: float) -> None:
        """Apply an answered extension to the lock of this client, by the state of its request."""
        if request.state is WAITING:
            if now < min(call.sent_at + call.transaction_timeout, request.lease.ends_at):
                self._hold(request, call.sent_at, call.transaction_timeout)
            else:  # the answer was late, too
                self._renew(request, now)
        elif request.state is HELD:
            request.transaction_timeout = call.transaction_timeout
            self.live.start_hold(request, call.sent_at)
            if request.last_extension in self._calls.pending:  # unanswered extensions may shorten the lock
                for later in self._calls.pending.values():
                    if isinstance(later, Extend) and later.request is request:
                        self.live.limit_hold(request, later)
        elif request.error is not None:  # this client has lost the lock before the reply
            self._calls.send(Release(request.id), now)

    # -- error replies --------------------------------------------------------------------------------------

    def on_error(self, request: Request, error: GenieError) -> None:
        """Handle an error reply with the `ref` of a request: the server rejected the request, or its release by `ref`."""
        release, outcomes = request.release, self._calls.outcomes
        is_released_by_id = release is not None and bool(release.id)
        if request.state is HELD or is_released_by_id:
            return  # every command with this `ref` has had its reply before
        self._end(request)
        if release is None:
            outcomes.append(Outcome(request, error=error))
        elif release.maybe_executed and is_unknown_id(error):  # the server executed it on an earlier connection
            outcomes.append(Outcome(release, result=errors.SUCCESS))
        else:
            if request.fence and is_unknown_id(error):
                self._lose(request, errors.unknown_to_server(request.id))
            outcomes.append(Outcome(release, error=error))

    def on_call_error(self, call: Release | Extend, error: GenieError, now: float) -> None:
        """Handle an error reply to a release or extension by id.

        After `unavailable`, a release is sent again to the next server, and a granted request is extended there. Any other
        error fails the call, and a lock whose release was rejected counts as held again.
        """
        is_unavailable = isinstance(error, Unavailable)
        if isinstance(call, Release) and is_unavailable:
            self._calls.deferred_releases.append(call)
        elif isinstance(call, Extend) and call.request is not None and call.request.state is WAITING:
            if not is_unavailable:
                self._fail_unextended(call.request, error, now)
        elif is_unknown_id(error):
            self._on_unknown_id(call, error)
        else:
            request = call.request if isinstance(call, Release) else None
            if request is not None and self.find(request.ref) is request:  # the lock is still held
                request.state = HELD
                request.release = None
            self._calls.outcomes.append(Outcome(call, error=error))

    def _fail_unextended(self, request: Request, error: GenieError, now: float) -> None:
        """Fail a granted request, because its extension was rejected, and too little of its timeout may remain."""
        self._end(request)
        if is_unknown_id(error):
            error = errors.unknown_to_server(request.id)
        else:
            self._calls.send(Release(request.id), now)
        self._calls.outcomes.append(Outcome(request, error=error))

    def _on_unknown_id(self, call: Release | Extend, error: GenieError) -> None:
        """Handle an error reply to a release or extension because the server does not know the id.

        A lock of this client with this id is lost. There is one exception: if the same release was sent before, on a
        connection that was lost, the server has executed the release then. So the release has succeeded.
        """
        own_request = call.request
        if isinstance(call, Release) and call.maybe_executed and own_request is not None:
            self._end(own_request)
            self._calls.outcomes.append(Outcome(call, result=errors.SUCCESS))
            return
        is_own_release = isinstance(call, Release) and own_request is not None
        # A release by id has no request of this client, but this client may hold the lock with this id.
        lock = own_request if is_own_release else self.find_held(call.id)
        if lock is not None and lock.state is not ENDED:
            self._lose(lock, errors.unknown_to_server(call.id))
        if isinstance(call, Extend) and own_request is not None:
            error = errors.unknown_to_server(call.id)  # it says that the lock is lost, not only that the id is unknown
        self._calls.outcomes.append(Outcome(call, error=error))

    # -- helpers --------------------------------------------------------------------------------------------

    def _send(self, request: Request, now: float) -> None:
        """Send a request on the current connection, for the first time or again."""
        self._calls.keepalive.start(now)
        if request.bound_to_session:
            self.lease.start(now)
        if request.first_sent_at is None:
            request.first_sent_at = now
        self._calls.unsent_lines.append(request.line)

    def _end(self, request: Request) -> None:
        """Remove a request that has ended."""
        self.live.remove(request)
        request.state = ENDED

    def _lose(self, request: Request, error: LockLost) -> None:
        """End a granted request, because its lock is lost. The I/O layer notifies the owner of the lock of `error`."""
        self._end(request)
        request.error = error
        self._calls.outcomes.append(Outcome(request, error=error))


def is_unknown_id(error: GenieError) -> bool:
    """Return whether an error reply means that the server does not know the id or `ref` of a command."""
    return isinstance(error, RequestRejected) and error.code == Code.UNKNOWN_ID
