"""Begins and ends sessions: `hello`, `bye`, and the end of a connection."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from genie.access import LOCK
from genie.config import NAMESPACE
from genie.core import Disconnect, LockManager, State
from genie.protocol import replies
from genie.protocol.commands import Bye, Hello
from genie.server.connection import Connection, ConnectionState
from genie.server.session import Session
from genie.server.telling import Telling

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.observability.stats import Stats

_VERSION = version("genie-lock")


class Greeting(Telling):
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
            self.say(connection, ending.line)
        for request in session.bound.values():
            if request.state is State.HELD:
                self.say(connection, replies.still_locked(request, self.now))
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
        self.ending.append(connection)

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
