"""The unspent tokens in memory, and their reservations for transactions.

A reservation is an object, and each token's entry refers to the reservation that holds it. A late
call of an expired reservation (a release, a spend) can therefore not affect tokens that another one
has reserved since.

Reservations of the same duration expire in the order in which they were renewed. So there is one
expiry queue for each duration. Nothing waits for tokens, so expiry needs no timers: the clock is
checked when tokens are selected.

`Buckets` index the tokens by wallet. Each bucket has a stack of free entries, from which reserving
takes time proportional to the number of reserved tokens, not to the size of the wallet.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Final

from genie_tokens.token import Token, Wallet, wallets_of

MAX_QUEUES = 16
"""Expiry queues beyond which empty ones are deleted. Otherwise they stay: the next reservation is
likely to have the same duration.
"""


class Reservation:
    """Tokens that are held for a transaction, for `duration` seconds from the last `renew`."""

    __slots__ = ("deadline", "duration", "entries", "pending_ids", "superseded", "transaction")

    def __init__(self, transaction: str, duration: float) -> None:
        self.transaction = transaction
        self.duration = duration
        """Seconds from the last `renew` until the reservation expires."""
        self.deadline = -math.inf
        """When the reservation expires, by the table's clock. -inf before the first `renew`, and
        once the reservation has ended.
        """
        self.entries: list[TokenEntry] = []
        """The entries of the tokens. Some may be spent, or held by a newer reservation."""
        self.pending_ids: tuple[str, ...] = ()
        """Ids of tokens that `restore` has reserved before they were loaded from the store."""
        self.superseded = False
        """True if some tokens were transferred to a newer reservation of the same transaction."""

    @property
    def held_entries(self) -> Iterator[TokenEntry]:
        """The entries that this reservation still holds."""
        return (entry for entry in self.entries if entry.reservation is self)

    @property
    def spent_ids(self) -> Iterator[str]:
        """The ids of the tokens that were spent while this reservation held them."""
        return (entry.id for entry in self.entries if entry.reservation is SPENT)


class ReservationTable:
    """All reservations of a selector, and the selector's unspent tokens. `clock` returns seconds.

    The store's follower adds and removes the tokens. A token whose id `restore` has reserved joins
    its reservation when the token is added.
    """

    __slots__ = (
        "_by_transaction",
        "_expiry_queues",
        "_next_deadline",
        "_reservation_by_unloaded_id",
        "buckets",
        "clock",
    )

    def __init__(self, buckets: Buckets, clock: Callable[[], float]) -> None:
        self.buckets = buckets
        """The unspent tokens."""
        self.clock = clock
        """Returns a monotonic time in seconds."""
        self._expiry_queues: dict[float, OrderedDict[Reservation, None]] = {}
        """The active reservations by duration, in each queue the first to expire first."""
        self._by_transaction: dict[str, set[Reservation]] = {}
        """The active reservations by transaction."""
        self._reservation_by_unloaded_id: dict[str, Reservation] = {}
        """The restored reservations of tokens that were not loaded from the store yet."""
        self._next_deadline = math.inf
        """A time before which no reservation expires."""

    def __len__(self) -> int:
        return sum(map(len, self._expiry_queues.values()))

    def renew(self, reservation: Reservation) -> None:
        """Activate a reservation, or extend it: the reservation expires `reservation.duration`
        seconds from now.
        """
        reservation.deadline = deadline = self.clock() + reservation.duration
        queue = self._expiry_queues.get(reservation.duration)
        if queue is None:
            queue = self._expiry_queues[reservation.duration] = OrderedDict()
        queue[reservation] = None
        queue.move_to_end(reservation)  # the queue stays sorted by deadline
        if deadline < self._next_deadline:  # noqa: PLR1730 - faster than a call of min()
            self._next_deadline = deadline
        self._by_transaction.setdefault(reservation.transaction, set()).add(reservation)

    def release(self, reservation: Reservation) -> None:
        """End a reservation, and free the tokens that the reservation still holds. Has no effect on
        a reservation that has ended.
        """
        entries, reservation.entries = reservation.entries, []
        release_entries(entries, reservation)
        for id in self.unloaded_ids(reservation):
            del self._reservation_by_unloaded_id[id]
        reservation.pending_ids = ()
        if reservation.deadline != -math.inf:  # the reservation is active
            reservation.deadline = -math.inf
            queue = self._expiry_queues[reservation.duration]
            del queue[reservation]
            if not queue and len(self._expiry_queues) > MAX_QUEUES:
                del self._expiry_queues[reservation.duration]
            same_transaction = self._by_transaction[reservation.transaction]
            same_transaction.discard(reservation)
            if not same_transaction:
                del self._by_transaction[reservation.transaction]

    def is_active(self, reservation: Reservation) -> bool:
        """Return whether a reservation still holds all of its unspent tokens. False if the
        reservation was released, has expired, or was superseded by a newer reservation of the same
        transaction.
        """
        return self.clock() < reservation.deadline and not reservation.superseded

    def unloaded_ids(self, reservation: Reservation) -> list[str]:
        """Return the token ids of a restored reservation that were not loaded from the store yet.
        Once the store was loaded completely, these are the ids of spent tokens.
        """
        return [id for id in reservation.pending_ids if self._reservation_by_unloaded_id.get(id) is reservation]

    def expire(self) -> None:
        """Release the reservations that have expired. Must be called before each selection, because
        there are no timers.
        """
        now = self.clock()
        if now < self._next_deadline:
            return
        for queue in list(self._expiry_queues.values()):
            for expired in list(takewhile(lambda reservation: reservation.deadline <= now, queue)):
                self.release(expired)
        # The first reservation of each queue expires first.
        self._next_deadline = min(
            (next(iter(queue)).deadline for queue in self._expiry_queues.values() if queue), default=math.inf
        )

    def reserved_in(self, bucket: Bucket) -> Iterator[tuple[TokenEntry, Reservation]]:
        """Iterate over the reserved entries of a bucket, each with its reservation. Takes time
        proportional to the number of all reserved tokens.
        """
        for queue in self._expiry_queues.values():
            for reservation in queue:
                for entry in reservation.held_entries:
                    if entry.owner_bucket is bucket or entry.account_bucket is bucket:
                        yield entry, reservation

    def held_by(self, transaction: str, bucket: Bucket) -> int:
        """Return the total amount of the tokens in a bucket that a transaction has reserved."""
        return sum(
            entry.amount
            for reservation in self._by_transaction.get(transaction, ())
            for entry in reservation.held_entries
            if entry.owner_bucket is bucket or entry.account_bucket is bucket
        )

    # -- restored reservations --------------------------------------------------------------------------------

    def restore(self, reservation: Reservation, tokens: Iterable[Token]) -> list[str]:
        """Reserve the tokens of a checkpoint by their ids, even if the tokens were not loaded from
        the store yet.

        Tokens that the same transaction holds are transferred to this reservation. Returns the ids
        of the tokens that other transactions hold; if there are any, nothing is changed.
        """
        self.expire()
        ids = [token.id for token in tokens]
        unavailable = [id for id in ids if not self._is_available_to(reservation.transaction, id)]
        if unavailable:
            return unavailable
        reservation.pending_ids = tuple(id for id in ids if self.buckets.entry(id) is None)
        for id in reservation.pending_ids:
            self._supersede(self._reservation_by_unloaded_id.get(id))
            self._reservation_by_unloaded_id[id] = reservation
        for entry in filter(None, map(self.buckets.entry, ids)):  # the tokens that are loaded
            if entry.reservation is None:
                reserve_entries([entry], reservation)
            else:  # a reservation of the same transaction
                self._supersede(entry.reservation)
                entry.reservation = reservation
            reservation.entries.append(entry)
        self.renew(reservation)
        return []

    def _supersede(self, holder: object) -> None:
        if isinstance(holder, Reservation):
            holder.superseded = True

    def _is_available_to(self, transaction: str, id: str) -> bool:
        """Return whether no other transaction has reserved a token."""
        entry = self.buckets.entry(id)
        holder = self._reservation_by_unloaded_id.get(id) if entry is None else entry.reservation
        # A holder that is not a Reservation means that the token is free (None) or spent (SPENT).
        return not isinstance(holder, Reservation) or holder.transaction == transaction

    # -- changes of the store ---------------------------------------------------------------------------------

    def add(self, token: Token) -> None:
        """Add a token that was issued or loaded. Has no effect if the token is present already. If
        `restore` has reserved the token's id, the token joins that reservation.
        """
        entry = self.buckets.add(token)
        reservation = (
            self._reservation_by_unloaded_id.pop(token.id, None)
            if entry is not None and self._reservation_by_unloaded_id
            else None
        )
        if reservation is not None and entry is not None:
            reservation.entries.append(entry)
            reserve_entries([entry], reservation)

    def remove(self, id: str) -> bool:
        """Remove a spent token. Returns whether the token was present."""
        return self.buckets.remove(id)

    def ids(self) -> Iterable[str]:
        """Return the ids of all tokens."""
        return self.buckets.ids()


# -- buckets ------------------------------------------------------------------------------------------------

SPENT: Final = object()
"""The `reservation` of an entry whose token was spent."""

BY_OWNER = 1
"""Flag of the buckets of owners' wallets."""
BY_ACCOUNT = 2
"""Flag of the buckets of accounts' wallets."""
ALL_FLAGS = BY_OWNER | BY_ACCOUNT

