"""The timeout handler: finds the transfers of a ledger that are still in processing after their
expiration date.

It implements a reference design, the document "Design Timeout DAO Layer". A run executes its steps
1 to 10 in three phases: scan (read only), deliver, apply (one transaction). So nothing is locked
during the delivery, and the callback may write to the ledger. A fault in any phase leaves the
tables as they were, and the next run repeats the work. It rehearses the apply phase before it
delivers, so that a lasting fault does not repeat the delivery.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Self

from genie import Client, ConnectionLost, Lock, LockLost, QueueTimeout, Unavailable
from genie.tasks import run_to_completion
from genie_ledger.apply import Applier
from genie_ledger.databases.opening import open_database, translate_errors
from genie_ledger.errors import DatabaseFailed, RunSuperseded
from genie_ledger.ledger import Ledger
from genie_ledger.plan import ExpiredTransfer, ScanResult
from genie_ledger.scan import Scanner
from genie_ledger.schema import prepare
from genie_ledger.sweep import SLICE_INTERVAL_S, IdleSweep

LOCK_TIMEOUT_S = 30.0
"""Timeout of the run's lock, extended while the run lasts: how long other replicas wait after a
crash.
"""

PHASE_TIMEOUT_S = 600.0
"""Upper bound of the check of the tables, of the attempt to acquire the database's run lock, of the scan, and of the
apply phase.
"""

SLICE_TIMEOUT_S = 10.0
"""Upper bound of one slice of the comparison between two runs: a handler that is stopped waits for
it.
"""

MAX_BATCH = 1_000_000
"""Upper bound of the option `batch`."""

OnExpired = Callable[[list[ExpiredTransfer]], Iterable[str] | Awaitable[Iterable[str] | None] | None]


def lock_resource(name: str) -> str:
    """Return the resource in Genie that serializes the runs of the replicas of the ledger `name`."""
    return f"exclusive:timeout-handler/{name}"


class _RehearsalDone(Exception):
    """Raised at the end of a rehearsal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutRun:
    """The result of a run: what it has read, and counts of transfers.

    `interval`: the new state changes are those with ids above the first number and up to the second
    (equal if there were none). `cleaned`: tracked transfers that became final. `inserted`: newly
    tracked transfers. `expired`: transfers delivered to the callback; it has `rejected` this many
    of them. `lagging`: there is more to do, so that the next run should follow at once. `unlisted`:
    the number of new state changes to each state that is neither a processing nor a final state.
    Transfers in these states do not expire; at most 20 states are counted.
    """

    interval: tuple[int, int]
    cleaned: int
    inserted: int
    expired: int
    rejected: int
    lagging: bool
    unlisted: Mapping[str, int] = field(default_factory=dict)


