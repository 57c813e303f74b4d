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
from sys import maxsize

from genie.core.context import shown_context
from genie.core.deadlock import (
    GraphTooLarge,
    Rearrangement,
    StepBudget,
    rearranged_order,
    strongly_connected_component,
    waiting_owners_below,
)
from genie.core.events import Cycle, Wait
from genie.core.lock_table import LockTable
from genie.core.model import Owner, QueueEntry, Request
from genie.core.special import Counted, Subtree, contains
from genie.core.subtrees import locks_below
from genie.core.wait_queue import MAX_ARRIVAL_STEPS, LockedResource, move_steps
from genie.lock_modes import CONFLICTS, IS, IX, SIX, QueueMode, S, U, UnitCount, X

STEPS_PER_WAITER = 3
"""Number of steps for which a waiter counts when the owners are read. Reading a waiter takes as long as reading three edges."""

NAMES_PER_STEP = 32
"""Locks of an owner that one step compares with a subtree."""

MAX_FINISHING_STEPS = 4_000
"""Steps of `finishes_in_queue_order`. A step reads a queue in which an owner waits, an owner that may be before it, or
`UNITS_PER_STEP` waiters or holders of a counted resource."""
UNITS_PER_STEP = 4

MAX_FINISHING_DEPTH = 100
"""Maximum length of the chains of owners in this search, which is recursive."""

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


# -- The usual case: no deadlock -------------------------------------------------------------


def finishes_in_queue_order(table: LockTable, owner: Owner) -> bool:
    """Return True if the owner of a new request can finish beside the waiters that are before it in the queues.

    Then there is no deadlock, and nothing needs to be rearranged: without this owner, all others could finish before the request
    arrived. False if this is not so, or if it is not found in a bounded search, which takes each owner at most once.
    """
    try:
        return _Finishing(table).finishes(owner)
    except GraphTooLarge:
        return False


class _UnitScan:
    """The waiters for units of one resource, read once from the first one on."""

    def __init__(self, table: LockTable, name: str, finished: Mapping[Owner, bool]) -> None:
        resource = table.resources[name]
        queue, special = table.wait_queue(name), resource.special
        assert isinstance(special, Counted)  # noqa: S101 - units of a subtree do not exist
        self.held = special.held_by_transaction
        self.in_use = sum(
            [
                units
                for owner, units in self.held.items()
                if not finished.get(owner) and table.transactions[str(owner)].waiting
            ]
        )
        """The units of waiting owners that are not known to finish."""
        self.asked = 0
        """The units that such owners wait for, of the waiters that were read."""
        self.asked_by: dict[Owner, int] = {}
        self.smallest = maxsize
        """The smallest limit of these waiters."""
        self.only_units = len(resource.holders) == special.unit_holder_count and queue.modes() == [U]
        self.entries = iter(queue.of_mode(U))
        self.fits: dict[int, bool] = {}
        """True if the units of each waiter that was read fit, by id."""

    def remove(self, owner: Owner) -> None:
        """Remove an owner that finishes."""
        self.in_use -= self.held.get(owner, 0)
        self.asked -= self.asked_by.pop(owner, 0)


