"""The classes of the names that a transaction holds, and of the names that a request asks for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from genie.core.lock_order.budget import CHARS_PER_STEP, MAX_STEPS
from genie.core.lock_order.classes import LockClass, LockClasses
from genie.core.lock_order.edges import DESCENDING, NUMBER_DESCENDING, Guards
from genie.core.lock_order.names import precedes_by_number
from genie.core.model import Request
from genie.lock_modes import Mode

MAX_HELD_CLASSES: Final = 64
"""Maximum number of classes, the first ones, that are analysed of the locks of a transaction."""
MAX_GUARDS: Final = 16
"""Maximum number of guards of a transaction. The first locks are used: a lock that guards other locks is taken before them."""
MAX_HELD_REQUESTS: Final = 256
"""Maximum number of held requests, the first ones, that are read for one request. After a release, all held requests are
read again."""

_NONE: Final[frozenset[str]] = frozenset()


class Members:
    """Names of one class. Only the first and the last name are kept, in both orders."""

    __slots__ = ("cls", "exclusive", "first", "first_by_number", "last", "last_by_number")

    def __init__(self, cls: LockClass, name: str, exclusive: bool) -> None:
        self.cls = cls
        self.exclusive = exclusive
        """True if one of the names is locked in exclusive mode."""
        self.first = self.last = name
        """The first name, if digits are compared as characters. `last` is the last name in this order."""
        self.first_by_number = self.last_by_number = name
        """The first name, if digits are compared as numbers. `last_by_number` is the last name in this order."""

    def add(self, name: str, exclusive: bool) -> None:
        """Add another name."""
        self.exclusive = self.exclusive or exclusive
        self.first = min(self.first, name)
        self.last = max(self.last, name)
        if precedes_by_number(name, self.first_by_number):
            self.first_by_number = name
        elif precedes_by_number(self.last_by_number, name):
            self.last_by_number = name

    def is_only(self, asked: Members) -> bool:
        """Return whether both contain one name only, and it is the same."""
        return self.last_by_number == asked.first_by_number and self.last == asked.first

    def direction_to(self, asked: Members) -> int:
        """Return the flags for both orders that show whether a requested name precedes a held name."""
        by_number = precedes_by_number(asked.first_by_number, self.last_by_number)
        return (NUMBER_DESCENDING if by_number else 0) | (DESCENDING if asked.first < self.last else 0)


class HeldClasses:
    """The classes of the names that a transaction holds. Updated when the transaction asks for more locks."""

    __slots__ = ("_request_count", "by_id", "classes", "guards", "subtrees")

    def __init__(self, classes: LockClasses) -> None:
        self.classes = classes
        self._request_count = 0
        """How many of the held requests `update` has included or, beyond `MAX_HELD_REQUESTS` in one call, skipped."""
        self.by_id: dict[int, Members] = {}
        """By the id of the class."""
        self.guards: Guards = {}
        self.subtrees: frozenset[str] = _NONE
        """The subtrees that are held in exclusive mode. The transaction never waits for a lock below them."""

    def count_missing(self, requests: dict[int, Request]) -> int:
        """Return the approximate number of names that `update` would read."""
        missing = min(len(requests) - self._request_count, MAX_HELD_REQUESTS)
        return sum(len(each.exclusive) + len(each.shared) for each in islice(reversed(requests.values()), missing))

    def update(self, requests: dict[int, Request]) -> None:
        """Include the held requests that were added since the last call, at most the first `MAX_HELD_REQUESTS` of them.

        If there are more, or if they take too many steps, they are skipped, and the budget is marked as exceeded.
        """
        budget, missing = self.classes.budget, len(requests) - self._request_count
        self._request_count = len(requests)
        if missing == 1:  # the usual case
            self.include(next(reversed(requests.values())))
            return
        if missing == len(requests):
            added: Iterable[Request] = requests.values()
        else:  # from the end of the dict: from its start, all earlier requests would be iterated over again
            added = reversed(list(islice(reversed(requests.values()), missing)))
        budget.is_exceeded |= missing > MAX_HELD_REQUESTS
        for request in islice(added, MAX_HELD_REQUESTS):
            if budget.steps >= MAX_STEPS:
                budget.is_exceeded = True
                break
            self.include(request)

    def include(self, request: Request) -> None:
        """Add the first names of a held request."""
        if request.details is not None:
            self.subtrees |= {name for name in request.details.subtrees if request.mode(name) is Mode.EXCLUSIVE}
        for cls, name, exclusive in self.classes.classified(request):
            members = self.by_id.get(cls.id)
            if members is not None:
                members.add(name, exclusive)
                self.classes.budget.steps += len(name) // CHARS_PER_STEP
            elif len(self.by_id) < MAX_HELD_CLASSES:
                members = self.by_id[cls.id] = Members(cls, name, exclusive)
            else:
                self.classes.budget.is_exceeded = True
                continue
            if cls.is_name and (name in self.guards or len(self.guards) < MAX_GUARDS):
                self.guards[cls.name] = members.exclusive  # equal to `name`, and one text for all transactions
