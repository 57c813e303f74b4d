"""What counted resources and subtrees have beside the holders and the waiters of a plain resource.

A counted resource counts the units in use. A subtree counts the locks below it as intentions, which are derived from the
names of the requests and never stored: `IS` for shared locks, `IX` for exclusive locks and units.
"""

from __future__ import annotations

from collections.abc import Iterator

from genie.core.model import Owner, Request
from genie.lock_modes import IS, IX, MAX_SUBTREE_LEVELS, SIX, WHOLE_NAMESPACE, QueueMode, S, X

MAX_EXAMPLES = 32
"""Number of locks below a subtree that are kept to describe blockers."""


def contains(subtree: str, name: str) -> bool:
    """Return whether `name` is below `subtree`."""
    return name.startswith(subtree[:-2]) and name != subtree


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
    """The units of a counted resource that are held."""

    __slots__ = ("by_transaction", "holders", "in_use")

    def __init__(self) -> None:
        self.holders = 0
        """Number of requests that hold units."""
        self.in_use = 0
        """The units of all holders."""
        self.by_transaction: dict[Owner, int] = {}
        """The units of each transaction that holds some. A request without a transaction never holds and waits."""

    def add(self, transaction: str | None, units: int) -> None:
        """Count the units of a new holder."""
        self.holders += 1
        self.in_use += units
        if transaction is not None:
            self.by_transaction[transaction] = self.by_transaction.get(transaction, 0) + units

    def remove(self, transaction: str | None, units: int) -> None:
        """Count the units of a holder that ends."""
        self.holders -= 1
        self.in_use -= units
        if transaction is not None:
            self.by_transaction[transaction] -= units
            if not self.by_transaction[transaction]:
                del self.by_transaction[transaction]


class Subtree:
    """The locks below a subtree that are held, as numbers of intentions."""

    __slots__ = ("by_transaction", "examples", "exclusive", "shared")

    def __init__(self) -> None:
        self.shared = 0
        """Number of shared locks that are held below the subtree: `IS`."""
        self.exclusive = 0
        """Number of exclusive locks and of locks of units that are held below the subtree: `IX`."""
        self.by_transaction: dict[str, tuple[int, int]] = {}
        """Of both, those of each transaction that has some. A request without a transaction never holds and waits."""
        self.examples: dict[str, tuple[QueueMode, Request]] = {}
        """A few of these locks by name, each with its mode and a holder, to describe blockers: at most `MAX_EXAMPLES`."""

    def add(self, request: Request, name: str, mode: QueueMode, count: int) -> None:
        """Add `count`, which is 1 or -1, to the number of locks below the subtree in `mode`."""
        if count > 0:
            if len(self.examples) < MAX_EXAMPLES:
                self.examples[name] = mode, request
        elif self.examples and self.examples.get(name, (mode, None))[1] is request:
            del self.examples[name]
        transaction = request.transaction
        shared, exclusive = (count, 0) if mode == S else (0, count)
        self.shared += shared
        self.exclusive += exclusive
        if transaction is not None:
            own_shared, own_exclusive = self.by_transaction.get(transaction, (0, 0))
            own = own_shared + shared, own_exclusive + exclusive
            if own == (0, 0):
                del self.by_transaction[transaction]
            else:
                self.by_transaction[transaction] = own

    def has_conflicting(self, mode: QueueMode, owner: Owner) -> bool:
        """Return whether another owner than `owner` holds a lock below the subtree that conflicts with `mode`."""
        own_shared, own_exclusive = self.by_transaction.get(owner, (0, 0)) if isinstance(owner, str) else (0, 0)
        if mode == X:
            return self.shared > own_shared or self.exclusive > own_exclusive
        return mode in (S, SIX) and self.exclusive > own_exclusive
