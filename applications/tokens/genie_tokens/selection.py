"""`Selection`, tokens that are held for a transaction until they are spent or released; argument
checks that both selectors share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from types import TracebackType
from typing import Any, Self

from genie_tokens.errors import SelectionEnded, SpentAlready
from genie_tokens.guard import Guard
from genie_tokens.store import TokenStore
from genie_tokens.token import Token


def read_checkpoint(data: Mapping[str, Any]) -> tuple[str, int, list[Token]]:
    """Parse a checkpoint, and return its transaction, requested amount and tokens. Raises
    ValueError if the checkpoint is invalid.
    """
    try:
        transaction, amount = data["transaction"], data["target"]
        tokens = [Token(**token) for token in data["tokens"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the checkpoint of a selection: {error!r}") from None
    has_duplicates = len({token.id for token in tokens}) < len(tokens)
    if type(transaction) is not str or type(amount) is not int or has_duplicates:
        raise ValueError("not the checkpoint of a selection: a token is contained twice, or a field has a wrong type")
    return transaction, amount, tokens


def check_limit(limit: int | None) -> int | None:
    """Return `limit`, the maximum number of tokens or None. Raises ValueError if `limit` is invalid."""
    if limit is not None and (type(limit) is not int or limit < 1):  # also rejects True
        raise ValueError(f"limit must be an integer of at least 1, not {limit!r}")
    return limit


def check_duration(seconds: float, name: str) -> float:
    """Return a duration in seconds. Raises ValueError, with the argument's `name`, if the duration
    is invalid.
    """
    if type(seconds) not in (int, float) or not seconds > 0:  # also rejects NaN
        raise ValueError(f"{name} must be a number of seconds above 0, not {seconds!r}")
    return seconds


class State(Enum):
    """The state of a selection. SPENDING: a spend is in progress, or its outcome is unknown."""

    HELD = auto()
    SPENDING = auto()
    SPENT = auto()
    RELEASED = auto()


class Selection(ABC):
    """Tokens that together reach the requested amount, `target`, and are held for a transaction.

    An async context manager that releases the tokens if they were not spent. A selection belongs to
    its selector's event loop: its methods raise RuntimeError in other threads.
    """

    __slots__ = ("_guard", "_state", "_store", "target", "tokens", "transaction")

    def __init__(self, store: TokenStore, tokens: Sequence[Token], target: int, transaction: str, guard: Guard) -> None:
        self._store = store
        self._guard = guard
        """Rejects calls from threads that may not use the selection."""
        self._state = State.HELD
        self.tokens = tuple(tokens)
        self.target = target
        """The requested amount."""
        self.transaction = transaction

    @property
    def amount(self) -> int:
        """The sum of the tokens; at least `target`."""
        return sum(token.amount for token in self.tokens)

    @property
    def change(self) -> int:
        """The sum of the tokens beyond `target`."""
        return self.amount - self.target

    @property
    @abstractmethod
    def held(self) -> bool:
        """True if this selection still holds the tokens."""

    @abstractmethod
    def checkpoint(self) -> dict[str, Any]:
        """Return JSON-compatible data from which `selector.restore` creates the selection again, in
        any process.
        """

    @abstractmethod
    async def _release(self) -> None:
        """Stop holding the tokens."""

    @abstractmethod
    async def _prepare_spend(self) -> None:
        """Make sure that the tokens stay held during a spend. Raises SelectionEnded if the tokens
        are no longer held.
        """

    @abstractmethod
    def _on_spent(self) -> None:
        """Update the selector after the store has spent the tokens."""

    async def spend(self, outputs: Sequence[Token] = ()) -> None:
        """Spend the tokens and issue `outputs`, all or nothing.

        Raises SelectionEnded if the tokens are no longer held. Raises SpentAlready if another
        transaction has spent any of the tokens without holding them. Raises ValueError if the
        outputs can't be issued. After any other error of the store the outcome is unknown, and the
        same spend can be retried.
        """
        self._guard.check()
        self._check_active()
        await self._prepare_spend()
        self._check_active()  # the selection may have been released during the await
        is_retry = self._state is State.SPENDING
        self._state = State.SPENDING
        try:
            await self._store.spend(self.tokens, transaction=self.transaction, outputs=outputs)
        except SpentAlready:  # nothing was changed
            self._state = State.HELD
            raise
        except ValueError:  # nothing was changed now, but an earlier attempt may have succeeded
            self._state = State.SPENDING if is_retry else State.HELD
            raise
        self._state = State.SPENT
        self._on_spent()

    def _check_active(self) -> None:
        """Raise SelectionEnded if the tokens were spent or released before."""
        if self._state not in (State.HELD, State.SPENDING):
            raise SelectionEnded(f"the selection of {self.transaction!r} was {self._state.name.lower()} before")

    async def release(self) -> None:
        """Stop holding the tokens. Has no effect on tokens that were released, spent or lost
        before.

        Tokens whose spend has an unknown outcome stay held until their lease or reservation
        expires.
        """
        self._guard.check()
        if self._state is State.HELD:
            self._state = State.RELEASED
            await self._release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.release()
