"""The additional state of special resources: `Counted` for a counted resource, `Subtree` for a subtree.

`Counted` has the units in use. `Subtree` has the number of locks below the subtree, by intention: `IS` for shared locks, `IX`
for exclusive locks and units. Intentions are derived from the names of the requests and never stored.
"""

from __future__ import annotations

from collections.abc import Iterator

from genie.core.model import Owner, Request
from genie.core.tables import CHECKED_SIZES, compact
from genie.lock_modes import IS, IX, MAX_SUBTREE_LEVELS, SIX, WHOLE_NAMESPACE, QueueMode, S, UnitCount

MAX_EXAMPLES = 32
"""Maximum number of locks below a subtree that are kept as examples, to describe blockers."""

MAX_WAITERS_BELOW = 10_000
"""Maximum number of requests that wait below the new subtrees of one request. It bounds the duration of a step, so a waiting
request with many names counts as several: see `NAMES_PER_WAITER_BELOW`."""

NAMES_PER_WAITER_BELOW = 16
"""For `MAX_WAITERS_BELOW`, this number of names of the waiting requests counts as one more request."""

MAX_QUEUES = 3_000
"""Maximum number of queues in which a request may wait: the queues of its names and of the subtrees above them. A step that
queues, grants or ends the request reads all of them. Without this limit there could be 17,408."""

MAX_COMPARED_NAMES = 1_000_000
"""Maximum number of comparisons of a locked name with a subtree, for one request that names several subtrees. All locked names
are compared with each new subtree. The locks of the transaction are compared with each subtree for which they are not
counted yet."""

MAX_SEARCHED_LEVELS = 5_000
"""Maximum number of levels that are searched for subtrees above the names of one `anyOf`. A directory is a name up to its last
slash. Each directory counts as one level, and each parent of a directory counts as many levels as it has slashes."""

MAX_SEPARATE_SUBTREES = 16
"""Maximum number of new subtrees that are loaded one by one, each with a pass over all names. If more are new, one pass
compares each name with all of them, which takes about as long."""

MAX_CLOSED_WAITERS = 1_000
"""Number of waiters whose intentions one step removes from the queue of a subtree that is no longer locked or waited for."""


def contains(subtree: str, name: str) -> bool:
    """Return whether `name` is below `subtree`."""
    return name.startswith(subtree[:-2]) and name != subtree


def range_below(subtree: str) -> tuple[str, str]:
    """Return two texts `first` and `end`: the names below a subtree are the names with `first <= name < end`.

    The two comparisons take half of the time of `str.startswith`. Not for the whole namespace, which has no such range.
    """
    return subtree[:-2], subtree[:-3] + "0"  # in Unicode, 0 is the next character after /


def possible_subtrees(name: str) -> Iterator[str]:
    """Yield the names of all subtrees that contain `name`, the outermost first: at most 1 + `MAX_SUBTREE_LEVELS`."""
    if name != WHOLE_NAMESPACE:
        yield WHOLE_NAMESPACE
    end = name.find("/")
    for _ in range(MAX_SUBTREE_LEVELS):
        if end < 0:
            return
        subtree = name[: end + 1] + WHOLE_NAMESPACE
        if subtree != name:
            yield subtree
        end = name.find("/", end + 1)


def with_intention(mode: QueueMode | None, below: QueueMode) -> QueueMode:
    """Return the new mode of a request in the queue of a subtree, when the intention for another of its locks is added.

    `below` is the mode of this lock, which is below the subtree. `mode` is the previous mode of the request in this queue; it
    is None if there is none.
    """
    intention = IS if below == S else IX
    if mode is None or mode in (intention, IS):  # IS is the weakest mode
        return intention
    return SIX if mode == S and intention == IX else mode


WaitingUnits = tuple[int, int, int]
"""The requests of a transaction that wait for units of one resource: (number of requests, sum of their units, lower bound of
their limits)."""


