"""What `SherdlockSelector` selects, and how it is written down for another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from genie.errors import GenieError, LockLost
from genie.tokens.errors import SelectionEnded, SpentAlready
from genie.tokens.guard import Guard
from genie.tokens.selection import Selection, State, read_checkpoint
from genie.tokens.sherdlock.grants import Grants, Lingering, all_of
from genie.tokens.sherdlock.holds import Held, Hold, Watching
from genie.tokens.sherdlock.locks import Client
from genie.tokens.store import TokenStore
from genie.tokens.token import Token


class Keeper(Protocol):
    """What a selection asks of its selector."""

    client: Client
    store: TokenStore
    lease: float
    guard: Guard
    tokens_held: Held
    watching: Watching
    lingering: Lingering

    def now(self) -> float:
        """The event loop's time."""

    def dropped(self, hold: Hold) -> None:
        """The tokens are held no longer."""

    def left(self, hold: Hold) -> None:
        """Nobody will give the tokens back: they stay held until their time is over."""

    def spent(self, ids: Sequence[str]) -> None:
        """The tokens are no part of any wallet any more."""

    def expect(self, outputs: Sequence[Token]) -> list[Token]:
        """These are about to be issued: see if they are spent at once."""

    def issued(self, expected: Sequence[Token]) -> None:
        """They are issued."""

    def expect_no_more(self, expected: Sequence[Token]) -> None:
        """They were issued or not, or nobody knows."""


class SherdlockSelection(Selection):
    """Tokens that are held in Genie, until they are spent or released, or their time is over.

    `earlier` are locks on the same tokens from before they were restored.
    """

    __slots__ = ("_earlier", "_grants", "_hold", "_keeper")

    def __init__(self, keeper: Keeper, grants: Grants, hold: Hold, asked: int, earlier: Sequence[int] = ()) -> None:
        super().__init__(keeper.store, grants.tokens, asked, hold.transaction, keeper.guard)
        self._keeper = keeper
        self._grants = grants
        self._hold = hold
        self._earlier = tuple(earlier)

    @property
    def held(self) -> bool:
        """Whether the tokens are still this selection's: its time is not over, and nobody has released its locks."""
        return (
            self._state in (State.HELD, State.SPENDING)
            and self._hold.until > self._keeper.now()
            and not any(lock.lost.is_set() for lock in self._grants.locks)
        )

    def checkpoint(self) -> dict[str, Any]:
        """Plain data (what JSON can say) by which `restore` holds these tokens again.

        SelectionEnded, where they are not held any more.
        """
        if not self.held:
            raise SelectionEnded(f"the selection of {self.transaction!r} holds nothing any more that could be restored")
        return {
            "transaction": self.transaction,
            "asked": self.asked,
            "tokens": [token.plain() for token in self.tokens],
            "locks": [*self._earlier, *(lock.id for lock in self._grants.locks)],
        }

    async def spend(self, outputs: Sequence[Token] = ()) -> None:
        """Spend the tokens and issue `outputs`, all or nothing; see `Selection.spend`.

        What others turn out to have spent is not selected any more.
        """
        self._guard.check()
        first = self._state is State.HELD and not self._earlier
        expected = self._keeper.expect(outputs)
        try:
            await super().spend(outputs)
        except SpentAlready as error:
            self._keeper.spent(error.ids)
            raise
        except BaseException:
            if self._state is State.SPENDING:
                self._keeper.left(self._hold)
            raise
        else:
            if first:  # else they may have been issued long ago, and be spent by now
                self._keeper.issued(expected)
        finally:
            self._keeper.expect_no_more(expected)

    async def _prepare_spend(self) -> None:
        """The locks must outlive the spend: from half of the lease on it begins anew."""
        keeper = self._keeper
        if not self.held:
            raise SelectionEnded(f"the selection of {self.transaction!r} is over: others may hold its tokens by now")
        if self._hold.until - keeper.now() >= keeper.lease / 2:
            return
        now = keeper.now()
        try:
            for lock in self._grants.locks:
                await lock.extend(keeper.lease)
        except LockLost as lost:
            raise SelectionEnded(f"the selection of {self.transaction!r} is over: {lost}") from lost
        self._hold.until = now + keeper.lease

    def _spent(self) -> None:
        self._keeper.left(self._hold)
        self._keeper.lingering.leave(self._grants.locks, self._hold.until, self._keeper.now())
        self._keeper.spent([token.id for token in self.tokens])

    async def _give_back(self) -> None:
        try:
            if self._earlier:
                await all_of(self._grants.give_back(), *(self._release(id) for id in self._earlier))
            else:
                await self._grants.give_back()
        finally:
            self._keeper.dropped(self._hold)

    async def _release(self, id: int) -> None:
        with suppress(GenieError):  # it may have ended long ago, and ends by its time
            await self._keeper.client.release(id)
            self._keeper.tokens_held.released(id, [token.id for token in self.tokens])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What `SherdlockSelection.checkpoint` has written down."""

    transaction: str
    asked: int
    tokens: list[Token]
    locks: list[int]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Read it."""
        return cls(*read_checkpoint(data), list(data.get("locks", ())))
