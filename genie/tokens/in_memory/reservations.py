"""Unspent tokens in memory, and the reservations of them: who holds which, and until when.

A reservation is an object, and each token's entry refers to the reservation that holds it. A late
call of an expired reservation (a release, a spend) can therefore not affect tokens that another one
has reserved since.

Reservations of the same duration expire in the order in which they were made. They form one queue
for each duration. Nothing waits for tokens, so expiry needs no timers: the clock is checked when
tokens are selected.

`Buckets` index the tokens by wallet. Each bucket has a stack of free entries, from which reserving
takes time proportional to the tokens reserved, not to those in the wallet.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Final

from genie.tokens.token import Token, Wallet, wallets_of

MAX_IDLE_QUEUES = 16
"""Empty queues are kept up to this number: the next reservation is likely to have the same
duration.
"""


class Reservation:
    """Some tokens, held for a transaction for `duration` seconds from each `renew`.

    `deadline` is when it expires, by the table's clock; -inf once it has ended. `pending_ids` are
    tokens that were reserved before the store has reported them. `superseded`: a newer reservation
    of the transaction has taken over some of its tokens.
    """

    __slots__ = ("deadline", "duration", "entries", "pending_ids", "superseded", "transaction")

    def __init__(self, transaction: str, duration: float) -> None:
        self.transaction = transaction
        self.duration = duration
        self.deadline = -math.inf
        self.entries: list[TokenEntry] = []
        self.pending_ids: tuple[str, ...] = ()
        self.superseded = False

    @property
    def owned(self) -> Iterator[TokenEntry]:
        """The entries that this reservation still holds."""
        return (entry for entry in self.entries if entry.reservation is self)

    @property
    def spent_ids(self) -> Iterator[str]:
        """Ids of the tokens that were spent while this reservation held them."""
        return (entry.id for entry in self.entries if entry.reservation is SPENT)


class ReservationTable:
    """All reservations, and the tokens of which they are made. `clock` returns seconds.

    The store's follower adds and removes tokens here. A token that was reserved before it is added
    becomes part of its reservation when it is.
    """

    __slots__ = ("_by_transaction", "_next_deadline", "_pending", "_queues", "buckets", "clock")

    def __init__(self, buckets: Buckets, clock: Callable[[], float]) -> None:
        self.buckets = buckets
        self.clock = clock
        self._queues: dict[float, OrderedDict[Reservation, None]] = {}
        """The reservations by duration, the first to expire first."""
        self._by_transaction: dict[str, set[Reservation]] = {}
        self._pending: dict[str, Reservation] = {}
        self._next_deadline = math.inf
        """No reservation expires earlier."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def renew(self, reservation: Reservation) -> None:
        """Start the time of a reservation, or start it again."""
        reservation.deadline = deadline = self.clock() + reservation.duration
        queue = self._queues.get(reservation.duration)
        if queue is None:
            queue = self._queues[reservation.duration] = OrderedDict()
        queue[reservation] = None
        queue.move_to_end(reservation)
        if deadline < self._next_deadline:  # noqa: PLR1730 - min() takes a function call
            self._next_deadline = deadline
        self._by_transaction.setdefault(reservation.transaction, set()).add(reservation)

    def release(self, reservation: Reservation) -> None:
        """Free the tokens that the reservation still holds, and end it. Idempotent."""
        entries, reservation.entries = reservation.entries, []
        release_entries(entries, reservation)
        for id in self.missing(reservation):
            del self._pending[id]
        reservation.pending_ids = ()
        if reservation.deadline != -math.inf:
            reservation.deadline = -math.inf
            queue = self._queues[reservation.duration]
            del queue[reservation]
            if not queue and len(self._queues) > MAX_IDLE_QUEUES:
                del self._queues[reservation.duration]
            same = self._by_transaction[reservation.transaction]
            same.discard(reservation)
            if not same:
                del self._by_transaction[reservation.transaction]

    def is_active(self, reservation: Reservation) -> bool:
        """Whether it has not expired, and holds all of its tokens but the spent ones."""
        return self.clock() < reservation.deadline and not reservation.superseded

    def missing(self, reservation: Reservation) -> list[str]:
        """Return the reserved ids that the store has not reported, or has reported spent."""
        return [id for id in reservation.pending_ids if self._pending.get(id) is reservation]

    def expire(self) -> None:
        """End the reservations that have expired. Must be called before each selection."""
        now = self.clock()
        if now < self._next_deadline:
            return
        for queue in list(self._queues.values()):
            for reservation in list(takewhile(lambda reservation: reservation.deadline <= now, queue)):
                self.release(reservation)
        self._next_deadline = min(
            (next(iter(queue)).deadline for queue in self._queues.values() if queue), default=math.inf
        )

    def reserved_in(self, bucket: Bucket) -> Iterator[tuple[TokenEntry, Reservation]]:
        """Iterate over the reserved entries of a bucket with their reservations. Visits every
        reservation.
        """
        for queue in self._queues.values():
            for reservation in queue:
                for entry in reservation.owned:
                    if entry.owner is bucket or entry.account is bucket:
                        yield entry, reservation

    def held_by(self, transaction: str, bucket: Bucket) -> int:
        """Return the amount that a transaction holds in a bucket."""
        return sum(
            entry.amount
            for reservation in self._by_transaction.get(transaction, ())
            for entry in reservation.owned
            if entry.owner is bucket or entry.account is bucket
        )

    # -- restored reservations --------------------------------------------------------------------------------

    def restore(self, reservation: Reservation, tokens: Iterable[Token]) -> list[str]:
        """Reserve tokens by id that were held before a restart, whether the store has reported them
        or not.

        Takes over what the same transaction holds of them. Returns the ids that other transactions
        hold; if there are any nothing is changed.
        """
        self.expire()
        ids = [token.id for token in tokens]
        others = [id for id in ids if not self._is_available_to(reservation.transaction, id)]
        if others:
            return others
        reservation.pending_ids = tuple(id for id in ids if self.buckets.entry(id) is None)
        for id in reservation.pending_ids:
            self._supersede(self._pending.get(id))
            self._pending[id] = reservation
        for entry in filter(None, map(self.buckets.entry, ids)):
            if entry.reservation is None:
                reserve_entries([entry], reservation)
            else:
                self._supersede(entry.reservation)
                entry.reservation = reservation
            reservation.entries.append(entry)
        self.renew(reservation)
        return []

    def _supersede(self, holder: object) -> None:
        if isinstance(holder, Reservation):
            holder.superseded = True

    def _is_available_to(self, transaction: str, id: str) -> bool:
        entry = self.buckets.entry(id)
        holder = self._pending.get(id) if entry is None else entry.reservation
        return not isinstance(holder, Reservation) or holder.transaction == transaction

    # -- changes of the store ---------------------------------------------------------------------------------

    def add(self, token: Token) -> None:
        """A token was issued, or loaded. It may be present already."""
        entry = self.buckets.add(token)
        reservation = self._pending.pop(token.id, None) if entry is not None and self._pending else None
        if reservation is not None and entry is not None:
            reservation.entries.append(entry)
            reserve_entries([entry], reservation)

    def remove(self, id: str) -> bool:
        """A token was spent. Returns whether it was present."""
        return self.buckets.remove(id)

    def ids(self) -> Iterable[str]:
        """The ids of all tokens."""
        return self.buckets.ids()


