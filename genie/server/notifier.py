"""What came of a command: to whom it concerns, and to the store.

Messages are only laid out here, in each connection's `out`; the pipeline sends them when the batch is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from genie import core
from genie.core import SUCCESS, Event, LockManager, Released, Request, State
from genie.errors import Code, RequestRejected
from genie.protocol import replies
from genie.server.connection import Connection
from genie.server.sessions import MAX_RETAINED_REPLIES, MAX_RETAINED_REPLY_BYTES, Session, SessionTable
from genie.server.watches import WatchRegistry
from genie.storage.store import Change, RetainedReply, is_stored

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.observability.stats import Stats


class Notifier:
    """Collects what one batch does: `changes` to be stored, connections `touched` by messages, those `ending`.

    `now` is the manager's time of the batch, to be set before anything else. Without `durable` nothing is stored, and
    no changes are collected.
    """

    def __init__(self, manager: LockManager, settings: Settings, stats: Stats, durable: bool = True) -> None:
        self.manager = manager
        self.stats = stats
        self.now = 0.0
        self._durable = durable
        self.sessions = SessionTable()
        self.watches = WatchRegistry(manager.table, self.say, self.reject, self.show, settings.limits.max_unread // 4)
        self.changes: dict[int, Change] = {}
        self.stored_below = manager.next_id
        """No request from this id on is in the store."""
        self.dirty: list[Connection] = []
        self.closing: list[Connection] = []

    def say(self, connection: Connection | None, line: bytes) -> None:
        """Lay out a message for a connection, if it is still there."""
        if connection is not None and not connection.closed:
            if not connection.outbox:
                self.dirty.append(connection)
            connection.has_reply = True
            connection.outbox.append(line)

    def reject(self, connection: Connection | None, rejected: RequestRejected) -> None:
        """Lay out an error."""
        self.stats.errors[rejected.code] += 1
        self.say(connection, replies.error(rejected))

    def show(self, connection: Connection, line: bytes) -> None:
        """The same for what it watches, which is not urgent."""
        if not connection.closed:
            if not connection.outbox:
                self.dirty.append(connection)
            connection.watch_bytes += len(line)
            connection.outbox.append(line)

    def forget(self) -> None:
        """Part what refers to each other, so that all of it is freed: the collector looks at none of it again."""
        self.watches.forget()
        self.dirty.clear()
        self.closing.clear()
        for session in self.sessions:
            session.forget()

    def _tell(self, events: list[Event], asker: Connection | None, ref: str | None = None) -> None:
        """Turn the events of a command into messages, and note what must be stored.

        `asker` sent the command, with this `ref`, which the answer echoes.
        """
        for event in events:
            _TELL[type(event)](self, event, asker, ref)

    def _queued(self, event: core.Queued, asker: Connection | None, ref: str | None) -> None:  # noqa: ARG002
        request = event.request
        session: Session = request.origin  # type: ignore[assignment]
        session.queued(request)
        session.alive += 1
        self.stats.arrived(request, self.manager.table)
        if session.key is not None and request.state is not State.ENDED:
            self._change(request)
        if request.ref is None or not session.quiet:
            self.say(session.connection, replies.queued(request))

    def _locked(self, event: core.Locked, asker: Connection | None, ref: str | None) -> None:  # noqa: ARG002
        request = event.request
        session: Session | None = request.origin  # type: ignore[assignment]
        self._change(request)
        self.stats.locked(event)
        if session is not None:
            session.locked(request)
            self.say(session.connection, replies.locked(request))
        if self.watches.prefixes:
            self.watches.tell(request, "locked")

    def _taken(self, event: core.Taken, asker: Connection | None, ref: str | None) -> None:  # noqa: ARG002
        request = event.request
        session: Session = request.origin  # type: ignore[assignment]
        session.granted(request)
        session.alive += 1
        self.stats.granted += 1
        self._change(request)
        if request.ref is None or not session.quiet:
            self.say(asker, replies.queued(request))
        self.say(asker, replies.taken(request))
        if self.watches.prefixes:
            self.watches.tell(request, "locked")

    def _released(self, event: Released, asker: Connection | None, ref: str | None) -> None:
        request = event.request
        session: Session | None = request.origin  # type: ignore[assignment]
        if request.fence and event.reason is SUCCESS:
            self.stats.holds.add(self.now - request.since)
        else:
            self.stats.over(event, self.now)
        own = asker is not None and session is not None and asker is session.connection
        line = b"" if own and event.reason is SUCCESS else replies.released(event, self.now, request.ref)
        self._close(request, event.reason, line)
        if session is not None and not own:
            self.say(session.connection, line)
        if asker is not None:
            self.say(asker, replies.released(event, self.now, ref))
        if self.watches.prefixes and request.fence:
            self.watches.tell(request, "unlocked")

    def _close(self, request: Request, reason: core.Reason, line: bytes) -> None:
        """A request ended: tell its session and the store. `line` is the ending for its session; see `RetainedReply`."""
        session: Session | None = request.origin  # type: ignore[assignment]
        change: Change = request
        if session is not None:
            session.alive -= 1
            session.bound.pop(request.id, None)
            if request.ref is not None or (session.key is not None and line):
                change = self._remember(session, request, reason, line)
        if not self._durable:
            return
        if (
            request.fence
            or session is None
            or (session.key is not None and (request.id < self.stored_below or request.id in self.changes))
        ):
            self.changes[request.id] = change

    def _remember(self, session: Session, request: Request, reason: core.Reason, line: bytes) -> Change:
        """Remember how a request of a session ended; returns what the store is to know of it."""
        if session.key is None:
            if session.connection is None:  # nobody can ask for it any more
                return request
            session.remember(RetainedReply(request.id, request.ref, session, self.now, b"", reason, request))
            if session.endings is not None and len(session.endings) > MAX_RETAINED_REPLIES:
                session.forget_oldest()
            return request
        if len(line) > MAX_RETAINED_REPLY_BYTES:
            line = replies.ended(request.id, reason, request.ref)
        ending = RetainedReply(request.id, request.ref, session, self.now, line, reason, request)
        for id_ in self.sessions.remember(session, ending):
            self._unset(id_)
        return ending

    def _extended(self, event: core.Extended, asker: Connection | None, ref: str | None) -> None:
        self._change(event.request)
        self.say(asker, replies.extended(event, ref))

    def _moved(self, event: core.Moved, asker: Connection | None, ref: str | None) -> None:  # noqa: ARG002
        """No message: only the store is concerned."""
        if is_stored(event.request):
            self._change(event.request)

    def _full(self, event: core.QueueFull, asker: Connection | None, ref: str | None) -> None:  # noqa: ARG002
        most = self.manager.max_queue_entries
        why = f"this would have to wait, and the lines have {most:.0f} places, or nearly: none is left for it"
        self.reject(asker, RequestRejected(Code.TOO_MANY, why, ref=ref))

    def _repeated(self, event: core.AlreadyEnded, asker: Connection | None, ref: str | None) -> None:
        self.say(asker, replies.ended(event.id, event.reason, ref))

    def _unknown(self, event: core.UnknownId, asker: Connection | None, ref: str | None) -> None:
        why = f"there is no request {event.id}, or it ended long ago"
        self.reject(asker, RequestRejected(Code.UNKNOWN_ID, why, ref=ref, id=event.id))

    def _not_held(self, event: core.NotHeld, asker: Connection | None, ref: str | None) -> None:
        request = event.request
        why = f"extend: {request.id} still waits; only a held lock can be extended"
        self.reject(asker, RequestRejected(Code.BAD_REQUEST, why, ref=ref, id=request.id))

    def _change(self, request: Request) -> None:
        """Let the store know. What waits for a connection alone goes with it, and so with this server: it is not stored."""
        if self._durable:
            self.changes[request.id] = request

    def _unset(self, id: int) -> None:
        """Nothing is to be known of this id any more."""
        if self._durable:
            self.changes[id] = None


_TELL: dict[type, Callable[[Notifier, Any, Connection | None, str | None], None]] = {
    core.Queued: Notifier._queued,  # noqa: SLF001
    core.Taken: Notifier._taken,  # noqa: SLF001
    core.Locked: Notifier._locked,  # noqa: SLF001
    core.Released: Notifier._released,  # noqa: SLF001
    core.Insufficient: Notifier._released,  # noqa: SLF001
    core.TimedOut: Notifier._released,  # noqa: SLF001
    core.Deadlocked: Notifier._released,  # noqa: SLF001
    core.QueueFull: Notifier._full,  # noqa: SLF001
    core.Extended: Notifier._extended,  # noqa: SLF001
    core.Moved: Notifier._moved,  # noqa: SLF001
    core.AlreadyEnded: Notifier._repeated,  # noqa: SLF001
    core.UnknownId: Notifier._unknown,  # noqa: SLF001
    core.NotHeld: Notifier._not_held,  # noqa: SLF001
}
