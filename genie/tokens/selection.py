"""Selections: tokens that are held until they are spent or released."""

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
    """Return the transaction, the requested amount and the tokens of a checkpoint. ValueError if it
    is invalid.
    """
    try:
        transaction, asked = data["transaction"], data["asked"]
        tokens = [Token(**token) for token in data["tokens"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the checkpoint of a selection: {error!r}") from None
    if type(transaction) is not str or type(asked) is not int or len({token.id for token in tokens}) < len(tokens):
        raise ValueError("not the checkpoint of a selection: a token is contained twice, or a field has a wrong type")
    return transaction, asked, tokens


def check_limit(limit: int | None) -> int | None:
    """Return the maximal number of tokens. ValueError if it is invalid."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"limit must be an integer of at least 1, not {limit!r}")
    return limit


def check_duration(seconds: float, name: str) -> float:
    """Return a duration in seconds. ValueError, which names the argument, if it is invalid."""
    if type(seconds) not in (int, float) or not seconds > 0:
        raise ValueError(f"{name} must be a number of seconds above 0, not {seconds!r}")
    return seconds


class State(Enum):
    """The state of a selection. SPENDING: a spend is in progress, or its outcome is unknown."""

    HELD = auto()
    SPENDING = auto()
    SPENT = auto()
    RELEASED = auto()


class Selection(ABC):
    """Tokens that together reach the amount `asked`, held for a transaction.

    An async context manager that releases the tokens if they were not spent. It belongs to its
    selector's event loop: RuntimeError if another thread uses it.
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
        """The sum of the tokens; at least `asked`."""
        return sum(token.amount for token in self.tokens)

    @property
    def change(self) -> int:
        """The sum of the tokens beyond `asked`."""
        return self.amount - self.asked

    @property
    @abstractmethod
    def held(self) -> bool:
        """Whether this selection still holds the tokens."""

    @abstractmethod
    def checkpoint(self) -> dict[str, Any]:
        """Return JSON-compatible data by which `selector.restore` holds these tokens again, in any
        process.
        """

    @abstractmethod
    async def _release(self) -> None:
        """Stop holding the tokens."""

    @abstractmethod
    async def _prepare_spend(self) -> None:
        """Make sure that the tokens stay held during the spend. SelectionEnded if they are not held
        any more.
        """

    @abstractmethod
    def _on_spent(self) -> None:
        """The store has spent the tokens."""

    async def spend(self, outputs: Sequence[Token] = ()) -> None:
        """Spend the tokens and issue `outputs`, all or nothing.

        SelectionEnded if the tokens are not held any more; SpentAlready if another transaction has
        spent some without holding them; ValueError if the outputs can't be issued. After any other
        error of the store the outcome is unknown, and the same spend can be repeated.
        """
        self._guard.check()
        self._check_not_ended()
        await self._prepare_spend()
        self._check_not_ended()  # possibly released during the await
        again, self._state = self._state is State.SPENDING, State.SPENDING
        try:
            await self._store.spend(self.tokens, transaction=self.transaction, outputs=outputs)
        except SpentAlready:  # nothing was changed
            self._state = State.HELD
            raise
        except ValueError:  # nor here; but an earlier attempt may have succeeded
            self._state = State.SPENDING if again else State.HELD
            raise
        self._state = State.SPENT
        self._on_spent()

    def _check_not_ended(self) -> None:
        if self._state not in (State.HELD, State.SPENDING):
            raise SelectionEnded(f"the selection of {self.transaction!r} was {self._state.name.lower()} before")

    async def release(self) -> None:
        """Release the tokens. Idempotent; has no effect on spent or lost tokens.

        Tokens whose spend has an unknown outcome stay held until their time expires.
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
