"""Eight threads that select in the memory of one process, from one wallet of 100,000 tokens.

Rates are by the wall clock: the threads wait for the mutex and for the interpreter lock. Each round
checks that no token is selected again before it is released.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from scale_parts.report import Row, building, progress

from genie_tokens import InsufficientFunds, MemoryTokenStore, Token
from genie_tokens.sync import InMemorySelection, InMemorySelector

TOKENS = 100_000
THREADS = 8
ROUNDS = 5
STEPS = 2_000
"""Selections of each thread in a round in which each selection is released before the next one."""
ALONE = 1_000
"""Selections of the main thread in a round."""
GOAL = 10_000
THREE = {"amount": 300, "owner": "alice", "token_type": "Fiat", "identifier": "GBP"}


def threads() -> Iterator[Row]:
    """From threads: selecting 3 tokens, with eight threads on one wallet of 100,000 tokens."""
    progress("100,000 tokens are loaded for threads")
    with building():
        store = MemoryTokenStore()
        asyncio.run(store.add(_tokens()))
        selector = InMemorySelector(store)
        selector.start()
    with closing(selector), ThreadPoolExecutor(THREADS) as pool:
        held, returned, alone = [], [], []
        for _ in range(ROUNDS):
            held.append(_take_everything(selector, pool))
            returned.append(_rate(pool, lambda number: _one_by_one(selector, number, STEPS)))
            began = time.perf_counter()
            alone.append(_one_by_one(selector, THREADS, ALONE) / (time.perf_counter() - began))
    yield Row(
        "selections of 3 tokens by 8 threads, until all 100,000 are held",
        statistics.median(held),
        unit="/s",
        goal=GOAL,
        at_least=True,
        digits=0,
        note=f"no token twice; {statistics.median(returned):,.0f} /s where each is released before the next",
    )
    yield Row("selections of the main thread, each released before the next", statistics.median(alone), "/s", digits=0)


def _tokens() -> list[Token]:
    tokens = [Token(f"token-{number}", "alice", "Fiat", "GBP", 100, "household") for number in range(TOKENS)]
    random.shuffle(tokens)
    return tokens


def _rate(pool: ThreadPoolExecutor, work: Callable[[int], int]) -> float:
    """Run `work`, which returns a count, in all threads at the same time; return the total per
    second.
    """
    begin = threading.Barrier(THREADS + 1)

    def one(number: int) -> int:
        begin.wait()
        return work(number)

    results = [pool.submit(one, number) for number in range(THREADS)]
    begin.wait()
    began = time.perf_counter()
    return sum(result.result() for result in results) / (time.perf_counter() - began)


def _take_everything(selector: InMemorySelector, pool: ThreadPoolExecutor) -> float:
    taken: list[list[InMemorySelection]] = [[] for _ in range(THREADS)]

    def take(number: int) -> int:
        mine, name = taken[number], f"tx-{number}"
        try:
            while True:
                mine.append(selector.select(transaction=name, **THREE))
        except InsufficientFunds:
            return len(mine)

    rate = _rate(pool, take)
    selections = [selection for mine in taken for selection in mine]
    ids = [token.id for selection in selections for token in selection.tokens]
    if len(set(ids)) < len(ids) or len(ids) != TOKENS // 3 * 3:
        raise AssertionError(f"{len(ids)} tokens were selected, {len(set(ids))} different ones, of {TOKENS}")
    random.shuffle(selections)
    list(pool.map(InMemorySelection.release, selections))
    return rate


def _one_by_one(selector: InMemorySelector, number: int, count: int) -> int:
    name = f"tx-{number}"
    for _ in range(count):
        with selector.select(transaction=name, **THREE):
            pass
    return count
