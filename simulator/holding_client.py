"""A simulated client that uses the library to hold locks for long, also idle, bound to its session or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any

import genie
from genie.client.aio import Client, Lock, connect
from simulator.beliefs import Beliefs
from simulator.library_client import LibraryClient
from simulator.scenario import ClientContext


class HoldingClient(LibraryClient):
    """A library client that records in `beliefs` which locks it considers held.

    Each of its connections has another session timeout. Half of its locks are bound to the session, and most of them end with
    the session long before their transaction timeout.
    """

    def __init__(self, context: ClientContext, name: str, random: Random, beliefs: Beliefs) -> None:
        super().__init__(context, name, random)
        self._beliefs = beliefs

    def _connect(self) -> Client:
        return connect(
            ",".join(self.context.addresses),
            connect_timeout=3.0,
            session_timeout=self.random.choice([0.3, 1.0, 1.0, 3.0, 10.0]),
        )

    def _patterns(self) -> list[Callable[[Client], Awaitable[None]]]:
        return [
            self._hold,
            self._hold,
            self._acquire_and_release,
            self._abandon,
            self._hold_with_watchdog,
            self._cancel,
        ]

    async def _hold(self, client: Client) -> None:
        """Hold a lock with a context manager."""
        async with client.lock(*self._names(), **self._options()) as lock:
            with self._beliefs.in_block(lock):
                await self._use(lock)

    async def _acquire_and_release(self, client: Client) -> None:
        """Acquire a lock without a context manager, and release it, sometimes by its id."""
        lock = await client.acquire(*self._names(), **self._options())
        self._beliefs.observe(lock)
        await self._use(lock)
        if self.random.random() < 0.2:
            self._beliefs.forget(lock)
            await client.release(lock.id)
        else:
            await lock.release()

    async def _use(self, lock: Lock) -> None:
        """Work with a lock, and sometimes extend it, which may also shorten it. An extension without an answer is ignored."""
        for _ in range(self.random.choice([1, 1, 3])):
            await self._work()
            if self.random.random() < 0.4:
                with suppress(genie.ConnectionLost, genie.Unavailable):
                    await lock.extend(self.random.choice([0.3, 2.0, 5.0]))
                await self._work()

    async def _abandon(self, client: Client) -> None:
        """Acquire a lock and never release it, as a task does that has failed."""
        options = self._options() | {"transaction_timeout": self.random.choice([1.0, 5.0])}
        self._beliefs.observe(await client.acquire(*self._names(), **options))

    async def _hold_with_watchdog(self, client: Client) -> None:
        """Hold a lock that the watchdog extends."""
        options = self._options() | {"transaction_timeout": self.random.choice([0.5, 2.0])}
        async with client.lock(*self._names(), watchdog=True, **options) as lock:
            with self._beliefs.in_block(lock):
                await self._work()

    def _options(self) -> dict[str, Any]:
        """Return random keyword arguments for `Client.lock` and `Client.acquire`."""
        return super()._options() | {
            "transaction_timeout": self.random.choice([0.5, 5.0, 60.0, 60.0]),
            "on_disconnect": self.random.choice(["keep", "release", "release"]),
        }

    async def _work(self) -> None:
        await asyncio.sleep(self.random.choice([0.01, 0.5, 2.0, 8.0]))
