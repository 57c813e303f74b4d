"""The timeout handler: finds the transfers of a ledger whose time has passed while they were in processing.

After the document "Design Timeout DAO Layer". One run is its steps 1 to 10, in three parts: result (it only reads), hand
over, write (one transaction). So nothing is locked while expired transfers are dealt with, and who deals with them may
write to the ledger. A fault at any point leaves everything as it was, and the next run does the same again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from genie.client.aio import Client, Lock
from genie.errors import ConnectionLost, LockLost, QueueTimeout, Unavailable
from genie.timeouts.apply import Applier
from genie.timeouts.databases.opening import open_database, translate_errors
from genie.timeouts.errors import DatabaseFailed, RunSuperseded
from genie.timeouts.ledger import Ledger
from genie.timeouts.plan import ExpiredTransfer, ScanResult
from genie.timeouts.scan import Scanner
from genie.timeouts.schema import prepare
from genie.timeouts.sweep import SLICE_INTERVAL_S, IdleSweep

LOCK_TIMEOUT_S = 30.0
"""For so long the others wait for a run whose process has died. It is extended while the run goes on."""

PHASE_TIMEOUT_S = 600.0
"""A bound: what reading or writing may take in a run."""

SLICE_TIMEOUT_S = 10.0
"""Seconds that one slice of the comparison between two runs may take: a handler that is stopped waits for it."""

MAX_BATCH = 1_000_000

OnExpired = Callable[[list[ExpiredTransfer]], Iterable[str] | Awaitable[Iterable[str] | None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutRun:
    """What a run has done.

    `interval`: the new state changes, above the first number and up to the second (equal, if there were none).
    `cleaned` and `inserted`: transfers that became final, and that were taken in. `expired`: those ids over, of which
    `rejected` were not dealt with. `lagging`: there may be more to do at once.
    """

    interval: tuple[int, int]
    cleaned: int
    inserted: int
    expired: int
    rejected: int
    lagging: bool


class TimeoutHandler:
    """Finds expired transfers in the database of `url` and hands them to `on_expired`.

    `on_expired` is a plain function (called in a thread) or an async one. It gets a list of `ExpiredTransfer`, the
    longest expired first, and returns nothing when all are dealt with, or the ids of those that are not. Those are
    ids over again by the next run, and so are all if it raises; what was dealt with is not ids over again unless
    it has been in a final state meanwhile.

    With a `client` of Genie the runs of all replicas that use the same `name` are one at a time, and one that stalled
    can't write after another; without one a lock of the database keeps runs apart. `batch`: how many state changes, and
    how many expired transfers, a run takes at most. `every`: seconds between two runs of `run`. `longest_transaction`:
    how many seconds a transaction of the ledger may be open; what is committed later than that may be missed.

    It is opened by its first use, or as an async context manager: then tables that are absent are created, and those
    that are there are checked (WrongSchema). Use it in one event loop, and `close` it at the end.
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
            raise TypeError("on_expired must be a function of a list of expired transfers")
        if not 1 <= batch <= MAX_BATCH:
            raise ValueError(f"batch must be from 1 to {MAX_BATCH}, not {batch}")
        if not 0 < every < float("inf") or not 0 <= longest_transaction < float("inf"):
            raise ValueError("every must be a number of seconds above 0, and longest_transaction one of at least 0")
        ledger = Ledger() if ledger is None else ledger
        self._database = open_database(url)
        max_transaction_age = timedelta(seconds=longest_transaction)
        self._scanner = Scanner(ledger, self._database, batch=batch, max_transaction_age=max_transaction_age)
        self._applier = Applier(ledger, self._database)
        self._ledger = ledger
        self._on_expired, self._client = on_expired, client
        self._resource = f"exclusive:timeout-handler/{name}"
        self._batch, self._every = batch, every
        self._running = False
        self._opened = False
        self._opening = asyncio.Lock()
        self._next_scan = 0.0

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
        """Create or check the tables, if that has not been done. WrongSchema or DatabaseFailed, where it fails."""
        async with self._opening:
            if not self._opened:
                await prepare(self._database, self._ledger)
                self._opened = True

    async def close(self) -> None:
        """Close the connections."""
        await self._database.close()

    async def run(self, on_result: Callable[[TimeoutRun | Exception | None], object]) -> None:
        """Run again and again, until it is cancelled: at once while it is lagging, else `every` so many seconds.

        In between it looks for dates that were moved in the ledger, and runs at once if it finds one.

        `on_result` hears of each run: what it has done, None where another replica was at it, or what went wrong. Nothing
        that goes wrong ends it.
        """
        while True:
            outcome: TimeoutRun | Exception | None
            try:
                outcome = await self.run_once()
            except Exception as error:  # noqa: BLE001 - on_result, and tried again
                outcome = error
            on_result(outcome)
            if not isinstance(outcome, TimeoutRun):
                await asyncio.sleep(self._every)
            elif not outcome.lagging:
                await self._wait()

    async def _wait(self) -> None:
        """Wait until the next run: `every` seconds, or until a moved date is found.

        Until then all dates are compared with the ledger's, once at most, slice by slice. Where that fails the next run
        says why.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._every
        sweep = self._scanner.start_idle_sweep()
        while not sweep.complete:
            await asyncio.sleep(max(0.0, min(end, self._next_scan) - loop.time()))
            if loop.time() >= end:
                return
            self._next_scan = loop.time() + SLICE_INTERVAL_S
            try:
                await _run_to_completion(
                    self._compare_slice(sweep)
                )  # a connection that is being opened can't be given up cleanly
            except DatabaseFailed:
                break
            if sweep.found:
                return
        await asyncio.sleep(max(0.0, end - loop.time()))

    async def _compare_slice(self, sweep: IdleSweep) -> None:
        with translate_errors(self._database):
            async with asyncio.timeout(SLICE_TIMEOUT_S):
                await self._scanner.compare_slice(sweep)

    async def run_once(self) -> TimeoutRun | None:
        """Do what is to be done now. None, where another replica is at it.

        DatabaseFailed, LockLost, RunSuperseded, WrongSchema, or what `on_expired` has raised: then nothing was changed.
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
        async with AsyncExitStack() as stack:
            with translate_errors(self._database):
                acquired = await stack.enter_async_context(self._database.try_lock())
            return await self._execute(None, lambda _done: None) if acquired else None

    async def _run_with_genie_lock(self, client: Client) -> TimeoutRun | None:
        done: list[TimeoutRun] = []
        held = client.lock(self._resource, queue_timeout=0, transaction_timeout=LOCK_TIMEOUT_S, watchdog=True)
        try:
            async with AsyncExitStack() as stack:
                try:
                    lock = await stack.enter_async_context(held)
                except QueueTimeout:
                    return None
                await self._execute(lock, done.append)
        except (LockLost, Unavailable, ConnectionLost):
            if not done:
                raise
        return done[0]

    async def _execute(self, lock: Lock | None, on_written: Callable[[TimeoutRun], object]) -> TimeoutRun:
        """`on_written` hears what was done as soon as it can't be undone: who waits for it may be cancelled just then."""
        with translate_errors(self._database):
            async with asyncio.timeout(PHASE_TIMEOUT_S):
                result = await self._scanner.scan()
        rejected = await self._deliver(list(result.plan.expired.values()))
        plan = result.plan
        more_due = result.due_until is not None or len(plan.expired) == self._batch
        lagging = result.change_count == self._batch or (more_due and not rejected) or result.more_unchecked
        done: list[TimeoutRun] = []

        async def write() -> None:
            if not result.is_empty:
                await self._write(result, plan.expired.keys() - rejected, lock)
            self._scanner.advance(result, bool(rejected))
            run = TimeoutRun(
                interval=(result.segment.start, result.last),
                cleaned=len(plan.delete),
                inserted=len(plan.insert),
                expired=len(plan.expired),
                rejected=len(rejected),
                lagging=lagging or self._scanner.catching_up,
            )
            done.append(run)
            on_written(run)

        await _run_to_completion(write())
        return done[0]

    async def _write(self, result: ScanResult, delivered: set[str], lock: Lock | None) -> None:
        def check() -> None:
            if lock is not None and lock.lost.is_set():
                raise RunSuperseded(f"the lock {self._resource} was lost before the run could be on_written")

        with translate_errors(self._database):
            async with asyncio.timeout(PHASE_TIMEOUT_S):
                await self._applier.apply(result, delivered, None if lock is None else lock.fence, check)

    async def _deliver(self, expired: list[ExpiredTransfer]) -> set[str]:
        """Those that were not dealt with."""
        if not expired:
            return set()
        ids = {one.transfer_id for one in expired}  # the list is theirs from now on
        if inspect.iscoroutinefunction(self._on_expired):
            returned = await self._on_expired(expired)
        else:
            returned = await asyncio.to_thread(self._on_expired, expired)
            if inspect.isawaitable(returned):
                returned = await returned
        return _parse_rejected(returned, ids)


def _parse_rejected(returned: object, ids: set[str]) -> set[str]:
    if returned is None:
        return set()
    if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
        raise TypeError(f"on_expired must return None or the ids that it has not dealt with, not {returned!r}")
    rejected = set(returned)
    unknown = sorted(map(str, rejected - ids))
    if unknown:
        raise ValueError(f"on_expired returned ids that it was not given: {', '.join(unknown[:10])}")
    return rejected


async def _run_to_completion(work: Coroutine[Any, Any, None]) -> None:
    """Do work to its end, also if who waits for it is cancelled: a commit that is left may happen or not."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # it was seen
        raise
