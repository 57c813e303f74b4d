"""The selections of `SherdlockSelector`, and their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from genie import GenieError, LockLost
from genie_tokens.errors import SelectionEnded, SpentAlready
from genie_tokens.guard import Guard
from genie_tokens.selection import Selection, State, read_checkpoint
from genie_tokens.sherdlock.cache import WalletCaches
from genie_tokens.sherdlock.grants import Grants, SpentLocks, gather_shielded
from genie_tokens.sherdlock.holds import LockSubscription, LockTracker, Reservation
from genie_tokens.sherdlock.locks import LockClient
from genie_tokens.store import TokenStore
from genie_tokens.token import Token


@dataclass(frozen=True, slots=True)
class SelectorContext:
    """The parts of a selector that its searches and its selections share. `lease` is in seconds."""

    client: LockClient
    store: TokenStore
    guard: Guard
    lease: float
    tracker: LockTracker
    caches: WalletCaches
    subscription: LockSubscription
    spent_locks: SpentLocks

    def now(self) -> float:
        """Return the event loop's time in seconds. Raises RuntimeError in another thread."""
        return self.guard.time()


class SherdlockSelection(Selection):
    """Tokens that are locked in Genie until they are spent or released, or their lease expires.

    `earlier_locks`: for a restored selection, the ids of the locks that the original selection had
    on the same tokens.
    """

    __slots__ = ("_context", "_earlier_locks", "_grants", "_reservation")

    def __init__(
        self,
        context: SelectorContext,
        grants: Grants,
        reservation: Reservation,
        target: int,
        earlier_locks: Sequence[int] = (),
    ) -> None:
        super().__init__(context.store, grants.tokens, target, reservation.transaction, context.guard)
        self._context = context
        self._grants = grants
        """The locks on the tokens."""
        self._reservation = reservation
        """Keeps the tokens from other selections of this selector."""
        self._earlier_locks = tuple(earlier_locks)
        """Ids of the original selection's locks on the tokens. Empty if this selection was not
        restored.
        """

    @property
    def held(self) -> bool:
        """True if this selection still holds the tokens: its lease has not expired, and none of its
        locks was lost.
        """
        return (
            self._state in (State.HELD, State.SPENDING)
            and self._reservation.expires_at > self._context.now()
            and not any(lock.lost.is_set() for lock in self._grants.locks)
        )

    def checkpoint(self) -> dict[str, Any]:
        """Return JSON-compatible data from which `selector.restore` creates the selection again, in
        any replica.

        Raises SelectionEnded if the tokens are no longer held.
        """
        if not self.held:
            raise SelectionEnded(f"the selection of {self.transaction!r} has ended: there is nothing to restore")
        return {
            "transaction": self.transaction,
            "target": self.target,
            "tokens": [token.plain() for token in self.tokens],
            "locks": [*self._earlier_locks, *(lock.id for lock in self._grants.locks)],
        }

    async def spend(self, outputs: Sequence[Token] = ()) -> None:
        """Spend the tokens and issue `outputs`, all or nothing; see `Selection.spend`.

        If the first attempt succeeds, the outputs can be selected at once. Tokens that turn out to
        be spent are removed from the wallet's cache. If the outcome is unknown, the locks stay until
        they expire.
        """
        self._guard.check()
        caches = self._context.caches
        is_first_attempt = self._state is State.HELD and not self._earlier_locks
        expected = caches.expect(outputs)
        try:
            await super().spend(outputs)
        except SpentAlready as error:
            self._remove_spent(error.ids)
            raise
        except BaseException:
            if self._state is State.SPENDING:
                self._keep_until_expiry()
            raise
        else:
            # After a retry, the earlier attempt may have issued the outputs, and they may have been spent since.
            if is_first_attempt:
                caches.on_issued(expected)
        finally:
            caches.stop_expecting(expected)

    async def _prepare_spend(self) -> None:
        """Extend the locks if less than half of the lease is left, so that the locks outlast the
        spend. Raises SelectionEnded if the tokens are no longer held.
        """
        context = self._context
        if not self.held:
            raise SelectionEnded(
                f"the selection of {self.transaction!r} has ended: other transactions may hold its tokens"
            )
        now = context.now()
        if self._reservation.expires_at - now >= context.lease / 2:
            return
        try:
            for lock in self._grants.locks:
                await lock.extend(context.lease)
        except LockLost as error:
            raise SelectionEnded(f"the selection of {self.transaction!r} has ended: {error}") from error
        self._check_active()  # the selection may have been released meanwhile
        context.tracker.renew(self._reservation, now + context.lease)

    def _on_spent(self) -> None:
        """Keep the locks until they expire, so that replicas that have not read the spend yet skip
        the tokens. Remove the tokens from the caches.
        """
        self._keep_until_expiry()
        context = self._context
        context.spent_locks.add(self._grants.locks, self._reservation.expires_at, context.now())
        self._remove_spent([token.id for token in self.tokens])

    def _keep_until_expiry(self) -> None:
        self._context.tracker.keep_until_expiry(self._reservation, self._context.now())

    def _remove_spent(self, ids: Sequence[str]) -> None:
        for id in ids:
            self._context.caches.on_spent(id)

    async def _release(self) -> None:
        """Release the locks of this selection. A restored selection also releases the locks of the
        original selection.
        """
        try:
            if self._earlier_locks:
                await gather_shielded(self._grants.release(), *map(self._release_earlier, self._earlier_locks))
            else:
                await self._grants.release()
        finally:
            self._context.tracker.drop(self._reservation)

    async def _release_earlier(self, lock_id: int) -> None:
        """Release a lock of the original selection, and ignore errors."""
        with suppress(GenieError):  # if the release fails the lock expires
            await self._context.client.release(lock_id)
            self._context.tracker.on_released(lock_id, [token.id for token in self.tokens])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The parsed data of `SherdlockSelection.checkpoint`. `locks` are ids of locks."""

    transaction: str
    target: int
    tokens: list[Token]
    locks: list[int]

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Parse the data of a checkpoint. Raises ValueError if the data is not a checkpoint."""
        return cls(*read_checkpoint(data), list(data.get("locks", ())))