class TimeoutHandler:
    """Finds expired transfers in a ledger, and delivers them to a callback: at least once each.

    The first use, or entering it as an async context manager, checks all tables (WrongSchema), and
    creates the handler's tables that don't exist. The ledger's own tables must exist. Use it in one event loop, and `close` it at the end.

    Args:
        url: The ledger's database.
        on_expired: A function (called in a thread) or coroutine function. It gets a list of
            `ExpiredTransfer`, the longest expired first, and returns the ids that it rejects, or None.
            The next run delivers those again; all of them if it raises. A transfer that it has accepted
            is delivered again only if it has been final since.
        client: A client of Genie. Its lock of `name` then serializes the runs of all replicas, and its
            fencing token rejects the writes of a stalled run. Without it a lock of the database
            serializes them.
        name: The name of the ledger among the ledgers that use the same Genie server.
        batch: How many state changes, and how many expired transfers, a run processes at most.
        every: Seconds between two runs of `run`.
        longest_transaction: Seconds that a transaction of the ledger may be open. What is committed
            later may be missed.
        ledger: The names and states of the ledger, if they are not those of the reference design.
    """

    def __init__(
        self,
        url: str,
        *,
        on_expired: OnExpired,
        client: Client | None = None,
        name: str = "ledger",
        batch: int = 100_000,
        every: float = 15.0,
        longest_transaction: float = 60.0,
        ledger: Ledger | None = None,
    ) -> None:
        if not callable(on_expired):
            raise TypeError(f"on_expired must be a function that takes a list of transfers, not {on_expired!r}")
        if not 1 <= batch <= MAX_BATCH:
            raise ValueError(f"batch must be from 1 to {MAX_BATCH}, not {batch}")
        if not 0 < every < float("inf"):
            raise ValueError(f"every must be a number of seconds above 0, not {every!r}")
        if not 0 <= longest_transaction < float("inf"):
            raise ValueError(
                f"longest_transaction must be a number of seconds of at least 0, not {longest_transaction!r}"
            )
        ledger = Ledger() if ledger is None else ledger
        self._database = open_database(url)
        max_transaction_age = timedelta(seconds=longest_transaction)
        self._scanner = Scanner(ledger, self._database, batch=batch, max_transaction_age=max_transaction_age)
        self._applier = Applier(ledger, self._database)
        self._ledger = ledger
        self._on_expired = on_expired
        self._client = client
        self._resource = lock_resource(name)
        self._batch_size = batch
        self._interval_s = every
        self._running = False
        """True if a call of `run_once` is in progress."""
        self._opened = False
        """True if the tables were created and checked."""
        self._can_write = False
        """True if the last writes of a run could be committed."""
        self._opening = asyncio.Lock()
        """Held while the tables are created and checked, so that concurrent callers of `open` wait."""
        self._next_slice_at = 0.0
        """Event-loop time before which no slice of dates is compared."""

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Check all tables, and create the handler's tables that don't exist. Has no effect once it
        has succeeded. Raises WrongSchema or DatabaseFailed; nothing is created if a table is wrong.
        """
        async with self._opening:
            if not self._opened:
                with translate_errors(self._database):
                    async with asyncio.timeout(PHASE_TIMEOUT_S):
                        await prepare(self._database, self._ledger)
                self._opened = True

    async def close(self) -> None:
        """Close the connections to the database."""
        await self._database.close()

    async def run(self, on_result: Callable[[TimeoutRun | Exception | None], object]) -> None:
        """Execute runs until cancelled. The pause between two runs is `every` seconds; there is no
        pause while the handler is lagging.

        During a pause, the handler looks for expiration dates that were changed in the ledger. If
        it finds such a date, the next run starts early. `on_result` is called with the result of
        each run: a `TimeoutRun`, None if another replica was running, or the exception that the run
        has raised. Exceptions do not end the loop.
        """
        while True:
            result: TimeoutRun | Exception | None
            try:
                result = await self.run_once()
            except Exception as error:  # noqa: BLE001 - reported by on_result, and the next run retries
                result = error
            on_result(result)
            if not isinstance(result, TimeoutRun):
                await asyncio.sleep(self._interval_s)
            elif not result.lagging:
                await self._pause()

    async def _pause(self) -> None:
        """Wait until the next run: for `every` seconds, or until a rescheduled transfer is found.

        During the wait, the handler's copies of the expiration dates are compared with the dates in
        the ledger, in slices, and each copy at most once. If the database fails, no further slices
        are compared, and the next run reports the error.
        """
        loop = asyncio.get_running_loop()
        next_run_at = loop.time() + self._interval_s
        sweep = self._scanner.start_idle_sweep()
        while not sweep.complete:
            await asyncio.sleep(max(0.0, min(next_run_at, self._next_slice_at) - loop.time()))
            if loop.time() >= next_run_at:
                return
            self._next_slice_at = loop.time() + SLICE_INTERVAL_S
            try:
                await self._compare_slice(sweep)
            except DatabaseFailed:
                break
            if sweep.found_rescheduled:
                return
        await asyncio.sleep(max(0.0, next_run_at - loop.time()))

    async def _compare_slice(self, sweep: IdleSweep) -> None:
        """Compare the next slice of copied dates with the dates in the ledger.

        Raises DatabaseFailed if the database fails, or takes longer than `SLICE_TIMEOUT_S`.
        """
        with translate_errors(self._database):
            async with asyncio.timeout(SLICE_TIMEOUT_S):
                await self._scanner.compare_slice(sweep)

    async def run_once(self) -> TimeoutRun | None:
        """Execute one run: scan, deliver, apply. Returns None, without a run, if another replica or
        another call of this handler is running.

        Raises DatabaseFailed, LockLost, RunSuperseded or WrongSchema, or the exception of
        `on_expired`. After an exception nothing was changed.
        """
        await self.open()
        if self._running:
            return None
        self._running = True
        try:
            if self._client is None:
                return await self._run_with_database_lock()
            return await self._run_with_genie_lock(self._client)
        finally:
            self._running = False

    async def _run_with_database_lock(self) -> TimeoutRun | None:
        """Execute one run under the database's run lock. Returns None, without a run, if another
        replica holds the lock.
        """
        async with AsyncExitStack() as stack:
            with translate_errors(self._database):
                async with asyncio.timeout(PHASE_TIMEOUT_S):
                    acquired = await stack.enter_async_context(self._database.try_lock())
            return await self._execute(lock=None) if acquired else None

    async def _run_with_genie_lock(self, client: Client) -> TimeoutRun | None:
        """Execute one run under a lock of Genie. Returns None, without a run, if another replica
        holds the lock.

        A loss of the lock, or of the connection to Genie, raises an exception only if the run has
        not been committed. After the commit the result is returned.
        """
        committed: list[TimeoutRun] = []
        lock_context = client.lock(self._resource, queue_timeout=0, transaction_timeout=LOCK_TIMEOUT_S, watchdog=True)
        try:
            async with AsyncExitStack() as stack:
                try:
                    lock = await stack.enter_async_context(lock_context)
                except QueueTimeout:
                    return None
                await self._execute(lock, on_committed=committed.append)
        except (LockLost, Unavailable, ConnectionLost):
            if not committed:  # after the commit, the run no longer needs the lock
                raise
        return committed[0]

    async def _execute(
        self, lock: Lock | None, *, on_committed: Callable[[TimeoutRun], object] = lambda _: None
    ) -> TimeoutRun:
        """Scan, deliver the expired transfers, and apply the result. The caller holds `lock`, or
        the database's run lock if `lock` is None.

        `on_committed` is called with the result once the result is committed, even if the caller is
        cancelled during the commit.
        """
        with translate_errors(self._database):
            async with asyncio.timeout(PHASE_TIMEOUT_S):
                result = await self._scanner.scan()
        plan = result.plan
        if plan.expired and not self._can_write:
            await self._rehearse(result, lock)
        rejected = await self._deliver(list(plan.expired.values()))
        more_due = result.due_until is not None or len(plan.expired) == self._batch_size
        # Rejected transfers are still due: delivering them again without a pause would be a busy loop.
        lagging = result.change_count == self._batch_size or (more_due and not rejected) or result.more_unchecked

        async def apply() -> TimeoutRun:
            if not result.is_empty:
                self._can_write = False
                await self._apply(result, plan.expired.keys() - rejected, lock)
                self._can_write = True
            self._scanner.advance(result, has_rejected=bool(rejected))
            run = TimeoutRun(
                interval=(result.segment.start, result.last_change_id),
                cleaned=len(plan.ids_to_delete),
                inserted=len(plan.to_insert),
                expired=len(plan.expired),
                rejected=len(rejected),
                lagging=lagging or self._scanner.catching_up,
                unlisted=result.unlisted,
            )
            on_committed(run)
            return run

        return await run_to_completion(apply())  # the outcome of an interrupted commit would be unknown

    async def _rehearse(self, result: ScanResult, lock: Lock | None) -> None:
        """Execute all writes of a run and roll them back, before the delivery.

        Otherwise a run that can't be committed, for example for want of a privilege, would deliver
        the same transfers again and again. The first delivery, and each delivery after a failed
        commit, is rehearsed. Raises DatabaseFailed or RunSuperseded.
        """

        def roll_back() -> None:
            raise _RehearsalDone

        with suppress(_RehearsalDone):
            await self._write(result, set(result.plan.expired), lock, before_commit=roll_back)

    async def _apply(self, result: ScanResult, delivered: set[str], lock: Lock | None) -> None:
        """Write the result of a scan in one transaction. `delivered` are the ids of the transfers
        that `on_expired` has accepted.

        Raises RunSuperseded, and rolls back, if `lock` was lost before the commit.
        """

        def check_lock() -> None:
            if lock is not None and lock.lost.is_set():
                raise RunSuperseded(f"the lock {self._resource} was lost before the run could be committed")

        await self._write(result, delivered, lock, before_commit=check_lock)

    async def _write(
        self, result: ScanResult, delivered: set[str], lock: Lock | None, *, before_commit: Callable[[], None]
    ) -> None:
        """Execute the apply phase. An exception of `before_commit` rolls it back. Raises DatabaseFailed
        or RunSuperseded.
        """
        fence = None if lock is None else lock.fence
        with translate_errors(self._database):
            async with asyncio.timeout(PHASE_TIMEOUT_S):
                await self._applier.apply(result, delivered=delivered, fence=fence, before_commit=before_commit)

    async def _deliver(self, expired: list[ExpiredTransfer]) -> set[str]:
        """Call `on_expired` with the expired transfers, and return the ids that it has rejected.

        A coroutine function is called in the event loop. Any other function is called in a thread,
        so that it may block. Without expired transfers there is no call. Raises RuntimeError if
        `on_expired` raises CancelledError, and this task was not cancelled: the error would end `run`.
        """
        if not expired:
            return set()
        ids = {transfer.transfer_id for transfer in expired}  # taken before the callback, which may change the list
        try:
            returned = await self._call_on_expired(expired)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RuntimeError("on_expired raised CancelledError, but the run was not cancelled") from error
        return _parse_rejected(returned, delivered_ids=ids)

    async def _call_on_expired(self, expired: list[ExpiredTransfer]) -> object:
        """Call `on_expired` in the event loop or in a thread, and return its result."""
        if inspect.iscoroutinefunction(self._on_expired):
            return await self._on_expired(expired)
        returned = await asyncio.to_thread(_call_in_thread, self._on_expired, expired)
        if inspect.isawaitable(returned):  # e.g. a lambda that calls a coroutine function
            returned = await returned
        return returned


def _call_in_thread(on_expired: OnExpired, expired: list[ExpiredTransfer]) -> object:
    """Call a plain function. Raises RuntimeError if the function raises StopIteration: before Python
    3.12 a thread can't pass this error to the event loop, which would wait forever.
    """
    try:
        return on_expired(expired)
    except StopIteration as error:
        raise RuntimeError("on_expired raised StopIteration") from error


def _parse_rejected(returned: object, *, delivered_ids: set[str]) -> set[str]:
    """Check the value that `on_expired` has returned, and return the rejected ids.

    Raises TypeError if the value is neither None nor a collection of ids. Raises ValueError if the
    collection contains an id that was not delivered.
    """
    if returned is None:
        return set()
    if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
        raise TypeError(f"on_expired must return None or the ids that it rejects, not {returned!r}")
    rejected = set(returned)
    unknown = sorted(map(str, rejected - delivered_ids))
    if unknown:
        raise ValueError(f"on_expired returned ids that it was not given: {', '.join(unknown[:10])}")
    return rejected
