"""Fills a server over TCP with locks, waiting requests and deadlocks. The connections of waiting
requests stay open.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from itertools import islice

BATCH = 1_000
HOUR_MS = 3_600_000
RING = 50
"""Number of transactions in a deadlock."""


class Filler:
    """A connection that stays open, whose replies are counted and not parsed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, address: tuple[str, int]) -> Filler:
        """Connect to a server."""
        return cls(*await asyncio.open_connection(*address))

    async def ask(self, names: Iterable[str], answers: int, transactions: Iterable[str] | None = None) -> None:
        """Send a request for each name, and wait for their replies."""
        todo = iter(names)
        owners = None if transactions is None else iter(transactions)
        while batch := list(islice(todo, BATCH)):
            for name in batch:
                owner = {} if owners is None else {"transactionName": next(owners)}
                asked = {"resources": [f"exclusive:{name}"], "queueTimeout": HOUR_MS, "transactionTimeout": HOUR_MS}
                self._writer.write(json.dumps({"command": "request", "payload": asked | owner}).encode() + b"\n")
            for _ in range(answers * len(batch)):
                await self._reader.readline()

    async def deadlocks(self, number: int) -> None:
        """Create deadlocks, each a cycle of `RING` transactions."""
        ring = [f"{'a-rather-long-name/' * 5}{place}" for place in range(RING)]
        owners = [f"transfer-{place}" for place in range(RING)]
        await self.ask(ring, 2, owners)
        await self.ask(ring[1:], 1, owners)
        for _ in range(number):
            await self.ask(ring[:1], 2, owners[-1:])

    def close(self) -> None:
        """Close the connection, which cancels its waiting requests."""
        self._writer.close()
