"""Begins and ends sessions: `hello`, `bye`, and the end of a connection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING

import structlog

from genie import core
from genie.access import INSPECT, LOCK, Principal
from genie.config import NAMESPACE
from genie.core import SUCCESS, Disconnect, Expire, Granted, LockManager, Release, Released, Request, State
from genie.errors import Code, RequestRejected
from genie.observability.histogram import BOUNDS_MS
from genie.protocol import replies
from genie.protocol.commands import (
    Bye,
    Hello,
    Inspect,
    Namespaced,
    Ping,
    ReleaseByRef,
    Unwatch,
    Watch,
    WireCommand,
    read,
)
from genie.protocol.replies import granted, released
from genie.protocol.resources import MAX_RESOURCES
from genie.server.auth import refused, sees
from genie.server.connection import DETACHED, END_OF_INPUT, Connection, ConnectionState, Item
from genie.server.notifier import Notifier
from genie.server.rejections import spanning
from genie.server.sessions import Session, same
from genie.storage.store import Batch, RetainedReply, snapshot_of

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.observability.stats import Stats

_VERSION = version("genie-lock")


class Greeting(Notifier):
    """Begins and ends the sessions of one namespace."""

    def __init__(
        self,
        manager: LockManager,
        settings: Settings,
        stats: Stats,
        durable: bool = True,
        namespace: str = NAMESPACE,
    ) -> None:
        super().__init__(manager, settings, stats, durable)
        self._namespace = namespace

    def _hello(self, connection: Connection, hello: Hello) -> None:
        """Begin or resume the session of a connection, or begin none, and answer `welcome`."""
        principal = connection.principal
        name = None if principal is None else principal.name
        if hello.session is None or (principal is not None and not principal.may(LOCK)):
            connection.session.quiet = hello.quiet
            self._welcome(connection, hello, resumed=False)
            return
        if connection.closed:  # the client's next connection says it again, and may have come already
            connection.state = ConnectionState.DETACHED
            return
        session, resumed = self.sessions.enter(hello.session, hello.session_timeout_ms, name)
        if session.connection is not None:
            self._part(session.connection)
        session.connection, session.since, connection.session = connection, self.now, session
        session.quiet = hello.quiet
        self._welcome(connection, hello, resumed=resumed)
        for ending in session.unreceived():
            self.say(connection, ending.message)
        for request in session.bound.values():
            if request.state is State.HELD:
                self.say(connection, replies.locked_again(request, self.now))
            elif request.ref is None or not session.quiet:
                self.say(connection, replies.queued(request))

    def _welcome(self, connection: Connection, hello: Hello, *, resumed: bool) -> None:
        line = replies.welcome(_VERSION, self._namespace, resumed=resumed, quiet=hello.quiet, ref=hello.ref)
        self.say(connection, line)

    def _bye(self, connection: Connection, bye: Bye) -> None:
        """End the session of a connection now, then the connection."""
        session = connection.session
        self.watches.leave(connection)
        self._tell(self.manager.step(Disconnect(list(session.bound.values())), self.now), None)
        if session.key is not None:
            self._end(session)
        else:
            session.close()
        connection.session = Session(connection)
        self.say(connection, replies.bare("bye", bye.ref))
        self._detach(connection)

    def _detach(self, connection: Connection) -> None:
        """Execute nothing more of a connection, and close it when what it was sent is written."""
        connection.state = ConnectionState.DETACHED
        connection.stop_reading()
        self.closing.append(connection)

    def _part(self, connection: Connection) -> None:
        """A newer connection has this one's session."""
        self.watches.leave(connection)
        connection.session = Session(connection)
        self._detach(connection)

    def _leave(self, connection: Connection) -> None:
        """A connection ends, or has ended: what is bound to it goes, or waits for the session's next connection."""
        session = connection.session
        self.watches.leave(connection)
        if session.key is not None:
            if session.connection is connection:
                self.sessions.leave(session, self.now)
            return
        if session.bound:
            self._tell(self.manager.step(Disconnect(list(session.bound.values())), self.now), None)
        if connection.closed:
            session.close()

    def _end(self, session: Session) -> None:
        """End a session. Locks that it keeps belong to no session from now on."""
        requests = list(session.bound.values())
        for request in requests:
            request.origin = None
            self._change(request)
        self._tell(self.manager.step(Disconnect(requests), self.now), None)
        for id_ in self.sessions.remove(session):
            self._unset(id_)


# -- One command after the other, to the lock manager. What comes of it is told in `telling` --------

MAX_TURN = 200
"""Commands of one connection, before it is the turn of others that wait."""

MAX_EXPIRY_CHANGES = 10_000
"""SessionTable end one after the other, and wait for the next batch when this one changes so much already."""

log = structlog.get_logger()

SHORTEST_MS = BOUNDS_MS[0]

_EXPIRE = Expire()


