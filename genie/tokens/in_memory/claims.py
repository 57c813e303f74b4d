"""Who holds which tokens, and until when.

A claim is an object of its own, and an entry says which one has it. So whatever comes late from a claim whose time was
over (a release, a spend) can't touch what somebody else has claimed since: it is not the one that the entry names.

Claims of the same duration end in the order in which they were made, so they stand in one queue; there is one for each
duration. Nobody waits for tokens, so it is enough to look at the clock when somebody asks: there are no timers.
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
"""With fewer queues an empty one is kept: the next claim is likely to have the same duration."""


class Claim:
    """A transaction's hold on some tokens, for `duration` seconds from when it is made and when it is prolonged.

    `deadline` is when it ends, by the claims' clock; -inf once it has ended.

    `ahead` are ids that were claimed before they were there. `passed_on`: another claim has some of it now.
    """

    __slots__ = ("ahead", "deadline", "duration", "entries", "passed_on", "transaction")

    def __init__(self, transaction: str, duration: float) -> None:
        self.transaction = transaction
        self.duration = duration
        self.deadline = -math.inf
        self.entries: list[Entry] = []
        self.ahead: tuple[str, ...] = ()
        self.passed_on = False

    @property
    def owned(self) -> Iterator[Entry]:
        """Those of the entries that are still this claim's."""
        return (entry for entry in self.entries if entry.claim is self)

    @property
    def gone(self) -> Iterator[str]:
        """Ids of those that were spent meanwhile."""
        return (entry.id for entry in self.entries if entry.claim is GONE)


class Claims:
    """All claims. What is told of tokens comes through here: one that is claimed before it comes is claimed when it
    does. `clock` returns seconds.
    """

    __slots__ = ("_ahead", "_by_transaction", "_queues", "_soonest", "buckets", "clock")

    def __init__(self, buckets: Buckets, clock: Callable[[], float]) -> None:
        self.buckets = buckets
        self.clock = clock
        self._queues: dict[float, OrderedDict[Claim, None]] = {}
        """The claims by duration, those that end first in front."""
        self._by_transaction: dict[str, set[Claim]] = {}
        self._ahead: dict[str, Claim] = {}
        self._soonest = math.inf
        """No claim ends before."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def hold(self, claim: Claim) -> None:
        """Let a claim count from now on, for its duration."""
        claim.deadline = deadline = self.clock() + claim.duration
        queue = self._queues.get(claim.duration)
        if queue is None:
            queue = self._queues[claim.duration] = OrderedDict()
        queue[claim] = None
        queue.move_to_end(claim)
        if deadline < self._soonest:  # noqa: PLR1730 - min() takes a function call
            self._soonest = deadline
        self._by_transaction.setdefault(claim.transaction, set()).add(claim)

    def end(self, claim: Claim) -> None:
        """Give back what the claim still has. A second time does nothing."""
        entries, claim.entries = claim.entries, []
        give_back(entries, claim)
        for id in self.missing(claim):
            del self._ahead[id]
        claim.ahead = ()
        if claim.deadline != -math.inf:
            claim.deadline = -math.inf
            queue = self._queues[claim.duration]
            del queue[claim]
            if not queue and len(self._queues) > MAX_IDLE_QUEUES:
                del self._queues[claim.duration]
            same = self._by_transaction[claim.transaction]
            same.discard(claim)
            if not same:
                del self._by_transaction[claim.transaction]

    def holds(self, claim: Claim) -> bool:
        """Whether its time is not over, and no other claim has any of it."""
        return self.clock() < claim.deadline and not claim.passed_on

    def missing(self, claim: Claim) -> list[str]:
        """Ids that it claims and that are not there: not yet, or spent."""
        return [id for id in claim.ahead if self._ahead.get(id) is claim]

    def expire(self) -> None:
        """End the claims whose time is over. To be called before anything is chosen."""
        now = self.clock()
        if now < self._soonest:
            return
        for queue in list(self._queues.values()):
            for claim in list(takewhile(lambda claim: claim.deadline <= now, queue)):
                self.end(claim)
        self._soonest = min((next(iter(queue)).deadline for queue in self._queues.values() if queue), default=math.inf)

    def claimed(self, bucket: Bucket) -> Iterator[tuple[Entry, Claim]]:
        """What is claimed in a bucket, and by whom. Looks at every claim."""
        for queue in self._queues.values():
            for claim in queue:
                for entry in claim.owned:
                    if entry.owner is bucket or entry.account is bucket:
                        yield entry, claim

    def held_by(self, transaction: str, bucket: Bucket) -> int:
        """What a transaction holds in a bucket."""
        return sum(
            entry.amount
            for claim in self._by_transaction.get(transaction, ())
            for entry in claim.owned
            if entry.owner is bucket or entry.account is bucket
        )

    # -- claims from before -------------------------------------------------------------------------------

    def again(self, claim: Claim, tokens: Iterable[Token]) -> list[str]:
        """Hold tokens that were held before, by id, whether they are there yet or not. What the same transaction holds
        already passes over to this claim. Ids that others hold are returned; then nothing has changed.
        """
        self.expire()
        ids = [token.id for token in tokens]
        others = [id for id in ids if not self._open_to(claim.transaction, id)]
        if others:
            return others
        claim.ahead = tuple(id for id in ids if self.buckets.entry(id) is None)
        for id in claim.ahead:
            self._pass_on(self._ahead.get(id))
            self._ahead[id] = claim
        for entry in filter(None, map(self.buckets.entry, ids)):
            if entry.claim is None:
                take([entry], claim)
            else:
                self._pass_on(entry.claim)
                entry.claim = claim
            claim.entries.append(entry)
        self.hold(claim)
        return []

    def _pass_on(self, holder: object) -> None:
        if isinstance(holder, Claim):
            holder.passed_on = True

    def _open_to(self, transaction: str, id: str) -> bool:
        entry = self.buckets.entry(id)
        holder = self._ahead.get(id) if entry is None else entry.claim
        return not isinstance(holder, Claim) or holder.transaction == transaction

    # -- what is told of tokens ---------------------------------------------------------------------------

    def add(self, token: Token) -> None:
        """A token is there."""
        entry = self.buckets.add(token)
        claim = self._ahead.pop(token.id, None) if entry is not None and self._ahead else None
        if claim is not None and entry is not None:
            claim.entries.append(entry)
            take([entry], claim)

    def remove(self, id: str) -> bool:
        """A token is spent; whether it was there."""
        return self.buckets.remove(id)

    def ids(self) -> Iterable[str]:
        """Of all tokens that are there."""
        return self.buckets.ids()


# -- Unspent tokens in memory, in buckets: one for each wallet that has any --------

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