class _Finishing:
    """A search for an order in which owners finish in queue order, depth first. An owner whose turn is not over does not finish."""

    def __init__(self, table: LockTable) -> None:
        self._table = table
        self._budget = StepBudget(MAX_ARRIVAL_STEPS - MAX_FINISHING_STEPS)
        self._finished: dict[Owner, bool] = {}
        self._scans: dict[str, _UnitScan] = {}
        self._depth = 0

    def finishes(self, owner: Owner) -> bool:
        """Return whether all that an owner waits for is free after others have finished. Raises GraphTooLarge."""
        waiting = self._table.waiting_of(owner)
        known = self._finished.get(owner) if waiting else True
        if known is not None:
            return known
        self._finished[owner] = False
        if self._depth >= MAX_FINISHING_DEPTH:
            raise GraphTooLarge
        self._depth += 1
        if all(
            self._has_turn(request, name, mode) for request in waiting.values() for name, mode in request.queue_modes()
        ):
            self._finish(owner)
        self._depth -= 1
        return self._finished[owner]

    def _finish(self, owner: Owner) -> None:
        if not self._finished.get(owner):
            self._finished[owner] = True
            for scan in self._scans.values():
                scan.remove(owner)

    def _has_turn(self, request: Request, name: str, mode: QueueMode) -> bool:
        """Return whether the owners finish that hold one resource, or wait for it earlier, against a waiting request."""
        self._budget.spend()
        for other in self._conflicting_owners(request, name, mode):
            self._budget.spend()
            if other != request.owner and not self.finishes(other):
                return False
        return mode != U or self._units_fit(request, name)

    def _conflicting_owners(self, request: Request, name: str, mode: QueueMode) -> Iterator[Owner]:
        """Yield enough of these owners: one that waits for an exclusive lock finishes after all that are before it."""
        resource, queue, entry = self._table.resources[name], self._table.wait_queue(name), request.entry(name)
        nearest = queue.exclusive.before(entry)
        special = resource.special
        if nearest is not None:
            yield nearest[2].owner
        elif resource.exclusive_count:  # then all holders have the same owner
            yield next(iter(resource.holders.values())).owner
        elif mode == X or (
            special is not None
            and not (isinstance(special, Counted) and mode == U and len(resource.holders) == special.unit_holder_count)
        ):
            for holder in resource.holders.values():
                if resource.holder_mode(name, holder) in CONFLICTS[mode]:
                    yield holder.owner
                else:
                    yield request.owner
        if nearest is None and isinstance(special, Subtree) and mode in (S, X, SIX):
            yield from waiting_owners_below(self._table, name, special, request.owner)
        for other_mode in CONFLICTS[mode]:
            if other_mode != X:
                for other in queue.of_mode(other_mode).between(nearest, entry):
                    yield other[2].owner

    def _units_fit(self, request: Request, name: str) -> bool:
        """Return whether the units of a waiting request fit beside those of the owners before it that do not finish."""
        scan = self._scans.get(name)
        if scan is None:
            self._budget.spend(len(self._table.resources[name].holders) // UNITS_PER_STEP)
            scan = self._scans[name] = _UnitScan(self._table, name, self._finished)
        fits, finished = scan.fits, self._finished
        while request.id not in fits:
            waiter = next(scan.entries)[2]
            owner, (units, limit) = waiter.owner, waiter.units[name]
            waiting = self._table.waiting_of(owner)
            if len(fits) % UNITS_PER_STEP == 0:
                self._budget.spend()
            asked = units if len(waiting) == 1 else self._units_asked_by(owner, name)
            smallest = min(scan.smallest, limit)
            does_fit = fits[waiter.id] = scan.in_use + scan.asked + asked <= smallest
            if does_fit and scan.only_units and len(waiting) == 1 and _is_in_one_queue(waiter):  # then it finishes
                if owner in scan.held or len(self._scans) > 1:
                    self._finish(owner)
                else:
                    finished[owner] = True
                continue
            scan.asked += units
            scan.asked_by[owner] = scan.asked_by.get(owner, 0) + units
            scan.smallest = smallest
            if does_fit and waiter is not request:
                self.finishes(owner)
        return scan.fits[request.id]

    def _units_asked_by(self, owner: Owner, name: str) -> int:
        """Return the units that all requests of a waiting owner ask for."""
        waiting = self._table.waiting_of(owner)
        self._budget.spend(len(waiting))
        return sum([request.units[name][0] for request in waiting.values() if name in request.units])


def find_deadlock(table: LockTable, victim: Owner, budget: StepBudget) -> Cycle | None:
    """Return the shortest cycle of a deadlock with the owner of a new request, or None if there is none. Raises GraphTooLarge."""
    return Reduction(table, victim, _blocking_owners(table, victim, budget), budget).find_deadlock()


def find_rearrangement(table: LockTable, owner: Owner, budget: StepBudget) -> Rearrangement:
    """Return how to rearrange wait queues so that all owners can finish in queue order. There must be no deadlock.

    Only the owners that both wait for `owner` and are waited for by it need to be looked at: before its request arrived, all
    others could finish without it. Raises GraphTooLarge. Changes nothing.
    """
    component, _ = strongly_connected_component(table, owner, budget)
    return Reduction(table, owner, component, budget).find_rearrangement()


def _blocking_owners(table: LockTable, victim: Owner, budget: StepBudget) -> list[Owner]:
    """Return the owner of a new request, and the waiting owners whose held locks block it, transitively."""
    found: dict[Owner, None] = {victim: None}
    searched: set[tuple[str, QueueMode]] = set()
    stack = [victim]
    while stack:
        owner = stack.pop()
        for request in table.waiting_of(owner).values():
            for each in request.queue_modes():
                budget.spend()
                if each not in searched:
                    searched.add(each)
                    for other in _holding_owners(table, *each, owner):
                        budget.spend()
                        if other not in found and table.waiting_of(other):
                            found[other] = None
                            stack.append(other)
    return list(found)


def _holding_owners(table: LockTable, name: str, mode: QueueMode, owner: Owner) -> Iterator[Owner]:
    """Yield the waiting owners that hold a resource against a mode, and `owner` for several that do not. Units count as a conflict."""
    resource = table.resources[name]
    modes = [*CONFLICTS[mode], U] if mode == U else CONFLICTS[mode]
    special = resource.special
    if isinstance(special, Counted) and mode == U and len(resource.holders) == special.unit_holder_count:
        for count, transaction in enumerate(special.held_by_transaction):
            if table.transactions[str(transaction)].waiting:
                yield transaction
            elif count % UNITS_PER_STEP == 0:
                yield owner
        return
    for holder in resource.holders.values():
        yield holder.owner if resource.holder_mode(name, holder) in modes else owner
    if isinstance(special, Subtree) and mode in (S, X, SIX):
        yield from waiting_owners_below(table, name, special, owner)


def _is_in_one_queue(request: Request) -> bool:
    modes = None if request.details is None else request.details.queue_modes
    return (request.name_count() if modes is None else len(modes)) == 1


class Reduction:
    """Waiting owners, and what they hold and wait for. All others are as if they had finished.

    Raises GraphTooLarge, like all its methods.
    """

    def __init__(self, table: LockTable, victim: Owner, owners: Iterable[Owner], budget: StepBudget) -> None:
        self._table, self._victim, self._budget = table, victim, budget
        self._owners = {owner: min(waiting) for owner in owners if (waiting := table.waiting_of(owner))}
        self._rooms: dict[str, _Room] = {}
        self._rooms_of: dict[Owner, list[str]] = {owner: [] for owner in self._owners}
        self._first: dict[Owner, tuple[float, int]] = {}
        """The first position of each owner in a queue."""
        self._needed: dict[Owner, tuple[float, int]] = {}
        """The first position of an earlier owner that waits for locks of this owner, also indirectly; see `_find_needed`."""
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

    def _room(self, name: str) -> _Room:
        """Return a resource with its holders among the waiting owners."""
        room = self._rooms.get(name)
        if room is None:
            resource = self._table.resources[name]
            room = self._rooms[name] = _Room(name, resource)
            self._read_holders(room)
            if isinstance(resource.special, Subtree):
                self._read_locks_below(room, resource.special)
        return room

    def _read_holders(self, room: _Room) -> None:
        """Add the waiting owners that hold a resource."""
        name, resource, owners = room.name, room.resource, self._owners
        special = resource.special
        if isinstance(special, Counted) and len(resource.holders) == special.unit_holder_count:
            held = special.held_by_transaction
            self._budget.spend(min(len(held), len(owners)) // UNITS_PER_STEP)
            for owner in held if len(held) < len(owners) else owners:
                if owner in held and owner in owners:
                    self._add_holder(room, owner, U, held[owner])
            return
        self._budget.spend(len(resource.holders))
        for holder in resource.holders.values():
            if holder.owner in owners:
                mode = resource.holder_mode(name, holder)
                self._add_holder(room, holder.owner, mode, holder.units[name][0] if mode == U else 0)

    def _read_locks_below(self, room: _Room, special: Subtree) -> None:
        """Add the waiting owners that hold locks below a subtree."""
        for owner in self._owners:
            transaction = self._table.transactions.get(owner) if isinstance(owner, str) else None
            if transaction is not None and transaction.grants:
                self._budget.spend(1 + len(transaction.grants) // NAMES_PER_STEP)
                shared, exclusive = locks_below(self._table, room.name, special, owner)
                if shared:
                    self._add_holder(room, owner, IS)
                if exclusive:
                    self._add_holder(room, owner, IX)

    def _add_holder(self, room: _Room, owner: Owner, mode: QueueMode, units: int = 0) -> None:
        room.add_holder(owner, mode, units)
        self._rooms_of[owner].append(room.name)

    def _reduce(self, rooms: Mapping[str, _HeldOnly | _UnitsInOrder], blockers: dict[Owner, set[Owner]]) -> list[Owner]:
        """Take owners that can finish, until no owner can, always the first of them in the queues, or that such an owner
        needs. Return them in this order.

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

    def _key(self, owner: Owner) -> tuple[tuple[float, int], tuple[float, int], int, Owner]:
        """Return a key that sorts owners by their first position in a queue. It ends with the owner."""
        first = self._first[owner]
        return self._needed.get(owner, first), first, self._owners[owner], owner

    def _find_needed(self) -> None:
        """Find the owners whose held locks block an earlier owner, also indirectly. They are ranked before later owners, which
        then need not overtake the earlier one.
        """
        waits = self._waits_by_owner()
        read: set[tuple[str, QueueMode]] = set()
        for earlier in sorted(self._owners, key=self._first.__getitem__):
            position = self._first[earlier]
            stack = [earlier]
            while stack:
                for room, waiter in waits[stack.pop()]:
                    blocking = (*CONFLICTS[waiter.mode], U) if waiter.mode == U else CONFLICTS[waiter.mode]
                    for mode in blocking:
                        if (room.name, mode) in read:
                            continue
                        read.add((room.name, mode))
                        for owner in room.holders.get(mode, ()):
                            self._budget.spend()
                            if position < self._first[owner] and owner not in self._needed:
                                self._needed[owner] = position
                                stack.append(owner)

    def _waits_by_owner(self) -> dict[Owner, list[tuple[_Room, _Waiter]]]:
        """Return the waiters of each owner, with their resources."""
        waits: dict[Owner, list[tuple[_Room, _Waiter]]] = {owner: [] for owner in self._owners}
        for room in self._rooms.values():
            for waiter in room.waiters:
                waits[waiter.owner].append((room, waiter))
        return waits

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

    def _reduce_held(self) -> list[Owner]:
        """Return the owners that can finish, whatever the order of the queues is, in this order."""
        return self._reduce({name: _HeldOnly(room) for name, room in self._rooms.items()}, {})

    # -- Deadlocks --------------------------------------------------------------------

    def find_deadlock(self) -> Cycle | None:
        """Return the shortest cycle through the victim among the owners that can never finish, or None if all can."""
        order = self._reduce_held()
        if len(order) == len(self._owners):
            return None
        deadlocked = self._owners.keys() - set(order)
        steps: dict[Owner, tuple[_Waiter, str, Owner]] = {}  # the edge by which each owner was reached
        waits = self._waits_by_owner()
        queue = deque([self._victim])
        while queue:
            owner = queue.popleft()
            for room, waiter in waits[owner]:
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
        self._find_needed()
        ranks = {owner: rank for rank, owner in enumerate(self._reduce_held())}
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
                moves = [request for entry, request in zip(entries, order, strict=True) if entry[2] is not request]
                self._budget.spend(move_steps(moves))
                if not self._table.wait_queue(name).may_move(name, moves):
                    raise GraphTooLarge
                rearrangement[name] = (entries, order)
        return rearrangement


def _entry(waiter: _Waiter) -> QueueEntry:
    return waiter.entry


def _ordered(requests: list[Request], name: str, ranks: dict[Owner, int]) -> list[Request] | None:
    """Return contiguous requests of a special queue, with conflicting requests of ranked owners ordered by rank.

    Other conflicting requests keep their order, and all requests keep it as far as possible. Returns None if nothing changes.

    Kahn's algorithm: of the requests that may be next, the one that was first in the queue is next.
    """
    # Requests are numbered by their positions in the queue.
    modes = [request.queue_mode(name) for request in requests]
    successors: list[list[int]] = [[] for _ in requests]
    """For each request, the requests that must be after it."""
    predecessor_count = [0] * len(requests)
    """For each request, the number of requests before it that are not in `order` yet."""
    for i, one in enumerate(requests):
        for j in range(i + 1, len(requests)):
            other = requests[j]
            if one.owner != other.owner and (modes[j] in CONFLICTS[modes[i]] or modes[i] == modes[j] == U):
                swapped = one.owner in ranks and other.owner in ranks and ranks[other.owner] < ranks[one.owner]
                earlier, later = (j, i) if swapped else (i, j)
                successors[earlier].append(later)
                predecessor_count[later] += 1
    ready = [i for i, count in enumerate(predecessor_count) if not count]  # sorted, so it is a heap
    order: list[int] = []
    while ready:
        i = heappop(ready)
        order.append(i)
        for j in successors[i]:
            predecessor_count[j] -= 1
            if not predecessor_count[j]:
                heappush(ready, j)
    return None if order == sorted(order) else [requests[i] for i in order]
