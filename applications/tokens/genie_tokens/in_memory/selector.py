"""The in-memory selector: selects tokens from a copy of the store, for wallets that only one
process uses.

`TokenPicker` reserves tokens without an await, so that each selection is atomic. It reads the store
only if some of the chosen tokens are not in memory. The tokens reserved so far stay reserved
meanwhile, and are released if the selection fails: the store raises, the caller is cancelled, or
the wallet's other tokens do not suffice.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from genie_tokens.errors import FundsLocked, InsufficientFunds, TooManyTokens
from genie_tokens.guard import Guard, ThreadGuard
from genie_tokens.in_memory.follower import StoreFollower
from genie_tokens.in_memory.reservations import (
    Bucket,
    Buckets,
    Reservation,
    ReservationTable,
    TokenEntry,
    largest,
    reserve_entries,
)
from genie_tokens.in_memory.selection import InMemorySelection
from genie_tokens.selection import check_duration, check_limit, read_checkpoint
from genie_tokens.store import TokenStore
from genie_tokens.token import MAX_AMOUNT, Token, Wallet, check_amount, make_wallet

Where = Callable[[Token], bool]

READ_BATCH = 500
"""Tokens requested from the store in one call."""


class TokenPicker:
    """Chooses and reserves tokens, and loads from the store the tokens that are not in memory."""

    __slots__ = ("_buckets", "_guard", "_reservations", "_store")

    def __init__(self, reservations: ReservationTable, store: TokenStore, guard: Guard) -> None:
        self._guard = guard
        self._reservations = reservations
        self._buckets = reservations.buckets
        self._store = store

    async def pick(
        self, reservation: Reservation, wallet: Wallet, target: int, where: Where | None, limit: int | None
    ) -> list[Token]:
        """Reserve free tokens of a wallet that together reach `target`, and return the tokens: at
        most `limit` tokens, and only tokens that `where` accepts.

        Raises InsufficientFunds, FundsLocked or TooManyTokens if that is impossible. After any
        exception nothing stays reserved.
        """
        try:
            while True:
                if where is None:
                    self._reserve_any(reservation, wallet, target, limit)
                else:
                    await self._reserve_where(reservation, wallet, target, where, limit)
                tokens = cached_tokens(reservation.entries)
                if tokens is None:
                    tokens = await self.load(reservation)
                    if sum(token.amount for token in tokens) < target:
                        # Some tokens turned out to be spent: try again without them.
                        self._reservations.release(reservation)
                        continue
                return tokens
        except BaseException:
            self._reservations.release(reservation)
            raise

    async def load(self, reservation: Reservation) -> list[Token]:
        """Return the unspent tokens of a reservation, and renew the reservation.

        Tokens that are not in memory are read from the store, in batches. Tokens that turn out to
        be spent are removed from memory and from the reservation.
        """
        loaded: dict[str, Token] = {}
        for batch in _batches([entry for entry in reservation.entries if entry.token is None]):
            loaded |= await self._read(batch)
        tokens = []
        for entry in reservation.held_entries:
            token = entry.token or loaded.get(entry.id)
            if token is None:
                self._buckets.remove(entry.id)
            else:
                self._buckets.cache_token(entry, token)
                tokens.append(token)
        reservation.entries = list(reservation.held_entries)  # without the spent tokens
        self._reservations.renew(reservation)
        return tokens

    async def _read(self, entries: Sequence[TokenEntry]) -> dict[str, Token]:
        """Read the tokens of entries from the store, and return them by id. Spent tokens are absent."""
        self._guard.check_can_wait()
        return await self._store.get([entry.id for entry in entries])

    # -- without a predicate ------------------------------------------------------------------------------

    def _reserve_any(self, reservation: Reservation, wallet: Wallet, target: int, limit: int | None) -> None:
        """Reserve free tokens of a wallet, in any order, until their sum reaches `target`. If that
        takes more than `limit` tokens, reserve the largest free tokens instead.

        Raises InsufficientFunds if the wallet is worth less than `target`, FundsLocked if other
        transactions hold too much of it, and TooManyTokens if `limit` tokens can't reach `target`.
        """
        bucket = self._buckets.find(wallet)
        if bucket is None:
            raise InsufficientFunds(target, free=0, locked=0, source=wallet)
        if bucket.free_amount < target:
            locked = bucket.reserved_amount - self._reservations.held_by(reservation.transaction, bucket)
            raise _shortfall_error(target, bucket.free_amount, locked, wallet)
        reservation.entries = bucket.reserve(target, reservation)
        if limit is not None and len(reservation.entries) > limit:
            self._reservations.release(reservation)
            locked_entries = self._reserved_by_others(bucket, reservation)
            self._reserve_largest(
                reservation,
                free=list(bucket.free_entries()),
                locked=locked_entries,
                target=target,
                limit=limit,
                wallet=wallet,
            )
        self._reservations.renew(reservation)

    def _reserve_largest(
        self,
        reservation: Reservation,
        *,
        free: list[TokenEntry],
        locked: list[TokenEntry],
        target: int,
        limit: int,
        wallet: Wallet,
    ) -> None:
        """Reserve the largest `free` entries: as few as reach `target`, and at most `limit`.

        If `limit` free entries can't reach `target`, raises FundsLocked if `limit` entries could
        once other transactions release the `locked` entries, and TooManyTokens otherwise.
        """
        chosen, reached = largest(free, target, limit)
        if reached < target and largest([*free, *locked], target, limit)[1] >= target:
            raise FundsLocked(target, free=_total(free), locked=_total(locked), source=wallet)
        if reached < target:
            raise TooManyTokens(target, limit, reached)
        reserve_entries(chosen, reservation)
        reservation.entries = chosen

    def _reserved_by_others(self, bucket: Bucket, reservation: Reservation) -> list[TokenEntry]:
        """Return the entries of a bucket that other transactions have reserved."""
        return [
            entry
            for entry, holder in self._reservations.reserved_in(bucket)
            if holder.transaction != reservation.transaction
        ]

    # -- with a predicate -------------------------------------------------------------------------------------

    async def _reserve_where(
        self, reservation: Reservation, wallet: Wallet, target: int, where: Where, limit: int | None
    ) -> None:
        """Reserve free tokens of a wallet that `where` accepts, until their sum reaches `target`.
        Tokens that are not in memory are read from the store only if the tokens in memory do not
        suffice.

        If that takes more than `limit` tokens, reserve the largest accepted tokens instead. Raises
        InsufficientFunds, FundsLocked or TooManyTokens if the target can't be reached.
        """
        bucket = self._buckets.find(wallet)
        if bucket is None:
            raise InsufficientFunds(target, free=0, locked=0, source=wallet)
        self._reservations.renew(reservation)
        uncached = bucket.reserve_where(target, reservation, where, reservation.entries)
        reached = _total(reservation.held_entries)
        for batch in _batches(uncached):
            if reached >= target:
                break
            loaded = await self._read(batch)
            self._reserve_matching(reservation, batch, loaded=loaded, where=where, target=target - reached)
            reached = _total(reservation.held_entries)
        if reached < target:
            raise await self._shortfall_error_where(reservation, bucket, target, free=reached, where=where)
        if limit is not None and len(reservation.entries) > limit:
            # Start again with all accepted tokens, to find the largest.
            self._reservations.release(reservation)
            matching = await self.matching(bucket.free_entries(), where)
            free = [entry for entry in matching if entry.reservation is None]
            if _total(free) < target:
                raise await self._shortfall_error_where(reservation, bucket, target, free=_total(free), where=where)
            locked = await self.matching(self._reserved_by_others(bucket, reservation), where)
            free = [entry for entry in free if entry.reservation is None]  # others may have reserved some meanwhile
            self._reserve_largest(reservation, free=free, locked=locked, target=target, limit=limit, wallet=wallet)
        self._reservations.renew(reservation)

    def _reserve_matching(
        self,
        reservation: Reservation,
        entries: Iterable[TokenEntry],
        *,
        loaded: dict[str, Token],
        where: Where,
        target: int,
    ) -> None:
        """Reserve entries until their sum reaches `target`: entries that are still free, and whose
        tokens `where` accepts. `loaded` are the entries' tokens, by id, which were just read from
        the store.
        """
        missing = target
        for entry in entries:
            if missing <= 0:
                break
            token = loaded.get(entry.id)
            if token is not None and entry.reservation is None and where(token):
                reserve_entries((entry,), reservation)
                reservation.entries.append(entry)
                missing -= entry.amount

    async def _shortfall_error_where(
        self, reservation: Reservation, bucket: Bucket, target: int, *, free: int, where: Where
    ) -> InsufficientFunds:
        """Return the error for a wallet whose free tokens are worth only `free`, which is less than
        `target`. Counts only tokens that `where` accepts.

        The error is FundsLocked if the tokens that other transactions hold would suffice in
        addition, else InsufficientFunds.
        """
        locked = await self.matching(self._reserved_by_others(bucket, reservation), where)
        return _shortfall_error(target, free, _total(locked), bucket.wallet)

    async def matching(self, entries: Iterable[TokenEntry], where: Where) -> list[TokenEntry]:
        """Return the entries whose tokens `where` accepts.

        Tokens that are not in memory are read from the store. During this wait other calls may
        reserve or spend the tokens, so the caller must check again that the returned entries are
        free.
        """
        accepted: list[TokenEntry] = []
        uncached: list[TokenEntry] = []
        for entry in entries:
            if entry.token is None:
                uncached.append(entry)
            elif where(entry.token):
                accepted.append(entry)
        for batch in _batches(uncached):
            loaded = await self._read(batch)
            accepted += [entry for entry in batch if entry.id in loaded and where(loaded[entry.id])]
        return accepted


def cached_tokens(entries: Iterable[TokenEntry]) -> list[Token] | None:
    """Return the tokens of entries, or None if some of the tokens are not in memory."""
    tokens = []
    for entry in entries:
        if entry.token is None:
            return None
        tokens.append(entry.token)
    return tokens


def _batches(entries: Sequence[TokenEntry]) -> Iterator[Sequence[TokenEntry]]:
    return (entries[start : start + READ_BATCH] for start in range(0, len(entries), READ_BATCH))


def _total(entries: Iterable[TokenEntry]) -> int:
    return sum(entry.amount for entry in entries)


def _shortfall_error(target: int, free: int, locked: int, wallet: Wallet) -> InsufficientFunds:
    """Return FundsLocked if the free and the locked amount together reach `target`, else
    InsufficientFunds.
    """
    error_type = FundsLocked if free + locked >= target else InsufficientFunds
    return error_type(target, free=free, locked=locked, source=wallet)


# -- consolidation ------------------------------------------------------------------------------------------


class Consolidation(InMemorySelection):
    """Small tokens that are held to be joined into fewer, larger tokens: spend them with outputs of
    these `amounts`, the largest first.
    """

    __slots__ = ("amounts",)

    def __init__(
        self,
        store: TokenStore,
        tokens: Sequence[Token],
        into: int,
        reservation: Reservation,
        reservations: ReservationTable,
        follower: StoreFollower,
        guard: Guard,
        *,
        restored: bool = False,
    ) -> None:
        super().__init__(
            store=store,
            tokens=tokens,
            target=sum(token.amount for token in tokens),
            reservation=reservation,
            reservations=reservations,
            follower=follower,
            guard=guard,
            restored=restored,
        )
        self.amounts = split(self.amount, into)
        """The amounts of the `into` outputs to spend the tokens with, the largest first."""

    def checkpoint(self) -> dict[str, Any]:
        """Return JSON-compatible data for `restore`; see `InMemorySelection.checkpoint`."""
        return super().checkpoint() | {"into": len(self.amounts)}


def split(total: int, into: int) -> tuple[int, ...]:
    """Divide an amount into `into` parts that differ by at most one. The larger parts are first."""
    quotient, remainder = divmod(total, into)
    return (quotient + 1,) * remainder + (quotient,) * (into - remainder)


def smallest(entries: Iterable[TokenEntry], into: int, at_most: int) -> list[TokenEntry]:
    """Return the smallest entries, at most `at_most`, to be joined into `into` outputs.

    The sum of the entries is limited to what the outputs can hold: each output has at most the
    amount `MAX_AMOUNT`. Returns an empty list unless there are more entries than outputs, because
    joining them would be pointless.
    """
    chosen: list[TokenEntry] = []
    total = 0
    for entry in heapq.nsmallest(at_most, entries, key=lambda entry: entry.amount):
        total += entry.amount
        if total > into * MAX_AMOUNT:
            break
        chosen.append(entry)
    return chosen if len(chosen) > into else []


# -- the selector -------------------------------------------------------------------------------------------


class InMemorySelector:
    """Selects tokens from an in-memory copy of a store's unspent tokens, which follows the store's
    change feed.

    An async context manager. It belongs to the event loop in which it is started: RuntimeError if
    another thread uses it. Threads use `genie_tokens.sync.InMemorySelector`.

    Args:
        store: The tokens of all wallets.
        auto_unlock: Seconds after which a selection that was neither spent nor released expires, and
            its tokens are free again. Calls can override it.
        max_tokens: Maximum number of tokens in memory. Of the others only ids and amounts are kept;
            they are read from the store when they are selected, or passed to a `where`.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        auto_unlock: float = 300.0,
        max_tokens: int | None = None,
    ) -> None:
        guard = ThreadGuard("Threads use genie_tokens.sync.InMemorySelector.")
        self._set_up(store, auto_unlock=auto_unlock, max_tokens=max_tokens, guard=guard)

    @classmethod
    def guarded_by(cls, guard: Guard, store: TokenStore, *, auto_unlock: float, max_tokens: int | None) -> Self:
        """Create a selector that is protected by `guard`, for a facade that can be used from
        several threads. The default guard confines a selector to one thread.
        """
        selector = cls.__new__(cls)
        cls._set_up(selector, store, auto_unlock=auto_unlock, max_tokens=max_tokens, guard=guard)
        return selector

    def _set_up(self, store: TokenStore, *, auto_unlock: float, max_tokens: int | None, guard: Guard) -> None:
        """Initialize the selector; `auto_unlock` is in seconds. Called by `__init__` and by
        `guarded_by`.
        """
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, not {max_tokens!r}")
        self._store = store
        self._auto_unlock = check_duration(auto_unlock, "auto_unlock")
        self._guard = guard
        self._reservations = ReservationTable(Buckets(max_tokens), guard.time)
        self._follower = StoreFollower(store, self._reservations)
        self._picker = TokenPicker(self._reservations, store, guard)

    @property
    def store_error(self) -> Exception | None:
        """The store's last error, or None once all tokens were loaded after the error. Until then
        selections use an outdated copy.
        """
        return self._follower.store_error

    async def start(self) -> None:
        """Load the tokens from the store, and begin to follow the store's changes. Raises the
        store's error if this first load fails.
        """
        if self._follower.is_running:  # then the follower raises RuntimeError below
            self._guard.check()
        else:
            self._guard.bind()
        await self._follower.start()

    async def close(self) -> None:
        """Stop following the store. No new selections are possible; existing ones can still be
        spent and released.
        """
        self._guard.check()
        await self._follower.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def select(
        self,
        amount: int,
        *,
        token_type: str,
        identifier: str,
        transaction: str,
        owner: str | None = None,
        account: str | None = None,
        where: Where | None = None,
        limit: int | None = None,
        auto_unlock: float | None = None,
    ) -> InMemorySelection:
        """Select and hold free tokens of one wallet that together reach the amount, all or none.

        Waits until the store is loaded, and after that only for tokens that are not in memory.

        Args:
            amount: Minimum sum of the tokens, in their smallest unit.
            token_type: The type of the tokens, such as "Fiat".
            identifier: The kind of token within this type, such as "GBP".
            transaction: The transaction that will spend the tokens.
            owner: Select from the wallet of this owner's key. Give either `owner` or `account`.
            account: Select from the wallet of this account, which has the tokens of several keys.
            where: A predicate that accepts or rejects a token. It must have no side effects.
            limit: Maximum number of tokens to select.
            auto_unlock: Seconds for which the tokens are held; by default the `auto_unlock` of the selector.

        Raises:
            InsufficientFunds: The wallet has less than the amount.
            FundsLocked: The wallet has enough, but other transactions hold too much of it.
            TooManyTokens: The amount can't be reached in `limit` tokens.
        """
        check_amount(amount)
        check_limit(limit)
        reservation = Reservation(
            transaction, self._auto_unlock if auto_unlock is None else self._duration(auto_unlock)
        )
        wallet = make_wallet(owner=owner, account=account, token_type=token_type, identifier=identifier)
        if not self._follower.is_ready:
            self._guard.check_can_wait()
            await self._follower.wait_loaded()
        self._reservations.expire()  # reads the guard's clock, which rejects calls of other threads
        tokens = await self._picker.pick(reservation, wallet, target=amount, where=where, limit=limit)
        return InMemorySelection(
            store=self._store,
            tokens=tokens,
            target=amount,
            reservation=reservation,
            reservations=self._reservations,
            follower=self._follower,
            guard=self._guard,
        )

    async def consolidate(
        self,
        *,
        token_type: str,
        identifier: str,
        transaction: str,
        owner: str | None = None,
        account: str | None = None,
        where: Where | None = None,
        into: int = 1,
        at_most: int = 100,
        auto_unlock: float | None = None,
    ) -> Consolidation | None:
        """Select and hold the smallest free tokens of a wallet, at most `at_most`, to join them
        into `into` outputs.

        Returns None if at most `into` tokens are free, because there is nothing to join. `where`
        should accept only tokens that can be joined with each other, such as the tokens of one
        issuer or one notary. `auto_unlock` is the same as in `select`.
        """
        self._guard.check()
        if not 1 <= into < at_most:
            raise ValueError(f"into must be at least 1 and less than at_most, not {into!r} and {at_most!r}")
        reservation = Reservation(transaction, self._duration(auto_unlock))
        wallet = make_wallet(owner=owner, account=account, token_type=token_type, identifier=identifier)
        if not self._follower.is_ready:
            self._guard.check_can_wait()
            await self._follower.wait_loaded()
        try:
            while True:
                self._reservations.expire()
                bucket = self._reservations.buckets.find(wallet)
                free = list(bucket.free_entries()) if bucket is not None else []
                if where is not None:
                    free = [entry for entry in await self._picker.matching(free, where) if entry.reservation is None]
                reservation.entries = smallest(free, into, at_most)
                if not reservation.entries:
                    return None
                reserve_entries(reservation.entries, reservation)
                self._reservations.renew(reservation)
                tokens = cached_tokens(reservation.entries) or await self._picker.load(reservation)
                if len(tokens) > into:
                    return self._consolidation(tokens, into=into, reservation=reservation)
                # Too many tokens turned out to be spent: try again without them.
                self._reservations.release(reservation)
        except BaseException:
            self._reservations.release(reservation)
            raise

    async def restore(self, data: Mapping[str, Any], *, auto_unlock: float | None = None) -> InMemorySelection:
        """Create a selection again from its `checkpoint`, and hold its tokens for as long as a new
        selection would.

        Call `restore` before `start`, for each selection that was active when the process ended, so
        that no other call selects the tokens first. Tokens that the same transaction holds are
        transferred to the restored selection. Raises FundsLocked, and holds nothing, if another
        transaction holds any of the tokens. Once the store is loaded, the selection's `lost` lists
        the tokens that were spent meanwhile.
        """
        self._guard.check()
        transaction, amount, tokens = read_checkpoint(data)
        reservation = Reservation(transaction, self._duration(auto_unlock))
        into = data.get("into")  # only in the checkpoint of a consolidation
        if into is not None and not (type(into) is int and 1 <= into < len(tokens)):
            raise ValueError(f"into must be an integer from 1 and below the number of tokens, not {into!r}")
        unavailable = set(self._reservations.restore(reservation, tokens))
        if unavailable:
            locked = sum(token.amount for token in tokens if token.id in unavailable)
            total = sum(token.amount for token in tokens)
            source = f"the checkpoint of {reservation.transaction!r}"
            raise FundsLocked(total, free=total - locked, locked=locked, source=source)
        if into is not None:
            return self._consolidation(tokens, into=into, reservation=reservation, restored=True)
        return InMemorySelection(
            store=self._store,
            tokens=tokens,
            target=amount,
            reservation=reservation,
            reservations=self._reservations,
            follower=self._follower,
            guard=self._guard,
            restored=True,
        )

    def _consolidation(
        self, tokens: Sequence[Token], *, into: int, reservation: Reservation, restored: bool = False
    ) -> Consolidation:
        return Consolidation(
            store=self._store,
            tokens=tokens,
            into=into,
            reservation=reservation,
            reservations=self._reservations,
            follower=self._follower,
            guard=self._guard,
            restored=restored,
        )

    def _duration(self, auto_unlock: float | None) -> float:
        return self._auto_unlock if auto_unlock is None else check_duration(auto_unlock, "auto_unlock")
