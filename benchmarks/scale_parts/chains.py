"""Transactions that wait in chains, and a new request that may close a cycle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from genie.core import LockManager, Release, Request
from scale_parts.report import Missing, Row, building, in_turns, medians, ratio

CHAINS = 100
LINKS = 100
ROUNDS = 151
LONG_MS = 2_000_000_000


def chains() -> Iterator[Row]:
    """10,000 transactions wait in 100 chains; a new one requests the end of a chain."""
    with building():
        manager = _build()
    names = [f"newcomer-{chain}" for chain in range(CHAINS)]
    for chain, name in enumerate(names):
        _ask(manager, f"own/{chain}", name)
    anonymous, named = in_turns(ROUNDS, _asking(manager, [None] * CHAINS), _asking(manager, names))
    yield Row(
        "a named request that holds and asks again, to an anonymous one",
        ratio(named, anonymous),
        goal=1.5,
        note=medians("us for an anonymous and for a named one, nobody waits for either", anonymous, named),
    )
    owned, through = in_turns(ROUNDS // 10, _asking(manager, [None]), _asking(manager, ["root-1"]))
    yield Row(
        f"… with {LINKS} waiting for it and {LINKS} ahead of it: the search walks both",
        ratio(through, owned),
        note=medians("us for an anonymous and for this one", owned, through),
    )
    yield _visits(manager)


def _build() -> LockManager:
    """Build the chains. Transaction k of a chain holds resource k and waits for k-1; the first
    waits for the resource of its chain's root.
    """
    manager = LockManager()
    for chain in range(CHAINS):
        _ask(manager, f"{chain}/root", f"root-{chain}")
        for link in range(LINKS):
            _ask(manager, f"{chain}/{link}", f"{chain}-{link}")
            _ask(manager, f"{chain}/{link - 1}" if link else f"{chain}/root", f"{chain}-{link}")
    assert len(manager.table.waiting) == CHAINS * LINKS, "all wait"  # noqa: S101 - what is measured
    return manager


def _ask(manager: LockManager, name: str, transaction: str | None) -> Request:
    request = Request(
        exclusive=(name,), transaction=transaction, queue_timeout_ms=LONG_MS, transaction_timeout_ms=LONG_MS
    )
    manager.step(request, 0)
    return request


def _end(chain: int) -> str:
    return f"{chain}/{LINKS - 1}"


class Looked(dict[str, Any]):
    """A mapping of transactions that records which of them were looked up: a cycle search looks up
    each one that it visits.
    """

    def __init__(self, transactions: dict[str, Any]) -> None:
        super().__init__(transactions)
        self.names: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.names.append(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value like `dict.get`, and record the key."""
        self.names.append(name)
        return super().get(name, default)


def _visits(manager: LockManager) -> Row:
    """Let the root of one chain request the end of another, so that a chain is before and another
    one after it; return the number of visited transactions.
    """
    table: Any = manager.table
    table.transactions = looked = Looked(table.transactions)
    request = _ask(manager, _end(1), "root-0")
    visits = list(looked.names)
    table.transactions = dict(looked)
    manager.step(Release(request.id), 0)
    reached = {"root-0", "root-1"} | {f"{chain}-{link}" for chain in (0, 1) for link in range(LINKS)}
    strangers = len(set(visits) - reached)
    seen = len(set(visits) & reached)
    if seen < LINKS:  # no search from either end is over sooner, so it went by another way than this counts
        raise Missing("the owners that the search visits can't be counted in this way any more")
    return Row(
        "owners that the search visits, to owners that can be reached",
        (seen + strangers) / len(reached),
        goal=1,
        note=f"{seen} of the {len(reached)} that are reached and {strangers} of the {CHAINS * LINKS + CHAINS - len(reached)}"
        f" others; {len(visits)} lookups in all",
    )


def _asking(manager: LockManager, names: Sequence[str | None]) -> Callable[[], float]:
    """Return the microseconds of each request for the end of a chain, one for each name. The
    requests are cancelled after the measurement.
    """

    def run() -> float:
        asked = [
            Request(exclusive=(_end(chain),), transaction=name, queue_timeout_ms=LONG_MS)
            for chain, name in enumerate(names)
        ]
        step = manager.step
        began = time.perf_counter()
        for request in asked:
            step(request, 0)
        took_s = time.perf_counter() - began
        for request in asked:
            assert request.id in manager.table.waiting, "it waits"  # noqa: S101 - what is measured
            step(Release(request.id), 0)
        return took_s / len(asked) * 1e6

    return run
