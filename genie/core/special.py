"""The additional state of counted resources and of subtrees, beside the holders and the waiters of each resource.

A counted resource counts the units in use. A subtree counts the locks below it as intentions, which are derived from the
names of the requests and never stored: `IS` for shared locks, `IX` for exclusive locks and units.
"""

from __future__ import annotations

from collections.abc import Iterator

from genie.core.model import Owner, Request
from genie.core.tables import CHECKED_SIZES, compact
from genie.lock_modes import IS, IX, MAX_SUBTREE_LEVELS, SIX, WHOLE_NAMESPACE, QueueMode, S, UnitCount

MAX_EXAMPLES = 32
"""Number of locks below a subtree that are kept to describe blockers."""

MAX_WAITERS_BELOW = 10_000
"""Maximum number of requests that wait below new subtrees, those of one request. It bounds the duration of a step, so a request
with many names counts as several."""

NAMES_PER_WAITER_BELOW = 16
"""Number of names of requests that wait below a new subtree that count as one more request."""

MAX_QUEUES = 3_000
"""Maximum number of queues in which a request may wait, those of its names and of the subtrees above them. A step that queues,
grants or ends the request reads all of them: without a limit there may be 17,408."""

MAX_COMPARED_NAMES = 1_000_000
"""Maximum number of comparisons of a locked name with a subtree for one request that names several: of all names with the new
subtrees, and of the locks of its transaction with all subtrees for which they are not counted."""

MAX_SEARCHED_LEVELS = 5_000
"""Maximum number of levels that are searched for subtrees above the names of one `anyOf`. Each directory, that is, a name up to its
last slash, counts as one, and each directory above one or more of them as its levels."""

MAX_SEPARATE_SUBTREES = 16
"""Number of loaded subtrees for each of which all names are read. If more are new, each name is compared with all of them at
once, which takes about as long."""

MAX_CLOSED_WAITERS = 1_000
"""Number of waiters whose intentions one step removes from the queue of a subtree that is no longer locked or waited for."""


def contains(subtree: str, name: str) -> bool:
    """Return whether `name` is below `subtree`."""
    return name.startswith(subtree[:-2]) and name != subtree


def range_below(subtree: str) -> tuple[str, str]:
    """Return the least text that begins as the names below a subtree do, and the least greater text that does not.

    Comparing names with both takes half of the time of `str.startswith`. The subtree of all names has no such range.
    """
    return subtree[:-2], subtree[:-3] + "0"  # 0 follows / in Unicode


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
    """Return the mode in the queue of a subtree for a request that names a resource below the subtree in the mode `below`.

    `mode`: the mode that the request has in this queue already, if any.
    """
    intention = IS if below == S else IX
    if mode is None or mode in (intention, IS):
        return intention
    return SIX if mode == S and intention == IX else mode


class Counted:
    """The units of a counted resource: held ones, and ones for which transactions wait."""

    __slots__ = ("asked", "by_transaction", "holders", "in_use", "requests")

    def __init__(self) -> None:
        self.holders = 0
        """Number of requests that hold units."""
        self.in_use = 0
        """The units of all holders."""
        self.by_transaction: dict[Owner, int] = {}
        """The units of each transaction that holds some. A request without a transaction never holds and waits."""
        self.requests: dict[str, int] = {}
        """The number of requests with which each of these transactions holds units."""
        self.asked: dict[str, tuple[int, int, int]] = {}
        """Of each transaction that waits for units: the number of its waiting requests, their units, and a limit that is at most
        the smallest one of theirs."""

    def add(self, transaction: str | None, units: int) -> None:
        """Count the units of a new holder."""
        self.holders += 1
        self.in_use += units
        if transaction is not None:
            self.by_transaction[transaction] = self.by_transaction.get(transaction, 0) + units
            self.requests[transaction] = self.requests.get(transaction, 0) + 1

    def remove(self, transaction: str | None, units: int) -> None:
        """Count the units of a holder that ends."""
        self.holders -= 1
        self.in_use -= units
        if transaction is not None:
            self.by_transaction[transaction] -= units
            self.requests[transaction] -= 1
            if not self.requests[transaction]:
                del self.by_transaction[transaction], self.requests[transaction]
                if len(self.requests) in CHECKED_SIZES:
                    compact(self.by_transaction)
                    compact(self.requests)

    def begin_wait(self, transaction: str, asked: UnitCount) -> None:
        """Count the units that a new waiting request asks for."""
        units, limit = asked
        count, others, smallest = self.asked.get(transaction, (0, 0, limit))
        self.asked[transaction] = count + 1, others + units, min(limit, smallest)

    def end_wait(self, transaction: str, units: int) -> None:
        """Count the end of the wait of a request. The limit stays, as a lower bound."""
        count, others, smallest = self.asked.pop(transaction)
        if count > 1:
            self.asked[transaction] = count - 1, others - units, smallest
        elif len(self.asked) in CHECKED_SIZES:
            compact(self.asked)

    def may_exceed_own_limit(self, transaction: str) -> bool:
        """Return whether a transaction that waits for units may hold and ask for more than a limit of its own."""
        _, units, limit = self.asked[transaction]
        return self.by_transaction.get(transaction, 0) + units > limit


class Subtree:
    """The locks below a subtree that are held, as numbers of intentions."""

    __slots__ = ("by_transaction", "examples", "exclusive", "requests", "shared")

    def __init__(self) -> None:
        self.shared = 0
        """Number of shared locks that are held below the subtree: `IS`."""
        self.exclusive = 0
        """Number of exclusive locks and of locks of units that are held below the subtree: `IX`."""
        self.by_transaction: dict[str, tuple[int, int]] = {}
        """Of both, those of each transaction that names the subtree in a request, once `subtrees.own_below` has counted them."""
        self.requests: dict[str, int] = {}
        """The number of requests of each transaction that name the subtree."""
        self.examples: dict[str, tuple[QueueMode, Request]] = {}
        """At most `MAX_EXAMPLES` of these locks, to describe blockers: by name, the mode and a holder."""

    def add(self, request: Request, names: list[str], mode: QueueMode, count: int) -> None:
        """Add the locks of a request for names below the subtree in `mode` (`count` is 1), or remove them (-1)."""
        examples = self.examples
        if count > 0:
            for name in names[: MAX_EXAMPLES - len(examples)]:
                examples[name] = mode, request
        elif examples:
            for name in names if len(names) < len(examples) else [*examples]:
                if name in examples and examples[name][1] is request:
                    del examples[name]
        transaction = request.transaction
        count *= len(names)
        shared, exclusive = (count, 0) if mode == S else (0, count)
        self.shared += shared
        self.exclusive += exclusive
        if transaction is not None and transaction in self.by_transaction:
            own_shared, own_exclusive = self.by_transaction[transaction]
            self.by_transaction[transaction] = own_shared + shared, own_exclusive + exclusive

    def end_request(self, transaction: str) -> None:
        """Record that a request of a transaction no longer names the subtree. After the last one, the locks of the transaction
        are no longer counted: they are counted again if another request asks.
        """
        self.requests[transaction] -= 1
        if not self.requests[transaction]:
            del self.requests[transaction]
            self.by_transaction.pop(transaction, None)
            if len(self.requests) in CHECKED_SIZES:
                compact(self.requests)
                compact(self.by_transaction)