# -- buckets ------------------------------------------------------------------------------------------------

SPENT: Final = object()
"""The `reservation` of an entry whose token was spent."""

BY_OWNER = 1
BY_ACCOUNT = 2
IN_ALL_STACKS = BY_OWNER | BY_ACCOUNT

MAX_STALE_ENTRIES = 64
"""Entries of spent tokens that a stack may contain, beyond the number of its tokens, before it is
swept.
"""


class TokenEntry:
    """An unspent token. `reservation` is what holds it: None, a reservation, or `SPENT`.

    `token` is None if only the id and the amount are kept in memory. `stacked_in` are the flags of
    the buckets on whose stacks the entry is.
    """

    __slots__ = ("account", "amount", "id", "owner", "reservation", "stacked_in", "token")

    def __init__(self, token: Token, owner: Bucket, account: Bucket | None) -> None:
        self.id = token.id
        self.amount = token.amount
        self.token: Token | None = token
        self.owner = owner
        self.account = account
        self.reservation: object | None = None
        self.stacked_in = 0

    def push(self) -> None:
        """Push it onto the stacks of its buckets: it is free."""
        if not self.stacked_in & BY_OWNER:
            self.owner.stack.append(self)
        if self.account is not None and not self.stacked_in & BY_ACCOUNT:
            self.account.stack.append(self)
        self.stacked_in = IN_ALL_STACKS

    def add_reserved(self, amount: int) -> None:
        """Add to the reserved amount of its buckets."""
        self.owner.reserved += amount
        if self.account is not None:
            self.account.reserved += amount


