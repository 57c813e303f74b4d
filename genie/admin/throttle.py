"""Limits on the work of the admin port: cooperative yielding, response caching, chunked encoding.

The admin port shares the event loop with the lock server. A response is computed in slices of bounded work. The event
loop serves other clients between two slices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from genie.admin.models import ApiError, ApiModel
from genie.errors import Code

MAX_SLICE_WORK: Final = 1_000
"""Work units between two pauses. A work unit takes about a microsecond, e.g. reading one row of a lock table."""


class WorkBudget:
    """Counts work units, and yields to the event loop after each slice of `MAX_SLICE_WORK` units.

    Work is counted rather than timed, so that slices are the same on every machine and in every run.
    """

    def __init__(self) -> None:
        self._spent = 0
        """Work units in the current slice."""
        self.max_spent = 0
        """Maximum number of work units that were spent without a pause."""

    async def spend(self, work: int) -> bool:
        """Count work units, and yield to the event loop if the current slice is used up.

        Returns whether it yielded. While it yields, the lock tables may change.
        """
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


Body = tuple[bytes, ...]
"""An encoded response, in chunks."""

# -- Response cache --------

RESPONSE_TTL_S = 0.5
"""Time for which a response is served from the cache."""
MAX_CACHED_RESPONSES = 16
MAX_WAITING_REQUESTS = 64
"""Maximum number of requests that wait for a response. Further requests are rejected."""


class CachedResponse(NamedTuple):
    """An encoded response, and the event-loop time at which it was completed."""

    computed_at: float
    body: Body


class ResponseCache:
    """Computes one response at a time, and serves requests with the same key from a cache for `RESPONSE_TTL_S`.

    So one iteration of the event loop does at most one slice of work, regardless of the number of polling clients.
    """

    def __init__(self, budget: WorkBudget) -> None:
        self.budget = budget
        self._mutex = asyncio.Lock()
        """Held while a response is computed."""
        self._waiting_count = 0
        """Number of requests that wait for a response, including the request whose response is being computed."""
        self._cached: dict[Hashable, CachedResponse] = {}
        """Responses by key, oldest first."""

    async def get_or_compute(self, key: Hashable, compute: Callable[[], Awaitable[Body]]) -> Body:
        """Return the cached response for the key. If none is cached, compute and cache it.

        Only one response is computed at a time; other callers wait. Raises ApiError 503 if `MAX_WAITING_REQUESTS`
        callers are waiting already.
        """
        if self._waiting_count >= MAX_WAITING_REQUESTS:
            raise ApiError(
                503, Code.TOO_MANY, f"{MAX_WAITING_REQUESTS} requests are waiting for responses; try again later"
            )
        self._waiting_count += 1
        try:
            async with self._mutex:
                now = asyncio.get_running_loop().time()
                self._cached = {
                    cached_key: response
                    for cached_key, response in self._cached.items()
                    if now - response.computed_at < RESPONSE_TTL_S
                }
                if key not in self._cached:
                    await self.budget.pause()
                    body = await compute()
                    if len(self._cached) >= MAX_CACHED_RESPONSES:
                        del self._cached[next(iter(self._cached))]  # the oldest response
                    self._cached[key] = CachedResponse(asyncio.get_running_loop().time(), body)
                return self._cached[key].body
        finally:
            self._waiting_count -= 1


# -- Chunked JSON encoding: a response may have several megabytes --------

CHUNK_BYTES = 16 << 10
"""Approximate size of a chunk. Chunks are written to the client one by one."""
BYTES_PER_WORK_UNIT = 256
"""Number of encoded bytes that count as one work unit."""

_encode = msgspec.json.Encoder().encode


async def encode(response: ApiModel, budget: WorkBudget) -> Body:
    """Encode a large response as JSON in chunks, and yield between list items as the work budget requires.

    All top-level fields are encoded, including fields with default values.
    """
    chunks: list[bytes] = []
    chunk = bytearray(b"{")
    for index, field in enumerate(msgspec.structs.fields(response)):
        chunk += b',"' if index else b'"'
        chunk += field.encode_name.encode() + b'":'
        value = getattr(response, field.name)
        # Only lists of structs can be long. Other values are encoded at once.
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
