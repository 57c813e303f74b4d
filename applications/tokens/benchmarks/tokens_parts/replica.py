"""A replica in a separate process: on request it selects from a wallet as fast as it can for some
time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection

import genie
from genie_tokens import FundsLocked, MemoryTokenStore, SherdlockSelector, Token

WALLET = 1_000
"""Number of tokens in each wallet."""

TOKENS = 5
"""Number of tokens in a selection: each has the amount 1."""

AT_A_TIME = 4
"""Number of concurrent selections of a replica."""

LEASE_S = 60.0

SHARED = "shared"
"""The owner of the wallet from which all replicas select."""

KIND = {"token_type": "Fiat", "identifier": "GBP"}


@dataclass(frozen=True, slots=True)
class Work:
    """A request: select by one of the `WAYS` from the wallet of an owner, for some seconds."""

    way: str
    owner: str
    seconds: float


@dataclass(slots=True)
class Done:
    """The result: the number of selections, of requested tokens that others held, and of selections
    that failed because of that.
    """

    selections: int = 0
    collisions: int = 0
    failed: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0


def replica(number: int, port: int, owners: list[str], pipe: Connection) -> None:
    """Report that the replica is ready, then execute the requests from the pipe and send their
    results, until None is received.
    """
    asyncio.run(_serve(number, port, owners, pipe))


async def _serve(number: int, port: int, owners: list[str], pipe: Connection) -> None:
    store, ids = MemoryTokenStore(), itertools.count()
    for owner in owners:
        await store.add([Token(f"{owner}-{i}", owner, amount=1, **KIND) for i in range(WALLET)])
    async with (
        genie.connect("127.0.0.1", port) as client,
        SherdlockSelector(client, store, lease=LEASE_S, backoff=0.05) as selector,
    ):
        chance = random.Random(number)
        ways: dict[str, Callable[[str, Done], Coroutine[None, None, None]]] = {
            "sherdlock": lambda owner, done: _select(selector, owner, f"tx-{number}-{next(ids)}", done),
            "one by one": lambda owner, done: _one_by_one(client, owner, f"tx-{number}-{next(ids)}", chance, done),
        }
        pipe.send(None)
        while (work := await asyncio.to_thread(pipe.recv)) is not None:
            done, begin, cpu = Done(), time.perf_counter(), time.process_time()
            before = selector.collisions
            async with asyncio.TaskGroup() as tasks:
                for _ in range(AT_A_TIME):
                    tasks.create_task(_go_on(ways[work.way], work, begin + work.seconds, done))
            done.seconds, done.cpu_s = time.perf_counter() - begin, time.process_time() - cpu
            done.collisions += selector.collisions - before
            pipe.send(done)


async def _go_on(way: Callable[[str, Done], Coroutine[None, None, None]], work: Work, end: float, done: Done) -> None:
    while time.perf_counter() < end:
        await way(work.owner, done)


async def _select(selector: SherdlockSelector, owner: str, name: str, done: Done) -> None:
    """Select as the library does: one round trip for all tokens."""
    try:
        selection = await selector.select(TOKENS, owner=owner, transaction=name, **KIND)
    except FundsLocked:
        done.failed += 1
        return
    await selection.release()
    done.selections += 1


async def _one_by_one(client: genie.Client, owner: str, name: str, chance: random.Random, done: Done) -> None:
    """Select as the original algorithm does: lock token by token in random order without waiting,
    and back off if too many are held.
    """
    held: list[genie.Lock] = []
    try:
        for number in chance.sample(range(WALLET), WALLET):
            lock = await client.try_acquire(
                f"exclusive:token/{owner}-{number}", transaction=name, transaction_timeout=LEASE_S
            )
            if lock is None:
                done.collisions += 1
            else:
                held.append(lock)
                if len(held) == TOKENS:
                    done.selections += 1
                    return
        done.failed += 1
        await asyncio.sleep(chance.uniform(0, 0.05))
    finally:
        for lock in held:
            await lock.release()