MAX_STALE_ENTRIES = 64
"""A stack is compacted when it has more entries than this plus twice the number of its tokens: then
most of them are of spent tokens.
"""


class TokenEntry:
    """A token in one or two buckets: the bucket of its owner, and the bucket of its account if it
    has one.

    A reserved entry stays on the stack of its other bucket until the entry is popped there.
    """

    __slots__ = ("account_bucket", "amount", "id", "owner_bucket", "reservation", "stack_flags", "token")

    def __init__(self, token: Token, owner_bucket: Bucket, account_bucket: Bucket | None) -> None:
        self.id = token.id
        self.amount = token.amount
        self.token: Token | None = token
        """None if only the id and the amount are kept in memory."""
        self.owner_bucket = owner_bucket
        self.account_bucket = account_bucket
        """None if the token has no account."""
        self.reservation: object | None = None
        """None while the token is free, else the reservation that holds the token, or `SPENT`."""
        self.stack_flags = 0
        """The flags of the buckets on whose stacks the entry is."""

    def push(self) -> None:
        """Push a free entry onto the stacks of its owner's and its account's bucket, except a stack
        that contains the entry already.
        """
        if not self.stack_flags & BY_OWNER:
            self.owner_bucket.stack.append(self)
        if self.account_bucket is not None and not self.stack_flags & BY_ACCOUNT:
            self.account_bucket.stack.append(self)
        self.stack_flags = ALL_FLAGS

    def add_reserved(self, amount: int) -> None:
        """Add an amount, which may be negative, to the reserved amounts of the entry's one or two
        buckets.
        """
        self.owner_bucket.reserved_amount += amount
        if self.account_bucket is not None:
            self.account_bucket.reserved_amount += amount


