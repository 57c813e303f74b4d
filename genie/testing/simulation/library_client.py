"""A simulated client that uses the library, `genie.connect`, as an application would."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import genie
from genie.client.aio import Client, connect
from genie.testing.simulation.history import NOTE
from genie.testing.simulation.scenario import ClientContext, Workload


class LibraryClient:
    """A few tasks that acquire and release locks over one `genie.Client`, until the scenario ends."""

    def __init__(self, context: ClientContext, name: str, random: Random) -> None:
        self.context = context
        self.name = name
        self.random = random
        self._workload = Workload(context.scenario, random)

    def __str__(self) -> str:
        return self.name

    async def run(self) -> None:
        """Connect, and run the tasks until the scenario ends; connect again where the connection fails for good."""
        while True:
            try:
                async with connect(",".join(self.context.addresses), connect_timeout=3.0) as client:
                    async with asyncio.TaskGroup() as tasks:
                        for _ in range(min(4, self.context.scenario.max_live_requests)):
                            tasks.create_task(self._task(client))
                    break
            except genie.GenieError:
                await asyncio.sleep(self.random.uniform(0.1, 1))
                if self.context.stopping.is_set():
                    break
        self.context.history.note(NOTE, self.name, "is done")

    async def _task(self, client: Client) -> None:
        random = self.random
        while not self.context.stopping.is_set():
            await asyncio.sleep(random.expovariate(1 / self.context.scenario.think_time_s))
            ways = [self._hold, self._hold, self._nested, self._by_hand, self._try, self._cancelled, self._watched]
            try:
                await random.choice(ways)(client)
            except genie.GenieError as error:
                self._note("failed", type(error).__name__)

    # -- patterns of use ---------------------------------------------------------------------------------

    async def _hold(self, client: Client) -> None:
        async with client.lock(*self._names(), **self._options()) as lock:
            self._note("holds", lock.id, lock.fence)
            await self._work()
            self._note("lets go", lock.id)

    async def _nested(self, client: Client) -> None:
        options = self._options()
        async with client.lock(*self._names(), **options) as outer:
            self._note("holds", outer.id, outer.fence)
            await self._work()
            async with client.lock(*self._names(), **options) as inner:
                self._note("holds", inner.id, inner.fence)
                await self._work()
                self._note("lets go", inner.id)
            self._note("lets go", outer.id)

    async def _by_hand(self, client: Client) -> None:
        lock = await client.acquire(*self._names(), **self._options())
        self._note("holds", lock.id, lock.fence)
        await self._work()
        if self.random.random() < 0.5:
            await lock.extend(self.random.choice([0.5, 2.0]))
        if self.random.random() < 0.2:
            self._note("lets go", lock.id)
            await client.release(lock.id)
        else:
            self._note("lets go", lock.id)
            await lock.release()

    async def _try(self, client: Client) -> None:
        options = self._options()
        del options["queue_timeout"]
        lock = await client.try_acquire(*self._names(), **options)
        if lock is not None:
            self._note("holds", lock.id, lock.fence)
            await self._work()
            self._note("lets go", lock.id)
            await lock.release()

    async def _cancelled(self, client: Client) -> None:
        try:
            async with asyncio.timeout(self.random.choice([0.0, 0.001, 0.05, 0.5])):
                await self._hold(client)
        except TimeoutError:
            self._note("was cancelled")

    async def _watched(self, client: Client) -> None:
        options = self._options() | {"transaction_timeout": self.random.choice([0.3, 1.0])}
        async with client.lock(*self._names(), watchdog=True, **options) as lock:
            self._note("holds", lock.id, lock.fence)
            await asyncio.sleep(self.random.choice([0.1, 1.0, 3.0]))
            self._note("lets go", lock.id)

    # -- inside -------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        return self._workload.resources()

    def _options(self) -> dict[str, Any]:
        return {
            "transaction": self._workload.transaction(self.name),
            "queue_timeout": self.random.choice([0.05, 0.5, 3.0, 10.0]),
            "transaction_timeout": self.random.choice([0.1, 1.0, 5.0]),
            "priority": self.random.choice([0, 0, 3]) if self.context.scenario.priorities else 0,
        }

    async def _work(self) -> None:
        await asyncio.sleep(self.random.choice([0.0, 0.01, 0.1, 0.5]))

    def _note(self, *what: object) -> None:
        self.context.history.note(NOTE, self.name, " ".join(map(str, what)))
