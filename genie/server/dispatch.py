"""One command after the other: to the lock manager, and what came of it to whom it concerns.

Messages are only laid out here, in each connection's `out`; the pump sends them when the batch is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from genie import core
from genie.core import Disconnect, Event, Expire, Granted, LockManager, Release, Released, Request, State
from genie.errors import Code, RequestRejected
from genie.protocol import replies
from genie.protocol.commands import Inspect, Ping, read
from genie.protocol.replies import granted, released
from genie.server.connection import HANGUP, Connection, Item
from genie.server.session import Session, same

if TYPE_CHECKING:
    from genie.config import Settings

_EXPIRE = Expire()


class Dispatch:
    """Collects what one batch does: `changes` to be stored, connections `touched` by messages, those `ending`.

    `now` is the manager's time of the batch, to be set before anything else. Without `durable` nothing is stored, and
    no changes are collected.
    """

    def __init__(self, manager: LockManager, settings: Settings, durable: bool = True) -> None:
        self.manager = manager
        self.now = 0.0
        self._durable = durable
        self._most = settings.max_requests
        self._step, self._held, self._waiting = manager.step, manager.table.held, manager.table.waiting
        self.changes: dict[int, Request] = {}
        self.touched: list[Connection] = []
        self.ending: list[Connection] = []

    def expire(self) -> None:
        """End what is due."""
        self._tell(self.manager.step(_EXPIRE, self.now), None)

    def recover(self) -> None:
        """The step after loading: nobody who asked before is connected now."""
        self._tell(self.manager.step(core.Recover(), self.now), None)

    def take(self, connection: Connection, items: Iterator[Item]) -> bool:  # noqa: C901, PLR0912 - the hot path
        """Carry out what a connection asks for, in order, up to a long look (`inspect`). Returns whether that ended it."""
        # Every command comes through this loop. The two that nearly all are, with the one event that nearly every one
        # of them brings, are dealt with on the spot; whatever else there is has a method of its own.
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
                    self._say(connection, replies.error(rejected))
                continue
            if type(command) is Request:
                room -= 1
                if (room < 0 or command.ref is not None) and not self._takes(connection, command):
                    continue
                command.origin = session
                events = step(command, now)
                if type(events[0]) is Granted:
                    if command.ref is not None or command.release_on_disconnect:
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
                    if self._durable and event.request.fence:
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
        return False

    def refuse(self, connection: Connection, item: Item) -> None:
        """Answer a line that was not taken up: `unavailable`, unless it is wrong in itself."""
        rejected = item
        if isinstance(item, bytes):
            try:
                command = read(item)
            except RequestRejected as wrong:
                if not item or item.isspace():
                    return
                rejected = wrong
            else:
                ref = command.ref if isinstance(command, Request) else None
                id_ = command.id if isinstance(command, (Release, core.Extend)) else None
                why = "the store can't be reached, try again later"
                rejected = RequestRejected(Code.UNAVAILABLE, why, ref=ref, id=id_)
        if isinstance(rejected, RequestRejected):
            self._say(connection, replies.error(rejected))

    # -- commands that need more than a step --------------------------------------------------------------

    def _note(self, connection: Connection, item: Item) -> None:
        """Say an error that a line brought before it could be read, or see a connection off."""
        if isinstance(item, RequestRejected):
            self._say(connection, replies.error(item))
        elif item is HANGUP:
            self._leave(connection)
            self.ending.append(connection)

    def _leave(self, connection: Connection) -> None:
        """A connection ends, or has ended: what is bound to it goes."""
        session = connection.session
        if session.bound:
            self._tell(self.manager.step(Disconnect(list(session.bound.values())), self.now), None)
        if connection.closed:
            session.close()

    def _look(self, connection: Connection, command: Inspect) -> None:
        found = core.inspect(
            self.manager.table,
            resource=command.resource,
            id=command.id,
            transaction=command.transaction,
            limit=command.limit,
        )
        self._say(connection, replies.inspected(found, self.now))

    def _takes(self, connection: Connection, request: Request) -> bool:
        """Whether a request is new and has a place. Otherwise it is answered here."""
        if request.ref is not None:
            known = connection.session.known(request.ref)
            if known is not None and (known.state is not State.ENDED or self.manager.reason(known.id)):
                self._repeat(connection, request, known)
                return False
        if len(self._held) + len(self._waiting) < self._most:
            return True
        told = RequestRejected(Code.TOO_MANY, f"{self._most} requests are held or wait, no more fit", ref=request.ref)
        self._say(connection, replies.error(told))
        return False

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
        self._say(session.connection, replies.queued(request))

    def _locked(self, event: core.Locked, asker: Connection | None) -> None:  # noqa: ARG002
        request = event.request
        session: Session | None = request.origin  # type: ignore[assignment]
        self._change(request)
        if session is not None:
            session.locked(request)
            self._say(session.connection, replies.locked(request))

    def _released(self, event: Released, asker: Connection | None) -> None:
        session: Session | None = event.request.origin  # type: ignore[assignment]
        self._close(event.request)
        line = replies.released(event, self.now)
        if session is not None:
            self._say(session.connection, line)
        if asker is not None and (session is None or asker is not session.connection):
            self._say(asker, line)

    def _extended(self, event: core.Extended, asker: Connection | None) -> None:
        self._change(event.request)
        self._say(asker, replies.extended(event))

    def _moved(self, event: core.Moved, asker: Connection | None) -> None:
        """Nobody is told, and where a request waits is not stored."""

    def _repeated(self, event: core.Repeated, asker: Connection | None) -> None:
        self._say(asker, replies.ended(event.id, event.reason, event.ref))

    def _unknown(self, event: core.Unknown, asker: Connection | None) -> None:
        self._say(asker, replies.unknown_id(event.id))

    def _not_held(self, event: core.NotHeld, asker: Connection | None) -> None:
        request = event.request
        why = f"extend: {request.id} still waits; only a held lock can be extended"
        self._say(asker, replies.error(RequestRejected(Code.BAD_REQUEST, why, ref=request.ref, id=request.id)))

    def _close(self, request: Request) -> None:
        """A request ended: its session and the store forget it."""
        session: Session | None = request.origin  # type: ignore[assignment]
        if session is not None and (session.bound or request.ref is not None):
            session.released(request)
        if request.fence or session is None:
            self._change(request)

    def _change(self, request: Request) -> None:
        """Let the store know. A request that waits goes with its connection, and so with this server: none is stored."""
        if self._durable:
            self.changes[request.id] = request

    def _say(self, connection: Connection | None, line: bytes) -> None:
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