class Counted:
    """The units of a counted resource: the held units, and the units that transactions wait for.

    Requests without a transaction have no entry in the dicts: they never hold and wait at the same time.
    """

    __slots__ = ("held_by_transaction", "in_use", "request_counts", "unit_holder_count", "waiting_by_transaction")

    def __init__(self) -> None:
        self.unit_holder_count = 0
        """Number of requests that hold units. The resource has more holders if others hold it in shared or exclusive mode."""
        self.in_use = 0
        """The units of all holders."""
        self.held_by_transaction: dict[Owner, int] = {}
        """The units that each transaction holds."""
        self.request_counts: dict[str, int] = {}
        """The number of requests with which each transaction holds units."""
        self.waiting_by_transaction: dict[str, WaitingUnits] = {}
        """The units that each transaction waits for."""

    def add(self, transaction: str | None, units: int) -> None:
        """Add the units of a new holder."""
        self.unit_holder_count += 1
        self.in_use += units
        if transaction is not None:
            self.held_by_transaction[transaction] = self.held_by_transaction.get(transaction, 0) + units
            self.request_counts[transaction] = self.request_counts.get(transaction, 0) + 1

    def remove(self, transaction: str | None, units: int) -> None:
        """Remove the units of a holder."""
        self.unit_holder_count -= 1
        self.in_use -= units
        if transaction is not None:
            self.held_by_transaction[transaction] -= units
            self.request_counts[transaction] -= 1
            if not self.request_counts[transaction]:
                del self.held_by_transaction[transaction], self.request_counts[transaction]
                if len(self.request_counts) in CHECKED_SIZES:
                    compact(self.held_by_transaction)
                    compact(self.request_counts)

    def begin_wait(self, transaction: str, asked: UnitCount) -> None:
        """Add the units that a new waiting request of a transaction asks for."""
        units, limit = asked
        count, other_units, other_limit = self.waiting_by_transaction.get(transaction, (0, 0, limit))
        self.waiting_by_transaction[transaction] = count + 1, other_units + units, min(limit, other_limit)

    def end_wait(self, transaction: str, units: int) -> None:
        """Remove the units of a request that no longer waits. Its limit stays included in the lower bound."""
        count, all_units, limit = self.waiting_by_transaction.pop(transaction)
        if count > 1:
            self.waiting_by_transaction[transaction] = count - 1, all_units - units, limit
        elif len(self.waiting_by_transaction) in CHECKED_SIZES:
            compact(self.waiting_by_transaction)

    def may_exceed_own_limit(self, transaction: str) -> bool:
        """Return whether the units that a transaction holds and waits for may exceed the limit of one of its waiting requests.

        The transaction must wait for units.
        """
        _, units, limit = self.waiting_by_transaction[transaction]
        return self.held_by_transaction.get(transaction, 0) + units > limit


class Subtree:
    """The numbers of locks that are held below a subtree."""

    __slots__ = ("counts_by_transaction", "examples", "exclusive_count", "request_counts", "shared_count")

    def __init__(self) -> None:
        self.shared_count = 0
        """Number of shared locks that are held below the subtree: `IS`."""
        self.exclusive_count = 0
        """Number of exclusive locks and of locks of units that are held below the subtree: `IX`."""
        self.counts_by_transaction: dict[str, tuple[int, int]] = {}
        """The numbers of shared and exclusive locks that a transaction holds below the subtree. Only for transactions that name
        the subtree in a request, and only after `subtrees.own_below` has counted these locks."""
        self.request_counts: dict[str, int] = {}
        """The number of requests of each transaction that name the subtree."""
        self.examples: dict[str, tuple[QueueMode, Request]] = {}
        """At most `MAX_EXAMPLES` locks below the subtree, to describe blockers: by name, the mode and one holder."""

    def add(self, request: Request, names: list[str], mode: QueueMode, sign: int) -> None:
        """Add the locks of a held request on `names`, all below the subtree and in the same `mode`.

        `sign` is 1 to add the locks, or -1 to remove them.
        """
        examples = self.examples
        if sign > 0:
            for name in names[: MAX_EXAMPLES - len(examples)]:
                examples[name] = mode, request
        elif examples:
            for name in names if len(names) < len(examples) else [*examples]:  # whichever are fewer
                if name in examples and examples[name][1] is request:
                    del examples[name]
        transaction = request.transaction
        change = sign * len(names)
        shared, exclusive = (change, 0) if mode == S else (0, change)
        self.shared_count += shared
        self.exclusive_count += exclusive
        if transaction is not None and transaction in self.counts_by_transaction:
            own_shared, own_exclusive = self.counts_by_transaction[transaction]
            self.counts_by_transaction[transaction] = own_shared + shared, own_exclusive + exclusive

    def end_request(self, transaction: str) -> None:
        """Record the end of a request that named the subtree.

        After the last such request of a transaction, the numbers of the transaction's locks are dropped. If a later request of
        the transaction names the subtree, `subtrees.own_below` counts the locks again.
        """
        self.request_counts[transaction] -= 1
        if not self.request_counts[transaction]:
            del self.request_counts[transaction]
            self.counts_by_transaction.pop(transaction, None)
            if len(self.request_counts) in CHECKED_SIZES:
                compact(self.request_counts)
                compact(self.counts_by_transaction)
