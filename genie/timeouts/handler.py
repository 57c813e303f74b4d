"""The timeout handler: finds the transfers of a ledger whose time has passed while they were in processing.

After the document "Design Timeout DAO Layer". One run is its steps 1 to 10, in three parts: look (it only reads), hand
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
from genie.timeouts.apply import Writing
from genie.timeouts.databases.opening import open_database, plainly
from genie.timeouts.errors import DatabaseFailed, TurnLost
from genie.timeouts.ledger import Ledger
from genie.timeouts.plan import ExpiredTransfer, Look
from genie.timeouts.scan import Reading
from genie.timeouts.schema import prepare
from genie.timeouts.sweep import SCAN_INTERVAL_S, Scan

HOLD_S = 30.0
"""For so long the others wait for a run whose process has died. It is extended while the run goes on."""

MOST_S = 600.0
"""A bound: what reading or writing may take in a run."""

MAX_SCAN_S = 10.0
"""Seconds that one slice of the comparison between two runs may take: a handler that is stopped waits for it."""

MOST_BATCH = 1_000_000

OnExpired = Callable[[list[ExpiredTransfer]], Iterable[str] | Awaitable[Iterable[str] | None] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutRun:
    """What a run has done.

    `interval`: the new state changes, above the first number and up to the second (equal, if there were none).
    `cleaned` and `inserted`: transfers that became final, and that were taken in. `expired`: those handed over, of which
    `refused` were not dealt with. `behind`: there may be more to do at once.
    """

    interval: tuple[int, int]
    cleaned: int
    inserted: int
    expired: int
    refused: int
    behind: bool


class TimeoutHandler:
    """Finds expired transfers in the database of `url` and hands them to `on_expired`.

    `on_expired` is a plain function (called in a thread) or an async one. It gets a list of `ExpiredTransfer`, the
    longest expired first, and returns nothing when all are dealt with, or the ids of those that are not. Those are
    handed over again by the next run, and so are all if it raises; what was dealt with is not handed over again unless
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
        if not 1 <= batch <= MOST_BATCH:
            raise ValueError(f"batch must be from 1 to {MOST_BATCH}, not {batch}")
        if not 0 < every < float("inf") or not 0 <= longest_transaction < float("inf"):
            raise ValueError("every must be a number of seconds above 0, and longest_transaction one of at least 0")
        ledger = Ledger() if ledger is None else ledger
        self._database = open_database(url)
        open_for = timedelta(seconds=longest_transaction)
        self._reading = Reading(ledger, self._database, batch=batch, open_for=open_for)
        self._writing = Writing(ledger, self._database)
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

    async def run(self, told: Callable[[TimeoutRun | Exception | None], object]) -> None:
        """Run again and again, until it is cancelled: at once while it is behind, else `every` so many seconds.

        In between it looks for dates that were moved in the ledger, and runs at once if it finds one.

        `told` hears of each run: what it has done, None where another replica was at it, or what went wrong. Nothing
        that goes wrong ends it.
        """
        while True:
            came: TimeoutRun | Exception | None
            try:
                came = await self.run_once()
            except Exception as error:  # noqa: BLE001 - told, and tried again
                came = error
            told(came)
            if not isinstance(came, TimeoutRun):
                await asyncio.sleep(self._every)
            elif not came.behind:
                await self._wait()

    async def _wait(self) -> None:
        """Wait until the next run: `every` seconds, or until a moved date is found.

        Until then all dates are compared with the ledger's, once at most, slice by slice. Where that fails the next run
        says why.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._every
        scan = self._reading.start_scan()
        while not scan.complete:
            await asyncio.sleep(max(0.0, min(end, self._next_scan) - loop.time()))
            if loop.time() >= end:
                return
            self._next_scan = loop.time() + SCAN_INTERVAL_S
            try:
                await _to_its_end(self._scan(scan))  # a connection that is being opened can't be given up cleanly
            except DatabaseFailed:
                break
            if scan.found:
                return
        await asyncio.sleep(max(0.0, end - loop.time()))

    async def _scan(self, scan: Scan) -> None:
        with plainly(self._database):
            async with asyncio.timeout(MAX_SCAN_S):
                await self._reading.scan(scan)

    async def run_once(self) -> TimeoutRun | None:
        """Do what is to be done now. None, where another replica is at it.

        DatabaseFailed, LockLost, TurnLost, WrongSchema, or what `on_expired` has raised: then nothing was changed.
        """
        await self.open()
        if self._running:
            return None
        self._running = True
        try:
            if self._client is None:
                return await self._alone()
            return await self._under_lock(self._client)
        finally:
            self._running = False

    async def _alone(self) -> TimeoutRun | None:
        async with AsyncExitStack() as stack:
            with plainly(self._database):
                ours = await stack.enter_async_context(self._database.turn())
            return await self._work(None, lambda _done: None) if ours else None

    async def _under_lock(self, client: Client) -> TimeoutRun | None:
        done: list[TimeoutRun] = []
        held = client.lock(self._resource, queue_timeout=0, transaction_timeout=HOLD_S, watchdog=True)
        try:
            async with AsyncExitStack() as stack:
                try:
                    lock = await stack.enter_async_context(held)
                except QueueTimeout:
                    return None
                await self._work(lock, done.append)
        except (LockLost, Unavailable, ConnectionLost):
            if not done:
                raise
        return done[0]

    async def _work(self, lock: Lock | None, written: Callable[[TimeoutRun], object]) -> TimeoutRun:
        """`written` hears what was done as soon as it can't be undone: who waits for it may be cancelled just then."""
        with plainly(self._database):
            async with asyncio.timeout(MOST_S):
                look = await self._reading.look()
        refused = await self._hand_over(list(look.plan.expired.values()))
        plan = look.plan
        more_due = look.due_to is not None or len(plan.expired) == self._batch
        behind = look.changes == self._batch or (more_due and not refused) or look.unchecked
        done: list[TimeoutRun] = []

        async def write() -> None:
            if not look.nothing:
                await self._write(look, plan.expired.keys() - refused, lock)
            self._reading.go_on(look, bool(refused))
            run = TimeoutRun(
                interval=(look.segment.start, look.last),
                cleaned=len(plan.delete),
                inserted=len(plan.insert),
                expired=len(plan.expired),
                refused=len(refused),
                behind=behind or self._reading.catching_up,
            )
            done.append(run)
            written(run)

        await _to_its_end(write())
        return done[0]

    async def _write(self, look: Look, dealt_with: set[str], lock: Lock | None) -> None:
        def check() -> None:
            if lock is not None and lock.lost.is_set():
                raise TurnLost(f"the lock {self._resource} was lost before the run could be written")

        with plainly(self._database):
            async with asyncio.timeout(MOST_S):
                await self._writing.write(look, dealt_with, None if lock is None else lock.fence, check)

    async def _hand_over(self, expired: list[ExpiredTransfer]) -> set[str]:
        """Those that were not dealt with."""
        if not expired:
            return set()
        handed = {one.transfer_id for one in expired}  # the list is theirs from now on
        if inspect.iscoroutinefunction(self._on_expired):
            said = await self._on_expired(expired)
        else:
            said = await asyncio.to_thread(self._on_expired, expired)
            if inspect.isawaitable(said):
                said = await said
        return _refused(said, handed)


def _refused(said: object, handed: set[str]) -> set[str]:
    if said is None:
        return set()
    if isinstance(said, str | bytes) or not isinstance(said, Iterable):
        raise TypeError(f"on_expired must return None or the ids that it has not dealt with, not {said!r}")
    refused = set(said)
    unknown = sorted(map(str, refused - handed))
    if unknown:
        raise ValueError(f"on_expired returned ids that it was not given: {', '.join(unknown[:10])}")
    return refused


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
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
