"""The pipeline of a leader: batches commands fairly, executes them, commits their changes together, sends the replies.

At most one batch is in flight. While the store is unavailable, commands that were not executed are rejected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from math import ceil, inf
from typing import TYPE_CHECKING

from genie.config import NAMESPACE
from genie.core import LockManager
from genie.errors import RequestRejected
from genie.protocol.commands import Hello
from genie.protocol.framing import UnsplitLines
from genie.server.dispatcher import Dispatcher
from genie.server.peer import END_OF_INPUT, Input, Item, Peer
from genie.server.rejections import reject_item
from genie.server.scheduler import CHUNK, CommandScheduler
from genie.server.sessions import Outbound
from genie.server.watches import MAX_BUFFERED_EVENTS
from genie.storage.store import Batch, LeadershipLost, RetainedReply, Store

if TYPE_CHECKING:
    from genie.config import Limits
    from genie.history.recorder import Recorder
    from genie.observability.stats import Stats

HEARTBEAT_S = 1.0
"""Interval in seconds at which an idle leader commits its clock; a third of the lease if that is shorter. After a crash,
locks last longer than requested by at most this interval.
"""

MIN_TICK_S = 0.025
"""Shortest interval in seconds of the timer that detects store timeouts."""

ID_RESERVATION = 100_000
"""Number of ids that are reserved in the store, by a high-water mark, before they are assigned to requests."""

WATCH_FLUSH_INTERVAL_S = 0.005
"""Seconds for which watch events are deferred, in order to send a watcher several events in one write."""

MAX_BUFFERED_REPLIES = 10_000
"""Maximum number of replies in an outbox while the store is unavailable. A connection with more is aborted."""


class Pipeline:
    """Executes commands batch by batch and sends each reply when its batch is stored.

    `clock` returns the lock manager's time in ms. `on_leadership_lost` is called once, with the reason as an exception,
    when this server lost leadership, cannot be sure to have it, or has a defect. The callback must close every connection
    without sending anything.
    """

    is_leader = True

    def __init__(
        self,
        manager: LockManager,
        store: Store,
        limits: Limits,
        stats: Stats,
        clock: Callable[[], float],
        on_leadership_lost: Callable[[BaseException], None],
        *,
        namespace: str = NAMESPACE,
        lease_s: float = 3.0,
        store_timeout_s: float = 2.0,
    ) -> None:
        self.manager = manager
        self.in_flight = False
        """Whether a commit was sent to the store and is not acknowledged yet."""
        self.store_unavailable = False
        """Whether the commit in flight has taken longer than the store timeout."""
        self._store = store
        self._stats = stats
        self._clock = clock
        self._on_leadership_lost = on_leadership_lost
        self._loop = asyncio.get_running_loop()
        self._scheduler = CommandScheduler(limits.max_pending)
        self._light, self._busy, self._slow = self._scheduler.light, self._scheduler.busy, self._scheduler.slow
        """The scheduler's queues of connections; references, because every read from a client checks them."""
        self._dispatcher = Dispatcher(manager, limits, stats, durable=store.durable, namespace=namespace)
        self._notifier = self._dispatcher.notifier
        self._request_deadlines = manager.deadlines
        self._session_deadlines = self._dispatcher.sessions.deadlines
        self._durable = store.durable
        self._only_connection: Peer | None = None
        """The connection that submitted last, if its input was executed immediately. If it also submits next, it is the only
        active connection. None after `stop`."""
        self._scheduled: asyncio.Handle | None = None
        """The scheduled run of a batch. At most one is scheduled, so that connections are read between two runs."""
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._expiry_at = inf
        """The lock manager's time (ms) at which the expiry timer fires."""
        self._expiry_pending = False
        """Whether the expiry timer has fired, so that requests or sessions may have expired."""
        self._disconnected: list[Peer] = []
        """Connections that were lost while the store was unavailable."""
        self._deferred: dict[Outbound, None] = {}
        """Connections with deferred watch events."""
        self._recorder: Recorder | None = None
        """Records the history; None if it is not recorded."""
        self._stopped = False
        self._drained: asyncio.Future[None] | None = None
        """Done when nothing is queued or in flight. None: `drained` was not called."""
        self._ids_reserved_below = 0
        """The high-water mark of ids in the store, or in the commit in flight."""
        self._committed_at = 0.0
        """Event-loop time when the last commit was sent."""
        self._store_timeout_s = store_timeout_s
        self._lease_s = lease_s if store.durable else inf  # leadership of a store in memory does not expire
        self._heartbeat_s = min(HEARTBEAT_S, self._lease_s / 3)
        self._tick_s = max(MIN_TICK_S, min(self._heartbeat_s, store_timeout_s / 4))
        self._ticker = self._loop.call_later(self._tick_s, self._on_tick) if store.durable else None

    # -- input --------------------------------------------------------------------------------------------

    def submit(self, connection: Peer, items: Input, size: int) -> None:
        """Queue commands of one connection in order. `size`: the bytes that were read for these commands, 0 for none.

        Fast path: the commands of the only active connection are executed immediately instead of being batched. With one
        connection, this saves an iteration of the event loop, and 11 % of the instructions of a cycle with Redis.

        The commands that are read first in an iteration of the event loop are executed immediately, too. If they release a
        lock, its next holder receives the lock while the server executes the commands of the other connections. With one
        contended lock, this makes 1.6 times as many handovers in memory.
        """
        if (
            (connection is self._only_connection or self._scheduled is None)
            and not self.in_flight
            and not self._light
            and not self._busy
            and not isinstance(items, UnsplitLines)
            and len(items) <= CHUNK
            and not connection.input_queue
        ):
            if connection is self._only_connection:
                self._execute_now(connection, items, is_only=True)
            elif not self._stopped:
                self._only_connection = connection
                self._schedule()  # the next input is not the first of this iteration
                self._execute_now(connection, items, is_only=False)
            return
        if self._stopped:
            return
        self._only_connection = None
        if self.store_unavailable and type(items) is list and type(items[0]) is Hello:
            self._reject(connection, iter(items))  # immediately, so that the connection rejects the following lines
            return
        self._scheduler.add(connection, items, size)
        if self._scheduled is None and (not self.in_flight or self.store_unavailable):
            self._schedule()

    def on_disconnect(self, connection: Peer) -> None:
        """Queue the end of a lost connection after its commands. The dispatcher then ends or keeps the bound requests.

        After `stop` no request ends any more: only the memory of the session is freed.
        """
        if connection is self._only_connection:
            self._only_connection = None
        if self._stopped:
            if (
                connection.session.key is None
            ):  # a session with a key belongs to the snapshot, so it is kept until `dispose`
                connection.session.dispose()
        else:
            self._enqueue(connection, [END_OF_INPUT], size=0)

    def on_writable(self, connection: Peer) -> None:
        """Continue with the commands of a client that reads its messages again."""
        self._scheduler.unpark(connection)
        if self._slow and not self._stopped:
            self._schedule()

    def _enqueue(self, connection: Peer, items: Input, size: int) -> None:
        self._scheduler.add(connection, items, size)
        self._schedule()

    def _schedule(self) -> None:
        """Schedule a batch after all connections with input are read, unless the last commit is still in flight.

        While the store is unavailable, the batch is scheduled in spite of the commit, in order to reject its commands.

        Executing many commands in one pass keeps code and tables in the processor's caches; a system call between two
        commands would evict them.
        """
        if self._scheduled is None and (not self.in_flight or self.store_unavailable):
            self._scheduled = self._loop.call_soon(self._run_scheduled)

    # -- one batch ----------------------------------------------------------------------------------------

    def _execute_now(self, connection: Peer, items: Input, *, is_only: bool) -> None:
        """Execute commands immediately, then commit or reply: the fast path of `submit`.

        If other connections may be active, only a granted lock is committed immediately. Other changes are committed
        together with those of the other connections, at the end of this iteration of the event loop.
        """
        try:
            self._notifier.now = now = self._clock()
            remaining = iter(items)
            slow = self._dispatcher.execute(connection, remaining)
            if slow is not None:
                self._only_connection = None
                self._scheduler.add_slow(connection, slow, remaining)
                self._schedule()
            if not self._durable:
                self._deliver()
            elif is_only or self._notifier.granted:
                self._finish_batch(now)
        except Exception as error:  # noqa: BLE001 - a defect: stop, as the state is unknown
            self._fail(error)

    def _run_scheduled(self) -> None:
        """Run a batch if there is anything to do; while the store is unavailable, reject the commands instead."""
        self._scheduled = None
        if self.store_unavailable:
            self._run_rejecting()
        elif self._light or self._busy or self._slow or self._durable or self._drained is not None:
            self._run_batch()

    def _run_batch(self) -> None:
        """Execute queued commands, then commit their changes. If nothing needs a commit, send the replies immediately."""
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._stopped or self.in_flight:
            return
        try:
            notifier = self._notifier
            notifier.now = now = self._clock()
            if self._expiry_pending:
                self._expiry_pending = False
                self._dispatcher.expire()
            self._scheduler.run_batch(self._dispatcher.execute, self._dispatcher.execute_slow)
            if self._durable:
                self._finish_batch(now)
            else:
                self._deliver()
        except Exception as error:  # noqa: BLE001 - a defect: stop, as the state is unknown
            self._fail(error)
            return
        if self._light or self._busy or self._slow:
            self._schedule()  # in the next iteration of the event loop, after other connections were read

    def _finish_batch(self, now: float) -> None:
        """Commit the changes of a batch. If nothing needs a commit, send the replies immediately."""
        if self._notifier.write_set or self._needs_commit():
            self._commit(now)
        else:  # within the lease, replies without changes, such as `pong` and errors, need no commit
            self._deliver()

    def _deliver(self) -> None:  # noqa: C901 - the hot path
        """Send the messages of the batch, because all its changes are stored.

        The connections of requests that were granted after a wait are flushed first, because others may wait for them in turn.
        Then close the connections whose input ended in the batch, set the expiry timer, and complete `drained` if nothing
        is left. Watch events without a reply are deferred.
        """
        notifier = self._notifier
        if self._recorder is not None:
            self._recorder.on_stored()
        if notifier.granted:
            for connection in notifier.granted:
                connection.flush()
            notifier.granted.clear()
        for connection in notifier.dirty:
            if connection.has_reply:
                connection.flush()
            elif connection.outbox:
                connection.defer()
                self._flush_later(connection)
        notifier.dirty.clear()
        if notifier.closing:
            for connection in notifier.closing:
                connection.finish()
            notifier.closing.clear()
        if self._request_deadlines.soonest < self._expiry_at or self._session_deadlines.soonest < self._expiry_at:
            self._set_expiry_timer()
        if self._drained is not None and not self._scheduler and not self._drained.done():
            self._drained.set_result(None)

    def _flush_later(self, connection: Outbound) -> None:
        """Send the watch events of a connection after `WATCH_FLUSH_INTERVAL_S`, several in one write."""
        if not self._deferred:
            self._loop.call_later(WATCH_FLUSH_INTERVAL_S, self._flush_deferred)
        self._deferred[connection] = None

    def _flush_deferred(self) -> None:
        """Send the deferred watch events of all connections."""
        deferred, self._deferred = self._deferred, {}
        for connection in deferred if not self._stopped else ():
            connection.flush_deferred()

    # -- commits ------------------------------------------------------------------------------------------

    def _needs_commit(self) -> bool:
        """Return whether a batch without changes needs a commit in a durable store.

        The lease may have expired, or an id that is not reserved in the store may have been assigned.
        """
        if self._loop.time() - self._committed_at > self._lease_s:
            return True
        return self.manager.next_id > self._ids_reserved_below

    def _commit(self, now: float) -> None:
        """Send all changes that are not sent yet to the store, with the high-water mark of ids.

        More ids are reserved once half of the last reservation is used. A later leader never assigns a reserved id. So an
        id may be sent to its client in `queued` although the request itself is not stored.
        """
        manager, notifier = self.manager, self._notifier
        write_set, notifier.write_set = notifier.write_set, {}
        notifier.stored_below = manager.next_id
        if manager.next_id > self._ids_reserved_below - ID_RESERVATION // 2:
            self._ids_reserved_below = manager.next_id + ID_RESERVATION
        self.in_flight, self._committed_at = True, self._loop.time()
        self._stats.batch_sizes.add(len(write_set))
        self._store.commit(Batch(write_set, self._ids_reserved_below, manager.next_fence, now), self._on_committed)

    def _on_committed(self, error: BaseException | None) -> None:
        """Send the replies of the stored batch, and run the next batch. With an `error`, give up leadership."""
        self.in_flight = self.store_unavailable = False
        if self._stopped:
            return
        took_s = self._loop.time() - self._committed_at
        self._stats.commits.add(took_s * 1000)
        if error is None and took_s > self._lease_s:
            reason = (
                f"a commit took {took_s:.1f} s, longer than the lease of {self._lease_s:g} s; another node may lead"
            )
            error = LeadershipLost(reason)
        if error is not None:
            self._fail(error)
            return
        try:
            if self._store.full is not self._dispatcher.store_full:
                self._dispatcher.set_store_full(self._store.full)
            self._deliver()
        except Exception as defect:  # noqa: BLE001 - a defect: stop, as the state is unknown
            self._fail(defect)
            return
        if self._disconnected:
            for connection in self._disconnected:
                self._scheduler.add(connection, [END_OF_INPUT], size=0)
            self._disconnected.clear()
        if self._light or self._busy or self._slow:
            self._run_batch()

    def _on_tick(self) -> None:
        """Detect a store timeout or an expired lease. Commit a heartbeat if the leader is idle.

        A single timer recurs, because a separate timer for each commit would cost more than the commit (measured).
        """
        if self._stopped:
            return
        self._ticker = self._loop.call_later(self._tick_s, self._on_tick)
        since_commit_s = self._loop.time() - self._committed_at
        try:
            if self.in_flight:
                if since_commit_s > self._lease_s:
                    self._fail(LeadershipLost(f"no commit was acknowledged within the lease of {self._lease_s:g} s"))
                elif since_commit_s >= self._store_timeout_s and not self.store_unavailable:
                    self._on_store_timeout()
            elif since_commit_s >= self._heartbeat_s - self._tick_s:  # the next tick would be too late
                self._commit(self._clock())
        except Exception as error:  # noqa: BLE001 - a defect: stop, as the state is unknown
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stop and report `error`. No replies are sent after this, because the batch in flight may not be stored."""
        self.stop()
        self._on_leadership_lost(error)

    # -- time ---------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The lock manager's time (ms)."""
        return self._clock()

    def _set_expiry_timer(self) -> None:
        """Set the timer to the earliest deadline of all requests and sessions, unless it fires earlier anyway.

        If grants are pending, it fires at once. The timer is not cancelled when a request ends before its deadline: it then
        fires and finds nothing to expire.
        """
        deadline = min(self._request_deadlines.next, self._session_deadlines.next)
        if self.manager.pending_grants:
            deadline = 0
        if deadline < self._expiry_at:
            if self._expiry_timer is not None:
                self._expiry_timer.cancel()
            self._expiry_at = deadline
            delay_s = max(0, ceil(deadline - self._clock())) / 1000  # in whole ms, which is what uvloop's timers count
            self._expiry_timer = self._loop.call_later(delay_s, self._on_expiry_timer)

    def _on_expiry_timer(self) -> None:
        """Run a batch, which ends expired requests and sessions. If a commit is in flight, the next batch ends them."""
        self._expiry_timer, self._expiry_at, self._expiry_pending = None, inf, True
        if not self.in_flight and not self._stopped:
            self._run_batch()

    # -- an unavailable store -----------------------------------------------------------------------------

    def _on_store_timeout(self) -> None:
        """Reject queued commands until the store answers. Commands of the batch in flight still wait for the commit."""
        self.store_unavailable = True
        self._stats.store_errors += 1
        if self._scheduler:
            self._schedule()

    def _run_rejecting(self) -> None:
        """Reject queued commands for the time of one batch, because the store is unavailable."""
        try:
            self._scheduler.run_batch(self._reject, self._reject_one)
        except Exception as error:  # noqa: BLE001 - a defect: stop, as the state is unknown
            self._fail(error)
            return
        if self._scheduler:
            self._schedule()

    def _reject_one(self, connection: Peer, item: Item) -> None:
        self._reject(connection, iter((item,)))

    def _reject(self, connection: Peer, items: Iterator[Item]) -> None:
        """Reject commands because the store is unavailable. The errors follow replies that wait for the batch in flight.

        A connection with too many messages in its outbox is aborted.
        """
        errors: list[RequestRejected] = []
        if self._collect_errors(connection, items, errors):
            # Otherwise the commands after the `hello` could be executed later, without the session that it requested.
            for later_items in self._scheduler.take_all(connection):
                self._collect_errors(connection, later_items, errors)
        had_replies = bool(connection.outbox)
        self._notifier.reject_now(connection, errors)
        if had_replies and len(connection.outbox) > MAX_BUFFERED_REPLIES + MAX_BUFFERED_EVENTS:
            connection.abort()

    def _collect_errors(self, connection: Peer, items: Iterator[Item], errors: list[RequestRejected]) -> bool:
        """Append the errors for rejected items to `errors`. Return whether the items include a `hello`.

        The end of a connection is kept in `_disconnected` until the store is available again.
        """
        has_hello = False
        for item in items:
            if item is END_OF_INPUT:
                self._disconnected.append(connection)
                continue
            has_hello = has_hello or isinstance(item, Hello)
            rejection = reject_item(connection, item)
            if rejection is not None:
                errors.append(rejection)
        return has_hello

    # -- state, for the namespace -------------------------------------------------------------------------

    @property
    def session_count(self) -> int:
        """Number of sessions, with and without a connection."""
        return len(self._dispatcher.sessions)

    @property
    def store_available(self) -> bool:
        """Whether commands are executed now."""
        return not self.store_unavailable and not self._stopped

    def may_keep_watches(self, connection: Peer) -> bool:
        """Return whether a connection still has the permission for each prefix that it watches."""
        return self._dispatcher.may_keep_watches(connection)

    def snapshot(self) -> Batch:
        """Return a snapshot of all requests and retained replies, which the store can write to Redis."""
        return self._dispatcher.snapshot(max(self.manager.next_id, self._ids_reserved_below))

    def record(self, recorder: Recorder) -> None:
        """Record the history from now on. Must be called before `recover`."""
        self._recorder = self._notifier.recorder = recorder

    def recover(self, replies: Iterable[RetainedReply]) -> None:
        """Restore sessions and retained replies from the loaded state, and schedule the commit of the changes.

        Requests that were bound to a connection of the previous leader end.
        """
        self._notifier.now = self._clock()
        self._dispatcher.recover(replies)
        self._scheduled = self._loop.call_soon(self._run_batch)

    async def drained(self) -> None:
        """Wait until all queued commands are executed and stored and their replies are sent."""
        if self._scheduler or self.in_flight or self._scheduled:
            self._drained = self._loop.create_future()
            try:
                await self._drained
            finally:
                self._drained = None

    def stop(self) -> None:
        """Stop executing commands and sending replies.

        Whether the store acknowledges the batch in flight is ignored. A call of `drained` returns.
        """
        self._stopped, self._only_connection = True, None
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = self._notifier.recorder = None
        for timer in (self._ticker, self._expiry_timer):
            if timer is not None:
                timer.cancel()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def dispose(self) -> None:
        """Free the memory of a stopped pipeline. Called when another node leads."""
        self._dispatcher.dispose()
        self._scheduler.clear()
        self._disconnected.clear()
        self._deferred.clear()
