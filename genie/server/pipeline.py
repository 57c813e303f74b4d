"""The pipeline of a leader: batches commands fairly, executes them, commits their changes together, sends the replies.

At most one batch is in flight. While the store is unavailable, commands that were not executed are rejected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from math import inf
from typing import TYPE_CHECKING

from genie import work_time
from genie.config import NAMESPACE
from genie.core import LockManager
from genie.protocol.commands import Hello
from genie.protocol.framing import UnsplitLines
from genie.server.commits import Commits, Due
from genie.server.dispatcher import Dispatcher
from genie.server.expiry_timer import ExpiryTimer
from genie.server.outcome import BatchOutcome
from genie.server.peer import END_OF_INPUT, Input, Item, Peer
from genie.server.scheduler import CHUNK, CommandScheduler
from genie.server.sessions import Outbound
from genie.server.turns import IterationTurns
from genie.server.unavailable import Rejecter
from genie.storage.store import Batch, RetainedReply, Store
from genie.tasks import run_in_iterations

if TYPE_CHECKING:
    from genie.config import Limits
    from genie.history.recorder import Recorder
    from genie.observability.stats import Stats

WATCH_FLUSH_INTERVAL_S = 0.005
"""Seconds for which watch events are deferred, in order to send a watcher several events in one write."""

MAX_FLUSHED_WATCHERS = 200
"""Maximum number of watchers whose deferred events are sent in one iteration of the event loop."""

MAX_FLUSHED_BYTES = 512 << 10
"""Maximum bytes of deferred events that are sent in one iteration of the event loop. Those of the last watcher may exceed
it."""


MAX_RECOVERED_CHANGES = 1_000
"""Number of changes of a recovery that are committed before it continues. The last part may exceed it."""


class DeferredEvents:
    """Defers watch events for `WATCH_FLUSH_INTERVAL_S`, so that a watcher receives several events in one write."""

    def __init__(self, turns: IterationTurns) -> None:
        self._loop = asyncio.get_running_loop()
        self._turns = turns
        self._connections: dict[Outbound, bool] = {}
        """Connections with deferred watch events. The value is True if the connection is closed after they are sent."""

    def add(self, connection: Outbound) -> None:
        """Send the watch events in the outbox of a connection after `WATCH_FLUSH_INTERVAL_S`."""
        connection.defer()
        if not self._connections:
            self._loop.call_later(WATCH_FLUSH_INTERVAL_S, self._flush)
        self._connections.setdefault(connection, False)

    def finish(self, connection: Outbound) -> None:
        """Close a connection after its deferred messages are sent, if it has any."""
        if connection.deferred and connection in self._connections:
            self._connections[connection] = True
        else:
            connection.finish()

    def clear(self) -> None:
        """Drop all deferred events."""
        self._connections = {}

    def _flush(self) -> None:
        """Send a slice of the deferred events if it is their turn. If some are left, continue in the next iteration."""
        self._turns.enter(id(self))
        self._turns.run_slice(id(self), self._flush_some)
        if self._connections:
            self._loop.call_soon(self._flush)

    def _flush_some(self) -> None:
        """Send the deferred events of at most `MAX_FLUSHED_WATCHERS` connections, and about `MAX_FLUSHED_BYTES`."""
        sent_bytes = 0
        for connection in [*islice(self._connections, MAX_FLUSHED_WATCHERS)]:
            if sent_bytes >= MAX_FLUSHED_BYTES:
                break
            sent_bytes += sum(map(len, connection.deferred))
            is_closed_afterwards = self._connections.pop(connection)
            if is_closed_afterwards:
                connection.finish()
            else:
                connection.flush_deferred()


class Pipeline:
    """Executes commands batch by batch and sends each reply when its batch is stored.

    `clock` returns the lock manager's time in ms. The pipeline calls `on_leadership_lost` once, with the reason as an
    exception: leadership is lost or uncertain, or there is a defect. The callback must close every connection without
    sending anything.
    """

    is_leader = True

    def __init__(  # noqa: PLR0913 - what a namespace gives its pipeline
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
        recorder: Recorder | None = None,
        turns: IterationTurns | None = None,
    ) -> None:
        # More than 16 fields, because each read from a client checks several of them: a field of a field takes two look-ups.
        self.manager = manager
        self._clock = clock
        self._on_leadership_lost = on_leadership_lost
        self._loop = asyncio.get_running_loop()
        self._turns = turns or IterationTurns()
        self._scheduler = CommandScheduler(limits.max_pending, self._turns)
        self._light, self._busy, self._slow = self._scheduler.light, self._scheduler.busy, self._scheduler.slow
        self._delayed = self._scheduler.delayed
        """The scheduler's queues of connections; references, because every read from a client checks them."""
        self._outcome = BatchOutcome(manager.next_id, durable=store.durable)
        self._dispatcher = Dispatcher(manager, limits, stats, self._outcome, recorder, self._turns, namespace=namespace)
        self._store = store
        self._commits = Commits(store, manager, stats, lease_s=lease_s, store_timeout_s=store_timeout_s)
        self._ticker = self._loop.call_later(self._commits.tick_s, self._on_tick) if store.durable else None
        """Checks the commits at intervals: a timer for each commit would cost more than the commit (measured)."""
        self._expiry = ExpiryTimer(
            manager, self._dispatcher.sessions.deadlines, self._dispatcher.watch_events.waiting, clock
        )
        self._is_expiry_due = False
        """True if a deadline has passed, so that the next batch ends requests or sessions."""
        self._rejecter = Rejecter(self._scheduler, self._dispatcher.notifier)
        self._deferred = DeferredEvents(self._turns)
        self._only_connection: Peer | None = None
        """The connection that submitted the last input, if this input was executed immediately. If it also submits the
        next input, it is the only active connection. None after `stop`."""
        self._scheduled: asyncio.Handle | None = None
        """The scheduled run of a batch. At most one is scheduled, so that connections are read between two runs."""
        self._recorder = recorder
        """Records the history. None if the history is off."""
        self._batch_at = 0.0
        """The lock manager's time of the last batch (ms)."""
        self._stopped = False
        self._drained: asyncio.Future[None] | None = None
        """Done when nothing is queued or in flight. None unless `drained` waits: a stop and a transfer of leadership may wait
        together."""
        self._has_dropped_queued = False
        """True after `drop_queued`: the pipeline stops after the commit in flight, whatever is queued later, such as the end of a
        connection."""

    # -- input --------------------------------------------------------------------------------------------

    def submit(self, connection: Peer, items: Input, size: int) -> None:
        """Queue commands of one connection in order. `size` is the number of their bytes.

        If nothing is queued or in flight, two kinds of commands are executed immediately instead:

        - The commands of the only active connection. This saves an iteration of the event loop, and 11 % of the instructions of a
          cycle with Redis.
        - The first commands of an iteration of the event loop. If they release a lock, its next holder receives the lock while the
          server executes the commands of the other connections. With one contended lock in memory, the server grants 1.6 times as
          many requests in the same time.
        """
        if (
            # Without a scheduled batch, these are the first commands of the iteration.
            (connection is self._only_connection or self._scheduled is None)
            and not self._commits.in_flight
            and not self._light
            and not self._busy
            and not isinstance(items, UnsplitLines)  # large input, which is executed in parts
            and len(items) <= CHUNK
            and not connection.input_queue
            and not self._turns.is_exhausted  # the iteration has time left
        ):
            if connection is self._only_connection:
                self._execute_now(connection, items, size, is_only=True)
            elif not self._stopped:
                self._only_connection = connection
                # No batch is scheduled or in flight. The batch that is scheduled here also marks that this iteration of
                # the event loop has had its first commands.
                self._scheduled = self._loop.call_soon(self._run_scheduled)
                self._execute_now(connection, items, size, is_only=False)
            return
        if self._stopped:
            return
        self._only_connection = None
        if self._commits.store_unavailable and type(items) is list and type(items[0]) is Hello:
            # Immediately, so that the connection rejects the following lines.
            self._rejecter.reject(connection, iter(items))
            return
        self._scheduler.add(connection, items, size)
        if self._scheduled is None and (not self._commits.in_flight or self._commits.store_unavailable):
            self._schedule()

    def on_partial_line(self, connection: Peer, size: int) -> None:
        """Stop reading from a connection with an incomplete line of `size` bytes if too many bytes are queued."""
        if not self._stopped:
            self._scheduler.check_partial_line(connection, size)

    def on_disconnect(self, connection: Peer) -> None:
        """Queue the end of a lost connection after its commands. The dispatcher then ends or keeps the bound requests.

        After `stop`, no request ends: only the memory of the session is freed.
        """
        if connection is self._only_connection:
            self._only_connection = None
        if self._stopped:
            # A session with a key belongs to the snapshot, and is kept until `Pipeline.dispose`.
            if connection.session.key is None:
                connection.session.dispose()
        elif self._commits.store_unavailable:
            # Not queued now: the errors of a turn may have exceeded the limit of unread output. In a turn, the scheduler
            # itself decides where the connection is queued next.
            self._rejecter.postponed.append((connection, END_OF_INPUT))
        else:
            self._scheduler.add(connection, [END_OF_INPUT], size=0)
            self._schedule()

    def on_writable(self, connection: Peer) -> None:
        """Continue with the commands of a client that reads its messages again."""
        self._scheduler.unpark(connection)
        if self._slow and not self._stopped:
            self._schedule()

    def _schedule(self) -> None:
        """Schedule a batch after all connections with input are read, unless a commit is in flight.

        While the store is unavailable, a commit in flight does not delay it, because its commands are only rejected.
        """
        # Executing many commands in one pass keeps code and tables in the processor's caches. A system call between two
        # commands would evict them.
        if self._scheduled is None and (not self._commits.in_flight or self._commits.store_unavailable):
            self._scheduled = self._loop.call_soon(self._run_scheduled)

    # -- one batch ----------------------------------------------------------------------------------------

    def _execute_now(self, connection: Peer, items: Input, size: int, *, is_only: bool) -> None:
        """Execute commands immediately, then commit or reply: the fast path of `submit`.

        The changes are committed immediately if this is the only active connection (`is_only`), or if a waiting request
        was granted. Otherwise they are committed together with the changes of the other connections, at the end of this
        iteration of the event loop.
        """
        try:
            self._batch_at = now = self._clock()
            remaining = iter(items)
            slow = self._dispatcher.execute(now, connection, remaining)
            if slow is not None:  # the command that must wait, for example because it is slow
                self._only_connection = None
                self._scheduler.add_unfinished(connection, slow, remaining, size)
                self._schedule()
            if not self._outcome.durable:
                self._deliver()
            elif is_only or self._outcome.granted:
                self._finish_batch(now)
        except Exception as error:  # noqa: BLE001 - a defect: stop, as the state is unknown
            self._fail(error)

    def _run_scheduled(self) -> None:
        """Run a batch if there is anything to do, or reject the commands while the store is unavailable."""
        self._scheduled = None
        if self._commits.store_unavailable:
            self._run_rejecting()
        elif (
            self._light
            or self._busy
            or self._slow
            or self._delayed
            or self._outcome.durable  # `_execute_now` may have left changes to commit
            or self._is_expiry_due
            or self._drained is not None  # `drained` may wait for the end of this batch
        ):
            self._run_batch()

    def _run_batch(self) -> None:
        """Execute queued commands, then commit their changes. If nothing needs a commit, send the replies immediately."""
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._stopped or self._commits.in_flight:
            return
        try:
            self._batch_at = now = self._clock()
            dispatcher = self._dispatcher
            if self._is_expiry_due:
                self._is_expiry_due = False
                self._turns.enter(id(self._scheduler))
                dispatcher.expire(now)  # after the batch, `_deliver` sets the timer for what is left
            self._scheduler.run_batch(partial(dispatcher.execute, now), self._execute_slow)
            if self._outcome.durable:
                self._finish_batch(now)
            else:
                self._deliver()
        except Exception as error:  # noqa: BLE001 - a defect: stop, as the state is unknown
            self._fail(error)
            return
        if self._light or self._busy or self._slow or self._delayed:
            self._schedule()  # in the next iteration of the event loop, after other connections were read

    def _execute_slow(self, connection: Peer, items: Iterator[Item]) -> Item | None:
        """Execute a command that may be slow, as part of the current batch."""
        return self._dispatcher.execute(self._batch_at, connection, items, may_be_slow=True)

    def _finish_batch(self, now: float) -> None:
        """Commit the changes of a batch. If nothing needs a commit, send the replies immediately."""
        if self._outcome.changes or self._commits.is_needed():
            self._commits.send(self._outcome, now, self._on_acknowledged)
        else:  # within the lease, replies without changes, such as `pong` and errors, need no commit
            self._deliver()

    def _deliver(self) -> None:  # noqa: C901 - the hot path
        """Send the messages of the batch, because all its changes are stored, and close the connections whose input has ended.

        Connections whose requests were granted after a wait are flushed first, because other clients may wait for these locks
        in turn. Watch events without a reply are deferred.
        """
        outcome, expiry = self._outcome, self._expiry
        if self._recorder is not None:
            self._recorder.on_stored()
        if outcome.granted:
            for connection in outcome.granted:
                connection.flush()
            outcome.granted.clear()
        for connection in outcome.dirty:  # those with new messages
            if connection.has_reply:
                connection.flush()
            elif connection.outbox:
                self._deferred.add(connection)
        outcome.dirty.clear()
        if outcome.closing:
            for connection in outcome.closing:
                self._deferred.finish(connection)
            outcome.closing.clear()
        if expiry.request_deadlines.soonest < expiry.at or expiry.session_deadlines.soonest < expiry.at:
            expiry.set(self._on_expiry)  # a deadline may be before the time for which the timer is set
        if self._drained is not None:
            if self._has_dropped_queued:
                self.stop()
            elif not self._scheduler:
                self._end_wait()

    # -- commits ------------------------------------------------------------------------------------------

    def _on_acknowledged(self, error: BaseException | None) -> None:
        """Send the replies of the stored batch, and run the next batch. After an `error` the batch may not be stored."""
        error = self._commits.end(error)  # a commit that took longer than the lease has failed, too
        if self._stopped:
            return
        if error is not None:
            self._fail(error)
            return
        try:
            if self._store.full is not self._dispatcher.limits.store_full:
                self._dispatcher.limits.set_store_full(self._store.full)
            self._deliver()
        except Exception as defect:  # noqa: BLE001 - a defect: stop, as the state is unknown
            self._fail(defect)
            return
        if self._rejecter.postponed:
            self._rejecter.queue_postponed()
        if self._light or self._busy or self._slow or self._delayed:
            self._run_batch()

    def _on_tick(self) -> None:
        """Send a heartbeat if the leader is idle. Reject commands after the store timeout. Stop after the lease."""
        self._ticker = self._loop.call_later(self._commits.tick_s, self._on_tick)
        try:
            due = self._commits.check()
            if due is Due.HEARTBEAT:
                self._commits.send(self._outcome, self._clock(), self._on_acknowledged)
            elif due is Due.REJECTION and self._scheduler:
                self._schedule()
        except Exception as error:  # noqa: BLE001 - the lease has expired, or a defect: stop, as the state is unknown
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stop and report `error`. No replies are sent after this, because the batch in flight may not be stored."""
        self.stop()
        self._on_leadership_lost(error)

    def _run_rejecting(self) -> None:
        """Reject queued commands for the time of one batch, because the store is unavailable."""
        try:
            self._rejecter.run_batch()
        except Exception as error:  # noqa: BLE001 - a defect: stop, as the state is unknown
            self._fail(error)
            return
        if self._scheduler:
            self._schedule()

    def _on_expiry(self) -> None:
        """Run a batch, which ends expired requests and sessions. If a commit is in flight, the next batch ends them.

        If a batch is scheduled, that batch ends them, because a batch may already have run in this iteration of the
        event loop.
        """
        self._is_expiry_due = True
        if self._scheduled is None and not self._commits.in_flight and not self._stopped:
            self._run_batch()

    # -- state, for the namespace -------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The lock manager's time (ms)."""
        return self._clock()

    @property
    def session_count(self) -> int:
        """Number of sessions, with and without a connection."""
        return len(self._dispatcher.sessions)

    @property
    def state_bytes(self) -> int:
        """The size of the state in bytes."""
        return self._dispatcher.size.bytes

    @property
    def store_available(self) -> bool:
        """True if commands are executed now."""
        return not self._commits.store_unavailable and not self._stopped

    def revoke_watches(self, connection: Peer) -> bool:
        """End all watches of a connection that lacks the permission for one of them. Return whether watches have ended."""
        return self._dispatcher.revoke_watches(connection)

    def snapshot(self) -> Batch:
        """Return a snapshot of all requests and retained replies, which the store can write to Redis."""
        return self._dispatcher.snapshot(max(self.manager.next_id, self._commits.ids_reserved_below), self._batch_at)

    async def recover(self, replies: Iterable[RetainedReply]) -> None:
        """Restore sessions and retained replies from the loaded state, then grant every grantable request.

        Requests without a session are disconnected, because their connections ended with the previous leader. The work
        is done in parts, between which the other namespaces are served. `MAX_RECOVERED_CHANGES` are committed before
        the next part. The last changes are committed with the next batch. Returns early if the pipeline is stopped.
        """
        self._batch_at = self._clock()
        turns, caller = self._turns, (id(self), "recovery")
        snapshot = () if self._recorder is None else self._recorder.write_snapshot()
        parts = chain(snapshot, self._dispatcher.recover(replies, self._clock))
        is_recovered = has_run = has_waited = False

        def recover_part() -> None:
            nonlocal is_recovered, has_run
            has_run = True
            is_recovered = next(parts, parts) is parts  # the default `parts` marks the end

        self._expiry.at = -inf  # nothing expires before its session is restored
        while True:
            has_run = False  # stays False if the part must wait for its turn
            if has_waited:
                turns.run_slice(caller, recover_part)
            elif not turns.is_exhausted:  # a small state needs no turns
                started = work_time.now()
                recover_part()
                turns.spend(work_time.now() - started)
            if is_recovered:
                break
            if not self._commits.in_flight:  # a heartbeat may be
                if len(self._outcome.changes) >= MAX_RECOVERED_CHANGES:
                    self._batch_at = now = self._clock()
                    self._commits.send(self._outcome, now, self._on_acknowledged)
                elif has_run:  # there may be time for another part in this iteration of the event loop
                    continue
                else:
                    await asyncio.sleep(0)
            await self.drained()  # the commit, or a heartbeat
            if self._stopped:
                return
            has_waited = True
            turns.enter(caller)
        self._expiry.at = inf
        self._scheduled = self._loop.call_soon(self._run_batch)

    async def drained(self) -> None:
        """Wait until all queued commands are executed, stored and answered, or until the pipeline is stopped."""
        if not self._stopped and (self._scheduler or self._commits.in_flight or self._scheduled):
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.wait({self._drained})  # if this wait is cancelled, another one continues

    def _end_wait(self) -> None:
        """Let all waiting calls of `drained` return."""
        drained, self._drained = self._drained, None
        if drained is not None:
            drained.set_result(None)

    def drop_queued(self) -> None:
        """Drop the queued commands without replies, and stop after the commit in flight, for which `drained` waits."""
        self._has_dropped_queued = True
        self._scheduler.clear()
        self._schedule()

    def stop(self) -> None:
        """Stop executing commands and sending replies.

        The acknowledgement of the batch in flight is ignored. Waiting calls of `drained` return.
        """
        if self._recorder is not None and not self._stopped:
            self._recorder.stop()
        self._stopped, self._only_connection = True, None
        if self._ticker is not None:
            self._ticker.cancel()
        self._expiry.cancel()
        self._deferred.clear()
        self._end_wait()

    def dispose(self) -> None:
        """Free the memory of a stopped pipeline, a part of it in each iteration. Called when another node leads."""
        self._scheduler.clear()
        self._rejecter.clear()
        run_in_iterations(self._dispatcher.dispose_in_parts())
