"""The theory of all kinds of locks, literally: what fits, who is deadlocked, and in which order owners can finish.

Slow on purpose. It shares no code with the lock manager, and derives every conflict from the names and modes alone: there are no
intentions and no counters. `reduce` decides step by step, as `genie/core/README.md` describes; `finishing_order` tries all orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import permutations

Owner = str | int
Position = tuple[float, int]
"""A position in a queue: (negated priority, ticket), sorted ascending."""


@dataclass(frozen=True)
class Lock:
    """One lock that a request names. `units` and `of` are 0 unless the mode is "units"."""

    name: str
    mode: str
    units: int = 0
    of: int = 0


@dataclass(eq=False)
class Entry:
    """A request that holds or waits. `moved` has its positions in rearranged queues, by resource."""

    id: int
    owner: Owner
    locks: tuple[Lock, ...]
    priority: float = 0
    held: bool = False
    moved: dict[str, Position] = field(default_factory=dict)

    def position(self, resource: str) -> Position:
        return self.moved.get(resource, (-self.priority, self.id))

    def lock(self, resource: str) -> Lock | None:
        return next((lock for lock in self.locks if lock.name == resource), None)

    def __repr__(self) -> str:
        return f"<{self.id} {self.owner} {'held' if self.held else 'waiting'} {self.locks}>"


def meeting(one: str, other: str) -> str | None:
    """Return the resource in whose queue locks on two names meet: the outer one of two names; None if they never meet."""
    if one == other or _contains(one, other):
        return one
    return other if _contains(other, one) else None


def _contains(subtree: str, name: str) -> bool:
    return (subtree == "**" or subtree.endswith("/**")) and name != subtree and name.startswith(subtree[:-2])


def conflict(one: Lock, other: Lock) -> bool:
    """Return whether locks of two owners exclude each other where they meet. Units of the same resource are counted instead."""
    if one.mode == other.mode == "units":
        return False
    return not one.mode == other.mode == "shared"


def leaves_room(request: Entry, holders: Iterable[Entry], waiters: Iterable[Entry]) -> bool:
    """Return whether a waiting request can be granted beside `holders` and those of `waiters` that are earlier in its queues."""
    others = [(other, False) for other in holders] + [(other, True) for other in waiters if other is not request]
    for lock in request.locks:
        in_use, limit = lock.units, lock.of
        for other, waits in others:
            for theirs in other.locks:
                resource = meeting(lock.name, theirs.name)
                if resource is None or (waits and other.position(resource) > request.position(resource)):
                    continue
                if other.owner != request.owner and conflict(lock, theirs):
                    return False
                if lock.mode == theirs.mode == "units":
                    in_use += theirs.units
                    limit = min(limit, theirs.of) if waits else limit
        if in_use > limit:
            return False
    return True


def can_finish(owner: Owner, requests: Iterable[Entry], in_queue_order: bool) -> bool:
    """Return whether everything that `owner` holds and asks for fits at once.

    `requests` are those of all owners that have not finished. `in_queue_order`: the requests of other owners that are earlier in a
    queue take their place too.
    """
    requests = list(requests)
    waiting = [request for request in requests if in_queue_order and not request.held and request.owner != owner]
    return all(
        leaves_room(
            own, [other for other in requests if other is not own and (other.held or other.owner == owner)], waiting
        )
        for own in requests
        if own.owner == owner and not own.held
    )


def reduce(requests: Iterable[Entry], in_queue_order: bool) -> tuple[list[Owner], set[Owner]]:
    """Take owners that can finish, until there are none. Return the owners taken, in order, and the others."""
    requests = list(requests)
    left = list(dict.fromkeys(request.owner for request in sorted(requests, key=lambda request: request.position(""))))
    order: list[Owner] = []
    while True:
        remaining = [request for request in requests if request.owner in left]
        taken = next((owner for owner in left if can_finish(owner, remaining, in_queue_order)), None)
        if taken is None:
            return order, set(left)
        order.append(taken)
        left.remove(taken)


def finishing_order(
    requests: Iterable[Entry], can_be_next: Callable[[Owner, list[Entry]], bool]
) -> tuple[Owner, ...] | None:
    """Return any order in which all owners can finish, by trying all of them; None if there is none."""
    requests = list(requests)
    for order in permutations(dict.fromkeys(request.owner for request in requests)):
        remaining = list(requests)
        for owner in order:
            if not can_be_next(owner, remaining):
                break
            remaining = [request for request in remaining if request.owner != owner]
        else:
            return order
    return None


class ReferenceManager:
    """A lock manager by the rules above. `requests` hold or wait, and are in order of arrival."""

    def __init__(self) -> None:
        self.requests: list[Entry] = []
        self.deadlocks = self.rearrangements = 0

    def request(self, request: Entry) -> None:
        """Queue a new request, and grant what fits. The request leaves if its owner is in a deadlock."""
        self.requests.append(request)
        if reduce(self.requests, in_queue_order=True)[1]:
            order, deadlocked = reduce(self.requests, in_queue_order=False)
            if deadlocked:
                self.requests.remove(request)
                self.deadlocks += 1
                return
            self._rearrange(self._component(request.owner), {owner: rank for rank, owner in enumerate(order)})
            self.rearrangements += 1
        self.grant()

    def end(self, request: Entry) -> None:
        self.requests.remove(request)
        named = {lock.name for each in self.requests for lock in each.locks}
        for each in self.requests:  # positions in the queue of a subtree end with it
            each.moved = {name: position for name, position in each.moved.items() if name in named}
        self.grant()

    def grant(self) -> None:
        """Grant what fits, in queue order, until nothing does: the grant of units can let a later request fit."""
        while granted := next(
            (each for each in self.waiting() if leaves_room(each, self.held(), self.waiting())), None
        ):
            granted.held = True
            granted.moved = {}

    def held(self) -> list[Entry]:
        return [request for request in self.requests if request.held]

    def waiting(self) -> list[Entry]:
        return sorted((each for each in self.requests if not each.held), key=lambda each: each.position(""))

    def queue(self, resource: str) -> list[Entry]:
        waiting = [
            each for each in self.waiting() if any(meeting(lock.name, resource) == resource for lock in each.locks)
        ]
        return sorted(waiting, key=lambda each: each.position(resource))

    def _component(self, start: Owner) -> set[Owner]:
        """Return the owners that wait for `start` and for which `start` waits, transitively, as if each waiter needed all blockers."""
        blockers: dict[Owner, set[Owner]] = {}
        waiters: dict[Owner, set[Owner]] = {}
        for request in self.waiting():
            for other in self.requests:
                if other.owner != request.owner and any(
                    depends(one, theirs) and (other.held or other.position(resource) < request.position(resource))
                    for one in request.locks
                    for theirs in other.locks
                    if (resource := meeting(one.name, theirs.name)) is not None
                ):
                    blockers.setdefault(request.owner, set()).add(other.owner)
                    waiters.setdefault(other.owner, set()).add(request.owner)
        return _reachable(blockers, start) & _reachable(waiters, start)

    def _rearrange(self, component: set[Owner], ranks: dict[Owner, int]) -> None:
        """Put the requests of a component in the order of their owners' ranks, in each queue. All others keep their order."""
        for resource in sorted({lock.name for request in self.requests for lock in request.locks}):
            queue = self.queue(resource)
            members = [index for index, request in enumerate(queue) if request.owner in component]
            if len(members) < 2:
                continue
            part = queue[members[0] : members[-1] + 1]
            positions = [request.position(resource) for request in part]
            left = list(range(len(part)))
            for position in positions:
                index = next(
                    i for i in left if not any(_must_precede(part, j, i, resource, ranks, component) for j in left)
                )
                left.remove(index)
                request = part[index]
                request.moved.pop(resource, None)
                if position != request.position(resource):
                    request.moved[resource] = position


def depends(one: Lock, other: Lock) -> bool:
    """Return whether a waiter for `one` may have to wait for another owner's `other`, which it meets."""
    return conflict(one, other) or one.mode == other.mode == "units"


def _must_precede(
    part: list[Entry], one: int, other: int, resource: str, ranks: dict[Owner, int], component: set[Owner]
) -> bool:
    first, second = part[one], part[other]
    if first.owner == second.owner or not any(
        meeting(lock.name, theirs.name) == resource and depends(lock, theirs)
        for lock in first.locks
        for theirs in second.locks
    ):
        return False
    if first.owner in component and second.owner in component:
        return ranks[first.owner] < ranks[second.owner]
    return one < other


def _reachable(edges: dict[Owner, set[Owner]], start: Owner) -> set[Owner]:
    found, stack = {start}, [start]
    while stack:
        for other in edges.get(stack.pop(), ()):
            if other not in found:
                found.add(other)
                stack.append(other)
    return found
