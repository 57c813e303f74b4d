"""Tokens that were selected, and are held until they are spent or given back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from types import TracebackType
from typing import Any, Self

from genie.tokens.errors import SelectionEnded, SpentAlready
from genie.tokens.store import TokenStore
from genie.tokens.token import Token


class State(Enum):
    """Where a selection is in its life."""

    HELD = auto()
    SPENDING = auto()
    SPENT = auto()
    RELEASED = auto()


class Selection(ABC):
    """Tokens that together reach the amount `asked`, held for a transaction. An async context manager: what was not
    spent when its block is left is released.
    """

    __slots__ = ("_state", "_store", "asked", "tokens", "transaction")

    def __init__(self, store: TokenStore, tokens: Sequence[Token], asked: int, transaction: str) -> None:
        self._store = store
        self._state = State.HELD
        self.tokens = tuple(tokens)
        self.asked = asked
        self.transaction = transaction

    @property
    def amount(self) -> int:
        """What the tokens are worth together; at least what was asked for."""
        return sum(token.amount for token in self.tokens)

    @property
    def change(self) -> int:
        """What they are worth beyond what was asked for."""
        return self.amount - self.asked

    @property
    @abstractmethod
    def held(self) -> bool:
        """Whether the tokens are still this selection's."""

    @abstractmethod
    def checkpoint(self) -> dict[str, Any]:
        """Plain data by which `selector.restore` holds these tokens again, in another process too."""

    @abstractmethod
    async def _give_back(self) -> None:
        """Hold the tokens no longer."""

    @abstractmethod
    async def _prepare_spend(self) -> None:
        """See to it that the tokens stay held while they are spent; SelectionEnded where they are not any more."""

    @abstractmethod
    def _spent(self) -> None:
        """They are spent."""

    async def spend(self, outputs: Sequence[Token] = ()) -> None:
        """Spend the tokens and issue `outputs`, all or nothing.

        SelectionEnded, where they are not held any more; SpentAlready, where somebody has spent them without holding
        them; ValueError, where the outputs can't be issued. If the store fails otherwise the outcome is not known: it can be
        said again.
        """
        self._check_not_ended()
        await self._prepare_spend()
        self._check_not_ended()  # it may have been released meanwhile
        self._state = State.SPENDING
        try:
            await self._store.spend(self.tokens, transaction=self.transaction, outputs=outputs)
        except (SpentAlready, ValueError):  # nothing was changed
            self._state = State.HELD
            raise
        self._state = State.SPENT
        self._spent()

    def _check_not_ended(self) -> None:
        if self._state not in (State.HELD, State.SPENDING):
            raise SelectionEnded(f"the selection of {self.transaction!r} was {self._state.name.lower()} before")

    async def release(self) -> None:
        """Give the tokens back. A second time does nothing, and neither does it for what was spent or is lost.

        Tokens of which it is not known whether they were spent stay held until their time is over.
        """
        if self._state is State.HELD:
            self._state = State.RELEASED
            await self._give_back()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.release()
