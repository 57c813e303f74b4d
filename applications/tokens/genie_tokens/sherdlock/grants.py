"""Locks on tokens: acquiring them in one or more requests, and keeping the locks of spent tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from genie import ConnectionLost, GenieError, Insufficient, LockLost, Unavailable
from genie.tasks import cancel_and_wait
from genie_tokens.sherdlock.holds import LockTracker
from genie_tokens.sherdlock.locks import EXCLUSIVE_TOKEN_PREFIX, Lock, LockClient
from genie_tokens.token import Token

MAX_NAMES = 10_000
"""Resource names in one request: a limit of the protocol."""
MAX_REQUEST_BYTES = 1_000_000
"""Bytes of names and weights in one request: a line may have 1 MiB."""
ALWAYS_FITTING_NAMES = 500
"""Number of names that fit into one line, even if all of them have the maximum length."""
MAX_REQUEST_ATTEMPTS = 5
"""Attempts to lock the free tokens of one request while other clients lock some of them."""


class Grants:
    """Locks on tokens that were granted to one transaction, the tokens, and their total amount."""

    __slots__ = ("_tracker", "amount", "locks", "requested_at", "tokens")

    def __init__(self, requested_at: float, tracker: LockTracker) -> None:
        self._tracker = tracker
        """Records which locks were released."""
        self.requested_at = requested_at
        """When the first lock was requested (event-loop seconds)."""
        self.locks: list[Lock] = []
        self.tokens: list[Token] = []
        self.amount = 0
        """The sum of the tokens."""

    def add(self, lock: Lock, requested: dict[str, Token]) -> None:
        """Add a lock and the tokens that it locks. `requested` maps the resource names of the
        lock's request to tokens; Genie may have locked only some of them.
        """
        self.locks.append(lock)
        for resource in lock.resources:
            token = requested[resource]
            self.tokens.append(token)
            self.amount += token.amount

    async def release(self) -> None:
        """Release all locks. If the server can't be reached, no error is raised: the client
        retries, or the locks expire.
        """
        if len(self.locks) == 1:
            await self._release(self.locks[0])
        elif self.locks:
            await gather_shielded(*(self._release(lock) for lock in self.locks))

    async def _release(self, lock: Lock) -> None:
        """Release a lock, and let the tracker ignore late reports of it."""
        with suppress(Unavailable, ConnectionLost):  # the client retries; if it is closed, the lock expires
            await lock.release()
            self._tracker.on_released(lock.id, [name.removeprefix(EXCLUSIVE_TOKEN_PREFIX) for name in lock.resources])


class Shortfall(NamedTuple):
    """A failed request: the amount of the free tokens, which did not reach the target, and the
    amount of the tokens that other transactions have locked.
    """

    free: int
    locked: int


async def acquire(
    client: LockClient, tracker: LockTracker, tokens: Sequence[Token], amount: int, transaction: str, lease: float
) -> Grants | Shortfall:
    """Lock free tokens, in the given order, until their sum reaches `amount`. The locks expire
    after `lease` seconds. If the free tokens don't reach the amount, lock nothing and return a
    Shortfall.

    A single request is atomic. If the names of the tokens do not fit into one request, the tokens
    locked by each request stay locked while the next request is made.
    """
    grants = Grants(asyncio.get_running_loop().time(), tracker)
    free = locked = 0
    try:
        for chunk in split_by_request(tokens):
            is_last = chunk[-1] is tokens[-1]
            shortfall = await _acquire_chunk(
                client, grants, chunk, amount=amount, transaction=transaction, lease=lease, is_last=is_last
            )
            if grants.amount >= amount:
                return grants
            free, locked = free + shortfall.free, locked + shortfall.locked
    except BaseException:
        await grants.release()
        raise
    await grants.release()
    return Shortfall(free, locked)


async def acquire_all(
    client: LockClient, tracker: LockTracker, tokens: Sequence[Token], transaction: str, lease: float
) -> Grants | Shortfall:
    """Lock all of the tokens. If any of them is not free, lock nothing and return a Shortfall.

    Each token counts as 1 instead of its amount, because the sum of the amounts may exceed the
    largest target of a request.
    """
    grants = Grants(asyncio.get_running_loop().time(), tracker)
    try:
        for chunk in split_by_request(tokens):
            requested = {EXCLUSIVE_TOKEN_PREFIX + token.id: token for token in chunk}
            lock = await client.acquire_any(
                list(requested), len(requested), transaction=transaction, transaction_timeout=lease
            )
            grants.add(lock, requested)
    except Insufficient:
        await grants.release()
        return Shortfall(free=0, locked=0)  # the caller ignores the amounts
    except BaseException:
        await grants.release()
        raise
    return grants


async def _acquire_chunk(
    client: LockClient,
    grants: Grants,
    chunk: Sequence[Token],
    *,
    amount: int,
    transaction: str,
    lease: float,
    is_last: bool,
) -> Shortfall:
    """Lock free tokens of `chunk` in one request, until the sum of all `grants` reaches `amount`.
    Adds the granted lock to `grants`.

    If the chunk does not suffice, locks all of its free tokens. But if the chunk is the last
    (`is_last`), locks none, because no further chunk can supply the rest. Returns the free and the
    locked amount from Genie's last rejection, or zeros if Genie has not rejected any attempt.
    """
    requested = {EXCLUSIVE_TOKEN_PREFIX + token.id: token for token in chunk}
    weights = [token.amount for token in chunk]
    target = amount - grants.amount
    shortfall = Shortfall(free=0, locked=0)
    for _ in range(MAX_REQUEST_ATTEMPTS):
        try:
            lock = await client.acquire_any(
                list(requested), target, weights=weights, transaction=transaction, transaction_timeout=lease
            )
        except Insufficient as rejection:
            shortfall = Shortfall(int(rejection.free), int(rejection.locked))
            if is_last or not shortfall.free:
                break
            target = shortfall.free  # lock all free tokens, unless other clients lock some of them first
        else:
            grants.add(lock, requested)
            break
    return shortfall


def split_by_request(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    """Split tokens into chunks. The resource names of each chunk fit into one request."""
    if len(tokens) <= ALWAYS_FITTING_NAMES:  # the names fit into one request whatever their lengths
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
    """Return the size of a token's resource name and weight in a request, in bytes of JSON."""
    name_size = len(EXCLUSIVE_TOKEN_PREFIX) + len(token.id.encode(errors="replace"))
    backslashes = token.id.count('"') + token.id.count("\\")  # JSON escapes these characters
    return name_size + backslashes + len(str(token.amount)) + len('"",,')