class Bucket:
    """The tokens of one wallet."""

    __slots__ = ("flag", "reserved_amount", "stack", "token_count", "total_amount", "wallet")

    def __init__(self, wallet: Wallet) -> None:
        self.wallet = wallet
        self.flag = BY_OWNER if wallet.account is None else BY_ACCOUNT
        """Set in the `stack_flags` of the entries that are on this bucket's stack."""
        self.stack: list[TokenEntry] = []
        """All free entries, and perhaps reserved and spent ones."""
        self.token_count = 0
        self.total_amount = 0
        self.reserved_amount = 0

    @property
    def free_amount(self) -> int:
        """The amount that is not reserved."""
        return self.total_amount - self.reserved_amount

    def reserve(self, target: int, reservation: object) -> list[TokenEntry]:
        """Pop free entries from the stack and reserve them until the sum of their amounts reaches
        `target`; return them. The caller must have checked that the bucket's free amount suffices.
        """
        stack, other_flags = self.stack, ~self.flag
        reserved: list[TokenEntry] = []
        reached = 0
        while reached < target:
            entry = stack.pop()
            entry.stack_flags &= other_flags
            if entry.reservation is None:  # else the token was spent, or reserved from the other bucket
                entry.reservation = reservation
                amount = entry.amount
                entry.owner_bucket.reserved_amount += amount
                if entry.account_bucket is not None:
                    entry.account_bucket.reserved_amount += amount
                reserved.append(entry)
                reached += amount
        return reserved

    def reserve_where(
        self, target: int, reservation: object, where: Callable[[Token], bool], reserved: list[TokenEntry]
    ) -> list[TokenEntry]:
        """Reserve free entries whose tokens `where` accepts, until the sum of their amounts reaches
        `target` or the stack is empty. Appends the reserved entries to `reserved`.

        Entries that are not reserved stay on the stack, in the same order. Returns the entries
        whose tokens are not in memory, so that `where` could not be called.
        """
        stack, other_flags = self.stack, ~self.flag
        not_reserved: list[TokenEntry] = []
        uncached: list[TokenEntry] = []
        reached = 0
        try:
            while stack and reached < target:
                entry = stack.pop()
                if entry.reservation is not None:
                    entry.stack_flags &= other_flags
                    continue
                not_reserved.append(entry)  # before the call of `where`, which may raise
                if entry.token is None:
                    uncached.append(entry)
                elif where(entry.token):
                    not_reserved.pop()
                    entry.stack_flags &= other_flags
                    reserve_entries((entry,), reservation)
                    reserved.append(entry)
                    reached += entry.amount
        finally:
            stack.extend(reversed(not_reserved))
        return uncached

    def free_entries(self) -> Iterator[TokenEntry]:
        """Iterate over the entries that are not reserved, in no particular order."""
        return (entry for entry in self.stack if entry.reservation is None)

    def compact_stack(self) -> None:
        """Remove the entries of spent tokens from the stack if most entries are of spent tokens."""
        if len(self.stack) > 2 * self.token_count + MAX_STALE_ENTRIES:
            self.stack = [entry for entry in self.stack if entry.reservation is not SPENT]


