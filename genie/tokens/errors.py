"""What can go wrong with tokens.

GenieError
├── InsufficientFunds         a wallet has not got what was asked for
│   └── FundsLocked           it has, but others hold too much of it
├── TooManyTokens             it has, but not in as few tokens as were allowed
├── SelectionEnded            a selection was released, spent or lost before
└── SpentAlready              another transaction has spent a token first
"""

from __future__ import annotations

from collections.abc import Sequence

from genie.errors import GenieError


class InsufficientFunds(GenieError):
    """`asked` was to be selected. `free` is what nobody holds, `locked` what others hold (of what `where` lets through)."""

    def __init__(self, asked: int, free: int, locked: int, of: object = "") -> None:
        self.asked, self.free, self.locked = asked, free, locked
        where = f" in {of}" if str(of) else ""
        held = f", others hold {locked}" if locked else ""
        super().__init__(f"{asked} was asked for{where}: {free} is free{held}")


class FundsLocked(InsufficientFunds):
    """There is enough, but others hold too much of it just now. Ask again later."""


class TooManyTokens(GenieError):
    """`asked` can't be had in `limit` tokens: the largest that are free reach `reached`. Consolidate, or allow more."""

    def __init__(self, asked: int, limit: int, reached: int) -> None:
        self.asked, self.limit, self.reached = asked, limit, reached
        super().__init__(f"{asked} was asked for in at most {limit} tokens: the largest that are free reach {reached}")


class SelectionEnded(GenieError):
    """What was selected is not held any more: it was released, spent, or its time is over. Select again."""


class SpentAlready(GenieError):
    """Another transaction has spent these tokens first (or they never were). Nothing was changed."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = tuple(ids)
        named = ", ".join(self.ids[:10]) + (f" and {len(self.ids) - 10} more" if len(self.ids) > 10 else "")  # noqa: PLR2004
        super().__init__(f"spent by another transaction, or never issued: {named}")