async def gather_shielded(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run coroutines concurrently. If the caller is cancelled, the coroutines still run to completion."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    await asyncio.shield(asyncio.gather(*tasks))


# -- locks of spent tokens --------------------------------------------------------------------------------------

MAX_SPENT_LOCKS = 80_000
"""Maximum number of locks on spent tokens. A session may have 100,000 requests; the rest are for
tokens that are held and not spent yet.
"""


class SpentLock(NamedTuple):
    """A lock on tokens that were spent. It expires at `expires_at` (event-loop seconds)."""

    expires_at: float
    lock: Lock


class SpentLocks:
    """The locks on tokens that this replica has spent. They are not released, and expire: until
    then replicas that have not read the spend yet skip the tokens.

    A busy replica would reach a session's limit of requests before its first lock expires. So the
    oldest locks beyond `MAX_SPENT_LOCKS` are released: the change feed has reported those spends
    long before.
    """

    __slots__ = ("_locks", "_releases")

    def __init__(self) -> None:
        self._locks: deque[SpentLock] = deque()
        """The locks, oldest first."""
        self._releases: set[asyncio.Task[None]] = set()
        """The releases in progress."""

    def add(self, locks: Iterable[Lock], expires_at: float, now: float) -> None:
        """Add the locks of tokens that were spent. The locks expire at `expires_at` (event-loop
        seconds).

        Removes locks that have expired by the time `now`. Releases the oldest locks, in background
        tasks, if there are more than `MAX_SPENT_LOCKS`.
        """
        self._locks.extend(SpentLock(expires_at, lock) for lock in locks)
        while self._locks and self._locks[0].expires_at <= now:
            self._locks.popleft()
        while len(self._locks) > MAX_SPENT_LOCKS:
            oldest = self._locks.popleft()
            task = asyncio.get_running_loop().create_task(_release_quietly(oldest.lock))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """Cancel the releases in progress. The locks stay held: the client no longer manages them."""
        for task in list(self._releases):
            await cancel_and_wait(task)
        for spent in self._locks:
            with suppress(LockLost):  # the lock has expired
                spent.lock.detach()
        self._locks.clear()


async def _release_quietly(lock: Lock) -> None:
    """Release a lock, and ignore errors."""
    with suppress(GenieError):  # if the release fails the lock expires
        await lock.release()
