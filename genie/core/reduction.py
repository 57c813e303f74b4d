"""Deadlocks and rearrangements where units or subtrees are involved, by reduction.

An owner that waits for units needs only enough of its blockers, so a cycle in the wait-for graph need not be a deadlock. The
general method (Holt, Some Deadlock Properties of Computer Systems, 1972): take any owner for whom all that it holds and asks
for fits beside what the owners hold that are not taken yet, and repeat. Owners that are never taken are deadlocked. The order
in which all are taken is an order in which all can be served: the queues are rearranged by it.

Owners that wait for nothing are taken first, so only waiting owners are looked at. `genie/core/README.md` has the theory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from genie.core.context import shown_context
from genie.core.deadlock import Rearrangement, StepBudget, rearranged_order, strongly_connected_component
from genie.core.events import Cycle, Wait
from genie.core.lock_table import LockTable
from genie.core.model import Owner, QueueEntry, Request
from genie.core.special import Subtree, contains
from genie.core.wait_queue import STEPS_PER_MOVE, LockedResource
from genie.lock_modes import CONFLICTS, IS, IX, QueueMode, S, U, UnitCount

ORDER_STEPS = 16
"""Pairs of requests that are compared in one step, to order the queue of a special resource."""


class _Waiter:
    """A request of a waiting owner in one queue."""

    __slots__ = ("entry", "fits", "mode", "owner", "request", "units")

    def __init__(self, request: Request, name: str, mode: QueueMode) -> None:
        self.request = request
        self.owner = request.owner
        self.entry = request.entry(name)
        self.mode = mode
        self.units: UnitCount = request.units[name] if mode == U else (0, 0)
        self.fits = False


class _Room:
    """A resource that waiting owners hold or wait for: who of the owners that are not taken yet holds it, and who waits."""

    def __init__(self, name: str, resource: LockedResource) -> None:
        self.name = name
        self.resource = resource
        self.holders: dict[QueueMode, dict[Owner, int]] = {}
        """The owners that hold it, by mode, with the units that they hold."""
        self.in_use = 0
        """The units that they hold."""
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

    def copy(self) -> _Room:
        """Return a copy for one reduction."""
        room = _Room(self.name, self.resource)
        room.holders = {mode: dict(owners) for mode, owners in self.holders.items()}
        room.in_use, room.waiters, room.asked = self.in_use, list(self.waiters), self.asked
        for waiter in room.waiters:
            waiter.fits = False
        return room

    def take(self, owner: Owner) -> None:
        """Remove an owner that is taken."""
        for owners in self.holders.values():
            self.in_use -= owners.pop(owner, 0)
        self.waiters = [waiter for waiter in self.waiters if waiter.owner != owner]

    def holder_leaves_room(self, waiter: _Waiter) -> bool:
        """Return whether no other owner holds the resource in a conflicting mode."""
        for mode in CONFLICTS[waiter.mode]:
            owners = self.holders.get(mode)
            if owners and len(owners) > (waiter.owner in owners):
                return False
        return True

    def fitting(self, in_queue_order: bool) -> Iterator[_Waiter]:
        """Yield the waiters that fit now and did not before. `in_queue_order`: also beside the earlier waiters of others."""
        seen: dict[
            QueueMode, Owner | None
        ] = {}  # the owner of all earlier waiters in a mode; None if there are several
        asked_before, own_before, smallest = 0, dict[Owner, int](), 0
        for waiter in self.waiters:
            owner = waiter.owner
            if not waiter.fits and self.holder_leaves_room(waiter):
                fits = not in_queue_order or all(seen.get(mode, owner) == owner for mode in CONFLICTS[waiter.mode])
                if fits and waiter.mode == U:
                    units, limit = self.asked[owner][0], waiter.units[1]
                    if in_queue_order:
                        units += asked_before - own_before.get(owner, 0)
                        limit = min(limit, smallest or limit)
                    fits = self.in_use + units <= limit
                if fits:
                    waiter.fits = True
                    yield waiter
            if waiter.mode == U:
                asked_before += waiter.units[0]
                own_before[owner] = own_before.get(owner, 0) + waiter.units[0]
                smallest = min(smallest or waiter.units[1], waiter.units[1])
            seen[waiter.mode] = owner if seen.get(waiter.mode, owner) == owner else None


class Reduction:
    """The owners that a new request's owner waits for, transitively, and what they hold and wait for.

    Raises GraphTooLarge, like all its methods.
    """

    def __init__(self, table: LockTable, victim: Owner, budget: StepBudget) -> None:
        self._table, self._victim, self._budget = table, victim, budget
        self._component, reachable = strongly_connected_component(table, victim, budget)
        self._owners = {owner: index for index, owner in enumerate(reachable) if table.waiting_of(owner)}
        self._rooms: dict[str, _Room] = {}
        self._rooms_of: dict[Owner, list[str]] = {owner: [] for owner in self._owners}
        for owner in self._owners:
            for request in table.waiting_of(owner).values():
                for name, mode in request.queue_modes():
                    budget.spend()
                    self._room(name).add_waiter(_Waiter(request, name, mode))
                    self._rooms_of[owner].append(name)
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
                self._budget.spend(len(resource.special.by_transaction))
                for owner, (shared, exclusive) in resource.special.by_transaction.items():
                    if owner in self._owners:
                        if shared:
                            self._add_holder(room, owner, IS)
                        if exclusive:
                            self._add_holder(room, owner, IX)
        return room

    def _add_holder(self, room: _Room, owner: Owner, mode: QueueMode, units: int = 0) -> None:
        room.add_holder(owner, mode, units)
        self._rooms_of[owner].append(room.name)

    def _reduce(self, in_queue_order: bool) -> tuple[list[Owner], dict[str, _Room]]:
        """Take owners as long as there are some that can finish: of several, the first one in the queues.

        Return them in this order, and what is left of the resources.
        """
        rooms = {name: room.copy() for name, room in self._rooms.items()}
        unfit = dict.fromkeys(self._owners, 0)
        first: dict[Owner, tuple[float, int]] = {}
        for room in rooms.values():
            for waiter in room.waiters:
                unfit[waiter.owner] += 1
                position = waiter.entry[:2]
                first[waiter.owner] = min(position, first.get(waiter.owner, position))
        ready: list[tuple[float, int, int, Owner]] = []
        changed = list(rooms)
        order: list[Owner] = []
        while True:
            for name in dict.fromkeys(changed):
                self._budget.spend(1 + len(rooms[name].waiters) // 4)
                for waiter in rooms[name].fitting(in_queue_order):
                    unfit[waiter.owner] -= 1
                    if not unfit[waiter.owner]:
                        heappush(ready, (*first[waiter.owner], self._owners[waiter.owner], waiter.owner))
            if not ready:
                return order, rooms
            owner = heappop(ready)[-1]
            order.append(owner)
            changed = self._rooms_of[owner]
            for name in dict.fromkeys(changed):
                rooms[name].take(owner)

    # -- Deadlocks --------------------------------------------------------------------

    def find_deadlock(self) -> Cycle | None:
        """Return the shortest cycle through the victim among the owners that can never finish, or None if all can."""
        self._order, rooms = self._reduce(in_queue_order=False)
        if len(self._order) == len(self._owners):
            return None
        steps: dict[Owner, tuple[_Waiter, str, Owner]] = {}  # the edge by which each owner was reached
        queue = deque([self._victim])
        while queue:
            owner = queue.popleft()
            for name in dict.fromkeys(self._rooms_of[owner]):
                for waiter in rooms[name].waiters:
                    self._budget.spend()
                    if waiter.owner != owner:
                        continue
                    for other in self._blocking_owners(rooms[name], waiter):
                        if other == self._victim:
                            return self._build_cycle(steps, (waiter, name, owner))
                        if other not in steps:
                            steps[other] = waiter, name, owner
                            queue.append(other)
        raise AssertionError("the victim of a deadlock is in a cycle")

    def _blocking_owners(self, room: _Room, waiter: _Waiter) -> Iterator[Owner]:
        """Yield the deadlocked owners whose held locks block a waiter: the owner itself only if its own units do."""
        for mode in CONFLICTS[waiter.mode]:
            for other in room.holders.get(mode, ()):
                if other != waiter.owner:
                    yield other
        if waiter.mode == U:
            asked, limit = room.asked[waiter.owner][0], waiter.units[1]
            if room.holders.get(U, {}).get(waiter.owner, 0) + asked > limit:
                yield waiter.owner
            elif room.in_use + asked > limit:
                for other in room.holders.get(U, ()):
                    if other != waiter.owner:
                        yield other

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

    def find_rearrangement(self) -> Rearrangement:
        """Return how to rearrange wait queues so that all owners can finish in queue order. There must be no deadlock.

        Changes nothing.
        """
        if len(self._reduce(in_queue_order=True)[0]) == len(self._owners):
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
    """Return contiguous requests of a special queue, those of owners with ranks ordered by them; None if nothing changes.

    Requests that need not be before each other keep their order, and so do all conflicting requests of other owners.
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
