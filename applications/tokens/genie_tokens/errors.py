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

from genie import GenieError

MAX_LISTED_IDS = 10
"""Maximum number of token ids in an error message."""


class InsufficientFunds(GenieError):
    """The wallet has less than the requested amount, `target`.

    `free` is the amount that no transaction holds, `locked` is the amount that other transactions
    hold. Both count only the tokens that `where` accepts.
    """

    def __init__(self, target: int, free: int, locked: int, source: object = "") -> None:
        """`source` is the wallet or the checkpoint that the message names. The message names none
        if `source` is "".
        """
        self.target = target
        self.free = free
        self.locked = locked
        location = f" in {source}" if str(source) else ""
        locked_part = f", {locked} held by others" if locked else ""
        super().__init__(f"requested {target}{location}: {free} free{locked_part}")


class FundsLocked(InsufficientFunds):
    """The wallet has the requested amount, but other transactions hold too much of it. Retry later."""


class TooManyTokens(GenieError):
    """The requested amount, `target`, can't be reached with at most `limit` tokens: the `limit`
    largest free tokens are worth only `reached`. Consolidate tokens, or raise the limit.
    """

    def __init__(self, target: int, limit: int, reached: int) -> None:
        self.target = target
        self.limit = limit
        self.reached = reached
        super().__init__(f"requested {target} in at most {limit} tokens: the largest free ones reach {reached}")


class SelectionEnded(GenieError):
    """The tokens are no longer held: the selection was released or spent, or its time has expired.
    Select again.
    """


class SpentAlready(GenieError):
    """Another transaction has spent these tokens, or they never existed. Nothing was changed."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = tuple(ids)
        listed_ids = ", ".join(self.ids[:MAX_LISTED_IDS])
        more = f" and {len(self.ids) - MAX_LISTED_IDS} more" if len(self.ids) > MAX_LISTED_IDS else ""
        super().__init__(f"spent by another transaction, or never issued: {listed_ids}{more}")
