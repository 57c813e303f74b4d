"""One batch in flight at most: what a commit may take, when the store counts as away, and the clock of an idle server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from genie.config import NAMESPACE
from genie.core import LockManager
from genie.protocol.commands import Hello
from genie.protocol.framing import SPLIT_BYTES, UnsplitLines
from genie.server.connection import END_OF_INPUT, Connection, Input, Item
from genie.server.dispatcher import Dispatcher
from genie.server.scheduler import CHUNK, CommandScheduler
from genie.server.watches import MAX_BUFFERED_EVENTS
from genie.storage.store import Batch, Change, LeadershipLost, RetainedReply, Store

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.observability.stats import Stats

HEARTBEAT_S = 1.0
"""How often an idle server commits its clock: what a crash may add to the life of a lock. Three times in a lease, where that is oftener."""

MIN_TICK_S = 0.025
"""How exactly the patience with the store is kept, at best."""

ID_RESERVATION = 100_000
"""Ids that are stored ahead of their use."""


class Owner(Protocol):
    """Who is told what comes of a commit."""

    def on_stored(self) -> None:
        """It is stored."""

    def on_away(self) -> None:
        """It takes longer than the store may."""

    def on_failure(self, error: BaseException) -> None:
        """The server can't go on: the store said so, or it has not answered for a lease, and another may lead by now."""


class Commits:
    """Writes batches to the store, one after the other."""

    def __init__(
        self,
        owner: Owner,
        dispatcher: Dispatcher,
        store: Store,
        settings: Settings,
        stats: Stats,
        clock: Callable[[], float],
    ) -> None:
        self._owner: Owner | None = owner
        """None when this is stopped: nobody is told any more, nor kept in memory by this."""
        self.in_flight = False
        self.away = False
        """The store has not answered for longer than it may."""
        self.reserved = 0
        """Ids below this are stored as given out."""
        self._dispatcher = dispatcher
        self._manager = dispatcher.manager
        self._store = store
        self._stats = stats
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        self._patience_s = settings.store_timeout_ms / 1000
        self._lease_s = settings.lease if store.durable else float("inf")
        self._heartbeat_s = min(HEARTBEAT_S, self._lease_s / 3)
        self._tick_s = max(MIN_TICK_S, min(self._heartbeat_s, self._patience_s / 4))
        self._ticker = self._loop.call_later(self._tick_s, self._tick) if store.durable else None

    @property
    def due(self) -> bool:
        """Whether one is needed though nothing has changed: to know that this server leads, or to have more ids."""
        if self._loop.time() - self._sent_at > self._lease_s:
            return True
        return self._manager.next_id > self.reserved and self._store.durable

    def write(self, changes: dict[int, Change], now: float) -> None:
        """Begin one. Ids are stored ahead of their use: what is said of one that waits need not be stored itself."""
        manager = self._manager
        self._dispatcher.stored_below = manager.next_id
        if manager.next_id > self.reserved - ID_RESERVATION // 2:
            self.reserved = manager.next_id + ID_RESERVATION
        self.in_flight, self._sent_at = True, self._loop.time()
        self._stats.sizes.add(len(changes))
        self._store.commit(Batch(changes, self.reserved, manager.next_fence, now), self._answered)

    def _answered(self, error: BaseException | None) -> None:
        self.in_flight = self.away = False
        owner = self._owner
        if owner is None:
            return
        took_s = self._loop.time() - self._sent_at
        self._stats.commits.add(took_s * 1000)
        if error is None and took_s > self._lease_s:
            error = LeadershipLost("it took longer than the lease until a commit was answered; another may lead by now")
        if error is None:
            owner.on_stored()
        else:
            owner.on_failure(error)

    def _tick(self) -> None:
        """Look after the store: is it away, or idle for so long that the clock should be stored?

        A timer of its own for each commit would cost more than the rest of it.
        """
        owner = self._owner
        if owner is None:
            return
        self._ticker = self._loop.call_later(self._tick_s, self._tick)
        quiet_s = self._loop.time() - self._sent_at
        try:
            if self.in_flight:
                if quiet_s > self._lease_s:
                    owner.on_failure(LeadershipLost("nothing could be committed for longer than the lease"))
                elif quiet_s >= self._patience_s and not self.away:
                    self.away = True
                    self._stats.store_errors += 1
                    owner.on_away()
            elif quiet_s >= self._heartbeat_s - self._tick_s:
                self.write({}, self._clock())
        except Exception as error:  # noqa: BLE001 - a defect: better no server than one that has lost its way
            owner.on_failure(error)

    def stop(self) -> None:
        """Whatever the store answers, nobody hears of it any more."""
        self._owner = None
        if self._ticker is not None:
            self._ticker.cancel()


