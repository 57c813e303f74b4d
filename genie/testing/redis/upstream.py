"""A replica's connection to its master, and what goes over it: writes, or all that the master has."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from genie.testing.redis.keys import Keys
from genie.testing.redis.resp import Reader

if TYPE_CHECKING:
    from genie.testing.redis.replicated import ReplicatedRedis


@dataclass(slots=True, eq=False)
class Write:
    """One write, with the commands that it consists of. `on` has the hosts of those who have, or had, carried it out."""

    number: int
    commands: list[list[bytes]]
    on: list[str] = field(default_factory=list)
    noted: Any = None
    """What a witness makes of it."""


@dataclass(slots=True)
class Writes:
    """What is under way between the Redises of one world: writes and whole states, by number."""

    known: list[Write] = field(default_factory=list)
    states: list[tuple[Keys, list[Write]]] = field(default_factory=list)


class Upstream(asyncio.Protocol):
    """A replica's connection to its master."""

    def __init__(self, redis: ReplicatedRedis) -> None:
        self._redis = redis
        self._reader = Reader()
        self._queue: deque[tuple[float, list[bytes]]] = deque()
        self._last_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.transport: Any = None
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """What is to be carried out, each after its time."""
        for message in self._reader.feed(data):
            self._last_at = max(self._last_at, self._loop.time() + self._redis.lag())
            self._queue.append((self._last_at, message))
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """It has ended; what was not carried out will come again, or not."""
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
        self.ended.set()

    def end(self) -> None:
        """Take nothing more."""
        self.ended.set()
        self.transport.abort()

    def _arm(self) -> None:
        if self._timer is None and self._queue:
            self._timer = self._loop.call_at(self._queue[0][0], self._take)

    def _take(self) -> None:
        self._timer = None
        while self._queue and self._queue[0][0] <= self._loop.time() and not self.ended.is_set():
            self._redis.take(self._queue.popleft()[1])
        self._arm()
