"""Unspent tokens in memory, in buckets: one for each wallet that has any.

A token lies in the bucket of its owner's key and in that of its account, if it has one. Each bucket keeps a *stack* of
entries that may be free. One that is taken through one bucket is left standing in the other's stack, and dropped when
it is met there; when it is given back it is put onto those stacks in which it does not stand any more. So every free
entry stands exactly once in each of its buckets, and all costs O(1), taken over time: what is dropped was put there.

Nothing here awaits. In one event loop each call is atomic, and needs no lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from genie.tokens.token import Token, Wallet, wallets_of

GONE: Final = object()
"""Who claims an entry that is no longer in its buckets: spent."""

BY_OWNER = 1
BY_ACCOUNT = 2
EVERYWHERE = BY_OWNER | BY_ACCOUNT

SLACK = 64
"""Entries of spent tokens that a stack may hold beyond as many as there are tokens, before it is swept."""


class Entry:
    """An unspent token. `claim` is who holds it: None, a claim, or `GONE`.

    `token` is None where only its id and amount are kept. `stands` says in which of its buckets' stacks it stands.
    """

    __slots__ = ("account", "amount", "claim", "id", "owner", "stands", "token")

    def __init__(self, token: Token, owner: Bucket, account: Bucket | None) -> None:
        self.id = token.id
        self.amount = token.amount
        self.token: Token | None = token
        self.owner = owner
        self.account = account
        self.claim: object | None = None
        self.stands = 0

    def stand(self) -> None:
        """Stand on the stacks of all its buckets: it is free."""
        if not self.stands & BY_OWNER:
            self.owner.stack.append(self)
        if self.account is not None and not self.stands & BY_ACCOUNT:
            self.account.stack.append(self)
        self.stands = EVERYWHERE

    def count_claimed(self, amount: int) -> None:
        """Add to what is claimed in its buckets."""
        self.owner.claimed += amount
        if self.account is not None:
            self.account.claimed += amount


class Bucket:
    """The tokens of one wallet: how many, what they are worth, how much of that is claimed, and the stack."""

    __slots__ = ("bit", "claimed", "count", "stack", "total", "wallet")

    def __init__(self, wallet: Wallet) -> None:
        self.wallet = wallet
        self.bit = BY_OWNER if wallet.account is None else BY_ACCOUNT
        self.stack: list[Entry] = []
        self.count = 0
        self.total = 0
        self.claimed = 0

    @property
    def free(self) -> int:
        """What nobody claims."""
        return self.total - self.claimed

    def pick(self, asked: int, claim: object) -> list[Entry]:
        """Claim free entries until they reach `asked`. As much must be free."""
        stack, left_out = self.stack, ~self.bit
        taken: list[Entry] = []
        reached = 0
        while reached < asked:
            entry = stack.pop()
            entry.stands &= left_out
            if entry.claim is None:
                entry.claim = claim
                amount = entry.amount
                entry.owner.claimed += amount
                if entry.account is not None:
                    entry.account.claimed += amount
                taken.append(entry)
                reached += amount
        return taken

    def search(self, asked: int, claim: object, where: Callable[[Token], bool], taken: list[Entry]) -> list[Entry]:
        """Claim free entries that `where` lets through, until they reach `asked` or there are no more, into `taken`.

        Those that it does not let through keep their places. Returned are those that it can't be asked about, since
        only their id and amount are known.
        """
        stack, left_out = self.stack, ~self.bit
        passed: list[Entry] = []
        unread: list[Entry] = []
        reached = 0
        try:
            while stack and reached < asked:
                entry = stack.pop()
                if entry.claim is not None:
                    entry.stands &= left_out
                    continue
                passed.append(entry)
                if entry.token is None:
                    unread.append(entry)
                elif where(entry.token):
                    passed.pop().stands &= left_out
                    take((entry,), claim)
                    taken.append(entry)
                    reached += entry.amount
        finally:
            stack.extend(reversed(passed))
        return unread

    def free_entries(self) -> Iterator[Entry]:
        """Those that nobody claims, in no order that matters."""
        return (entry for entry in self.stack if entry.claim is None)

    def sweep(self) -> None:
        """Drop spent tokens from the stack where they are most of it."""
        if len(self.stack) > 2 * self.count + SLACK:
            self.stack = [entry for entry in self.stack if entry.claim is not GONE]


def take(entries: Iterable[Entry], claim: object) -> None:
    """Claim entries that are free."""
    for entry in entries:
        entry.claim = claim
        entry.count_claimed(entry.amount)


def give_back(entries: Iterable[Entry], claim: object) -> None:
    """Free those of the entries that this claim still has, and no others."""
    for entry in entries:
        if entry.claim is claim:
            entry.claim = None
            entry.count_claimed(-entry.amount)
            entry.stand()


def largest(entries: Iterable[Entry], asked: int, limit: int) -> tuple[list[Entry], int]:
    """The fewest entries that reach `asked`, at most `limit`, and their sum; less than `asked` if `limit` is too few."""
    chosen: list[Entry] = []
    reached = 0
    for entry in heapq.nlargest(limit, entries, key=_amount):
        if reached >= asked:
            break
        chosen.append(entry)
        reached += entry.amount
    return chosen, reached


def _amount(entry: Entry) -> int:
    return entry.amount


class Buckets:
    """All buckets. At most `max_tokens` tokens are kept whole; of the rest only the id and the amount."""

    __slots__ = ("_buckets", "_entries", "_max_tokens", "_whole")

    def __init__(self, max_tokens: int | None = None) -> None:
        self._buckets: dict[Wallet, Bucket] = {}
        self._entries: dict[str, Entry] = {}
        self._max_tokens = max_tokens
        self._whole = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def whole(self) -> int:
        """How many tokens are kept whole."""
        return self._whole

    def ids(self) -> Iterable[str]:
        """Of all tokens that are there."""
        return self._entries.keys()

    def find(self, wallet: Wallet) -> Bucket | None:
        """The bucket of a wallet, if it has any tokens."""
        return self._buckets.get(wallet)

    def entry(self, id: str) -> Entry | None:
        """A token's entry, if it is there."""
        return self._entries.get(id)

    def add(self, token: Token) -> Entry | None:
        """A token that came, and is free; None if it was there before."""
        if token.id in self._entries:
            return None
        wallets = wallets_of(token)
        entry = Entry(token, self._bucket(wallets[0]), self._bucket(wallets[1]) if len(wallets) > 1 else None)
        self._entries[entry.id] = entry
        entry.token = None
        self.keep(entry, token)
        self._count(entry, 1)
        entry.stand()
        return entry

    def keep(self, entry: Entry, token: Token) -> None:
        """Keep a token whole if there is room."""
        if entry.token is None and (self._max_tokens is None or self._whole < self._max_tokens):
            entry.token = token
            self._whole += 1

    def remove(self, id: str) -> bool:
        """A token that is spent; whether it was there. Whoever claims it has it no more."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return False
        if entry.claim is not None:
            entry.count_claimed(-entry.amount)
        entry.claim = GONE
        if entry.token is not None:
            entry.token = None
            self._whole -= 1
        self._count(entry, -1)
        return True

    def _bucket(self, wallet: Wallet) -> Bucket:
        bucket = self._buckets.get(wallet)
        if bucket is None:
            bucket = self._buckets[wallet] = Bucket(wallet)
        return bucket

    def _count(self, entry: Entry, one: int) -> None:
        for bucket in (entry.owner, entry.account):
            if bucket is not None:
                bucket.count += one
                bucket.total += one * entry.amount
                if not bucket.count:
                    del self._buckets[bucket.wallet]
                elif one < 0:
                    bucket.sweep()
