"""Joining small change: many tokens that spending has split are spent into few.

The smallest free tokens of a wallet are picked, up to a number. They are to be spent into outputs of equal amounts (to
the smallest unit), which together are worth as much. Whose key the outputs have, and what issuer, is the caller's to
say: who joins tokens of different issuers or notaries can tell them apart by `where`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from genie.tokens.guard import Guard
from genie.tokens.in_memory.buckets import Entry
from genie.tokens.in_memory.claims import Claim, Claims
from genie.tokens.in_memory.follow import Follower
from genie.tokens.in_memory.selection import InMemorySelection
from genie.tokens.store import TokenStore
from genie.tokens.token import MAX_AMOUNT, Token


class Consolidation(InMemorySelection):
    """Small change that is held to be joined. Spend it into outputs of `amounts`, the largest first."""

    __slots__ = ("amounts",)

    def __init__(
        self,
        store: TokenStore,
        tokens: Sequence[Token],
        into: int,
        claim: Claim,
        claims: Claims,
        follower: Follower,
        guard: Guard,
        *,
        restored: bool = False,
    ) -> None:
        asked = sum(token.amount for token in tokens)
        super().__init__(store, tokens, asked, claim, claims, follower, guard, restored=restored)
        self.amounts = split(self.amount, into)

    def checkpoint(self) -> dict[str, Any]:
        """Plain data by which `restore` gives this consolidation again; see `InMemorySelection.checkpoint`."""
        return super().checkpoint() | {"into": len(self.amounts)}


def split(total: int, into: int) -> tuple[int, ...]:
    """A total in so many parts that differ by one at most, the largest first."""
    part, rest = divmod(total, into)
    return (part + 1,) * rest + (part,) * (into - rest)


def smallest(entries: Iterable[Entry], into: int, at_most: int) -> list[Entry]:
    """The smallest, up to `at_most`, that `into` outputs can be worth together; none if they are not more than `into`:
    nothing would be joined then.
    """
    chosen: list[Entry] = []
    total = 0
    for entry in heapq.nsmallest(at_most, entries, key=lambda entry: entry.amount):
        total += entry.amount
        if total > into * MAX_AMOUNT:
            break
        chosen.append(entry)
    return chosen if len(chosen) > into else []
