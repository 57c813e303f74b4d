"""One command at a time: to the lock manager, and what came of it to whom it concerns.

Messages are only laid out here, in each connection's `out`; the pump sends them when the batch is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from genie import core
from genie.core import HELD, Disconnect, Event, Expire, LockManager, Request, State
from genie.errors import Code, RequestRejected
from genie.protocol import replies
from genie.protocol.commands import Inspect, Ping, read
from genie.server.connection import HANGUP, Connection, Item
from genie.server.session import Session, same

if TYPE_CHECKING:
    from genie.config import Settings

_EXPIRE = Expire()


class Dispatch:
    """Collects what one batch does: `changes` to be stored, connections `touched` by messages, those `ending`."""

    def __init__(self, manager: LockManager, settings: Settings, durable: bool = True) -> None:
        self.manager = manager
        self._durable = durable
        self._settings = settings
        self.changes: dict[int, Request] = {}
        self.touched: list[Connection] = []
        self.ending: list[Connection] = []

    def expire(self, now: float) -> None:
        """End what is due."""
        self._tell(self.manager.step(_EXPIRE, now), None)

    def recover(self, now: float) -> None:
        """The step after loading: nobody who asked before is connected now."""
        self._tell(self.manager.step(core.Recover(), now), None)

    def leave(self, connection: Connection, now: float) -> None:
        """A connection ends, or has ended: what is bound to it goes."""
        session = connection.session
        if session.bound:
            self._tell(self.manager.step(Disconnect(list(session.bound.values())), now), None)
        if connection.closed:
            session.close()

    def take(self, connection: Connection, item: Item, now: float) -> bool:
        """Carry out what one line of a connection asks for. Returns whether that was a long look (`inspect`)."""
        if isinstance(item, bytes):
            try:
                command = read(item)
            except RequestRejected as rejected:
                self._say(connection, replies.error(rejected))
                return False
            if isinstance(command, Request):
                self._request(connection, command, now)
                return False
            if isinstance(command, core.Release):
                self._release(connection, command, now)
                return False
            if isinstance(command, core.Extend):
                self._tell(self.manager.step(command, now), connection)
                return False
            return self._look(connection, command, now)
        if isinstance(item, RequestRejected):
            self._say(connection, replies.error(item))
        elif item is HANGUP:
            self.leave(connection, now)
            self.ending.append(connection)
        return False

    def refuse(self, connection: Connection, item: Item) -> None:
        """Answer a line that was not taken up: `unavailable`, unless it is wrong in itself."""
        rejected = item
        if isinstance(item, bytes):
            try:
                command = read(item)
            except RequestRejected as wrong:
                rejected = wrong
            else:
                ref = command.ref if isinstance(command, Request) else None
                id_ = command.id if isinstance(command, (core.Release, core.Extend)) else None
                why = "the store can't be reached, try again later"
                rejected = RequestRejected(Code.UNAVAILABLE, why, ref=ref, id=id_)
        if isinstance(rejected, RequestRejected):
            self._say(connection, replies.error(rejected))

    def _look(self, connection: Connection, command: Ping | Inspect, now: float) -> bool:
        if isinstance(command, Ping):
            self._say(connection, replies.PONG)
            return False
        found = core.inspect(
            self.manager.table,
            resource=command.resource,
            id=command.id,
            transaction=command.transaction,
            limit=command.limit,
        )
        self._say(connection, replies.inspected(found, now))
        return True

    def _request(self, connection: Connection, request: Request, now: float) -> None:
        session = connection.session
        if request.ref is not None:
            known = session.known(request.ref)
            if known is not None and (known.state is not State.ENDED or self.manager.reason(known.id)):
                self._repeat(connection, request, known)
                return
        table, limit = self.manager.table, self._settings.max_requests
        if len(table.held) + len(table.waiting) >= limit:
            told = RequestRejected(Code.TOO_MANY, f"{limit} requests are held or wait, no more fit", ref=request.ref)
            self._say(connection, replies.error(told))
            return
        request.origin = session
        events = self.manager.step(request, now)
        if request.state is HELD and request.ref is None and not request.release_on_disconnect and len(events) == 1:
            # `Granted`, which nearly every request is: told without the way over `_tell`, which would take twice as long
            if self._durable:
                self.changes[request.id] = request
            self._say(connection, replies.granted(request))
        else:
            self._tell(events, connection)

    def _release(self, connection: Connection, command: core.Release, now: float) -> None:
        events = self.manager.step(command, now)
        event = events[0]
        if len(events) == 1 and isinstance(event, core.Released):
            request, session = event.request, connection.session
            if request.origin is session and request.ref is None and not session.bound:
                # one's own lock that nobody waited for: the same shortcut
                if self._durable:
                    self.changes[request.id] = request
                self._say(connection, replies.released(event))
                return
        self._tell(events, connection)

    def _repeat(self, connection: Connection, request: Request, known: Request) -> None:
        """A request that came again with its `ref` gets the id that it has, and how it stands."""
        if not same(request, known):
            told = RequestRejected(
                Code.REF_CONFLICT, f"this ref belongs to another request, {known.id}", ref=request.ref, id=known.id
            )
            self._say(connection, replies.error(told))
            return
        self._say(connection, replies.queued(known))
        if known.state is State.HELD:
            self._say(connection, replies.locked(known))
        elif known.state is State.ENDED:
            reason = self.manager.reason(known.id)
            if reason is not None:
                self._say(connection, replies.ended(known.id, reason, known.ref))

    # -- what is told -------------------------------------------------------------------------------------

    def _tell(self, events: list[Event], asker: Connection | None) -> None:
        """Turn events into messages, and note what must be stored."""
        for event in events:
            _TELL[type(event)](self, event, asker)

    def _queued(self, event: core.Queued, asker: Connection | None) -> None:  # noqa: ARG002
        request = event.request
        session: Session = request.origin  # type: ignore[assignment]
        session.queued(request)
        self.changes[request.id] = request
        self._say(session.connection, replies.queued(request))

    def _granted(self, event: core.Granted, asker: Connection | None) -> None:
        request = event.request
        session: Session = request.origin  # type: ignore[assignment]
        session.granted(request)
        self.changes[request.id] = request
        self._say(asker, replies.granted(request))

    def _locked(self, event: core.Locked, asker: Connection | None) -> None:  # noqa: ARG002
        request = event.request
        session: Session | None = request.origin  # type: ignore[assignment]
        self.changes[request.id] = request
        if session is not None:
            session.locked(request)
            self._say(session.connection, replies.locked(request))

    def _released(self, event: core.Released, asker: Connection | None) -> None:
        request = event.request
        session: Session | None = request.origin  # type: ignore[assignment]
        self.changes[request.id] = request
        line = replies.released(event)
        if session is not None:
            if session.bound or request.ref is not None:
                session.released(request)
            self._say(session.connection, line)
            if asker is not None and asker is not session.connection:
                self._say(asker, line)
        elif asker is not None:
            self._say(asker, line)

    def _extended(self, event: core.Extended, asker: Connection | None) -> None:
        self.changes[event.request.id] = event.request
        self._say(asker, replies.extended(event))

    def _moved(self, event: core.Moved, asker: Connection | None) -> None:  # noqa: ARG002
        self.changes[event.request.id] = event.request

    def _repeated(self, event: core.Repeated, asker: Connection | None) -> None:
        self._say(asker, replies.ended(event.id, event.reason, event.ref))

    def _unknown(self, event: core.Unknown, asker: Connection | None) -> None:
        self._say(asker, replies.unknown_id(event.id))

    def _not_held(self, event: core.NotHeld, asker: Connection | None) -> None:
        request = event.request
        why = f"extend: {request.id} still waits; only a held lock can be extended"
        self._say(asker, replies.error(RequestRejected(Code.BAD_REQUEST, why, ref=request.ref, id=request.id)))

    def _say(self, connection: Connection | None, line: bytes) -> None:
        if connection is not None and not connection.closed:
            if not connection.out:
                self.touched.append(connection)
            connection.out.append(line)


_TELL: dict[type, Callable[[Dispatch, Any, Connection | None], None]] = {
    core.Queued: Dispatch._queued,  # noqa: SLF001
    core.Granted: Dispatch._granted,  # noqa: SLF001
    core.Locked: Dispatch._locked,  # noqa: SLF001
    core.Released: Dispatch._released,  # noqa: SLF001
    core.Extended: Dispatch._extended,  # noqa: SLF001
    core.Moved: Dispatch._moved,  # noqa: SLF001
    core.Repeated: Dispatch._repeated,  # noqa: SLF001
    core.Unknown: Dispatch._unknown,  # noqa: SLF001
    core.NotHeld: Dispatch._not_held,  # noqa: SLF001
}
