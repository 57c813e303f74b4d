"""Selections of three tokens in the memory of one process, from wallets of different sizes.

Times are measured by the wall clock of a quiet machine: the only thread waits for nothing.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from scale_parts.report import Row, building, in_turns, medians, progress, ratio

from genie_tokens import InMemorySelector, MemoryTokenStore, Token

FEW = 100_000
MANY = 1_000_000
STEPS = 4_000
"""Selections that are held at once in a round, before they are released in random order."""
DEEP = 30_000
"""So that they hold nine tenths of the smaller wallet."""
ROUNDS = 21
DEEP_ROUNDS = 5
ISSUERS = 10
THREE = {"amount": 300, "token_type": "Fiat", "identifier": "GBP", "transaction": "tx"}
ALICE = {"owner": "alice", **THREE}
ACCOUNT = {"account": "household", **THREE}
ISSUED = {**ALICE, "where": lambda token: token.issuer == "issuer-3"}


def in_memory() -> Iterator[Row]:
    """In memory: selecting 3 tokens of one wallet, with 100,000 tokens in it and with 1,000,000."""
    with asyncio.Runner() as runner:
        progress("100,000 and 1,000,000 tokens are loaded")
        with building():
            few, many = (runner.run(_selector_of(count)) for count in (FEW, MANY))

        def holding(selector: InMemorySelector, how: dict[str, Any], count: int) -> Callable[[], float]:
            return lambda: runner.run(_hold(selector, how, count))

        def one_by_one(selector: InMemorySelector) -> Callable[[], float]:
            return lambda: runner.run(_one_by_one(selector))

        alone, base, mine = in_turns(ROUNDS, one_by_one(few), holding(few, ALICE, STEPS), holding(many, ALICE, STEPS))
        yield Row(
            "selections of 3 tokens out of 100,000, with 4,000 held at once",
            1e6 / statistics.median(base),
            unit="/s",
            goal=30_000,
            at_least=True,
            digits=0,
            note=f"{1e6 / statistics.median(alone):,.0f} /s where each is released before the next",
        )
        yield Row(
            "a selection out of 1,000,000 tokens, to one out of 100,000",
            ratio(mine, base),
            goal=1.3,
            note=medians("us with 100,000 and with 1,000,000", base, mine),
        )
        base, mine = in_turns(DEEP_ROUNDS, holding(few, ALICE, DEEP), holding(many, ALICE, DEEP))
        yield Row(
            "… with 30,000 held at once",
            ratio(mine, base),
            goal=1.3,
            note=medians("us with 100,000 and with 1,000,000", base, mine),
        )
        base, account, issued = in_turns(
            ROUNDS, holding(few, ALICE, STEPS // 4), holding(few, ACCOUNT, STEPS // 4), holding(few, ISSUED, STEPS // 4)
        )
        yield Row(
            "a selection by account, to one by key",
            ratio(account, base),
            note=medians("us by key and by account", base, account),
        )
        yield Row(
            "a selection of one of ten issuers' tokens, to one of any",
            ratio(issued, base),
            note=medians("us of any and of the issuer", base, issued),
        )
        for selector in (few, many):
            runner.run(selector.close())


async def _selector_of(count: int) -> InMemorySelector:
    """Create a selector, and load a wallet of this number of tokens, in random order in memory."""
    store = MemoryTokenStore()
    tokens = [
        Token(f"token-{number}", "alice", "Fiat", "GBP", 100, "household", issuer=f"issuer-{number % ISSUERS}")
        for number in range(count)
    ]
    random.shuffle(tokens)
    await store.add(tokens)
    selector = InMemorySelector(store)
    await selector.start()
    return selector


async def _hold(selector: InMemorySelector, how: dict[str, Any], count: int) -> float:
    """Hold this number of selections at once, then release them in random order; return the
    microseconds for each.
    """
    order = random.sample(range(count), count)
    began = time.thread_time()
    held = [await selector.select(**how) for _ in range(count)]
    for place in order:
        await held[place].release()
    return (time.thread_time() - began) / count * 1e6


async def _one_by_one(selector: InMemorySelector) -> float:
    """Select and release repeatedly; return the microseconds for each."""
    began = time.thread_time()
    for _ in range(STEPS):
        async with await selector.select(**ALICE):
            pass
    return (time.thread_time() - began) / STEPS * 1e6
