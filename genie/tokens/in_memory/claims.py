"""Who holds which tokens, and until when.

A claim is an object of its own, and an entry says which one has it. So whatever comes late from a claim whose time was
over (a release, a spend) can't touch what somebody else has claimed since: it is not the one that the entry names.

Claims of the same duration end in the order in which they were made, so they stand in one queue; there is one for each
duration. Nobody waits for tokens, so it is enough to look at the clock when somebody asks: there are no timers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

from genie.tokens.in_memory.buckets import GONE, Bucket, Buckets, Entry, give_back, take
from genie.tokens.token import Token

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
