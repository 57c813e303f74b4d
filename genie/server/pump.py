"""Step, commit, reply: the heart of the server.

Commands that arrive while a commit is under way form the next batch. A batch is stepped in one go, written to the store
in one go, and only then is anyone told anything. One batch is in flight at most, so that what is told is always what is
stored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING

from genie.config import NAMESPACE
from genie.core import LockManager
from genie.server.connection import HANGUP, Connection, Item
from genie.server.dispatch import MAX_TURN, Dispatch
from genie.server.refusal import refuse
from genie.server.watches import MOST_EVENTS
from genie.storage.base import Batch, Change, Ending, Store, Superseded

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.observability.stats import Stats

HEARTBEAT_S = 1.0
"""How often an idle server commits its clock: what a crash may add to the life of a lock. Three times in a lease, where that is oftener."""

MIN_TICK_S = 0.025
"""How exactly the patience with the store is kept, at best."""

SHOW_S = 0.005
"""How late those who watch may be told of what happened."""

MAX_BATCH = 2_000
"""Commands in one batch. An `inspect`, the one with a long answer, ends its batch."""

MAX_BATCH_BYTES = 512 << 10
"""Bytes of commands in one batch, more or less. A line may name thousands of resources: it is worth many commands."""

RESERVE = 100_000
"""Ids that are stored ahead of their use."""

MAX_AHEAD = 256 << 10
"""Bytes of commands that may wait for one connection, before no more of it are read."""

MAX_UNTOLD = 10_000
"""Messages that may wait for the outcome of a batch, for a connection that goes on asking while the store is away, besides what it watches."""


class Pump:
    """Feeds commands to the lock manager, batch by batch, and tells what came of them.

    `clock` gives the manager's time in ms. `on_failure` is called once, when the store is another server's now, or may
    be: this one must close every connection without another word.
    """

    def __init__(
        self,
        manager: LockManager,
        store: Store,
        settings: Settings,
        stats: Stats,
        clock: Callable[[], float],
        on_failure: Callable[[BaseException], None],
        namespace: str = NAMESPACE,
    ) -> None:
        self.leads = True
        self.manager = manager
        self._deadlines = manager.deadlines
        self._dispatch = Dispatch(manager, settings, stats, store.durable, namespace)
        self._leaving = self._dispatch.sessions.deadlines
        self._store = store
        self._stats = stats
        self._talker: Connection | None = None
        """Who spoke last."""
        self._settings = settings
        self._clock = clock
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Connection] = deque()
        """Those in whose `inbox` something waits for its turn, each once."""
        self._pending_bytes = 0
        self._direct = not store.durable
        self._in_flight = False
        self._sent_at = 0.0
        self._scheduled = False
        self._away = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._due = False
        """The timer has rung: something may have expired."""
        self._late: dict[Connection, None] = {}
        """Those that watch and have to be told of what is stored."""
        self._reserved = 0
        """Ids below this are stored as given out."""
        self._lease_s = settings.lease if store.durable else float("inf")
        self._heartbeat_s = min(HEARTBEAT_S, self._lease_s / 3)
        self._tick_s = max(MIN_TICK_S, min(self._heartbeat_s, settings.store_timeout_ms / 4000))
        self._ticker = self._loop.call_later(self._tick_s, self._tick) if store.durable else None
        self._stopped = False
        self._idle: asyncio.Future[None] | None = None

    # -- what comes in ------------------------------------------------------------------------------------

    def submit(self, connection: Connection, items: Sequence[Item], size: int) -> None:
        """Commands of one connection, in order; a `RequestRejected` among them is told in its place.

        `size` is how many bytes they came in: what waits for the store is bounded.
        """
        if connection is self._talker and self._direct and not self._pending and len(items) <= MAX_TURN:
            self._take_at_once(connection, items)
            return
        self._talker = connection
        if self._stopped:
            return
        if self._away:
            self._refuse(connection, items)
            return
        self._pending_bytes += size
        connection.ahead += size
        self._put(connection, items, size)
        if connection.ahead > MAX_AHEAD or self._pending_bytes > self._settings.max_pending:
            connection.pause()

    def gone(self, connection: Connection) -> None:
        """A connection has ended: what was bound to it goes. Never refused, whatever the store does."""
        if connection is self._talker:
            self._talker = None
        if self._stopped:
            connection.session.forget()
        else:
            self._put(connection, [HANGUP], 0)

    def _put(self, connection: Connection, items: Sequence[Item], size: int) -> None:
        if not connection.inbox:
            self._pending.append(connection)
        connection.inbox.append((iter(items), len(items), size))
        self._kick()

    def _kick(self) -> None:
        """Run a batch when everybody was read who has said something by now.

        One pass over all of it finds the code and the tables in the processor's caches, where a system call between
        any two commands would drive them out.
        """
        if not self._in_flight and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    # -- one batch ----------------------------------------------------------------------------------------

    def _take_at_once(self, connection: Connection, items: Sequence[Item]) -> None:
        """Answer on the spot who talks alone, where nothing is stored that it would have to wait for."""
        try:
            self._dispatch.now = self._clock()
            todo = iter(items)
            if self._dispatch.take(connection, todo):
                self._put(connection, list(todo), 0)
            self._deliver()
        except Exception as error:  # noqa: BLE001 - see `_run`
            self._fail(error)

    def _run(self) -> None:
        self._scheduled = False
        if self._stopped or self._in_flight:
            return
        try:
            dispatch = self._dispatch
            dispatch.now = now = self._clock()
            if self._due:
                self._due = False
                dispatch.expire()
            self._take_up()
            overdue = self._loop.time() - self._sent_at > self._lease_s
            if dispatch.changes or overdue or (self.manager.next_id > self._reserved and self._store.durable):
                changes, dispatch.changes = dispatch.changes, {}
                self._commit(changes, now)
            else:  # while this server surely leads: a ping, an error, a look, a request that has to wait; or no store to speak of
                self._deliver()
        except Exception as error:  # noqa: BLE001 - a defect: better no server than one that has lost its way
            self._fail(error)
            return
        if self._pending:
            self._kick()  # others are read in between

    def _take_up(self) -> None:
        """Step what waits, as much as one batch may be. They take turns: whoever has more goes to the end of the line."""
        take, pending, room, room_bytes = self._dispatch.take, self._pending, MAX_BATCH, MAX_BATCH_BYTES
        while pending and room > 0 and room_bytes > 0:
            connection = pending.popleft()
            inbox = connection.inbox
            items, count, size = inbox.popleft()
            looked = take(connection, items if count <= MAX_TURN else islice(items, MAX_TURN))
            left = length_hint(items) if looked or count > MAX_TURN else 0
            if left:
                inbox.appendleft((items, left, size))
            else:
                self._done_with(connection, size)
                room_bytes -= size
            if inbox:
                pending.append(connection)
            if looked:
                return
            room -= count - left

    def _done_with(self, connection: Connection, size: int) -> None:
        self._pending_bytes -= size
        connection.ahead -= size
        if connection.paused:
            connection.resume()

    def _commit(self, changes: dict[int, Change], now: float) -> None:
        """Write a batch. Ids are stored ahead of their use: what is said of one that waits need not be stored itself."""
        manager = self.manager
        self._dispatch.stored_below = manager.next_id
        if manager.next_id > self._reserved - RESERVE // 2:
            self._reserved = manager.next_id + RESERVE
        self._in_flight, self._sent_at = True, self._loop.time()
        self._stats.sizes.add(len(changes))
        self._store.commit(Batch(changes, self._reserved, manager.next_fence, now), self._committed)

    @property
    def now(self) -> float:
        """The manager's time (ms)."""
        return self._clock()

    @property
    def sessions(self) -> int:
        """How many sessions there are, with and without a connection."""
        return len(self._dispatch.sessions)

    @property
    def reaches_store(self) -> bool:
        """Whether commands are taken up at present."""
        return not self._away and not self._stopped

    def may_watch_on(self, connection: Connection) -> bool:
        """Whether what a connection watches is still for it to see, when its rights have changed."""
        return self._dispatch.may_watch_on(connection)

    def whole(self) -> Batch:
        """The whole state, as a store should have it."""
        return self._dispatch.whole(max(self.manager.next_id, self._reserved))

    def _committed(self, error: BaseException | None) -> None:
        self._in_flight = self._away = False
        if self._stopped:
            return
        self._dispatch.full = self._store.full
        took_s = self._loop.time() - self._sent_at
        self._stats.commits.add(took_s * 1000)
        if error is None and took_s > self._lease_s:
            error = Superseded("it took longer than the lease until a commit was answered; another may lead by now")
        if error is not None:
            self._fail(error)
            return
        try:
            self._deliver()
        except Exception as defect:  # noqa: BLE001 - see `_run`
            self._fail(defect)
            return
        if self._pending:
            self._run()

    def _fail(self, error: BaseException) -> None:
        self.stop()
        self._on_failure(error)

    def _deliver(self) -> None:
        dispatch = self._dispatch
        for connection in dispatch.touched:
            if connection.urgent:
                connection.flush()
            elif connection.out:
                connection.postpone()
                self._show_later(connection)
        dispatch.touched.clear()
        if dispatch.ending:
            for connection in dispatch.ending:
                connection.finish()
            dispatch.ending.clear()
        if self._deadlines.soonest < self._timer_at or self._leaving.soonest < self._timer_at:
            self._arm()
        if self._idle is not None and not self._pending and not self._idle.done():
            self._idle.set_result(None)

    def _show_later(self, connection: Connection) -> None:
        """Many watch, and much happens: what happens within a few milliseconds goes out in one write for each of them."""
        if not self._late:
            self._loop.call_later(SHOW_S, self._show)
        self._late[connection] = None

    def _show(self) -> None:
        late, self._late = self._late, {}
        for connection in late if not self._stopped else ():
            connection.flush_late()

    # -- time ---------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """One timer for the next deadline. It may ring too early, when that one was released; then it is set anew."""
        due = min(self._deadlines.next, self._leaving.next)
        if due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = self._loop.call_later(max(0.0, due - self._clock()) / 1000, self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_at, self._due = None, float("inf"), True
        if not self._in_flight and not self._stopped:
            self._run()

    def _tick(self) -> None:
        """Look after the store: is it away, or idle for so long that the clock should be stored?

        A timer of its own for each commit would cost more than the rest of it.
        """
        self._ticker = self._loop.call_later(self._tick_s, self._tick)
        quiet_s = self._loop.time() - self._sent_at
        try:
            if self._in_flight:
                if quiet_s > self._lease_s:
                    self._fail(Superseded("nothing could be committed for longer than the lease"))
                elif quiet_s >= self._settings.store_timeout_ms / 1000 and not self._away:
                    self._lose_patience()
            elif quiet_s >= self._heartbeat_s - self._tick_s:
                self._commit({}, self._clock())
        except Exception as error:  # noqa: BLE001 - see `_run`
            self._fail(error)

    # -- bad days -----------------------------------------------------------------------------------------

    def _lose_patience(self) -> None:
        """The store does not answer. What it has been given waits for its outcome; the rest is refused."""
        self._away = True
        self._stats.store_errors += 1
        pending, self._pending = self._pending, deque()
        for connection in pending:
            inbox, connection.inbox = connection.inbox, deque()
            for items, _, size in inbox:
                self._refuse(connection, items)
                self._done_with(connection, size)

    def _refuse(self, connection: Connection, items: Iterable[Item]) -> None:
        """Answer commands that were not taken up, without overtaking what this connection is still to be told."""
        waiting = bool(connection.out)
        for item in items:
            if item is HANGUP:
                self._put(connection, [item], 0)
                continue
            rejected = refuse(connection, item)
            if rejected is not None:
                self._dispatch.reject(connection, rejected)
        if not waiting and connection.out:
            self._dispatch.touched.pop()  # nobody else was told anything since
            connection.flush()
        elif len(connection.out) > MAX_UNTOLD + MOST_EVENTS:
            connection.abort()

    async def settled(self) -> None:
        """Wait until everything that was taken up is stored and told."""
        if self._pending or self._in_flight or self._scheduled:
            self._idle = self._loop.create_future()
            await self._idle

    def stop(self) -> None:
        """Nothing is taken up or told any more."""
        self._stopped, self._direct = True, False
        for handle in (self._timer, self._ticker):
            if handle is not None:
                handle.cancel()
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def forget(self) -> None:
        """Let go of all locks and lines, when this was stopped and another leads: it may be much memory."""
        self._dispatch.forget()
        self._pending.clear()
        self._late.clear()

    def recover(self, endings: Iterable[Ending]) -> None:
        """The step after loading: nobody who asked before is connected now. Must be the first."""
        self._dispatch.now = self._clock()
        self._dispatch.recover(endings)
        self._kick()
