"""The selections of `InMemorySelector`, and their checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genie_tokens.errors import SelectionEnded, SpentAlready
from genie_tokens.guard import Guard
from genie_tokens.in_memory.follower import StoreFollower
from genie_tokens.in_memory.reservations import Reservation, ReservationTable
from genie_tokens.selection import Selection, State
from genie_tokens.store import TokenStore
from genie_tokens.token import Token


class InMemorySelection(Selection):
    """Tokens that are held in memory until they are spent or released, or their reservation expires."""

    __slots__ = ("_follower", "_reservation", "_reservations", "_restored")

    def __init__(
        self,
        store: TokenStore,
        tokens: Sequence[Token],
        target: int,
        reservation: Reservation,
        reservations: ReservationTable,
        follower: StoreFollower,
        guard: Guard,
        *,
        restored: bool = False,
    ) -> None:
        super().__init__(store, tokens, target, reservation.transaction, guard)
        self._restored = restored
        """True if the selection was created from a checkpoint: the transaction may have spent the tokens before."""
        self._reservation = reservation
        """The reservation of this selection's tokens."""
        self._reservations = reservations
        """All reservations of the selector."""
        self._follower = follower
        """Keeps the selector's tokens current. A spend reports to the follower which tokens were spent and issued."""

    @property
    def held(self) -> bool:
        """True if this selection still holds all of the tokens, and none is known to be spent."""
        self._guard.check()
        return self._reservations.is_active(self._reservation) and not self.lost

    @property
    def lost(self) -> tuple[str, ...]:
        """The ids of the selected tokens that are known to be spent although this selection holds
        them.

        If this transaction has spent the tokens, before a restart or in a spend whose reply was
        lost, `spend` has no effect. If another transaction has spent them, `spend` raises
        SpentAlready.
        """
        self._guard.check()
        unloaded_ids = self._reservations.unloaded_ids(self._reservation) if self._follower.is_ready else ()
        return (*self._reservation.spent_ids, *unloaded_ids)

    def checkpoint(self) -> dict[str, Any]:
        """Return JSON-compatible data from which `restore` creates the selection again after a
        restart. A spend whose outcome is unknown can then be retried.

        Raises SelectionEnded if the tokens are no longer held.
        """
        self._guard.check()
        if self._state not in (State.HELD, State.SPENDING) or not self._reservations.is_active(self._reservation):
            raise SelectionEnded(f"the selection of {self.transaction!r} has ended: there is nothing to restore")
        return {
            "transaction": self.transaction,
            "target": self.target,
            "tokens": [token.plain() for token in self.tokens],
        }

    async def spend(self, outputs: Sequence[Token] = ()) -> None:
        """Spend the tokens and issue `outputs`, all or nothing; see `Selection.spend`.

        Renews the reservation of the tokens. Tokens that turn out to be spent are not selected
        again. The outputs can be selected as soon as `spend` returns.
        """
        self._guard.check()
        # Only a first attempt makes its outputs selectable at once. Before a retry, the earlier attempt may have issued
        # the outputs, and they may have been spent since: then the change feed reports the unspent ones.
        is_first_attempt = self._state is State.HELD and not self._restored
        expected = outputs if is_first_attempt else ()
        self._follower.expect(expected)
        try:
            await super().spend(outputs)
            self._follower.on_issued(expected)
        except SpentAlready as error:
            for id in set(error.ids).intersection(token.id for token in self.tokens):
                self._follower.on_spent(id)
            raise
        finally:
            self._follower.stop_expecting(expected)

    async def _release(self) -> None:
        self._reservations.release(self._reservation)

    async def _prepare_spend(self) -> None:
        """Renew the reservation, so that the tokens stay held during the spend. Raises
        SelectionEnded if the reservation no longer holds all tokens.
        """
        if not self._reservations.is_active(self._reservation):
            raise SelectionEnded(
                f"the selection of {self.transaction!r} has ended: other transactions may hold its tokens"
            )
        self._reservations.renew(self._reservation)

    def _on_spent(self) -> None:
        for token in self.tokens:
            self._follower.on_spent(token.id)
        self._reservations.release(self._reservation)
