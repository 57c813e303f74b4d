"""One command after the other: to the lock manager, and what came of it to whom it concerns.

Messages are only laid out here, in each connection's `out`; the pump sends them when the batch is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import chain
from typing import TYPE_CHECKING, Any

from genie import core
from genie.core import SUCCESS, Disconnect, Event, Expire, Granted, LockManager, Release, Released, Request, State
from genie.errors import Code, RequestRejected
from genie.protocol import replies
from genie.protocol.commands import Hello, Inspect, Ping, read
from genie.protocol.replies import granted, released
from genie.server.connection import HANGUP, Connection, Item
from genie.server.refusal import refusal
from genie.server.session import ENDINGS_IN_ALL, LONGEST_ENDING, Session, same
from genie.server.sessions import Sessions
from genie.storage.base import Batch, Change, Ending, is_stored, whole

if TYPE_CHECKING:
    from genie.config import Settings

_EXPIRE = Expire()
_VERSION = version("genie-lock")


class Dispatch:
    """Collects what one batch does: `changes` to be stored, connections `touched` by messages, those `ending`.

    `now` is the manager's time of the batch, to be set before anything else. Without `durable` nothing is stored, and
    no changes are collected.
    """

    def __init__(self, manager: LockManager, settings: Settings, durable: bool = True) -> None:
        self.manager = manager
        self.now = 0.0
        self._durable = durable
        self._namespace = settings.namespace
        self._most = settings.max_requests
        self.sessions = Sessions()
        self._step, self._held, self._waiting = manager.step, manager.table.held, manager.table.waiting
        self.changes: dict[int, Change] = {}
        self.stored_below = manager.next_id
        """No request from this id on is in the store."""
        self.touched: list[Connection] = []
        self.ending: list[Connection] = []

    def expire(self) -> None:
        """End what is due, and the sessions that waited in vain for another connection."""
        self._tell(self.manager.step(_EXPIRE, self.now), None)
        for session in self.sessions.ended(self.now):
            self._end(session)

    def recover(self, endings: Iterable[Ending]) -> None:
        """The step after loading: nobody who asked before is connected now, but sessions may come back."""
        requests = [*self._held.values(), *self._waiting.values()]
        self.sessions.restore(requests, endings, self.now)
        self._tell(self.manager.step(core.Recover(), self.now), None)

    def whole(self, next_id: int) -> Batch:
        """The whole state, as a store should have it."""
        endings = {id_: ending for session in self.sessions for id_, ending in session.endings.items()}
        return whole(self.manager, endings, next_id, self.now)

    def take(self, connection: Connection, items: Iterator[Item]) -> bool:  # noqa: C901, PLR0912 - the hot path
        """Carry out what a connection asks for, in order, up to a long look (`inspect`). Returns whether that ended it."""
        # Every command comes through this loop. The two that nearly all are, with the one event that nearly every one
        # of them brings, are dealt with on the spot; whatever else there is has a method of its own.
        if connection.fresh:
            items = self._greeted(connection, items)
        session, out, step, now = connection.session, connection.out, self._step, self.now
        room = self._most - len(self._held) - len(self._waiting)
        if not out:
            self.touched.append(connection)
        for item in items:
            if type(item) is not bytes:
                self._note(connection, item)
                continue
            try:
                command = read(item)
            except RequestRejected as rejected:
                if item and not item.isspace():
                    self.say(connection, replies.error(rejected))
                continue
            if type(command) is Request:
                room -= 1
                if (room < 0 or command.ref is not None) and not self._takes(connection, command):
                    continue
                command.origin = session
                events = step(command, now)
                if type(events[0]) is Granted:
                    if session.key is not None or command.ref is not None or command.release_on_disconnect:
                        session.granted(command)
                    if self._durable:
                        self.changes[command.id] = command
                    out.append(granted(command))
                else:
                    self._tell(events, connection)
            elif type(command) is Release:
                events = step(command, now)
                event = events[0]
                if type(event) is Released and len(events) == 1 and event.request.origin is session:
                    if session.bound or event.request.ref is not None:
                        session.released(event.request)
                    if self._durable and (event.request.fence or session.key is not None):
                        self.changes[command.id] = event.request
                    out.append(released(event, now))
                else:
                    self._tell(events, connection)
            elif type(command) is core.Extend:
                self._tell(step(command, now), connection)
            elif type(command) is Ping:
                out.append(replies.PONG)
            elif type(command) is Inspect:
                self._look(connection, command)
                return True
            elif type(command) is Hello:
                why = "hello: it must be the first command of a connection, and comes once"
                self.say(connection, replies.error(RequestRejected(Code.BAD_REQUEST, why)))
        return False

    # -- commands that need more than a step --------------------------------------------------------------

    def _note(self, connection: Connection, item: Item) -> None:
        """Say an error that a line brought before it could be read, or see a connection off."""
        if isinstance(item, RequestRejected):
            self.say(connection, replies.error(item))
        elif item is HANGUP:
            self._leave(connection)
            self.ending.append(connection)

    def _greeted(self, connection: Connection, items: Iterator[Item]) -> Iterator[Item]:
        """See whether the first line is `hello`, and do as it says. Returns what is left."""
        if connection.parted:
            return iter([item for item in items if item is HANGUP])
        for item in items:
            if item is HANGUP:
                return chain([item], items)
            if isinstance(item, bytes) and (not item or item.isspace()):
                continue
            if isinstance(item, bytes) and self._hello(connection, item):
                connection.fresh = False
                break
            if not connection.snubbed:
                connection.fresh = False
                return chain([item], items)
            line = refusal(item, "hello was refused; it must be said again first")
            self.say(connection, line or b"")
        return items

    def _hello(self, connection: Connection, line: bytes) -> bool:
        try:
            command = read(line)
        except RequestRejected:
            return False
        if type(command) is not Hello:
            return False
        if command.session is None:
            self.say(connection, replies.welcome(_VERSION, self._namespace, resumed=False))
            return True
        session, resumed = self.sessions.enter(command.session, command.session_timeout_ms)
        if session.connection is not None:
            self._part(session.connection)
        session.connection, session.since, connection.session = connection, self.now, session
        self.say(connection, replies.welcome(_VERSION, self._namespace, resumed))
        for ending in session.endings.values():
            self.say(connection, ending.line)
        for request in session.bound.values():
            held = request.state is State.HELD
            self.say(connection, replies.still_locked(request, self.now) if held else replies.queued(request))
        return True

    def _part(self, connection: Connection) -> None:
        """A newer connection has this one's session."""
        connection.session = Session(connection)
        connection.fresh = connection.parted = True
        connection.stop_reading()
        self.ending.append(connection)

    def _leave(self, connection: Connection) -> None:
        """A connection ends, or has ended: what is bound to it goes, or waits for the session's next connection."""
        session = connection.session
        if session.key is not None:
            if session.connection is connection:
                self._forget_told(session)
                self.sessions.leave(session, self.now)
            return
        if session.bound:
            self._tell(self.manager.step(Disconnect(list(session.bound.values())), self.now), None)
        if connection.closed:
            session.close()

    def _end(self, session: Session) -> None:
        """A session is over. What it holds and keeps belongs to nobody from now on."""
        requests = list(session.bound.values())
        for request in requests:
            request.origin = None
            self._change(request)
        self._tell(self.manager.step(Disconnect(requests), self.now), None)
        self.sessions.endings -= len(session.endings)
        for id_ in session.endings:
            self._unset(id_)
        session.close()

    def _look(self, connection: Connection, command: Inspect) -> None:
        found = core.inspect(
            self.manager.table,
            resource=command.resource,
            id=command.id,
            transaction=command.transaction,
            limit=command.limit,
        )
        self.say(connection, replies.inspected(found, self.now))

    def _takes(self, connection: Connection, request: Request) -> bool:
        """Whether a request is new and has a place. Otherwise it is answered here."""
        if request.ref is not None:
            known = connection.session.known(request.ref)
            if known is not None and self._repeat(connection, request, known):
                return False
        if len(self._held) + len(self._waiting) < self._most:
            return True
        told = RequestRejected(Code.TOO_MANY, f"{self._most} requests are held or wait, no more fit", ref=request.ref)
        self.say(connection, replies.error(told))
        return False

    def _repeat(self, connection: Connection, request: Request, known: Request | Ending) -> bool:
        """A request that came again with its `ref` gets the id that it has, and how it stands.

        False where that is forgotten: then it is a new one.
        """
        ending = known if isinstance(known, Ending) else connection.session.endings.get(known.id)
        reason = self.manager.reason(known.id)
        if ending is None and not isinstance(known, Ending) and known.state is State.ENDED and reason is None:
            return False
        if not isinstance(known, Ending) and not same(request, known):
            told = RequestRejected(
                Code.REF_CONFLICT, f"this ref belongs to another request, {known.id}", ref=request.ref, id=known.id
            )
            self.say(connection, replies.error(told))
            return True
        self.say(connection, replies.queued(known))
        if ending is not None:
            self.say(connection, ending.line)
        elif reason is not None:
            self.say(connection, replies.ended(known.id, reason, known.ref))
        elif not isinstance(known, Ending) and known.state is State.HELD:
            self.say(connection, replies.still_locked(known, self.now))
        return True

    # -- what is told -------------------------------------------------------------------------------------

    def _tell(self, events: list[Event], asker: Connection | None) -> None:
        """Turn events into messages, and note what must be stored."""
        for event in events:
            _TELL[type(event)](self, event, asker)

    def _queued(self, event: core.Queued, asker: Connection | None) -> None:  # noqa: ARG002
        request = event.request
        session: Session = request.origin  # type: ignore[assignment]
        session.queued(request)
        if session.key is not None and request.state is not State.ENDED:
            self._change(request)
        self.say(session.connection, replies.queued(request))

    def _locked(self, event: core.Locked, asker: Connection | None) -> None:  # noqa: ARG002
        request = event.request
        session: Session | None = request.origin  # type: ignore[assignment]
        self._change(request)
        if session is not None:
            session.locked(request)
            self.say(session.connection, replies.locked(request))

    def _released(self, event: Released, asker: Connection | None) -> None:
        request = event.request
        session: Session | None = request.origin  # type: ignore[assignment]
        self._close(request)
        line = replies.released(event, self.now)
        if session is not None:
            if session.key is not None and not (asker is session.connection and event.reason is SUCCESS):
                self._keep(session, Ending(request.id, request.ref, session, self.now, line), event.reason)
            self.say(session.connection, line)
        if asker is not None and (session is None or asker is not session.connection):
            self.say(asker, line)

    def _keep(self, session: Session, ending: Ending, reason: core.Reason) -> None:
        """A session may have to be told once more how a request ended, also by the next server."""
        if len(ending.line) > LONGEST_ENDING:
            ending.line = replies.ended(ending.id, reason, ending.ref)
        session.keep(ending)
        self.sessions.endings += 1
        self._forget_told(session)
        if self._durable and ending.id in self.changes:
            self.changes[ending.id] = ending

    def _forget_told(self, session: Session) -> None:
        for id_ in session.told(self.now, self.sessions.endings - ENDINGS_IN_ALL):
            self.sessions.endings -= 1
            self._unset(id_)

    def _extended(self, event: core.Extended, asker: Connection | None) -> None:
        self._change(event.request)
        self.say(asker, replies.extended(event))

    def _moved(self, event: core.Moved, asker: Connection | None) -> None:  # noqa: ARG002
        """Nobody is told."""
        if is_stored(event.request):
            self._change(event.request)

    def _repeated(self, event: core.Repeated, asker: Connection | None) -> None:
        self.say(asker, replies.ended(event.id, event.reason, event.ref))

    def _unknown(self, event: core.Unknown, asker: Connection | None) -> None:
        self.say(asker, replies.unknown_id(event.id))

    def _not_held(self, event: core.NotHeld, asker: Connection | None) -> None:
        request = event.request
        why = f"extend: {request.id} still waits; only a held lock can be extended"
        self.say(asker, replies.error(RequestRejected(Code.BAD_REQUEST, why, id=request.id)))

    def _close(self, request: Request) -> None:
        """A request ended: its session and the store forget it."""
        session: Session | None = request.origin  # type: ignore[assignment]
        if session is not None and (session.bound or request.ref is not None):
            session.released(request)
        if (
            request.fence
            or session is None
            or (session.key is not None and (request.id < self.stored_below or request.id in self.changes))
        ):
            self._change(request)

    def _change(self, request: Request) -> None:
        """Let the store know. What waits for a connection alone goes with it, and so with this server: it is not stored."""
        if self._durable:
            self.changes[request.id] = request

    def _unset(self, id: int) -> None:
        """Nothing is to be known of this id any more."""
        if self._durable:
            self.changes[id] = None

    def say(self, connection: Connection | None, line: bytes) -> None:
        """Lay out a message for a connection, if it is still there."""
        if connection is not None and not connection.closed:
            if not connection.out:
                self.touched.append(connection)
            connection.out.append(line)


_TELL: dict[type, Callable[[Dispatch, Any, Connection | None], None]] = {
    core.Queued: Dispatch._queued,  # noqa: SLF001
    core.Locked: Dispatch._locked,  # noqa: SLF001
    core.Released: Dispatch._released,  # noqa: SLF001
    core.TimedOut: Dispatch._released,  # noqa: SLF001
    core.Deadlocked: Dispatch._released,  # noqa: SLF001
    core.Extended: Dispatch._extended,  # noqa: SLF001
    core.Moved: Dispatch._moved,  # noqa: SLF001
    core.Repeated: Dispatch._repeated,  # noqa: SLF001
    core.Unknown: Dispatch._unknown,  # noqa: SLF001
    core.NotHeld: Dispatch._not_held,  # noqa: SLF001
}
