"""Tokens that were selected, and are held until they are spent or given back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from types import TracebackType
from typing import Any, Self

from genie.tokens.errors import SelectionEnded, SpentAlready
from genie.tokens.guard import Guard
from genie.tokens.store import TokenStore
from genie.tokens.token import Token


def read_checkpoint(data: Mapping[str, Any]) -> tuple[str, int, list[Token]]:
    """The transaction, what was asked for and the tokens of a checkpoint; ValueError, if it is none."""
    try:
        transaction, asked = data["transaction"], data["asked"]
        tokens = [Token(**token) for token in data["tokens"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is not what a selection's checkpoint() gave: {error!r}") from None
    if type(transaction) is not str or type(asked) is not int or len({token.id for token in tokens}) < len(tokens):
        raise ValueError(
            "this is not what a selection's checkpoint() gave: a token is there twice, or a field is wrong"
        )
    return transaction, asked, tokens


def check_limit(limit: int | None) -> int | None:
    """How many tokens a selection may be, if that is limited; else a ValueError."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"limit must be an integer of at least 1, not {limit!r}")
    return limit


def check_duration(seconds: float, name: str) -> float:
    """A duration in seconds, if it is one; else a ValueError that names the argument."""
    if type(seconds) not in (int, float) or not seconds > 0:
        raise ValueError(f"{name} must be a number of seconds above 0, not {seconds!r}")
    return seconds


class State(Enum):
    """Where a selection is in its life."""

    HELD = auto()
    SPENDING = auto()
    SPENT = auto()
    RELEASED = auto()


class Selection(ABC):
    """Tokens that together reach the amount `asked`, held for a transaction. An async context manager: what was not
    spent when its block is left is released.

    It belongs to its selector's event loop: RuntimeError where it is used from another thread.
    """

    __slots__ = ("_guard", "_state", "_store", "asked", "tokens", "transaction")

    def __init__(self, store: TokenStore, tokens: Sequence[Token], asked: int, transaction: str, guard: Guard) -> None:
        self._store = store
        self._guard = guard
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
    async def _release(self) -> None:
        """Hold the tokens no longer."""

    @abstractmethod
    async def _prepare_spend(self) -> None:
        """See to it that the tokens stay held while they are spent; SelectionEnded where they are not any more."""

    @abstractmethod
    def _on_spent(self) -> None:
        """They are spent."""

    async def spend(self, outputs: Sequence[Token] = ()) -> None:
        """Spend the tokens and issue `outputs`, all or nothing.

        SelectionEnded, where they are not held any more; SpentAlready, where somebody has spent them without holding
        them; ValueError, where the outputs can't be issued. If the store fails otherwise the outcome is not known: it can be
        said again.
        """
        self._guard.check()
        self._check_not_ended()
        await self._prepare_spend()
        self._check_not_ended()  # it may have been released meanwhile
        again, self._state = self._state is State.SPENDING, State.SPENDING
        try:
            await self._store.spend(self.tokens, transaction=self.transaction, outputs=outputs)
        except SpentAlready:  # nothing was changed
            self._state = State.HELD
            raise
        except ValueError:  # nor here; but what is said again may have been carried out before
            self._state = State.SPENDING if again else State.HELD
            raise
        self._state = State.SPENT
        self._on_spent()

    def _check_not_ended(self) -> None:
        if self._state not in (State.HELD, State.SPENDING):
            raise SelectionEnded(f"the selection of {self.transaction!r} was {self._state.name.lower()} before")

    async def release(self) -> None:
        """Give the tokens back. A second time does nothing, and neither does it for what was spent or is lost.

        Tokens of which it is not known whether they were spent stay held until their time is over.
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
