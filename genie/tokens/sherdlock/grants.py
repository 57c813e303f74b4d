"""Locks on tokens: requesting them in as many requests as needed, and keeping those of spent tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from genie.errors import ConnectionLost, GenieError, Insufficient, Unavailable
from genie.tasks import cancel_and_wait
from genie.tokens.sherdlock.holds import LockTracker
from genie.tokens.sherdlock.locks import EXCLUSIVE_TOKEN_PREFIX, Lock, LockClient
from genie.tokens.token import Token

MAX_NAMES = 10_000
"""Resource names in one request: a limit of the protocol."""
MAX_REQUEST_BYTES = 1_000_000
"""Bytes of names and weights in one request: a line may have 1 MiB."""
ALWAYS_FITTING_NAMES = 500
"""This many names fit into one line whatever their length."""
MAX_PART_ATTEMPTS = 5
"""Attempts to lock the free tokens of one request while other clients lock some of them."""


class Grants:
    """Locks on tokens that were granted to one transaction. `requested_at`: when the first was requested."""

    __slots__ = ("_tracker", "amount", "locks", "requested_at", "tokens")

    def __init__(self, requested_at: float, tracker: LockTracker) -> None:
        self._tracker = tracker
        self.requested_at = requested_at
        self.locks: list[Lock] = []
        self.tokens: list[Token] = []
        self.amount = 0

    def add(self, lock: Lock, requested: dict[str, Token]) -> None:
        """Add a lock. `requested`: the tokens of its request, by resource."""
        self.locks.append(lock)
        for resource in lock.resources:
            token = requested[resource]
            self.tokens.append(token)
            self.amount += token.amount

    async def release(self) -> None:
        """Release all locks. A lock that can't be released now is retried by the client, or expires."""
        if len(self.locks) == 1:
            await self._release(self.locks[0])
        elif self.locks:
            await gather_shielded(*(self._release(lock) for lock in self.locks))

    async def _release(self, lock: Lock) -> None:
        with suppress(Unavailable, ConnectionLost):  # the client retries; if it is closed, the lease expires
            await lock.release()
            self._tracker.on_released(lock.id, [name.removeprefix(EXCLUSIVE_TOKEN_PREFIX) for name in lock.resources])


class Shortfall(NamedTuple):
    """Amounts of the requested tokens, which did not reach the target: of the free ones, and of those that others hold."""

    free: int
    locked: int


async def acquire(
    client: LockClient, tracker: LockTracker, tokens: Sequence[Token], amount: int, transaction: str, lease: float
) -> Grants | Shortfall:
    """Lock the first free tokens that together reach the amount, or none.

    One request is atomic. Where the names need several requests, the free tokens of the first are
    held while the next is made.
    """
    grants = Grants(asyncio.get_running_loop().time(), tracker)
    requests = list(split_by_request(tokens))
    free = locked = 0
    try:
        for part in requests:
            short = await _acquire_part(client, grants, part, amount, transaction, lease, last=part is requests[-1])
            if grants.amount >= amount:
                return grants
            free, locked = free + short.free, locked + short.locked
    except BaseException:
        await grants.release()
        raise
    await grants.release()
    return Shortfall(free, locked)


async def acquire_all(
    client: LockClient, tracker: LockTracker, tokens: Sequence[Token], transaction: str, lease: float
) -> Grants | Shortfall:
    """Lock all of the tokens, or none. Each has weight 1: their sum may exceed the largest target."""
    grants = Grants(asyncio.get_running_loop().time(), tracker)
    try:
        for part in split_by_request(tokens):
            requested = {EXCLUSIVE_TOKEN_PREFIX + token.id: token for token in part}
            lock = await client.acquire_any(
                list(requested), len(requested), transaction=transaction, transaction_timeout=lease
            )
            grants.add(lock, requested)
    except Insufficient:
        await grants.release()
        return Shortfall(0, 0)
    except BaseException:
        await grants.release()
        raise
    return grants


async def _acquire_part(
    client: LockClient,
    grants: Grants,
    part: Sequence[Token],
    amount: int,
    transaction: str,
    lease: float,
    *,
    last: bool,
) -> Shortfall:
    """Lock the missing amount from one request's tokens; where it is not there and more requests follow, all free ones.

    Returns the amounts that the request came to.
    """
    requested = {EXCLUSIVE_TOKEN_PREFIX + token.id: token for token in part}
    weights = [token.amount for token in part]
    target = amount - grants.amount
    short = Shortfall(0, 0)
    for _ in range(MAX_PART_ATTEMPTS):
        try:
            lock = await client.acquire_any(
                list(requested), target, weights=weights, transaction=transaction, transaction_timeout=lease
            )
        except Insufficient as rejected:
            short = Shortfall(int(rejected.free), int(rejected.locked))
            if last or not short.free:
                break
            target = short.free
        else:
            grants.add(lock, requested)
            break
    return short


def split_by_request(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    """Split tokens into parts whose names fit into one request each."""
    if len(tokens) <= ALWAYS_FITTING_NAMES:
        yield tokens
        return
    start = size = 0
    for index, token in enumerate(tokens):
        token_size = _encoded_size(token)
        if size + token_size > MAX_REQUEST_BYTES or index - start == MAX_NAMES:
            yield tokens[start:index]
            start, size = index, 0
        size += token_size
    yield tokens[start:]


def _encoded_size(token: Token) -> int:
    escaped = token.id.count('"') + token.id.count("\\")
    return len(token.id.encode(errors="replace")) + escaped + len(EXCLUSIVE_TOKEN_PREFIX) + len(str(token.amount)) + 4


async def gather_shielded(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all coroutines to completion, even if the caller is cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    await asyncio.shield(asyncio.gather(*tasks))


# -- locks of spent tokens --------------------------------------------------------------------------------------

MAX_SPENT_LOCKS = 80_000
"""Locks on spent tokens that are kept. A session may have 100,000 requests; the rest is for tokens
that are held and not spent yet.
"""


class SpentLocks:
    """Locks on spent tokens. They stay until they expire, so that replicas that have not read the spend yet skip the tokens.

    A busy replica would reach the limit of requests of a session before the first lock expires.
    Beyond `MAX_SPENT_LOCKS` the oldest are therefore released: the store's change feed has reported
    their spends long before.
    """

    __slots__ = ("_locks", "_releases")

    def __init__(self) -> None:
        self._locks: deque[tuple[float, Lock]] = deque()
        """Each with the time at which it expires."""
        self._releases: set[asyncio.Task[None]] = set()

    def add(self, locks: Iterable[Lock], expires_at: float, now: float) -> None:
        """Keep the locks of tokens that were spent."""
        self._locks.extend((expires_at, lock) for lock in locks)
        while self._locks and self._locks[0][0] <= now:
            self._locks.popleft()
        while len(self._locks) > MAX_SPENT_LOCKS:
            task = asyncio.get_running_loop().create_task(_release_quietly(self._locks.popleft()[1]))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """Cancel the releases in progress."""
        for task in list(self._releases):
            await cancel_and_wait(task)


async def _release_quietly(lock: Lock) -> None:
    with suppress(GenieError):  # it expires
        await lock.release()
