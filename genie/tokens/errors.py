"""The errors of token selection.

GenieError
├── InsufficientFunds         the wallet has less than the requested amount
│   └── FundsLocked           the wallet has enough, but other transactions hold too much of it
├── TooManyTokens             the wallet has enough, but not in as few tokens as allowed
├── SelectionEnded            the selection was released, spent or lost before
└── SpentAlready              another transaction has spent a token first
"""

from __future__ import annotations

from collections.abc import Sequence

from genie.errors import GenieError


class InsufficientFunds(GenieError):
    """The wallet has less than the requested amount, `target`.

    `free` is the amount that no transaction holds, `locked` the amount that other transactions
    hold. Both count only the tokens that `where` accepts.
    """

    def __init__(self, target: int, free: int, locked: int, source: object = "") -> None:
        self.target, self.free, self.locked = target, free, locked
        location = f" in {source}" if str(source) else ""
        held = f", {locked} held by others" if locked else ""
        super().__init__(f"requested {target}{location}: {free} free{held}")


class FundsLocked(InsufficientFunds):
    """The wallet has enough, but other transactions hold too much of it. Retry later."""


class TooManyTokens(GenieError):
    """The requested amount, `target`, can't be reached in `limit` tokens: the sum of the largest
    free ones is `reached`. Consolidate tokens, or allow more.
    """

    def __init__(self, target: int, limit: int, reached: int) -> None:
        self.target, self.limit, self.reached = target, limit, reached
        super().__init__(f"requested {target} in at most {limit} tokens: the largest free ones reach {reached}")


class SelectionEnded(GenieError):
    """The tokens are no longer held: the selection was released or spent, or its time has expired.
    Select again.
    """


class SpentAlready(GenieError):
    """Another transaction has spent these tokens, or they never existed. Nothing was changed."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = tuple(ids)
        listed = ", ".join(self.ids[:10]) + (f" and {len(self.ids) - 10} more" if len(self.ids) > 10 else "")  # noqa: PLR2004
        super().__init__(f"spent by another transaction, or never issued: {listed}")