# -- Step, commit, reply: the heart of the server --------

WATCH_FLUSH_INTERVAL_S = 0.005
"""How late those who watch may be told of what happened."""

MAX_BUFFERED_REPLIES = 10_000
"""Messages that may wait for the outcome of a batch, for a connection that goes on asking while the store is away, besides what it watches."""


class Pipeline:
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
        self._dispatcher = Dispatcher(manager, settings, stats, store.durable, namespace)
        self._leaving = self._dispatcher.sessions.deadlines
        self._store = store
        self._talker: Connection | None = None
        """Who spoke last."""
        self._clock = clock
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._scheduler = CommandScheduler(settings.limits.max_pending)
        self._light, self._busy = self._scheduler.light, self._scheduler.busy
        self._direct = not store.durable
        self._commits = Commits(self, self._dispatcher, store, settings, stats, clock)
        self._scheduled: asyncio.Handle | None = None
        """The next run, if one is due: never more than one, or input would be read only after all of them."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._due = False
        """The timer has rung: something may have expired."""
        self._left: list[Connection] = []
        """Connections that ended while the store was away."""
        self._late: dict[Connection, None] = {}
        """Those that watch and have to be told of what is stored."""
        self._stopped = False
        self._idle: asyncio.Future[None] | None = None

    # -- what comes in ------------------------------------------------------------------------------------

    def submit(self, connection: Connection, items: Input, size: int) -> None:
        """Commands of one connection, in order; a `RequestRejected` among them is told in its place.

        `size` is how many bytes they came in: what waits for the store is bounded.
        """
        if (
            connection is self._talker
            and self._direct
            and not self._light
            and not self._busy
            and size <= SPLIT_BYTES
            and not isinstance(items, UnsplitLines)
            and len(items) <= CHUNK
        ):
            self._execute_now(connection, items)
            return
        self._talker = connection
        if self._stopped:
            return
        if self._commits.away and type(items) is list and type(items[0]) is Hello:
            self._refuse(connection, iter(items))  # at once: it decides what becomes of the lines after it
            return
        self._put(connection, items, size)

    def gone(self, connection: Connection) -> None:
        """A connection has ended: what was bound to it goes. Never refused, whatever the store does."""
        if connection is self._talker:
            self._talker = None
        if self._stopped:
            if connection.session.key is None:  # the others are still part of what this server knows, until `forget`
                connection.session.forget()
        else:
            self._put(connection, [END_OF_INPUT], 0)

    def _put(self, connection: Connection, items: Input, size: int) -> None:
        self._scheduler.add(connection, items, size)
        self._kick()

    def _kick(self) -> None:
        """Run a batch when everybody was read who has said something by now.

        One pass over all of it finds the code and the tables in the processor's caches, where a system call between
        any two commands would drive them out.
        """
        if self._scheduled is None and (not self._commits.in_flight or self._commits.away):
            self._scheduled = self._loop.call_soon(self._run_scheduled)

    # -- one batch ----------------------------------------------------------------------------------------

    def _execute_now(self, connection: Connection, items: Sequence[Item]) -> None:
        """Answer on the spot who talks alone, where nothing is stored that it would have to wait for."""
        try:
            self._dispatcher.now = self._clock()
            todo = iter(items)
            if self._dispatcher.take(connection, todo):
                self._put(connection, list(todo), 0)
            self._deliver()
        except Exception as error:  # noqa: BLE001 - see `_run`
            self.on_failure(error)

    def _run_scheduled(self) -> None:
        self._scheduled = None
        if self._commits.away:
            self._run_away()
        else:
            self._run()

    def _run(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._stopped or self._commits.in_flight:
            return
        try:
            dispatcher = self._dispatcher
            dispatcher.now = now = self._clock()
            if self._due:
                self._due = False
                dispatcher.expire()
            self._scheduler.run_batch(dispatcher.take)
            if dispatcher.changes or self._commits.due:
                changes, dispatcher.changes = dispatcher.changes, {}
                self._commits.write(changes, now)
            else:  # while this server surely leads: a ping, an error, a look, a request that has to wait; or no store to speak of
                self._deliver()
        except Exception as error:  # noqa: BLE001 - a defect: better no server than one that has lost its way
            self.on_failure(error)
            return
        if self._light or self._busy:
            self._kick()  # others are read in between

    @property
    def now(self) -> float:
        """The manager's time (ms)."""
        return self._clock()

    @property
    def sessions(self) -> int:
        """How many sessions there are, with and without a connection."""
        return len(self._dispatcher.sessions)

    @property
    def store_available(self) -> bool:
        """Whether commands are taken up at present."""
        return not self._commits.away and not self._stopped

    def may_watch_on(self, connection: Connection) -> bool:
        """Whether what a connection watches is still for it to see, when its rights have changed."""
        return self._dispatcher.may_watch_on(connection)

    def snapshot(self) -> Batch:
        """The whole state, as a store should have it."""
        return self._dispatcher.snapshot(max(self.manager.next_id, self._commits.reserved))

    def on_stored(self) -> None:
        """The batch in flight is stored: tell what came of it, and go on."""
        try:
            self._dispatcher.full = self._store.full
            self._deliver()
        except Exception as defect:  # noqa: BLE001 - see `_run`
            self.on_failure(defect)
            return
        for connection in self._left:
            self._scheduler.add(connection, [END_OF_INPUT], 0)
        self._left.clear()
        if self._light or self._busy:
            self._run()

    def on_failure(self, error: BaseException) -> None:
        """An end without another word to anyone."""
        self.stop()
        self._on_failure(error)

    def _deliver(self) -> None:
        dispatcher = self._dispatcher
        for connection in dispatcher.dirty:
            if connection.has_reply:
                connection.flush()
            elif connection.outbox:
                connection.defer()
                self._show_later(connection)
        dispatcher.dirty.clear()
        if dispatcher.closing:
            for connection in dispatcher.closing:
                connection.finish()
            dispatcher.closing.clear()
        if self._deadlines.soonest < self._timer_at or self._leaving.soonest < self._timer_at:
            self._arm()
        if self._idle is not None and not self._scheduler and not self._idle.done():
            self._idle.set_result(None)

    def _show_later(self, connection: Connection) -> None:
        """Many watch, and much happens: what happens within a few milliseconds goes out in one write for each of them."""
        if not self._late:
            self._loop.call_later(WATCH_FLUSH_INTERVAL_S, self._show)
        self._late[connection] = None

    def _show(self) -> None:
        late, self._late = self._late, {}
        for connection in late if not self._stopped else ():
            connection.flush_deferred()

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
        if not self._commits.in_flight and not self._stopped:
            self._run()

    # -- bad days -----------------------------------------------------------------------------------------

    def on_away(self) -> None:
        """The store does not answer. What it has been given waits for its outcome; the rest is refused, batch by batch."""
        if self._scheduler:
            self._kick()

    def _run_away(self) -> None:
        """Refuse commands, as many as fit into one batch."""
        try:
            self._scheduler.run_batch(self._refuse)
        except Exception as error:  # noqa: BLE001 - see `_run`
            self.on_failure(error)
            return
        if self._light or self._busy:
            self._kick()

    def _refuse(self, connection: Connection, items: Iterator[Item]) -> bool:
        """Answer commands that were not taken up, without overtaking what this connection is still to be told."""
        waiting, all_of_it = bool(connection.outbox), False
        for item in items:
            if item is END_OF_INPUT:
                self._left.append(connection)
                continue
            all_of_it = all_of_it or isinstance(item, Hello)
            rejected = connection.unavailable(item)
            if rejected is not None:
                self._dispatcher.reject(connection, rejected)
        if (
            all_of_it
        ):  # what was sent after a `hello` must not run without its session, if the store is back before its turn
            for more in self._scheduler.take_all(connection):
                self._refuse(connection, more)
        if not waiting and connection.outbox:
            self._dispatcher.dirty.pop()  # nobody else was told anything since
            connection.flush()
        elif len(connection.outbox) > MAX_BUFFERED_REPLIES + MAX_BUFFERED_EVENTS:
            connection.abort()
        return False

    async def drained(self) -> None:
        """Wait until everything that was taken up is stored and told."""
        if self._scheduler or self._commits.in_flight or self._scheduled:
            self._idle = self._loop.create_future()
            await self._idle

    def stop(self) -> None:
        """Nothing is taken up or told any more."""
        self._stopped, self._direct = True, False
        self._commits.stop()
        if self._timer is not None:
            self._timer.cancel()
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def forget(self) -> None:
        """Let go of all locks and lines, when this was stopped and another leads: it may be much memory."""
        self._dispatcher.forget()
        self._scheduler.clear()
        self._left.clear()
        self._late.clear()

    def recover(self, endings: Iterable[RetainedReply]) -> None:
        """The step after loading: nobody who asked before is connected now. Must be the first."""
        self._dispatcher.now = self._clock()
        self._dispatcher.recover(endings)
        self._kick()
