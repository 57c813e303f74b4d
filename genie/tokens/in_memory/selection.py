"""What `InMemorySelector` selects, and how it is written down for a restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genie.tokens.errors import SelectionEnded, SpentAlready
from genie.tokens.guard import Guard
from genie.tokens.in_memory.claims import Claim, Claims
from genie.tokens.in_memory.follower import Follower
from genie.tokens.selection import Selection, State
from genie.tokens.store import TokenStore
from genie.tokens.token import Token


class InMemorySelection(Selection):
    """Tokens that are held in memory, until they are spent or released, or their time is over.

    `restored`: its transaction may have spent them before.
    """

    __slots__ = ("_claim", "_claims", "_follower", "_restored")

    def __init__(
        self,
        store: TokenStore,
        tokens: Sequence[Token],
        asked: int,
        claim: Claim,
        claims: Claims,
        follower: Follower,
        guard: Guard,
        *,
        restored: bool = False,
    ) -> None:
        super().__init__(store, tokens, asked, claim.transaction, guard)
        self._restored = restored
        self._claim = claim
        self._claims = claims
        self._follower = follower

    @property
    def held(self) -> bool:
        """Whether all of the tokens are still this selection's, and none is known to be spent."""
        self._guard.check()
        return self._claims.holds(self._claim) and not self.lost

    @property
    def lost(self) -> tuple[str, ...]:
        """Ids of those of the tokens that are known to be spent, while this selection holds them.

        It may be that this transaction has spent them, before a restart or when the answer of the store was lost: then
        `spend` has no effect and says nothing. If it was another, `spend` raises SpentAlready.
        """
        self._guard.check()
        missing = self._claims.missing(self._claim) if self._follower.ready else ()
        return (*self._claim.gone, *missing)

    def checkpoint(self) -> dict[str, Any]:
        """Plain data (what JSON can say) by which `restore` holds these tokens again.

        SelectionEnded, where they are not held any more. A spend whose outcome is not known can be said again after a
        restart.
        """
        self._guard.check()
        if self._state not in (State.HELD, State.SPENDING) or not self._claims.holds(self._claim):
            raise SelectionEnded(f"the selection of {self.transaction!r} holds nothing any more that could be restored")
        return {
            "transaction": self.transaction,
            "asked": self.asked,
            "tokens": [token.plain() for token in self.tokens],
        }

    async def spend(self, outputs: Sequence[Token] = ()) -> None:
        """Spend the tokens and issue `outputs`, all or nothing; see `Selection.spend`.

        From here on the tokens are held for as long again as at first. What others turn out to have spent is not
        selected any more. What is issued can be selected as soon as this returns.
        """
        self._guard.check()
        # Otherwise they may have been issued long ago, and be spent by now: the store tells.
        issued = () if self._restored or self._state is not State.HELD else outputs
        self._follower.expect(issued)
        try:
            await super().spend(outputs)
            self._follower.issued_here(issued)
        except SpentAlready as error:
            for id in set(error.ids).intersection(token.id for token in self.tokens):
                self._follower.spent_here(id)
            raise
        finally:
            self._follower.expect_no_more(issued)

    async def _release(self) -> None:
        self._claims.end(self._claim)

    async def _prepare_spend(self) -> None:
        if not self._claims.holds(self._claim):
            raise SelectionEnded(f"the selection of {self.transaction!r} is over: others may hold its tokens by now")
        self._claims.hold(self._claim)

    def _on_spent(self) -> None:
        for token in self.tokens:
            self._follower.spent_here(token.id)
        self._claims.end(self._claim)
