"""Step, commit, reply: the heart of the server.

Commands that arrive while a commit is under way form the next batch. A batch is stepped in one go, written to the store
in one go, and only then is anyone told anything. One batch is in flight at most, so that what is told is always what is
stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from genie import core
from genie.core import Disconnect, Event, Expire, LockManager, Request, State
from genie.errors import Code, RequestRejected
from genie.protocol import replies
from genie.protocol.commands import Inspect, Ping, WireCommand
from genie.server.connection import HANGUP, Connection, Hangup
from genie.server.session import Session, same
from genie.storage.base import Batch, Store

if TYPE_CHECKING:
    from genie.config import Settings

HEARTBEAT_S = 1.0
"""How often an idle server commits its clock: what a crash may add to the life of a lock."""

MAX_UNTOLD = 10_000
"""Messages that may wait for the outcome of a batch, for a connection that goes on asking while the store is away."""

Item = WireCommand | RequestRejected | Hangup
_EXPIRE = Expire()


class Pump:
    """Feeds commands to the lock manager, batch by batch, and tells what came of them.

    `clock` gives the manager's time in ms. `on_failure` is called once, when the store is another server's now: this
    one must close every connection without another word.
    """

    def __init__(
        self,
        manager: LockManager,
        store: Store,
        settings: Settings,
        clock: Callable[[], float],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.manager = manager
        self._store = store
        self._settings = settings
        self._clock = clock
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._pending: list[tuple[Connection, Sequence[Item]]] = []
        self._pending_bytes = 0
        self._gone: dict[Connection, None] = {}
        self._touched: list[Connection] = []
        self._ending: list[Connection] = []
        self._changes: dict[int, Request] = {}
        self._in_flight: asyncio.Future[None] | None = None
        self._scheduled = False
        self._away = False
        self._patience: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._committed_at = 0.0
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._beat)
        self._stopped = False
        self._idle: asyncio.Future[None] | None = None
        self.draining = False
        """No new requests are taken: the server stops."""

    # -- what comes in ------------------------------------------------------------------------------------

    def submit(self, connection: Connection, items: Sequence[Item], size: int) -> None:
        """Commands of one connection, in order; a `RequestRejected` among them is told in its place.

        `size` is how many bytes they came in: what waits for the store is bounded.
        """
        if self._stopped:
            return
        if self._away or self._pending_bytes > self._settings.max_pending:
            self._refuse(connection, items)
            return
        self._pending.append((connection, items))
        self._pending_bytes += size
        self._kick()

    def gone(self, connection: Connection) -> None:
        """A connection has ended: what was bound to it goes. Never refused, whatever the store does."""
        if not self._stopped:
            self._gone[connection] = None
            self._kick()

    def _kick(self) -> None:
        """Run a batch now or, where the store takes its time, at the end of this tick, with what else it brings."""
        if self._in_flight is not None or self._scheduled:
            return
        if self._store.durable:
            self._scheduled = True
            self._loop.call_soon(self._run)
        else:
            self._run()

    # -- one batch ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._scheduled = False
        if self._stopped or self._in_flight is not None:
            return
        try:
            self._step_all()
        except Exception as error:  # noqa: BLE001 - a defect: better no server than one that has lost its way
            self.stop()
            self._on_failure(error)

    def _step_all(self) -> None:
        now = self._clock()
        if self.manager.deadlines.next <= now:
            self._tell(self.manager.step(_EXPIRE, now), None)
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for connection, items in pending:
            for item in items:
                self._take(connection, item, now)
        if self._gone:
            gone, self._gone = self._gone, {}
            for connection in gone:
                self._leave(connection, now)
        changes, self._changes = self._changes, {}
        if not changes:
            self._deliver()  # nothing to store: a ping, an error, a look
            return
        self._commit(Batch(changes, self.manager.next_id, self.manager.next_fence, now))

    def _commit(self, batch: Batch) -> None:
        future = self._store.commit(batch)
        if future is None:
            self._deliver()
            return
        self._in_flight = future
        self._patience = self._loop.call_later(self._settings.store_timeout_ms / 1000, self._lose_patience)
        future.add_done_callback(self._committed)

    def _committed(self, future: asyncio.Future[None]) -> None:
        self._in_flight = None
        if self._patience is not None:
            self._patience.cancel()
        self._away = False
        if future.cancelled() or self._stopped:
            return
        error = future.exception()
        if error is not None:
            self.stop()
            self._on_failure(error)
            return
        self._committed_at = self._loop.time()
        self._deliver()
        if self._pending or self._gone:
            self._run()

    def _deliver(self) -> None:
        touched, self._touched = self._touched, []
        for connection in touched:
            connection.flush()
        if self._ending:
            for connection in self._ending:
                connection.finish()
            self._ending.clear()
        self._arm()
        if self._idle is not None and not self._pending and not self._gone and not self._idle.done():
            self._idle.set_result(None)

    # -- one command --------------------------------------------------------------------------------------

    def _take(self, connection: Connection, item: Item, now: float) -> None:
        if isinstance(item, Request):
            self._request(connection, item, now)
        elif isinstance(item, (core.Release, core.Extend)):
            self._tell(self.manager.step(item, now), connection)
        elif isinstance(item, RequestRejected):
            self._say(connection, replies.error(item))
        elif isinstance(item, Ping):
            self._say(connection, replies.PONG)
        elif isinstance(item, Inspect):
            found = core.inspect(
                self.manager.table,
                resource=item.resource,
                id=item.id,
                transaction=item.transaction,
                limit=item.limit,
            )
            self._say(connection, replies.inspected(found, now))
        elif item is HANGUP:
            self._leave(connection, now)
            self._ending.append(connection)

    def _request(self, connection: Connection, request: Request, now: float) -> None:
        session = connection.session
        if request.ref is not None:
            known = session.known(request.ref)
            if known is not None:
                self._repeat(connection, request, known)
                return
        table, limit = self.manager.table, self._settings.max_requests
        if len(table.held) + len(table.waiting) >= limit:
            told = RequestRejected(Code.TOO_MANY, f"{limit} requests are held or wait, no more fit", ref=request.ref)
            self._say(connection, replies.error(told))
            return
        if self.draining:
            told = RequestRejected(Code.UNAVAILABLE, "this server is stopping", ref=request.ref)
            self._say(connection, replies.error(told))
            return
        request.origin = session
        self._tell(self.manager.step(request, now), connection)

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

    def _leave(self, connection: Connection, now: float) -> None:
        session = connection.session
        if session.bound:
            self._tell(self.manager.step(Disconnect(list(session.bound.values())), now), None)
        if connection.closed:
            session.close()

    # -- what is told -------------------------------------------------------------------------------------

    def _tell(self, events: list[Event], asker: Connection | None) -> None:
        """Turn events into messages, and note what must be stored."""
        for event in events:
            _TELL[type(event)](self, event, asker)

    def _queued(self, event: core.Queued, asker: Connection | None) -> None:  # noqa: ARG002
        request = event.request
        session: Session = request.origin  # type: ignore[assignment]
        session.queued(request)
        self._changes[request.id] = request
        self._say(session.connection, replies.queued(request))

    def _granted(self, event: core.Granted, asker: Connection | None) -> None:
        request = event.request
        session: Session = request.origin  # type: ignore[assignment]
        session.granted(request)
        self._changes[request.id] = request
        self._say(asker, replies.granted(request))

    def _locked(self, event: core.Locked, asker: Connection | None) -> None:  # noqa: ARG002
        request = event.request
        session: Session | None = request.origin  # type: ignore[assignment]
        self._changes[request.id] = request
        if session is not None:
            session.locked(request)
            self._say(session.connection, replies.locked(request))

    def _released(self, event: core.Released, asker: Connection | None) -> None:
        request = event.request
        session: Session | None = request.origin  # type: ignore[assignment]
        self._changes[request.id] = request
        line = replies.released(event)
        if session is not None:
            session.released(request)
            self._say(session.connection, line)
            if asker is not None and asker is not session.connection:
                self._say(asker, line)
        elif asker is not None:
            self._say(asker, line)

    def _extended(self, event: core.Extended, asker: Connection | None) -> None:
        self._changes[event.request.id] = event.request
        self._say(asker, replies.extended(event))

    def _moved(self, event: core.Moved, asker: Connection | None) -> None:  # noqa: ARG002
        self._changes[event.request.id] = event.request

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
                self._touched.append(connection)
            connection.out.append(line)

    # -- time ---------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """One timer for the next deadline. It may ring too early, when that one was released; then it is set anew."""
        due = self.manager.deadlines.next
        if due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = self._loop.call_later(max(0.0, due - self._clock()) / 1000, self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        if self._in_flight is None and not self._stopped:
            self._run()

    def _beat(self) -> None:
        if self._stopped:
            return
        self._heartbeat = self._loop.call_later(HEARTBEAT_S, self._beat)
        if (
            self._store.durable
            and self._in_flight is None
            and self._loop.time() - self._committed_at >= HEARTBEAT_S / 2
        ):
            self._commit(Batch({}, self.manager.next_id, self.manager.next_fence, self._clock()))

    # -- bad days -----------------------------------------------------------------------------------------

    def _lose_patience(self) -> None:
        """The store does not answer. What it has been given waits for its outcome; the rest is refused."""
        self._patience = None
        self._away = True
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for connection, items in pending:
            self._refuse(connection, items)

    def _refuse(self, connection: Connection, items: Sequence[Item]) -> None:
        """Answer commands that were not taken up, without overtaking what this connection is still to be told."""
        told = bool(connection.out)
        for item in items:
            if item is HANGUP:
                self._pending.append((connection, [item]))
                continue
            if not isinstance(item, RequestRejected):
                ref, id_ = getattr(item, "ref", None), None if type(item) is Request else getattr(item, "id", None)
                item = RequestRejected(  # noqa: PLW2901
                    Code.UNAVAILABLE, "the store can't be reached, try again later", ref=ref, id=id_
                )
            connection.out.append(replies.error(item))
        if not told and connection.out:
            connection.flush()
        elif len(connection.out) > MAX_UNTOLD:
            connection.abort()

    async def drained(self) -> None:
        """Wait until everything that was taken up is stored and told."""
        if self._pending or self._gone or self._in_flight is not None or self._scheduled:
            self._idle = self._loop.create_future()
            await self._idle

    def stop(self) -> None:
        """Nothing is taken up or told any more."""
        self._stopped = True
        for handle in (self._timer, self._heartbeat, self._patience):
            if handle is not None:
                handle.cancel()

    def recover(self) -> None:
        """The step after loading: nobody who asked before is connected now. Must be the first."""
        self._tell(self.manager.step(core.Recover(), self._clock()), None)
        self._kick()


_TELL: dict[type, Callable[[Pump, Any, Connection | None], None]] = {
    core.Queued: Pump._queued,  # noqa: SLF001
    core.Granted: Pump._granted,  # noqa: SLF001
    core.Locked: Pump._locked,  # noqa: SLF001
    core.Released: Pump._released,  # noqa: SLF001
    core.Extended: Pump._extended,  # noqa: SLF001
    core.Moved: Pump._moved,  # noqa: SLF001
    core.Repeated: Pump._repeated,  # noqa: SLF001
    core.Unknown: Pump._unknown,  # noqa: SLF001
    core.NotHeld: Pump._not_held,  # noqa: SLF001
}