def reserve_entries(entries: Iterable[TokenEntry], reservation: object) -> None:
    """Reserve entries, which must be free."""
    for entry in entries:
        entry.reservation = reservation
        entry.add_reserved(entry.amount)


def release_entries(entries: Iterable[TokenEntry], reservation: object) -> None:
    """Free the entries that `reservation` still holds, and ignore all others."""
    for entry in entries:
        if entry.reservation is reservation:
            entry.reservation = None
            entry.add_reserved(-entry.amount)
            entry.push()


def largest(entries: Iterable[TokenEntry], target: int, limit: int) -> tuple[list[TokenEntry], int]:
    """Return the largest entries, and the sum of their amounts: as few entries as reach `target`,
    but at most `limit`. The sum is less than `target` if `limit` entries can't reach it.
    """
    chosen: list[TokenEntry] = []
    reached = 0
    for entry in heapq.nlargest(limit, entries, key=_amount):
        if reached >= target:
            break
        chosen.append(entry)
        reached += entry.amount
    return chosen, reached


def _amount(entry: TokenEntry) -> int:
    return entry.amount


class Buckets:
    """The buckets by wallet, and the entries by token id. Every unspent token has an entry, with its
    id and its amount. The `Token` objects of at most `max_cached_tokens` entries are kept as well.
    """

    __slots__ = ("_cached_token_count", "_entry_by_id", "_max_cached_tokens", "_wallet_buckets")

    def __init__(self, max_cached_tokens: int | None = None) -> None:
        self._wallet_buckets: dict[Wallet, Bucket] = {}
        """The bucket of each wallet that has unspent tokens."""
        self._entry_by_id: dict[str, TokenEntry] = {}
        """The entries of all unspent tokens, by token id."""
        self._max_cached_tokens = max_cached_tokens
        """Maximum number of entries whose `Token` object is kept. None: no limit."""
        self._cached_token_count = 0
        """The number of entries whose `Token` object is kept."""

    def __len__(self) -> int:
        return len(self._entry_by_id)

    @property
    def cached_token_count(self) -> int:
        """The number of entries whose `Token` object is kept."""
        return self._cached_token_count

    def ids(self) -> Iterable[str]:
        """Return the ids of all tokens."""
        return self._entry_by_id.keys()

    def find(self, wallet: Wallet) -> Bucket | None:
        """Return the bucket of a wallet, if it has any tokens."""
        return self._wallet_buckets.get(wallet)

    def entry(self, id: str) -> TokenEntry | None:
        """Return a token's entry, if it is present."""
        return self._entry_by_id.get(id)

    def add(self, token: Token) -> TokenEntry | None:
        """Add a free token, and return its entry. Returns None if the token was present already."""
        if token.id in self._entry_by_id:
            return None
        wallets = wallets_of(token)
        entry = TokenEntry(token, self._bucket(wallets[0]), self._bucket(wallets[1]) if len(wallets) > 1 else None)
        self._entry_by_id[entry.id] = entry
        entry.token = None  # unless `cache_token` keeps it
        self.cache_token(entry, token)
        self._update_totals(entry, 1)
        entry.push()
        return entry

    def cache_token(self, entry: TokenEntry, token: Token) -> None:
        """Keep the `Token` object of an entry, unless `max_cached_tokens` of them are kept already."""
        has_room = self._max_cached_tokens is None or self._cached_token_count < self._max_cached_tokens
        if entry.token is None and has_room:
            entry.token = token
            self._cached_token_count += 1

    def remove(self, id: str) -> bool:
        """Remove a spent token. Marks the token's entry as spent, so that a reservation that
        contains the entry can report the token. Returns whether the token was present.
        """
        entry = self._entry_by_id.pop(id, None)
        if entry is None:
            return False
        if entry.reservation is not None:
            entry.add_reserved(-entry.amount)
        entry.reservation = SPENT
        if entry.token is not None:
            entry.token = None
            self._cached_token_count -= 1
        self._update_totals(entry, -1)
        return True

    def _bucket(self, wallet: Wallet) -> Bucket:
        """Return the bucket of a wallet, which is created on first use."""
        bucket = self._wallet_buckets.get(wallet)
        if bucket is None:
            bucket = self._wallet_buckets[wallet] = Bucket(wallet)
        return bucket

    def _update_totals(self, entry: TokenEntry, sign: int) -> None:
        """Add an entry to the totals of its buckets (`sign` 1), or subtract the entry from them
        (`sign` -1). Removes buckets that have become empty.
        """
        for bucket in (entry.owner_bucket, entry.account_bucket):
            if bucket is not None:
                bucket.token_count += sign
                bucket.total_amount += sign * entry.amount
                if not bucket.token_count:
                    del self._wallet_buckets[bucket.wallet]
                elif sign < 0:
                    bucket.compact_stack()
