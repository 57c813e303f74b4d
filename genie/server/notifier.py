"""Turns events of the lock manager into messages to clients, and into changes for the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from genie import core
from genie.access import NO_ACCESS, Principal
from genie.core import ENDED, SUCCESS, WAITING, Event, LockManager, Released, Request
from genie.core.context import NO_CONTEXT
from genie.core.size import SHORT_TEXT_BYTES, text_bytes
from genie.core.view import MAX_COUNTED_ON_ARRIVAL, find_blockers
from genie.errors import Code, RequestRejected
from genie.history.recorder import Recorder
from genie.protocol import replies
from genie.server.outcome import BatchOutcome
from genie.server.peer import Item
from genie.server.sessions import MAX_RETAINED_REPLY_BYTES, Outbound, Session, SessionTable, fingerprint
from genie.server.state_size import FirstBlockers, StateSize
from genie.server.watch_events import WatchEvents
from genie.storage.store import Change, RetainedReply, is_stored

if TYPE_CHECKING:
    from genie.observability.stats import Stats


class Notifier:
    """Adds the messages and changes that follow from events to the outcome of the batch.

    In the methods, `requester` is the connection that sent the command, or None for a command of the server itself.
    `ref` is the `ref` of the command. `now` is the lock manager's time of the batch (ms).
    """

    def __init__(
        self,
        manager: LockManager,
        sessions: SessionTable,
        size: StateSize,
        watch_events: WatchEvents,
        stats: Stats,
        outcome: BatchOutcome,
        recorder: Recorder | None,
    ) -> None:
        self.manager = manager
        self.stats = stats
        self.outcome = outcome
        """The changes and messages of the current batch."""
        self.sessions = sessions
        self.size = size
        self._charges = size.requests
        """The charges of large requests. Empty if there are none."""
        self.watch_events = watch_events
        self._watched = watch_events.watched
        """The watched prefixes. While it is empty, no watch events are sent."""
        self.recorder = recorder
        """Records the history. None if the history is off."""

    # -- messages -----------------------------------------------------------------------------------------

    def reject(self, connection: Outbound | None, rejection: RequestRejected) -> None:
        """Count an error, and send it once the batch is stored."""
        self.stats.errors[rejection.code] += 1
        self.outcome.send(connection, replies.error(rejection))

    def reject_now(self, connection: Outbound, errors: list[RequestRejected]) -> None:
        """Count errors, and send them immediately.

        If messages wait for the batch in flight, send the errors after them.
        """
        for rejection in errors:
            self.stats.errors[rejection.code] += 1
        if connection.closed or not errors:
            return
        in_order = not connection.outbox  # no earlier message waits for the batch in flight
        connection.outbox += map(replies.error, errors)
        if in_order:
            connection.flush()
        else:
            connection.has_reply = True  # flushed with the batch

    # -- events of the lock manager -----------------------------------------------------------------------

    def handle_events(
        self,
        events: list[Event],
        now: float,
        requester: Outbound | None = None,
        ref: str | None = None,
        request_line: Item | None = None,
    ) -> None:
        """Record the events of a command in the history, send their messages, and add the changed requests to the outcome.

        If a `request` waits, the history stores its received line, `request_line`. Without it, the history encodes the
        events.
        """
        if self.recorder is not None and events:
            self.recorder.on_events(events, now, request_line)
        for event in events:
            _ON_EVENT[type(event)](self, event, requester, ref, now)

    def on_queued(self, event: core.Queued, requester: Outbound | None, ref: str | None, now: float) -> None:
        """Send `queued`. Store the request if its session has a key: otherwise it ends with the connection."""
        request = event.request
        session: Session = request.origin  # type: ignore[assignment]
        session.add_queued(request)
        session.live_requests += 1
        self.stats.record_queued(request, self.manager.table)
        if session.key is not None and request.state is not ENDED:
            self.outcome.store(request)
        if request.context is not NO_CONTEXT:  # it may have a principal or a `traceparent`
            self._begin_wait(request)
        if request.ref is None or not session.quiet:
            self.outcome.send(session.connection, replies.queued(request))

    def _begin_wait(self, request: Request) -> None:
        """Count the wait of a request for its principal.

        If it has a `traceparent`, keep its first blockers for its `locked`. The blockers are not stored. Blockers with
        long texts are not kept, because the texts could outlive the requests that are charged for them.
        """
        self.size.begin_wait(request)
        if request.context.traceparent is None or request.state is not WAITING:
            return
        blockers, total = find_blockers(self.manager.table, request, MAX_COUNTED_ON_ARRIVAL)
        for blocker in blockers:
            for text in (blocker.resource, blocker.transaction, blocker.context.note):
                if text is not None and text_bytes(text) > SHORT_TEXT_BYTES:
                    return
        self.size.first_blockers[request.id] = blockers, total

    def end_wait(self, request: Request) -> FirstBlockers | None:
        """Record the end of the wait of a request. Return its first blockers, or None if they were not kept."""
        self.size.end_wait(request)
        return self.size.first_blockers.pop(request.id, None)

    def on_locked(self, event: core.Locked, requester: Outbound | None, ref: str | None, now: float) -> None:
        """Send `locked` for a request that was granted after a wait."""
        request = event.request
        session: Session | None = request.origin  # type: ignore[assignment]
        outcome = self.outcome
        if outcome.durable:
            outcome.changes[request.id] = request
        self.stats.record_granted(event)
        first_blockers = None if request.context is NO_CONTEXT else self.end_wait(request)
        if session is not None:
            session.on_granted(request)
            connection = session.connection
            if connection is not None and not connection.closed:
                connection.has_reply = True
                connection.outbox.append(
                    replies.locked(request)
                    if first_blockers is None
                    else replies.locked_after_wait(request, *first_blockers, connection.principal)
                )
                outcome.granted.append(connection)
        if self._watched:
            self.watch_events.publish(request, "locked")

    def on_taken(self, event: core.Taken, requester: Outbound | None, ref: str | None, now: float) -> None:
        """Send `queued` and `locked` for a request with `anyOf`, units or subtrees that is granted immediately."""
        request = event.request
        session: Session = request.origin  # type: ignore[assignment]
        session.add_granted(request)
        session.live_requests += 1
        self.stats.granted += 1
        self.outcome.store(request)
        if request.ref is None or not session.quiet:
            self.outcome.send(requester, replies.queued(request))
        has_choices = request.context.choice_digest is not None  # `anyOf`
        self.outcome.send(requester, replies.taken(request) if has_choices else replies.locked(request))
        if self._watched:
            self.watch_events.publish(request, "locked")

    def on_released(self, event: Released, requester: Outbound | None, ref: str | None, now: float) -> None:
        """Send `released` to the requester, and to the connection of the ended request if that is another connection.

        Count the end of the request, retain the reply, and send watch events.
        """
        request = event.request
        session: Session | None = request.origin  # type: ignore[assignment]
        if request.fence and event.reason is SUCCESS:
            self.stats.holds.add(now - request.since)
        else:
            self.stats.record_ended(event, now)
        is_own = requester is not None and session is not None and requester is session.connection
        # A client that released its own request gets the reply below, so the session retains only the reason.
        message = b""
        if not is_own or event.reason is not SUCCESS:
            message = replies.released(event, now, request.ref, _viewer(request))
        self._end(request, event.reason, message, now)
        if session is not None and not is_own:
            self.outcome.send(session.connection, message)
        if requester is not None:
            self.outcome.send(requester, replies.released(event, now, ref, requester.principal))
        if self._watched and request.fence:
            self.watch_events.publish(request, "unlocked")

    def _end(self, request: Request, reason: core.Reason, message: bytes, now: float) -> None:
        """Remove an ended request from its session, and from the store if it may have a record there.

        The session retains `message`, the reply to the request, if the client can receive it again: after a reconnect,
        or by a retry with the same `ref`.
        """
        session: Session | None = request.origin  # type: ignore[assignment]
        change: Change = request
        if session is not None:
            session.live_requests -= 1
            if not session.live_requests:
                self.sessions.on_last_request(session)
            session.unbind(request)
            if request.ref is not None or (session.key is not None and message):
                change = self.retain_reply(session, request, reason, message, now)
        self.size.credit_request(request.id, request.context.principal)
        if not request.fence:
            self.end_wait(request)
        if not self.outcome.durable:
            return
        if (  # the request may have a record in the store, from this batch or an earlier batch
            request.fence  # it was held
            or session is None
            or (
                session.key is not None
                and (request.id < self.outcome.stored_below or request.id in self.outcome.changes)
            )
        ):
            self.outcome.changes[request.id] = change

    def retain_reply(
        self, session: Session, request: Request, reason: core.Reason, message: bytes, now: float
    ) -> Change:
        """Retain the terminal reply of a request in its session, and return the change for the store.

        A session without a key cannot be resumed. It retains only the reason, for the reply to a retry with the same
        `ref`. The oldest replies beyond the limits are dropped.
        """
        if session.key is None:
            if session.connection is None:  # the connection is lost: no client can use the `ref`
                return request
            message = b""
        elif len(message) > MAX_RETAINED_REPLY_BYTES:
            message = replies.ended(request.id, reason, request.ref)  # without blockers or cycle
        reply = RetainedReply(request.id, request.ref, session, now, message, reason, request)
        if self._charges and self.size.is_large(request.id):
            # Keep only a digest of the long texts, because they are no longer charged after the end of the request.
            reply.request, reply.fingerprint = None, fingerprint(request)
        if session.key is not None:
            for id_ in self.sessions.retain(session, reply):
                self.outcome.delete(id_)
            return reply
        session.retain(reply)
        is_over_limit = len(session.retained_replies or ()) > session.reply_limit
        if is_over_limit and not self.sessions.raise_reply_limit(session, request.context.principal):
            session.drop_oldest_reply()
        return request

    def on_extended(self, event: core.Extended, requester: Outbound | None, ref: str | None, now: float) -> None:
        """Send `extended`."""
        self.outcome.store(event.request)
        self.outcome.send(requester, replies.extended(event, ref))

    def on_moved(self, event: core.Moved, requester: Outbound | None, ref: str | None, now: float) -> None:
        """Store the new queue position of a waiting request. The client is not notified."""
        if is_stored(event.request):
            self.outcome.store(event.request)

    def on_queue_full(self, event: core.QueueFull, requester: Outbound | None, ref: str | None, now: float) -> None:
        """Reject a request that would have to wait.

        The wait queues are full, or its principal has used up its share of them.
        """
        limit, principal = self.size.max_queue_entries, event.request.context.principal
        if event.is_opening and event.request.context.choice_digest is not None:
            reason = (
                "the names of anyOf are in too many different directories of many levels: while subtrees are locked or waited "
                f"for, at most {core.MAX_SEARCHED_LEVELS} levels are searched for subtrees above the names"
            )
        elif event.is_opening:
            reason = (
                "too many waiting requests or locks: "
                f"at most {core.MAX_WAITERS_BELOW} requests may wait below new subtrees, fewer if they have many names; "
                f"several new subtrees may be compared with locked names at most {core.MAX_COMPARED_NAMES} times; "
                f"and a request may wait in at most {core.MAX_QUEUES} queues of names and of subtrees above them"
            )
        elif principal is None or self.size.queue_limit(principal) >= limit:
            reason = f"too many waiting requests: all wait queues together have at most {limit} entries"
        else:
            limit = self.size.max_queue_share
            reason = f"too many waiting requests: one principal may have at most {limit} entries in the wait queues"
        self._reject_arrival(event.request, reason, requester, ref, now)

    def on_graph_full(self, event: core.GraphFull, requester: Outbound | None, ref: str | None, now: float) -> None:
        """Reject a request that would have to wait, because the search for a deadlock has exceeded its limit."""
        limit = core.MAX_ARRIVAL_STEPS
        reason = f"too many requests wait for each other: the search for a deadlock has at most {limit} steps"
        self._reject_arrival(event.request, reason, requester, ref, now)

    def _reject_arrival(
        self, request: Request, reason: str, requester: Outbound | None, ref: str | None, now: float
    ) -> None:
        """Reject a request that has an id, and was neither granted nor queued."""
        self.size.credit_request(request.id, request.context.principal)
        if self.recorder is not None:
            self.recorder.on_id_skipped(now)
        self.reject(requester, RequestRejected(Code.TOO_MANY, reason, ref=ref))

    def on_already_ended(
        self, event: core.AlreadyEnded, requester: Outbound | None, ref: str | None, now: float
    ) -> None:
        """Send `released` for a request that ended earlier, with its reason."""
        self.outcome.send(requester, replies.ended(event.id, event.reason, ref))

    def on_unknown_id(self, event: core.UnknownId, requester: Outbound | None, ref: str | None, now: float) -> None:
        """Reject a command for an id that does not exist."""
        reason = f"there is no request {event.id}, or it ended long ago"
        self.reject(requester, RequestRejected(Code.UNKNOWN_ID, reason, ref=ref, id=event.id))

    def on_not_held(self, event: core.NotHeld, requester: Outbound | None, ref: str | None, now: float) -> None:
        """Reject an `extend` of a waiting request."""
        id_ = event.request.id
        reason = f"extend: request {id_} still waits; only a held lock can be extended"
        self.reject(requester, RequestRejected(Code.BAD_REQUEST, reason, ref=ref, id=id_))


_ON_EVENT: dict[type, Callable[[Notifier, Any, Outbound | None, str | None, float], None]] = {
    core.Queued: Notifier.on_queued,
    core.Taken: Notifier.on_taken,
    core.Locked: Notifier.on_locked,
    core.Released: Notifier.on_released,
    core.Insufficient: Notifier.on_released,
    core.TimedOut: Notifier.on_released,
    core.Deadlocked: Notifier.on_released,
    core.QueueFull: Notifier.on_queue_full,
    core.GraphFull: Notifier.on_graph_full,
    core.Extended: Notifier.on_extended,
    core.Moved: Notifier.on_moved,
    core.AlreadyEnded: Notifier.on_already_ended,
    core.UnknownId: Notifier.on_unknown_id,
    core.NotHeld: Notifier.on_not_held,
}


def _viewer(request: Request) -> Principal | None:
    """Return the client that is sent the reply to a request. None if it may see everything.

    If it has lost its connection, its principal may have other prefixes when it gets the reply. So it may see nothing, unless
    its principal had no prefixes. After a takeover that is not known.
    """
    session: Session | None = request.origin  # type: ignore[assignment]
    if session is not None and session.connection is not None:
        return session.connection.principal
    if request.context.principal is None or (session is not None and session.sees_all):
        return None
    return NO_ACCESS
