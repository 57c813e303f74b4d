"""A simulated client that uses the library, `genie.connect`, as an application does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import genie
from genie.client.aio import Client, connect
from genie.testing.simulation.history import NOTE
from simulator.scenario import ClientContext, Workload


class LibraryClient:
    """Runs some tasks that acquire and release locks over one `genie.Client`, until the scenario ends."""

    def __init__(self, context: ClientContext, name: str, random: Random) -> None:
        self.context = context
        self.name = name
        self.random = random
        self._workload = Workload(context.scenario, random)

    def __str__(self) -> str:
        return self.name

    async def run(self) -> None:
        """Connect, and run the tasks until the scenario ends. If Genie raises an error, connect again after a pause."""
        while True:
            try:
                async with self._connect() as client:
                    async with asyncio.TaskGroup() as tasks:
                        for _ in range(min(4, self.context.scenario.max_live_requests)):
                            tasks.create_task(self._task(client))
                    break
            except genie.GenieError:
                await asyncio.sleep(self.random.uniform(0.1, 1))
                if self.context.stopping.is_set():
                    break
        self.context.history.append(NOTE, self.name, "finished")

    async def _task(self, client: Client) -> None:
        """Use locks in random ways, with random pauses, until the scenario ends. Errors of Genie are only recorded."""
        random = self.random
        while not self.context.stopping.is_set():
            await asyncio.sleep(random.expovariate(1 / self.context.scenario.think_time_s))
            try:
                await random.choice(self._patterns())(client)
            except genie.GenieError as error:
                self._note("failed", type(error).__name__)

    def _connect(self) -> Client:
        return connect(",".join(self.context.addresses), connect_timeout=3.0)

    # -- patterns of use ---------------------------------------------------------------------------------

    def _patterns(self) -> list[Callable[[Client], Awaitable[None]]]:
        """Return the methods that use locks, each as often as it should be chosen among the others."""
        return [
            self._hold,
            self._hold,
            self._hold_nested,
            self._acquire_and_release,
            self._try_acquire,
            self._cancel,
            self._hold_with_watchdog,
        ]

    async def _hold(self, client: Client) -> None:
        """Hold a lock for a random time, with a context manager."""
        async with client.lock(*self._names(), **self._options()) as lock:
            self._note("holds", lock.id, lock.fence)
            await self._work()
            self._note("releases", lock.id)

    async def _hold_nested(self, client: Client) -> None:
        """Acquire a second lock with the same options, perhaps of the same transaction, while the first lock is held."""
        options = self._options()
        async with client.lock(*self._names(), **options) as outer:
            self._note("holds", outer.id, outer.fence)
            await self._work()
            async with client.lock(*self._names(), **options) as inner:
                self._note("holds", inner.id, inner.fence)
                await self._work()
                self._note("releases", inner.id)
            self._note("releases", outer.id)

    async def _acquire_and_release(self, client: Client) -> None:
        """Acquire a lock without a context manager, sometimes extend the lock, and release it, sometimes by id."""
        lock = await client.acquire(*self._names(), **self._options())
        self._note("holds", lock.id, lock.fence)
        await self._work()
        if self.random.random() < 0.5:
            await lock.extend(self.random.choice([0.5, 2.0]))
        by_id = self.random.random() < 0.2
        self._note("releases", lock.id)
        if by_id:
            await client.release(lock.id)
        else:
            await lock.release()

    async def _try_acquire(self, client: Client) -> None:
        """Acquire a lock only if it is available at once."""
        options = self._options()
        del options["queue_timeout"]
        lock = await client.try_acquire(*self._names(), **options)
        if lock is not None:
            self._note("holds", lock.id, lock.fence)
            await self._work()
            self._note("releases", lock.id)
            await lock.release()

    async def _cancel(self, client: Client) -> None:
        """Cancel acquiring or holding a lock after a random time."""
        try:
            async with asyncio.timeout(self.random.choice([0.0, 0.001, 0.05, 0.5])):
                await self._hold(client)
        except TimeoutError:
            self._note("was cancelled")

    async def _hold_with_watchdog(self, client: Client) -> None:
        """Hold a lock, sometimes for longer than its transaction timeout: the watchdog extends the lock."""
        options = self._options() | {"transaction_timeout": self.random.choice([0.3, 1.0])}
        async with client.lock(*self._names(), watchdog=True, **options) as lock:
            self._note("holds", lock.id, lock.fence)
            await asyncio.sleep(self.random.choice([0.1, 1.0, 3.0]))
            self._note("releases", lock.id)

    # -- inside -------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        """Return random resources with modes, e.g. `shared:a`."""
        return self._workload.resources()

    def _options(self) -> dict[str, Any]:
        """Return random keyword arguments for `Client.lock` and `Client.acquire`."""
        return {
            "transaction": self._workload.transaction(self.name),
            "queue_timeout": self.random.choice([0.05, 0.5, 3.0, 10.0]),
            "transaction_timeout": self.random.choice([0.1, 1.0, 5.0]),
            "priority": self.random.choice([0, 0, 3]) if self.context.scenario.priorities else 0,
        }

    async def _work(self) -> None:
        await asyncio.sleep(self.random.choice([0.0, 0.01, 0.1, 0.5]))

    def _note(self, *words: object) -> None:
        """Record a remark in the history, which consists of the words."""
        self.context.history.append(NOTE, self.name, " ".join(map(str, words)))
