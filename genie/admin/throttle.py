"""Keep the admin port from delaying the locks: cooperative yielding, response caching, chunked encoding.

All of it runs in the server's event loop. A response is computed in slices of bounded work, and
the loop serves clients in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

import msgspec
from msgspec import Struct

from genie.admin.models import ApiError, ApiModel
from genie.errors import Code

MAX_SLICE_WORK: Final = 1_000
"""Work between two pauses. A unit takes about a microsecond: reading a row of a table, or writing some 100 bytes."""


class WorkBudget:
    """Counts work and yields to the event loop when a slice is used up.

    It counts work rather than time, so that the slices are the same on every machine and in every run.
    """

    def __init__(self) -> None:
        self._spent = 0
        self.max_spent = 0
        """The most work ever done without a pause."""

    async def spend(self, work: int) -> bool:
        """Add to the work done. Return whether this yielded: then any table may have changed."""
        self._spent += work
        self.max_spent = max(self.max_spent, self._spent)
        if self._spent < MAX_SLICE_WORK:
            return False
        await self.pause()
        return True

    async def pause(self) -> None:
        """Yield to the event loop and start a new slice."""
        self._spent = 0
        await asyncio.sleep(0)


# -- Response cache --------

RESPONSE_TTL_S = 0.5
"""How long a response is served from the cache."""
MAX_CACHED_RESPONSES = 16
MAX_WAITING_REQUESTS = 64
"""Requests that may wait for a response. Each wakes the event loop, which also serves the locks."""


class ResponseCache:
    """Computes one response at a time and coalesces equal requests.

    However many clients poll, the event loop runs at most one slice of this work per iteration.
    """

    def __init__(self, budget: WorkBudget) -> None:
        self.budget = budget
        self._mutex = asyncio.Lock()
        self._waiting = 0
        self._cached: dict[Hashable, tuple[float, Body]] = {}

    async def get_or_compute(self, key: Hashable, compute: Callable[[], Awaitable[Body]]) -> Body:
        """Return the cached response for the key, or compute it. ApiError 503 if too many requests wait."""
        if self._waiting >= MAX_WAITING_REQUESTS:
            raise ApiError(
                503, Code.TOO_MANY, f"{MAX_WAITING_REQUESTS} requests are waiting for responses; try again later"
            )
        self._waiting += 1
        try:
            async with self._mutex:
                now = asyncio.get_running_loop().time()
                self._cached = {
                    known: entry for known, entry in self._cached.items() if now - entry[0] < RESPONSE_TTL_S
                }
                if key not in self._cached:
                    await self.budget.pause()
                    body = await compute()
                    if len(self._cached) >= MAX_CACHED_RESPONSES:
                        del self._cached[next(iter(self._cached))]
                    self._cached[key] = asyncio.get_running_loop().time(), body
                return self._cached[key][1]
        finally:
            self._waiting -= 1


# -- Chunked JSON encoding: a response may have several megabytes --------

CHUNK_BYTES = 16 << 10
"""Approximate size of a chunk, which is sent by itself."""
BYTES_PER_WORK_UNIT = 256

Body = tuple[bytes, ...]
"""An encoded response, in chunks."""

_encode = msgspec.json.Encoder().encode


async def encode(response: ApiModel, budget: WorkBudget) -> Body:
    """Encode a large response, its lists item by item. Its top-level fields must not be omitted by default."""
    chunks: list[bytes] = []
    chunk = bytearray(b"{")
    for index, field in enumerate(msgspec.structs.fields(response)):
        chunk += b',"' if index else b'"'
        chunk += field.encode_name.encode() + b'":'
        value = getattr(response, field.name)
        if not isinstance(value, list) or not value or not isinstance(value[0], Struct):
            chunk += _encode(value)
            continue
        separator = b"["
        for item in value:
            encoded = _encode(item)
            chunk += separator
            chunk += encoded
            separator = b","
            if len(chunk) >= CHUNK_BYTES:
                chunks.append(bytes(chunk))
                chunk.clear()
            await budget.spend(1 + len(encoded) // BYTES_PER_WORK_UNIT)
        chunk += b"]"
    chunk += b"}"
    return (*chunks, bytes(chunk))
