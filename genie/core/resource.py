"""One resource: who holds it, and the line of those who wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge

from genie.core.model import Entry, Request
from genie.core.queue import Queue


class Resource:
    """A name that is held or waited for. One that is neither does not exist."""

    __slots__ = ("exclusives", "holders", "line")

    def __init__(self, holder: Request | None = None, exclusives: int = 0) -> None:
        self.holders: dict[int, Request] = {} if holder is None else {holder.id: holder}
        """The grants on it by id. An owner may have several."""
        self.exclusives = exclusives
        """How many of them are exclusive. Above zero, all the grants are one owner's."""
        self.line: Line | None = None


class Line:
    """Those who wait for a resource, in the order in which they stand.

    The two modes are kept apart, each in order, so that neither "is an exclusive request ahead of me" nor "who is
    next" ever walks through a crowd of the other mode.
    """

    __slots__ = ("entangled", "exclusive", "mixed", "shared")

    def __init__(self) -> None:
        self.shared = Queue()
        self.exclusive = Queue()
        self.entangled = 0
        """How many of them are not simple: without them no cycle goes through this line."""
        self.mixed = False
        """Whether a reordering put requests of different priorities in another order than theirs."""

    def __len__(self) -> int:
        return len(self.shared) + len(self.exclusive)

    def __iter__(self) -> Iterator[Entry]:
        """All places, first to last."""
        return merge(self.shared, self.exclusive) if self.exclusive else iter(self.shared)

    def entries(self) -> list[Entry]:
        """The same, all at once."""
        return list(self)

    def insert(self, name: str, request: Request, exclusive: bool, moved: dict[Request, None]) -> None:
        """Put a newcomer right behind the last request of its priority or a higher one.

        Adds the requests whose places changed by it to `moved`: none, unless the line is mixed.
        """
        if not request.simple:
            self.entangled += 1
        (self.exclusive if exclusive else self.shared).add(request.entry(name))
        if not self.mixed:
            return
        order = [entry[2] for entry in self.entries() if entry[2] is not request]
        behind = max((i for i, other in enumerate(order) if other.priority >= request.priority), default=-1)
        order.insert(behind + 1, request)
        moved |= dict.fromkeys(self.rearrange(name, order))

    def rearrange(self, name: str, order: Sequence[Request]) -> list[Request]:
        """Let the same requests stand in another order, and return those whose places changed.

        The places themselves stay: they are dealt out anew, so that who comes next finds them as they were.
        """
        places = self.entries()
        changed = []
        for place, request in zip(places, order, strict=True):
            if place[2] is request:
                continue
            request.move(name, place)
            changed.append(request)
        if changed:
            self.shared, self.exclusive, self.mixed = Queue(), Queue(), False
            for request in order:
                self.place(name, request, name in request.exclusive)
        return changed

    def restore(self, name: str, request: Request, exclusive: bool) -> None:
        """Take in a request that was loaded, at the place that it had."""
        self.entangled += not request.simple
        self.place(name, request, exclusive)

    def place(self, name: str, request: Request, exclusive: bool) -> None:
        """Put a request at the place that it has."""
        entry = request.entry(name)
        (self.exclusive if exclusive else self.shared).add(entry)
        self.mixed = self.mixed or -entry[0] != request.priority

    @property
    def last(self) -> Entry | None:
        """The place behind all others."""
        shared, exclusive = self.shared.last, self.exclusive.last
        if shared is None or exclusive is None:
            return shared or exclusive
        return max(shared, exclusive)