class Bucket:
    """The tokens of one wallet: their number, total and reserved amount, and the stack of free
    entries.
    """

    __slots__ = ("count", "flag", "reserved", "stack", "total", "wallet")

    def __init__(self, wallet: Wallet) -> None:
        self.wallet = wallet
        self.flag = BY_OWNER if wallet.account is None else BY_ACCOUNT
        self.stack: list[TokenEntry] = []
        self.count = 0
        self.total = 0
        self.reserved = 0

    @property
    def free(self) -> int:
        """The amount that is not reserved."""
        return self.total - self.reserved

    def reserve(self, asked: int, reservation: object) -> list[TokenEntry]:
        """Reserve free entries until they reach `asked`. The bucket must have as much free."""
        stack, others = self.stack, ~self.flag
        reserved: list[TokenEntry] = []
        reached = 0
        while reached < asked:
            entry = stack.pop()
            entry.stacked_in &= others
            if entry.reservation is None:
                entry.reservation = reservation
                amount = entry.amount
                entry.owner.reserved += amount
                if entry.account is not None:
                    entry.account.reserved += amount
                reserved.append(entry)
                reached += amount
        return reserved

    def reserve_where(
        self, asked: int, reservation: object, where: Callable[[Token], bool], reserved: list[TokenEntry]
    ) -> list[TokenEntry]:
        """Reserve free entries that `where` accepts, into `reserved`, until they reach `asked` or
        there are no more.

        Rejected entries keep their places on the stack. Returns the entries that `where` could not
        be asked about because only their id and amount are in memory.
        """
        stack, others = self.stack, ~self.flag
        kept: list[TokenEntry] = []
        unread: list[TokenEntry] = []
        reached = 0
        try:
            while stack and reached < asked:
                entry = stack.pop()
                if entry.reservation is not None:
                    entry.stacked_in &= others
                    continue
                kept.append(entry)
                if entry.token is None:
                    unread.append(entry)
                elif where(entry.token):
                    kept.pop().stacked_in &= others
                    reserve_entries((entry,), reservation)
                    reserved.append(entry)
                    reached += entry.amount
        finally:
            stack.extend(reversed(kept))
        return unread

    def free_entries(self) -> Iterator[TokenEntry]:
        """The entries that are not reserved, in no particular order."""
        return (entry for entry in self.stack if entry.reservation is None)

    def sweep(self) -> None:
        """Remove spent entries from the stack once they are most of it."""
        if len(self.stack) > 2 * self.count + MAX_STALE_ENTRIES:
            self.stack = [entry for entry in self.stack if entry.reservation is not SPENT]


def reserve_entries(entries: Iterable[TokenEntry], reservation: object) -> None:
    """Reserve entries, which must be free."""
    for entry in entries:
        entry.reservation = reservation
        entry.add_reserved(entry.amount)


def release_entries(entries: Iterable[TokenEntry], reservation: object) -> None:
    """Free the entries that this reservation still holds."""
    for entry in entries:
        if entry.reservation is reservation:
            entry.reservation = None
            entry.add_reserved(-entry.amount)
            entry.push()


def largest(entries: Iterable[TokenEntry], asked: int, limit: int) -> tuple[list[TokenEntry], int]:
    """Return the fewest entries, at most `limit`, that reach `asked`, and their sum; it is less if
    `limit` is too small.
    """
    chosen: list[TokenEntry] = []
    reached = 0
    for entry in heapq.nlargest(limit, entries, key=_amount):
        if reached >= asked:
            break
        chosen.append(entry)
        reached += entry.amount
    return chosen, reached


def _amount(entry: TokenEntry) -> int:
    return entry.amount


class Buckets:
    """All buckets, by wallet. At most `max_tokens` tokens are kept in memory; of the rest only the
    id and amount.
    """

    __slots__ = ("_buckets", "_cached_count", "_entries", "_max_tokens")

    def __init__(self, max_tokens: int | None = None) -> None:
        self._buckets: dict[Wallet, Bucket] = {}
        self._entries: dict[str, TokenEntry] = {}
        self._max_tokens = max_tokens
        self._cached_count = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def cached_count(self) -> int:
        """How many tokens are kept in memory."""
        return self._cached_count

    def ids(self) -> Iterable[str]:
        """The ids of all tokens."""
        return self._entries.keys()

    def find(self, wallet: Wallet) -> Bucket | None:
        """Return the bucket of a wallet, if it has any tokens."""
        return self._buckets.get(wallet)

    def entry(self, id: str) -> TokenEntry | None:
        """Return a token's entry, if it is present."""
        return self._entries.get(id)

    def add(self, token: Token) -> TokenEntry | None:
        """Add a free token and return its entry; None if it was present already."""
        if token.id in self._entries:
            return None
        wallets = wallets_of(token)
        entry = TokenEntry(token, self._bucket(wallets[0]), self._bucket(wallets[1]) if len(wallets) > 1 else None)
        self._entries[entry.id] = entry
        entry.token = None
        self.cache_token(entry, token)
        self._count(entry, 1)
        entry.push()
        return entry

    def cache_token(self, entry: TokenEntry, token: Token) -> None:
        """Keep a token in memory if `max_tokens` allows it."""
        if entry.token is None and (self._max_tokens is None or self._cached_count < self._max_tokens):
            entry.token = token
            self._cached_count += 1

    def remove(self, id: str) -> bool:
        """Remove a spent token, also from the reservation that holds it. Returns whether it was
        present.
        """
        entry = self._entries.pop(id, None)
        if entry is None:
            return False
        if entry.reservation is not None:
            entry.add_reserved(-entry.amount)
        entry.reservation = SPENT
        if entry.token is not None:
            entry.token = None
            self._cached_count -= 1
        self._count(entry, -1)
        return True

    def _bucket(self, wallet: Wallet) -> Bucket:
        bucket = self._buckets.get(wallet)
        if bucket is None:
            bucket = self._buckets[wallet] = Bucket(wallet)
        return bucket

    def _count(self, entry: TokenEntry, one: int) -> None:
        for bucket in (entry.owner, entry.account):
            if bucket is not None:
                bucket.count += one
                bucket.total += one * entry.amount
                if not bucket.count:
                    del self._buckets[bucket.wallet]
                elif one < 0:
                    bucket.sweep()
