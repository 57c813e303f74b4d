"""The classes of the names that a transaction holds, and of the names that a request asks for."""

from __future__ import annotations

from itertools import islice
from typing import Final

from genie.core.lock_order.classes import LockClass, LockClasses
from genie.core.lock_order.edges import DESCENDING, NUMBER_DESCENDING, Guards
from genie.core.lock_order.names import precedes_by_number
from genie.core.model import Request
from genie.lock_modes import Mode

MAX_HELD_CLASSES: Final = 64
"""Maximum number of classes that are analysed of what a transaction holds, the first ones."""
MAX_GUARDS: Final = 16
"""Maximum number of guards of a transaction, the first ones: a lock that guards others is taken before them."""
MAX_HELD_REQUESTS: Final = 256
"""Maximum number of held requests that are read for one request, the first ones. After a release all are read again."""

_NONE: Final[frozenset[str]] = frozenset()


class Members:
    """Names of one class, as the first and the last one in both orders."""

    __slots__ = ("cls", "exclusive", "first", "first_by_number", "last", "last_by_number")

    def __init__(self, cls: LockClass, name: str, exclusive: bool) -> None:
        self.cls = cls
        self.exclusive = exclusive
        """One of them is exclusive, the stronger mode."""
        self.first = self.last = name
        """If digits are compared as characters."""
        self.first_by_number = self.last_by_number = name
        """If digits are compared as numbers."""

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
        """Return whether both have one name, which is the same."""
        return self.last_by_number == asked.first_by_number and self.last == asked.first

    def direction_to(self, asked: Members) -> int:
        """Return the flags of whether one of the names that are asked for precedes a held name, in both orders."""
        by_number = precedes_by_number(asked.first_by_number, self.last_by_number)
        return (NUMBER_DESCENDING if by_number else 0) | (DESCENDING if asked.first < self.last else 0)


class HeldClasses:
    """The classes of the names that a transaction holds. Updated when the transaction asks for more locks."""

    __slots__ = ("_request_count", "by_id", "classes", "guards", "subtrees")

    def __init__(self, classes: LockClasses) -> None:
        self.classes = classes
        self._request_count = 0
        """How many of the held requests are included, the earliest ones."""
        self.by_id: dict[int, Members] = {}
        """By the id of the class."""
        self.guards: Guards = {}
        self.subtrees: frozenset[str] = _NONE
        """The subtrees that are held in exclusive mode: a lock below them is never waited for."""

    def count_missing(self, requests: dict[int, Request]) -> int:
        """Return about how many names `update` would read."""
        missing = min(len(requests) - self._request_count, MAX_HELD_REQUESTS)
        return sum(len(each.exclusive) + len(each.shared) for each in islice(reversed(requests.values()), missing))

    def update(self, requests: dict[int, Request]) -> None:
        """Include the held requests that were added since the last call."""
        missing = len(requests) - self._request_count
        if missing > MAX_HELD_REQUESTS:
            self.classes.budget.is_exceeded = True
        added = list(islice(reversed(requests.values()), missing))
        for request in islice(reversed(added), MAX_HELD_REQUESTS):
            self.include(request)
        self._request_count = len(requests)

    def include(self, request: Request) -> None:
        """Add the first names of a held request."""
        if request.details is not None:
            self.subtrees |= {name for name in request.details.subtrees if request.mode(name) is Mode.EXCLUSIVE}
        for cls, name, exclusive in self.classes.classified(request):
            members = self.by_id.get(cls.id)
            if members is not None:
                members.add(name, exclusive)
            elif len(self.by_id) < MAX_HELD_CLASSES:
                members = self.by_id[cls.id] = Members(cls, name, exclusive)
            else:
                self.classes.budget.is_exceeded = True
                continue
            if cls.is_name and (name in self.guards or len(self.guards) < MAX_GUARDS):
                self.guards[cls.name] = members.exclusive  # equal to `name`, and one text for all transactions
