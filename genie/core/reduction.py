"""Deadlocks and rearrangements where units or subtrees are involved, by reduction.

An owner that waits for units needs only enough of its blockers, so a cycle in the wait-for graph need not be a deadlock. The
general method (Holt, Some Deadlock Properties of Computer Systems, 1972): take an owner whose requested locks fit beside the
locks of the other owners that are not taken yet, and repeat. Owners that are never taken are deadlocked. If all owners can
be taken, the queues are rearranged into this order, in which all can be served.

Owners that wait for nothing are taken first, so only waiting owners are examined. `genie/core/README.md` has the theory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush
from itertools import islice

from genie.core.context import shown_context
from genie.core.deadlock import Rearrangement, StepBudget, rearranged_order, strongly_connected_component
from genie.core.events import Cycle, Wait
from genie.core.lock_table import LockTable
from genie.core.model import Owner, QueueEntry, Request
from genie.core.special import Subtree, contains
from genie.core.wait_queue import STEPS_PER_MOVE, LockedResource
from genie.lock_modes import CONFLICTS, IS, IX, QueueMode, S, U, UnitCount, X

STEPS_PER_WAITER = 3
"""Number of steps for which a waiter counts when the owners are read. Reading a waiter takes as long as reading three edges."""

NAMES_PER_STEP = 32
"""Locks of an owner that one step compares with a subtree."""

ORDER_STEPS = 16
"""Pairs of requests that are compared in one step, to order the queue of a special resource."""


class _Waiter:
    """A request of a waiting owner in one queue."""

    __slots__ = ("entry", "mode", "owner", "request", "units")

    def __init__(self, request: Request, name: str, mode: QueueMode) -> None:
        self.request = request
        self.owner = request.owner
        self.entry = request.entry(name)
        self.mode = mode
        self.units: UnitCount = request.units[name] if mode == U else (0, 0)


class _Room:
    """A resource that waiting owners hold or wait for, with its holders and waiters among these owners."""

    def __init__(self, name: str, resource: LockedResource) -> None:
        self.name = name
        self.resource = resource
        self.holders: dict[QueueMode, dict[Owner, int]] = {}
        """By mode, the owners that hold the resource, with their units."""
        self.in_use = 0
        """The sum of the units of all holders."""
        self.waiters: list[_Waiter] = []
        """In queue order."""
        self.asked: dict[Owner, UnitCount] = {}
        """The units that each owner waits for, in all its requests, and their smallest limit."""

    def add_holder(self, owner: Owner, mode: QueueMode, units: int = 0) -> None:
        owners = self.holders.setdefault(mode, {})
        owners[owner] = owners.get(owner, 0) + units
        self.in_use += units

    def add_waiter(self, waiter: _Waiter) -> None:
        self.waiters.append(waiter)
        if waiter.mode == U:
            units, limit = waiter.units
            other_units, other_limit = self.asked.get(waiter.owner, (0, limit))
            self.asked[waiter.owner] = units + other_units, min(limit, other_limit)


class _HeldOnly:
    """A resource in the reduction over held locks. Finds the waiters that fit beside the owners that are not taken."""

    def __init__(self, room: _Room) -> None:
        self._holders = {mode: dict(owners) for mode, owners in room.holders.items()}
        self._in_use = room.in_use
        self._excluded: dict[QueueMode, dict[Owner, list[_Waiter]]] = {}
        """By mode and owner, the waiters that a holder in a conflicting mode may exclude: at first all waiters."""
        self._without_units: list[tuple[int, int, _Waiter]] = []
        """Waiters for units that no other mode excludes, as a heap of (-spare, request id, waiter).

        `spare` is how many units may be in use when the waiter is granted: its limit minus the units for which its owner
        waits. The first waiter allows the most, so it fits first.
        """
        for waiter in room.waiters:
            self._excluded.setdefault(waiter.mode, {}).setdefault(waiter.owner, []).append(waiter)
        self._asked = room.asked

    def take(self, owner: Owner) -> None:
        """Remove an owner that is taken. It no longer waits."""
        for owners in self._holders.values():
            self._in_use -= owners.pop(owner, 0)

    def fitting(self, budget: StepBudget) -> Iterator[_Waiter]:
        """Yield the waiters that fit now and did not before. Reads no other waiter."""
        for mode, by_owner in self._excluded.items():
            blocking: set[Owner] = set()
            for each in CONFLICTS[mode]:
                blocking.update(islice(self._holders.get(each, ()), 2))
            if not blocking:
                owners = list(by_owner)
            elif len(blocking) == 1:
                owners = [owner for owner in blocking if owner in by_owner]
            else:
                continue
            for owner in owners:
                for waiter in by_owner.pop(owner):
                    budget.spend()
                    if mode == U:
                        spare = waiter.units[1] - self._asked[owner][0]
                        heappush(self._without_units, (-spare, waiter.request.id, waiter))
                    else:
                        yield waiter
        while self._without_units and self._in_use <= -self._without_units[0][0]:
            budget.spend()
            yield heappop(self._without_units)[-1]


class _UnitsInOrder:
    """A counted resource in the reduction in queue order. Finds the waiters for units that fit beside earlier waiters."""

    def __init__(self, room: _Room) -> None:
        self._held = dict(room.holders.get(U, {}))
        self._in_use = room.in_use
        self._waiters = {waiter.request.id: waiter for waiter in room.waiters if waiter.mode == U}
        self._fitting: set[int] = set()
        self._asked = room.asked
        self._of_owner: dict[Owner, list[int]] = {}
        for id_, waiter in self._waiters.items():
            self._of_owner.setdefault(waiter.owner, []).append(id_)

    def take(self, owner: Owner) -> None:
        """Remove an owner that is taken."""
        self._in_use -= self._held.pop(owner, 0)
        for id_ in self._of_owner.pop(owner, ()):
            del self._waiters[id_]

    def fitting(self, budget: StepBudget) -> Iterator[_Waiter]:
        """Yield the waiters that fit now and did not before. Reads the queue until its units exceed every limit in it."""
        before, of_owner, largest = 0, dict[Owner, int](), 0
        smallest: dict[Owner, int] = {}  # the smallest limit of each owner so far: at most two owners are compared
        for id_, waiter in self._waiters.items():
            budget.spend()
            owner, (units, limit) = waiter.owner, waiter.units
            if id_ not in self._fitting:
                others = min([each for other, each in smallest.items() if other != owner], default=limit)
                total = self._in_use + self._asked[owner][0] + before - of_owner.get(owner, 0)
                if total <= min(limit, others):
                    self._fitting.add(id_)
                    yield waiter
            before += units
            of_owner[owner] = of_owner.get(owner, 0) + units
            smallest[owner] = min(limit, smallest.get(owner, limit))
            if len(smallest) > 2:  # noqa: PLR2004 - the greatest one of three decides nothing
                del smallest[max(smallest, key=lambda each: smallest[each])]
            largest = max(largest, limit)
            if self._in_use + before > largest:
                return


class Reduction:
    """Reduces the owners for which the owner of a new request waits, transitively, with the locks that they hold and wait
    for.

    Raises GraphTooLarge, like all its methods.
    """

    def __init__(self, table: LockTable, victim: Owner, budget: StepBudget) -> None:
        self._table, self._victim, self._budget = table, victim, budget
        self._component, reachable = strongly_connected_component(table, victim, budget)
        self._owners = {owner: min(waiting) for owner in reachable if (waiting := table.waiting_of(owner))}
        self._rooms: dict[str, _Room] = {}
        self._rooms_of: dict[Owner, list[str]] = {owner: [] for owner in self._owners}
        self._first: dict[Owner, tuple[float, int]] = {}
        """The first position of each owner in a queue."""
        for owner in self._owners:
            for request in table.waiting_of(owner).values():
                for name, mode in request.queue_modes():
                    budget.spend(STEPS_PER_WAITER)
                    waiter = _Waiter(request, name, mode)
                    self._room(name).add_waiter(waiter)
                    self._rooms_of[owner].append(name)
                    position = waiter.entry[:2]
                    self._first[owner] = min(position, self._first.get(owner, position))
        for room in self._rooms.values():
            room.waiters.sort(key=_entry)
        self._order: list[Owner] = []

    def _room(self, name: str) -> _Room:
        """Return a resource with its holders among the waiting owners."""
        room = self._rooms.get(name)
        if room is None:
            resource = self._table.resources[name]
            room = self._rooms[name] = _Room(name, resource)
            self._budget.spend(len(resource.holders))
            for holder in resource.holders.values():
                if holder.owner in self._owners:
                    mode = holder.queue_mode(name)
                    self._add_holder(room, holder.owner, mode, holder.units[name][0] if mode == U else 0)
            if isinstance(resource.special, Subtree):
                for owner in self._owners:
                    transaction = self._table.transactions.get(owner) if isinstance(owner, str) else None
                    if transaction is not None and transaction.grants:
                        self._budget.spend(1 + len(transaction.grants) // NAMES_PER_STEP)
                        shared, exclusive = self._table.locks_below(name, resource.special, owner)
                        if shared:
                            self._add_holder(room, owner, IS)
                        if exclusive:
                            self._add_holder(room, owner, IX)
        return room

    def _add_holder(self, room: _Room, owner: Owner, mode: QueueMode, units: int = 0) -> None:
        room.add_holder(owner, mode, units)
        self._rooms_of[owner].append(room.name)

    def _reduce(self, rooms: Mapping[str, _HeldOnly | _UnitsInOrder], blockers: dict[Owner, set[Owner]]) -> list[Owner]:
        """Take owners that can finish, until no owner can, always the first of them in the queues. Return them in this
        order.

        An owner can finish if all its waits in `rooms` fit, and all its `blockers` have finished.
        """
        left = self._count_obstacles(rooms, blockers)
        blocked: dict[Owner, list[Owner]] = {}
        for owner, others in blockers.items():
            for other in others:
                blocked.setdefault(other, []).append(owner)
        ready = [self._key(owner) for owner, count in left.items() if not count]
        heapify(ready)
        order: list[Owner] = []
        advanced: Iterable[Owner] = self._fitting_owners(rooms, rooms)
        while True:
            for owner in advanced:
                left[owner] -= 1
                if not left[owner]:
                    heappush(ready, self._key(owner))
            if not ready:
                return order
            taken = heappop(ready)[-1]
            order.append(taken)
            changed = [name for name in dict.fromkeys(self._rooms_of[taken]) if name in rooms]
            for name in changed:
                rooms[name].take(taken)
            advanced = [*blocked.get(taken, ()), *self._fitting_owners(rooms, changed)]

    def _count_obstacles(
        self, rooms: Mapping[str, _HeldOnly | _UnitsInOrder], blockers: dict[Owner, set[Owner]]
    ) -> dict[Owner, int]:
        """Return for each owner the number of its waits that may not fit, plus the number of its blockers."""
        left = {owner: len(blockers.get(owner, ())) for owner in self._owners}
        for name, state in rooms.items():
            for waiter in self._rooms[name].waiters:
                left[waiter.owner] += isinstance(state, _HeldOnly) or waiter.mode == U
        return left

    def _key(self, owner: Owner) -> tuple[float, int, int, Owner]:
        """Return a key that sorts owners by their first position in a queue. It ends with the owner."""
        return (*self._first[owner], self._owners[owner], owner)

    def _fitting_owners(
        self, rooms: Mapping[str, _HeldOnly | _UnitsInOrder], changed: Iterable[str]
    ) -> Iterator[Owner]:
        """Yield the owner of each waiter that fits now, after a change of the resources `changed`."""
        for name in changed:
            self._budget.spend()
            for waiter in rooms[name].fitting(self._budget):
                yield waiter.owner

    def _blockers_in_order(self) -> dict[Owner, set[Owner]]:
        """Return for each owner the nearest owners for which it waits in queue order, except for units."""
        blockers: dict[Owner, set[Owner]] = {owner: set() for owner in self._owners}
        for room in self._rooms.values():
            queue = self._table.wait_queue(room.name)
            for waiter in room.waiters:
                found, entry = blockers[waiter.owner], waiter.entry
                nearest = queue.exclusive.before(entry)
                if nearest is not None:  # the waiter waits for all entries before it, except those of its own owner
                    found.add(nearest[2].owner)
                else:
                    for mode in CONFLICTS[waiter.mode]:
                        self._budget.spend(len(room.holders.get(mode, ())) // 4)
                        found.update(room.holders.get(mode, ()))
                for mode in CONFLICTS[waiter.mode]:
                    if mode != X:
                        for other in queue.of_mode(mode).between(nearest, entry):
                            self._budget.spend()
                            found.add(other[2].owner)
                found.discard(waiter.owner)
        for owner, found in blockers.items():
            blockers[owner] = found & self._owners.keys()
        return blockers

    # -- Deadlocks --------------------------------------------------------------------

    def find_deadlock(self) -> Cycle | None:
        """Return the shortest cycle through the victim among the owners that can never finish, or None if all can."""
        self._order = self._reduce({name: _HeldOnly(room) for name, room in self._rooms.items()}, {})
        if len(self._order) == len(self._owners):
            return None
        deadlocked = self._owners.keys() - set(self._order)
        steps: dict[Owner, tuple[_Waiter, str, Owner]] = {}  # the edge by which each owner was reached
        waiters: dict[Owner, list[tuple[_Room, _Waiter]]] = {}
        for room in self._rooms.values():
            for waiter in room.waiters:
                waiters.setdefault(waiter.owner, []).append((room, waiter))
        queue = deque([self._victim])
        while queue:
            owner = queue.popleft()
            for room, waiter in waiters[owner]:
                for other in self._blocking_owners(room, waiter, deadlocked):
                    self._budget.spend()
                    if other == self._victim:
                        return self._build_cycle(steps, (waiter, room.name, owner))
                    if other not in steps:
                        steps[other] = waiter, room.name, owner
                        queue.append(other)
        raise AssertionError("the victim of a deadlock is in a cycle")

    def _blocking_owners(self, room: _Room, waiter: _Waiter, deadlocked: AbstractSet[Owner]) -> Iterator[Owner]:
        """Yield the deadlocked owners whose held locks block a waiter.

        Its own owner is yielded only if its own units block it.
        """
        for mode in CONFLICTS[waiter.mode]:
            for other in room.holders.get(mode, ()):
                if other != waiter.owner and other in deadlocked:
                    yield other
        if waiter.mode == U:
            held = {owner: units for owner, units in room.holders.get(U, {}).items() if owner in deadlocked}
            self._budget.spend(len(held))
            asked, limit = room.asked[waiter.owner][0], waiter.units[1]
            if held.get(waiter.owner, 0) + asked > limit:
                yield waiter.owner
            elif sum(held.values()) + asked > limit:
                yield from (other for other in held if other != waiter.owner)

    def _build_cycle(self, steps: dict[Owner, tuple[_Waiter, str, Owner]], last: tuple[_Waiter, str, Owner]) -> Cycle:
        """Return the cycle that the edge `last` to the victim closes."""
        edges = [last]
        while edges[-1][2] != self._victim:
            edges.append(steps[edges[-1][2]])
        edges.reverse()
        waits: list[Wait] = []
        for index, (waiter, name, _) in enumerate(edges):
            target = edges[(index + 1) % len(edges)][2]
            resource, holder = self._blocking_request(waiter, name, target)
            units = waiter.units if waiter.mode == U else None
            waits.append(Wait(resource, waiter.request.id, holder.id, shown_context(waiter.request), units))
        return Cycle(tuple([owner for _, _, owner in edges]), tuple(waits))

    def _blocking_request(self, waiter: _Waiter, name: str, owner: Owner) -> tuple[str, Request]:
        """Return a request of `owner` that blocks a waiter, and the resource that it holds: `name`, or one below it."""
        transaction = self._table.transactions[str(owner)]
        blocking = [*CONFLICTS[waiter.mode], U] if waiter.mode == U else CONFLICTS[waiter.mode]
        for request in transaction.held.values():
            for held, mode in request.modes():
                self._budget.spend()
                is_below = name in self._table.subtrees and contains(name, held)
                intention = IS if mode == S else IX
                if (held == name and mode in blocking) or (is_below and intention in blocking):
                    return held, request
        # The owner waits for its own units, and holds none of them.
        others = [request for request in transaction.waiting.values() if request is not waiter.request]
        return name, next((request for request in others if name in request.units), waiter.request)

    # -- Rearrangement ------------------------------------------------------------------

    @property
    def owners(self) -> Iterable[Owner]:
        """The examined waiting owners."""
        return self._owners

    def finishing_owners(self) -> list[Owner]:
        """Return the owners that can finish without overtaking earlier waiters, in the order in which they can finish."""
        in_order = {name: _UnitsInOrder(room) for name, room in self._rooms.items() if room.asked}
        return self._reduce(in_order, self._blockers_in_order())

    def find_rearrangement(self) -> Rearrangement:
        """Return how to rearrange wait queues so that all owners can finish in queue order. There must be no deadlock.

        Changes nothing.
        """
        if len(self.finishing_owners()) == len(self._owners):
            return {}
        component = set(self._component)
        ranks = {owner: rank for rank, owner in enumerate(self._order) if owner in component}
        rearrangement: Rearrangement = {}
        for name, room in self._rooms.items():
            members = [waiter.entry for waiter in room.waiters if waiter.owner in ranks]
            if len(members) < 2:  # noqa: PLR2004
                continue
            first, last = members[0], members[-1]
            between = self._table.wait_queue(name).entries_between(first, last, self._budget.left + len(members))
            self._budget.spend(len(between))
            entries = [first, *between, last]
            requests = [entry[2] for entry in entries]
            if room.resource.special is None:
                order = rearranged_order(requests, name, ranks)
            else:
                self._budget.spend(len(entries) ** 2 // ORDER_STEPS)
                order = _ordered(requests, name, ranks)
            if order is not None:
                moves = sum(entry[2] is not request for entry, request in zip(entries, order, strict=True))
                self._budget.spend(STEPS_PER_MOVE * moves)
                rearrangement[name] = (entries, order)
        return rearrangement


def _entry(waiter: _Waiter) -> QueueEntry:
    return waiter.entry


def _ordered(requests: list[Request], name: str, ranks: dict[Owner, int]) -> list[Request] | None:
    """Return contiguous requests of a special queue, with the requests of ranked owners ordered by rank. Return None if
    nothing changes.

    Requests that may have any order keep their order. Conflicting requests of other owners keep their order, too.
    """
    modes = [request.queue_mode(name) for request in requests]
    before: list[list[int]] = [[] for _ in requests]  # of each request, the requests that must come after it
    count = [0] * len(requests)  # of each request, how many must come before it
    for i, one in enumerate(requests):
        for j in range(i + 1, len(requests)):
            other = requests[j]
            if one.owner != other.owner and (modes[j] in CONFLICTS[modes[i]] or modes[i] == modes[j] == U):
                swapped = one.owner in ranks and other.owner in ranks and ranks[other.owner] < ranks[one.owner]
                earlier, later = (j, i) if swapped else (i, j)
                before[earlier].append(later)
                count[later] += 1
    free: list[int] = []
    for i, needed in enumerate(count):
        if not needed:
            heappush(free, i)
    order: list[int] = []
    while free:
        i = heappop(free)
        order.append(i)
        for j in before[i]:
            count[j] -= 1
            if not count[j]:
                heappush(free, j)
    return None if order == sorted(order) else [requests[i] for i in order]
