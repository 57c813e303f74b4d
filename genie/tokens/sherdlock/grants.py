"""Locks on what is spent: they stay until their lease ends, so that those who have not heard of the spend pass it by.

A session of Genie can have 100,000 requests. A busy replica would have used them up before the first lease ends, and could
select nothing until then. So beyond a number the oldest are given back: by then the store has told of them long ago.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from genie.errors import ConnectionLost, GenieError, Insufficient, Unavailable
from genie.tasks import end
from genie.tokens.sherdlock.holds import Held
from genie.tokens.sherdlock.locks import EXCLUSIVE_TOKEN, Client, Lock
from genie.tokens.token import Token

MOST = 80_000
"""Of a session's 100,000 requests; the others are for what is held and not spent yet."""


class Lingering:
    """Locks that nobody will give back, and when each ends."""

    __slots__ = ("_locks", "_releases")

    def __init__(self) -> None:
        self._locks: deque[tuple[float, Lock]] = deque()
        self._releases: set[asyncio.Task[None]] = set()

    def leave(self, locks: Iterable[Lock], until: float, now: float) -> None:
        """Their tokens are spent."""
        self._locks.extend((until, lock) for lock in locks)
        while self._locks and self._locks[0][0] <= now:
            self._locks.popleft()
        while len(self._locks) > MOST:
            task = asyncio.get_running_loop().create_task(_release(self._locks.popleft()[1]))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """End what goes on in the background."""
        for task in list(self._releases):
            await end(task)


async def _release(lock: Lock) -> None:
    with suppress(GenieError):  # it ends by its time
        await lock.release()


# -- Asking Genie for tokens, in as many requests as their names need --------

MAX_NAMES = 10_000
"""Names in one request, as the protocol has it."""
MAX_BYTES = 1_000_000
"""Of names and weights in one request: a line has 1 MiB."""
SURELY_ONE = 500
"""So many names fit into one line however long they are."""
RACES = 5
"""How often the free part of some names is asked for, while others take of it."""


class Grants:
    """Locks on tokens that were given for one transaction. `asked_at` is when the first of them was asked for."""

    __slots__ = ("_held", "amount", "asked_at", "locks", "tokens")

    def __init__(self, asked_at: float, held: Held) -> None:
        self._held = held
        self.asked_at = asked_at
        self.locks: list[Lock] = []
        self.tokens: list[Token] = []
        self.amount = 0

    def add(self, lock: Lock, asked: dict[str, Token]) -> None:
        """One more."""
        self.locks.append(lock)
        for resource in lock.resources:
            token = asked[resource]
            self.tokens.append(token)
            self.amount += token.amount

    async def give_back(self) -> None:
        """Release them. What can't be done now goes on in the background, or ends by its time."""
        if len(self.locks) == 1:
            await self._release(self.locks[0])
        elif self.locks:
            await all_of(*(self._release(lock) for lock in self.locks))

    async def _release(self, lock: Lock) -> None:
        with suppress(Unavailable, ConnectionLost):  # the client goes on trying; where it is closed, the lease ends it
            await lock.release()
            self._held.released(lock.id, [name.removeprefix(EXCLUSIVE_TOKEN) for name in lock.resources])


class Short(NamedTuple):
    """What tokens came to that did not reach the amount: what was free, and what others held."""

    free: int
    locked: int


async def take(
    client: Client, held: Held, tokens: Sequence[Token], amount: int, transaction: str, lease: float
) -> Grants | Short:
    """Lock tokens that reach the amount, the first that are free. If they don't reach it none are held.

    One request is one step. Where the names need several, what is free of the first is held while the next is asked.
    """
    grants = Grants(asyncio.get_running_loop().time(), held)
    requests = list(parts(tokens))
    free = locked = 0
    try:
        for part in requests:
            short = await _take_part(client, grants, part, amount, transaction, lease, last=part is requests[-1])
            if grants.amount >= amount:
                return grants
            free, locked = free + short.free, locked + short.locked
    except BaseException:
        await grants.give_back()
        raise
    await grants.give_back()
    return Short(free, locked)


async def take_all(
    client: Client, held: Held, tokens: Sequence[Token], transaction: str, lease: float
) -> Grants | Short:
    """Lock all of the tokens, or none. They may be worth more than a target can say, so each counts 1."""
    grants = Grants(asyncio.get_running_loop().time(), held)
    try:
        for part in parts(tokens):
            asked = {EXCLUSIVE_TOKEN + token.id: token for token in part}
            lock = await client.acquire_any(list(asked), len(asked), transaction=transaction, transaction_timeout=lease)
            grants.add(lock, asked)
    except Insufficient:
        await grants.give_back()
        return Short(0, 0)
    except BaseException:
        await grants.give_back()
        raise
    return grants


async def _take_part(
    client: Client, grants: Grants, part: Sequence[Token], amount: int, transaction: str, lease: float, *, last: bool
) -> Short:
    """Of one request's names take what is missing; if they don't have it and there are more, all that is free of them.

    Returns what they came to.
    """
    asked = {EXCLUSIVE_TOKEN + token.id: token for token in part}
    weights = [token.amount for token in part]
    target = amount - grants.amount
    short = Short(0, 0)
    for _ in range(RACES):
        try:
            lock = await client.acquire_any(
                list(asked), target, weights=weights, transaction=transaction, transaction_timeout=lease
            )
        except Insufficient as refused:
            short = Short(int(refused.free), int(refused.locked))
            if last or not short.free:
                break
            target = short.free
        else:
            grants.add(lock, asked)
            break
    return short


def parts(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    """Tokens in parts whose names fit into one request."""
    if len(tokens) <= SURELY_ONE:
        yield tokens
        return
    begin = size = 0
    for place, token in enumerate(tokens):
        bytes_ = _size(token)
        if size + bytes_ > MAX_BYTES or place - begin == MAX_NAMES:
            yield tokens[begin:place]
            begin, size = place, 0
        size += bytes_
    yield tokens[begin:]


def _size(token: Token) -> int:
    escaped = token.id.count('"') + token.id.count("\\")
    return len(token.id.encode(errors="replace")) + escaped + len(EXCLUSIVE_TOKEN) + len(str(token.amount)) + 4


async def all_of(*ways: Coroutine[Any, Any, None]) -> None:
    """Go all the ways to their ends, also if who waits for them is cancelled."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    await asyncio.shield(asyncio.gather(*tasks))
