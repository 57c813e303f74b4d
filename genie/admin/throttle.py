"""Limits on the work of the admin port: cooperative yielding, response caching, chunked encoding.

The admin port shares the event loop with the locks. A response is computed in slices of bounded work, between which
the loop serves other clients.
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
"""Work units between two pauses. A unit takes about a microsecond: reading a table row, or encoding 100 bytes."""


class WorkBudget:
    """Counts units of work, and yields to the event loop after each slice of `MAX_SLICE_WORK`.

    Work is counted rather than timed, so that slices are the same on every machine and in every run.
    """

    def __init__(self) -> None:
        self._spent = 0
        self.max_spent = 0
        """Maximum work done so far without a pause."""

    async def spend(self, work: int) -> bool:
        """Count work, and yield if the slice is used up. Return whether it yielded: then any table may have changed."""
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
"""Maximum number of requests that wait for a response."""


class ResponseCache:
    """Computes one response at a time, and serves equal requests from a cache for `RESPONSE_TTL_S`.

    However many clients poll, an iteration of the event loop contains at most one slice of this work.
    """

    def __init__(self, budget: WorkBudget) -> None:
        self.budget = budget
        self._mutex = asyncio.Lock()
        self._waiting = 0
        self._cached: dict[Hashable, tuple[float, Body]] = {}
        """The time of computation and the response, by key, oldest first."""

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
                    cached_key: (computed_at, body)
                    for cached_key, (computed_at, body) in self._cached.items()
                    if now - computed_at < RESPONSE_TTL_S
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
"""Approximate size of a chunk; each is written separately."""
BYTES_PER_WORK_UNIT = 256

Body = tuple[bytes, ...]
"""An encoded response, in chunks."""

_encode = msgspec.json.Encoder().encode


async def encode(response: ApiModel, budget: WorkBudget) -> Body:
    """Encode a large response in chunks, and yield between the items of its lists.

    All top-level fields are encoded, also those with default values.
    """
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
