"""Limits on the work of the admin port: cooperative yielding, response caching, chunked encoding.

The admin port shares the event loop with the lock server. A response is computed in slices of bounded work, between
which the event loop serves other clients.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from genie.admin.models import ApiError, ApiModel
from genie.errors import Code

MAX_SLICE_WORK: Final = 1_000
"""Work units between two pauses. A work unit takes about a microsecond, for example to read one row of a lock table."""


class WorkBudget:
    """Counts work units, and yields to the event loop after each slice of `MAX_SLICE_WORK` units.

    Work is counted instead of timed, so that slices are the same on every machine and in every run.
    """

    def __init__(self) -> None:
        self._spent = 0
        """Work units in the current slice."""
        self.max_spent = 0
        """Maximum number of work units that were spent without a pause."""

    async def spend(self, work: int) -> bool:
        """Count work units of about 1 µs. If the current slice is used up, yield to the event loop and return True.

        The lock tables may change in the meantime.
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
MAX_CACHED_BYTES: Final = 32 << 20
"""Maximum size of all cached responses. The last response may exceed it."""
MAX_SENT_BYTES: Final = 64 << 20
"""Maximum size of all large responses that are being sent. A single larger response is sent if no other is being sent."""
LARGE_BYTES: Final = 1 << 20
"""A response of at least this size is large. Smaller responses are only limited by the number of connections."""
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
        self._clients: Counter[int] = Counter()
        """By the `id()` of each large body that is being sent, to how many clients."""
        self.sent_bytes = 0
        """Size of the large bodies that are being sent. A body that is sent to several clients counts once."""

    async def get_or_compute(self, key: Hashable, compute: Callable[[], Awaitable[Body]]) -> Body:
        """Return the cached response for the key. If none is cached, compute and cache it.

        Only one response is computed at a time, while other callers wait. Raises ApiError 503 if `MAX_WAITING_REQUESTS`
        callers are waiting already.
        """
        if self._waiting_count >= MAX_WAITING_REQUESTS:
            raise ApiError(
                503, Code.TOO_MANY, f"{MAX_WAITING_REQUESTS} requests are waiting for responses; try again later"
            )
        self._waiting_count += 1
        try:
            async with self._mutex:
                self._drop_expired()
                if key not in self._cached:
                    await self.budget.pause()
                    body = await compute()
                    self._make_room(_size(body))
                    self._cached[key] = CachedResponse(asyncio.get_running_loop().time(), body)
                return self._cached[key].body
        finally:
            self._waiting_count -= 1

    def _drop_expired(self) -> None:
        """Drop the responses that are older than `RESPONSE_TTL_S`."""
        expired_before = asyncio.get_running_loop().time() - RESPONSE_TTL_S
        self._cached = {
            key: response for key, response in self._cached.items() if response.computed_at > expired_before
        }

    def _make_room(self, size: int) -> None:
        """Drop the oldest responses until a further response of `size` bytes fits."""
        cached_bytes = sum(_size(response.body) for response in self._cached.values())
        while self._cached and (len(self._cached) >= MAX_CACHED_RESPONSES or cached_bytes + size > MAX_CACHED_BYTES):
            oldest = self._cached.pop(next(iter(self._cached)))
            cached_bytes -= _size(oldest.body)

    @contextmanager
    def sending(self, body: Body) -> Iterator[None]:
        """Count a body while it is sent to a client, which may read it slowly.

        Raises ApiError 503 if the large bodies that are being sent would exceed `MAX_SENT_BYTES` together.
        """
        key, size = id(body), _size(body)
        if size < LARGE_BYTES:
            yield
            return
        if key not in self._clients:
            if self.sent_bytes and self.sent_bytes + size > MAX_SENT_BYTES:
                message = f"responses of more than {MAX_SENT_BYTES} bytes are being sent; try again later"
                raise ApiError(503, Code.TOO_MANY, message)
            self.sent_bytes += size
        self._clients[key] += 1
        try:
            yield
        finally:
            self._clients[key] -= 1
            if not self._clients[key]:
                del self._clients[key]
                self.sent_bytes -= size


def _size(body: Body) -> int:
    """Return the bytes of all chunks."""
    return sum(map(len, body))


# -- Chunked JSON encoding: a response may have several megabytes --------

CHUNK_BYTES = 16 << 10
"""Approximate size of a chunk. Chunks are written to the client one by one."""
BYTES_PER_WORK_UNIT = 256
"""Number of encoded bytes that count as one work unit."""

_encode = msgspec.json.Encoder().encode


async def encode(response: ApiModel, budget: WorkBudget) -> Body:
    """Encode a large response as JSON in chunks, and yield between list items as the work budget requires.

    All fields of the response that are set are encoded, including fields with default values.
    """
    chunks: list[bytes] = []
    chunk = bytearray(b"{")
    separator = b""
    for field in msgspec.structs.fields(response):
        value = getattr(response, field.name)
        if value is msgspec.UNSET:
            continue
        chunk += separator + b'"' + field.encode_name.encode() + b'":'
        separator = b","
        is_list_of_structs = isinstance(value, list) and bool(value) and isinstance(value[0], Struct)
        if not is_list_of_structs:  # and so not long
            chunk += _encode(value)
            continue
        item_separator = b"["
        for item in value:
            encoded = _encode(item)
            chunk += item_separator
            chunk += encoded
            item_separator = b","
            if len(chunk) >= CHUNK_BYTES:
                chunks.append(bytes(chunk))
                chunk.clear()
            await budget.spend(1 + len(encoded) // BYTES_PER_WORK_UNIT)
        chunk += b"]"
    chunk += b"}"
    return (*chunks, bytes(chunk))
