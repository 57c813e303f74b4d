"""Who a connection is: the namespace and the session that its `hello` names, and what becomes of them when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from itertools import chain
from typing import TYPE_CHECKING

from genie.access import LOCK
from genie.config import NAMESPACE
from genie.core import Disconnect, LockManager, State
from genie.errors import Code, RequestRejected
from genie.protocol import replies
from genie.protocol.commands import Hello, read
from genie.protocol.fields import is_hello
from genie.server.connection import HANGUP, Connection, Item
from genie.server.refusal import refusal
from genie.server.session import Session
from genie.server.telling import Telling

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.observability.stats import Stats

_VERSION = version("genie-lock")


class Greeting(Telling):
    """Greets connections for one namespace, and sees them off."""

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

    def _greeted(self, connection: Connection, items: Iterator[Item]) -> Iterator[Item]:
        """See whether the first line is `hello`, and do as it says. Returns what is left."""
        for item in items:
            if item is HANGUP:
                return chain([item], items)
            if connection.parted or (isinstance(item, bytes) and (not item or item.isspace())):
                continue
            if isinstance(item, bytes) and self._hello(connection, item):
                if connection.parted or connection.snubbed:
                    continue
                connection.fresh = False
                break
            if not connection.snubbed:
                connection.fresh = False
                return chain([item], items)
            rejected = refusal(item, "hello was refused; it must be said again first")
            if rejected is not None:
                self.reject(connection, rejected)
        return items

    def _hello(self, connection: Connection, line: bytes) -> bool:
        try:
            command = read(line)
        except RequestRejected:
            connection.snubbed = connection.snubbed or is_hello(
                line
            )  # what is behind it would be without what it asked for
            return False
        if type(command) is not Hello:
            return False
        connection.snubbed = command.namespace not in (None, self._namespace)
        if connection.snubbed:
            why = f"this connection is for the namespace {self._namespace!r}, another needs another connection"
            self.reject(connection, RequestRejected(Code.UNAVAILABLE, why))
            return True
        principal = connection.principal
        name = None if principal is None else principal.name
        if command.session is None or (principal is not None and not principal.may(LOCK)):
            self.say(connection, replies.welcome(_VERSION, self._namespace, resumed=False))
            return True
        if connection.closed:  # it will be said again by the next one, and that may have come already
            connection.parted = True
            return True
        session, resumed = self.sessions.enter(command.session, command.session_timeout_ms, name)
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
        self.watches.leave(connection)
        connection.session = Session(connection)
        connection.fresh = connection.parted = True
        connection.stop_reading()
        self.ending.append(connection)

    def _leave(self, connection: Connection) -> None:
        """A connection ends, or has ended: what is bound to it goes, or waits for the session's next connection."""
        session = connection.session
        self.watches.leave(connection)
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