class Dispatcher(Greeting):
    """Carries out what connections ask for, and what time brings."""

    def __init__(
        self,
        manager: LockManager,
        settings: Settings,
        stats: Stats,
        durable: bool = True,
        namespace: str = NAMESPACE,
    ) -> None:
        super().__init__(manager, settings, stats, durable, namespace)
        self._most_locks = settings.limits.max_locks
        self._roomy_below = settings.limits.max_locks - MAX_TURN * MAX_RESOURCES
        self.full = False
        """The store has no room for more."""
        self._table = manager.table
        self._most_of_session, self._most_of_connection = (
            settings.limits.max_requests_per_session,
            settings.limits.max_requests_per_connection,
        )
        self._step, self._held, self._waiting = manager.step, manager.table.held, manager.table.waiting

    def expire(self) -> None:
        """End what is due, and the sessions that waited in vain for another connection."""
        self._tell(self.manager.step(_EXPIRE, self.now), None)
        while len(self.changes) < MAX_EXPIRY_CHANGES and (session := self.sessions.ended(self.now)) is not None:
            self._end(session)

    def recover(self, endings: Iterable[RetainedReply]) -> None:
        """The step after loading: nobody who asked before is connected now, but sessions may come back."""
        requests = [*self._held.values(), *self._waiting.values()]
        endings = list(endings)
        for ending in endings:
            self.manager.add_outcome(ending.id, ending.reason)
        self.sessions.restore(requests, endings, self.now)
        self._tell(self.manager.step(core.Recover(), self.now), None)

    def snapshot(self, next_id: int) -> Batch:
        """The whole state, as a store should have it."""
        endings = {ending.id: ending for session in self.sessions for ending in session.endings or ()}
        return snapshot_of(self.manager, endings, next_id, self.now)

    def take(self, connection: Connection, items: Iterator[Item]) -> bool:  # noqa: C901, PLR0911, PLR0912, PLR0915 - the hot path
        """Carry out what a connection asks for, in order, up to a long look (`inspect`). Returns whether that ended it."""
        # Every command comes through this loop. The two that nearly all are, with the one event that nearly every one
        # of them brings, are dealt with on the spot; whatever else there is has a method of its own.
        if connection.state is DETACHED:
            for item in items:
                if item is END_OF_INPUT:
                    self._note(connection, item)
            return False
        session, out, step, now = connection.session, connection.outbox, self._step, self.now
        watched, stats, table = self.watches.prefixes, self.stats, self._table
        holds = stats.holds
        principal = connection.principal
        # How many requests surely have a place, whatever they name. Those beyond are looked at one by one.
        room = self._most_of_connection if session.key is None else self._most_of_session
        room -= session.alive
        if self.full or len(table.uncontended) + table.grants > self._roomy_below:
            room = 0
        if not out:
            self.dirty.append(connection)
        connection.has_reply, quiet = True, session.quiet
        for item in items:
            if type(item) is bytes:
                try:
                    command = read(item)
                except RequestRejected as rejected:
                    if item and not item.isspace():
                        self.reject(connection, rejected)
                    continue
            elif type(item) is Namespaced:
                command = item.command
            elif type(item) is Hello:
                self._hello(connection, item)
                return False  # it is submitted alone, since the session is another one now
            else:
                self._note(connection, item)
                continue
            if principal is not None and not self._may(connection, principal, command):
                continue
            if type(command) is Request:
                room -= 1
                if (room < 0 or command.ref is not None) and not self._takes(connection, command, len(command.names())):
                    continue
                command.origin = session
                events = step(command, now)
                if type(events[0]) is Granted:
                    stats.granted += 1
                    session.alive += 1
                    if session.key is not None or command.ref is not None or command.release_on_disconnect:
                        session.granted(command)
                    if self._durable:
                        self.changes[command.id] = command
                    out.append(granted(command, quiet))
                    if watched:
                        self.watches.tell(command, "locked")
                else:
                    self._tell(events, connection, command.ref)
            elif type(command) is Release:
                events = step(command, now)
                event = events[0]
                if type(event) is Released and len(events) == 1 and event.request.origin is session:
                    request = event.request
                    if request.fence:
                        lasted_ms = now - request.since
                        if lasted_ms <= SHORTEST_MS:
                            holds.counts[0] += 1
                            holds.total += lasted_ms
                        else:
                            holds.add(lasted_ms)
                    else:
                        stats.over(event, now)
                    session.alive -= 1
                    if session.bound:
                        session.bound.pop(request.id, None)
                    change = request if request.ref is None else self._remember(session, request, SUCCESS, b"")
                    if self._durable and (request.fence or session.key is not None):
                        self.changes[command.id] = change
                    out.append(released(event, now, command.ref))
                    if watched and request.fence:
                        self.watches.tell(request, "unlocked")
                else:
                    self._tell(events, connection, command.ref)
            elif type(command) is core.Take:
                room -= 1
                asked, most = command.request, len(command.choices)
                if (room >= 0 and asked.ref is None and most <= MAX_RESOURCES) or self._takes(connection, asked, most):
                    asked.origin = session
                    self._tell(step(command, now), connection, asked.ref)
            elif type(command) is ReleaseByRef:
                self._release_by_ref(connection, command)
            elif type(command) is core.Extend:
                self._tell(step(command, now), connection, command.ref)
            elif type(command) is Ping:
                out.append(replies.bare("pong", command.ref))
            elif type(command) is Inspect:
                self._look(connection, command)
                return True
            elif type(command) is Watch:
                self.watches.watch(connection, command.prefix, command.ref)
                return True
            elif type(command) is Unwatch:
                self.watches.unwatch(connection, command.prefix, command.ref)
            elif type(command) is Hello:
                why = "hello: it must be the first command of a connection, and comes once"
                self.reject(connection, RequestRejected(Code.BAD_REQUEST, why, ref=command.ref))
            elif type(command) is Bye:
                self._bye(connection, command)
                return self.take(connection, items)
            elif type(command) is Namespaced:
                room -= 1  # it may be a request, and what follows must know
                if command.namespace != self._namespace:
                    self.reject(connection, spanning(command, self._namespace))
                elif self.take(connection, iter((command,))):
                    return True
        return False

    # -- commands that need more than a step --------------------------------------------------------------

    def _note(self, connection: Connection, item: Item) -> None:
        """Say an error that a line brought before it could be read, or see a connection off."""
        if isinstance(item, RequestRejected):
            self.reject(connection, item)
        elif item is END_OF_INPUT:
            self._leave(connection)
            self.closing.append(connection)

    def _may(self, connection: Connection, principal: Principal, command: WireCommand) -> bool:
        """Whether this is for somebody with this name. Otherwise it is answered here."""
        rejected = refused(principal, command, self.manager.table)
        if rejected is not None:
            self.reject(connection, rejected)
        elif type(command) is Release:
            request = self.manager.table.find(command.id)
            if request is not None and request.principal != principal.name:
                log.info("released by an operator", id=command.id, by=principal.name, of=request.principal)
        return rejected is None

    def may_watch_on(self, connection: Connection) -> bool:
        """Whether what a connection watches is still for it to see, with its rights of now."""
        principal = connection.principal
        watched = self.watches.of(connection)
        if principal is None or not watched:
            return True
        return principal.may(INSPECT) and all(sees(principal, prefix) for prefix in watched)

    def _look(self, connection: Connection, command: Inspect) -> None:
        found = core.inspect(
            self.manager.table,
            resource=command.resource,
            id=command.id,
            transaction=command.transaction,
            limit=command.limit,
            only=command.only,
        )
        bounds = None if connection.principal is None else connection.principal.bounds
        self.say(connection, replies.inspected(found, self.now, bounds, command.ref))

    def _release_by_ref(self, connection: Connection, command: ReleaseByRef) -> None:
        """Release the request that the session made with a `ref`."""
        known = connection.session.known(command.ref)
        if known is None:
            why = f"there is no request with the ref {command.ref!r} in this session, or it ended long ago"
            self.reject(connection, RequestRejected(Code.UNKNOWN_ID, why, ref=command.ref))
        elif isinstance(known, RetainedReply):
            self.say(connection, replies.ended(known.id, known.reason, command.ref))
        else:
            self._tell(self._step(Release(known.id, command.ref), self.now), connection, command.ref)

    def _takes(self, connection: Connection, request: Request, locks: int) -> bool:
        """Whether a request for so many locks is new and has a place. Otherwise it is answered here."""
        if request.ref is not None:
            known = connection.session.known(request.ref)
            if known is not None:
                self._repeat(connection, request, known)
                return False
        why, session = "", connection.session
        if self.full:
            why = "Redis is full: locks can be given back, and no new ones be had"
        elif self._table.locks + locks > self._most_locks:
            why = f"{self._most_locks} locks are held, no more fit"
        elif session.key is not None and session.alive >= self._most_of_session:
            why = f"{self._most_of_session} requests of this session are held or wait, it can't have more"
        elif session.key is None and session.alive >= self._most_of_connection:
            why = f"{self._most_of_connection} requests of this connection are held or wait, it can't have more"
        if why:
            self.reject(connection, RequestRejected(Code.TOO_MANY, why, ref=request.ref))
        return not why

    def _repeat(self, connection: Connection, request: Request, known: Request | RetainedReply) -> None:
        """Answer a request that was sent again with its `ref`: by its id and its present state."""
        first = known.request if isinstance(known, RetainedReply) else known
        if first is not None and not same(request, first):
            why = f"this ref belongs to another request, {known.id}"
            self.reject(connection, RequestRejected(Code.REF_CONFLICT, why, ref=request.ref))
            return
        if not connection.session.quiet:
            self.say(connection, replies.queued(known))
        if isinstance(known, RetainedReply):
            self.say(connection, known.message or replies.ended(known.id, known.reason, known.ref))
        elif known.state is State.HELD:
            self.say(connection, replies.locked_again(known, self.now))
