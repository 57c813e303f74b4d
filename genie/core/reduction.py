"""Deadlocks and rearrangements where units or subtrees are involved, by reduction.

An owner that waits for units is served once enough of its blockers end, not all of them. So a cycle in the wait-for graph may
be no deadlock. The general method (Holt, Some Deadlock Properties of Computer Systems, 1972): take an owner whose requested
locks fit beside the locks of the other owners that are not taken yet, and repeat. Owners that are never taken are deadlocked.
If all owners can be taken, the queues are rearranged into the order in which they were taken.

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
"""Maximum number of steps of `finishes_in_queue_order`. A step reads a queue in which an owner waits, an owner that may be
before it, or `UNITS_PER_STEP` waiters or holders of a counted resource."""
UNITS_PER_STEP = 4

MAX_FINISHING_DEPTH = 100
"""Maximum length of a chain of owners in `finishes_in_queue_order`, which is recursive."""

HOLDERS_PER_STEP = 4
"""Number of holders of a resource that one step adds to the blockers of a waiter."""

_BLOCKING_MODES = tuple([(*CONFLICTS[mode], U) if mode == U else CONFLICTS[mode] for mode in range(len(CONFLICTS))])
"""By the mode of a waiter, the modes of the holders that may block it: the conflicting modes, and for units also units."""

PAIRS_PER_STEP = 16
"""Pairs of requests that one step compares, to order the queue of a special resource."""


class _Waiter:
    """A request of a waiting owner in one queue."""

    __slots__ = ("entry", "mode", "owner", "request", "units")

    def __init__(self, request: Request, name: str, mode: QueueMode) -> None:
        self.request = request
        self.owner = request.owner
        self.entry = request.entry(name)
        self.mode = mode
        self.units: UnitCount = request.units[name] if mode == U else (0, 0)


_Edge = tuple[_Waiter, str, Owner]
"""A waiter, the name of its resource, and the owner of the waiter."""


class _ExaminedResource:
    """A resource that waiting owners hold or wait for, with its holders and waiters among these owners."""

    def __init__(self, name: str, resource: LockedResource) -> None:
        self.name = name
        self.resource = resource
        self.holders: dict[QueueMode, dict[Owner, int]] = {}
        """By mode, the owners that hold the resource, with their units."""
        self.in_use = 0
        """The sum of the units of all holders."""
        self.waiters: list[_Waiter] = []
        """The waiters, in queue order."""
        self.asked: dict[Owner, UnitCount] = {}
        """For each owner, the units that all its requests wait for, and the smallest limit of these requests."""

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
    """A resource in the reduction over held locks: finds the waiters that fit beside the holders that are not taken."""

    def __init__(self, examined: _ExaminedResource) -> None:
        self._holders = {mode: dict(owners) for mode, owners in examined.holders.items()}
        self._in_use = examined.in_use
        self._excluded: dict[QueueMode, dict[Owner, list[_Waiter]]] = {}
        """By mode and owner, the waiters that a holder in a conflicting mode may still exclude. At first, these are all waiters."""
        self._excluded_by_units: list[tuple[int, int, _Waiter]] = []
        """Waiters for units that only units may still exclude, as a heap of (-max_in_use, request id, waiter).

        `max_in_use` is the maximum of the units in use with which the waiter fits: its limit minus the units for which its owner
        waits. The first waiter of the heap has the greatest maximum, so it fits first.
        """
        for waiter in examined.waiters:
            self._excluded.setdefault(waiter.mode, {}).setdefault(waiter.owner, []).append(waiter)
        self._asked = examined.asked

    def take(self, owner: Owner) -> None:
        """Remove the locks of an owner that is taken. It has no waiters left, because all of them fit."""
        for owners in self._holders.values():
            self._in_use -= owners.pop(owner, 0)

    def fitting(self, budget: StepBudget) -> Iterator[_Waiter]:
        """Yield each waiter once, when it fits beside the holders that are not taken yet. Reads no other waiter."""
        for mode, by_owner in self._excluded.items():
            blocking: set[Owner] = set()
            for each in CONFLICTS[mode]:
                blocking.update(islice(self._holders.get(each, ()), 2))  # two owners exclude all waiters of the mode
            if not blocking:
                owners = list(by_owner)
            elif len(blocking) == 1:  # an owner does not block itself
                owners = [owner for owner in blocking if owner in by_owner]
            else:
                continue
            for owner in owners:
                for waiter in by_owner.pop(owner):
                    budget.spend()
                    if mode == U:
                        max_in_use = waiter.units[1] - self._asked[owner][0]
                        heappush(self._excluded_by_units, (-max_in_use, waiter.request.id, waiter))
                    else:
                        yield waiter
        while self._excluded_by_units and self._in_use <= -self._excluded_by_units[0][0]:
            budget.spend()
            yield heappop(self._excluded_by_units)[-1]


class _UnitsInOrder:
    """A counted resource in the reduction in queue order: finds the waiters for units that fit beside earlier waiters."""

    def __init__(self, examined: _ExaminedResource) -> None:
        self._held = dict(examined.holders.get(U, {}))
        self._in_use = examined.in_use
        self._waiters = {waiter.request.id: waiter for waiter in examined.waiters if waiter.mode == U}
        """By the id of the request, in queue order, the waiters for units of owners that are not taken."""
        self._yielded: set[int] = set()
        """The ids of the requests that `fitting` has yielded."""
        self._asked = examined.asked
        self._ids_by_owner: dict[Owner, list[int]] = {}
        """The keys of `_waiters` that belong to each owner."""
        for id_, waiter in self._waiters.items():
            self._ids_by_owner.setdefault(waiter.owner, []).append(id_)

    def take(self, owner: Owner) -> None:
        """Remove the units and the waiters of an owner that is taken."""
        self._in_use -= self._held.pop(owner, 0)
        for id_ in self._ids_by_owner.pop(owner, ()):
            del self._waiters[id_]

    def fitting(self, budget: StepBudget) -> Iterator[_Waiter]:
        """Yield each waiter once, when it fits beside the units in use and those of the waiters before it.

        Reads the queue until the units in use and the units of the waiters that were read exceed every limit.
        """
        units_before, largest_limit = 0, 0
        units_before_of = dict[Owner, int]()
        smallest_limits: dict[Owner, int] = {}  # of the owners before, but only the smallest two: see below
        for id_, waiter in self._waiters.items():
            budget.spend()
            owner, (units, limit) = waiter.owner, waiter.units
            if id_ not in self._yielded:
                limits_of_others = [each for other, each in smallest_limits.items() if other != owner]
                units_of_others = units_before - units_before_of.get(owner, 0)
                # All that its owner asks for must fit, not only this request.
                if self._in_use + units_of_others + self._asked[owner][0] <= min([limit, *limits_of_others]):
                    self._yielded.add(id_)
                    yield waiter
            units_before += units
            units_before_of[owner] = units_before_of.get(owner, 0) + units
            smallest_limits[owner] = min(limit, smallest_limits.get(owner, limit))
            if len(smallest_limits) > 2:  # noqa: PLR2004 - one of the smaller two belongs to another owner, for any owner
                del smallest_limits[max(smallest_limits, key=lambda each: smallest_limits[each])]
            largest_limit = max(largest_limit, limit)
            if self._in_use + units_before > largest_limit:
                return


# -- The usual case: no deadlock -------------------------------------------------------------


def finishes_in_queue_order(table: LockTable, owner: Owner) -> bool:
    """Return whether the owner of a new request can finish beside the waiters that are before it in the queues.

    If it can, there is no deadlock, and nothing needs to be rearranged: before the request arrived, all others could finish
    without this owner. False may also mean that the search, which is bounded, has found no answer.
    """
    try:
        return _Finishing(table).finishes(owner)
    except GraphTooLarge:
        return False


class _UnitScan:
    """The state of one pass over the waiters for units of a resource, from the first one on."""

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
        """The units that waiting owners hold, without owners that are known to finish."""
        self.asked = 0
        """The units of the waiters that were read, without owners that are known to finish."""
        self.asked_by: dict[Owner, int] = {}
        """The part of `asked` of each owner."""
        self.smallest = maxsize
        """The smallest limit of the waiters in `asked`."""
        self.only_units = len(resource.holders) == special.unit_holder_count and queue.modes() == [U]
        """True if all holders and waiters of the resource name units."""
        self.entries = iter(queue.of_mode(U))
        """The entries that were not read yet."""
        self.fits: dict[int, bool] = {}
        """By request id, for each waiter that was read: True if its units fit beside those of earlier waiters."""

    def remove(self, owner: Owner) -> None:
        """Remove an owner that finishes."""
        self.in_use -= self.held.get(owner, 0)
        self.asked -= self.asked_by.pop(owner, 0)


class _Finishing:
    """A depth-first search for owners that can finish in queue order. An owner in the current path counts as not finishing."""

    def __init__(self, table: LockTable) -> None:
        self._table = table
        self._budget = StepBudget(MAX_ARRIVAL_STEPS - MAX_FINISHING_STEPS)
        self._finished: dict[Owner, bool] = {}
        """For each visited owner, True if it can finish. False while it is in the current path."""
        self._scans: dict[str, _UnitScan] = {}
        """By the name of the counted resource."""
        self._depth = 0
        """Length of the current path."""

    def finishes(self, owner: Owner) -> bool:
        """Return whether an owner can finish: after other owners have finished, everything that it waits for is free.

        Raises GraphTooLarge.
        """
        waiting = self._table.waiting_of(owner)
        known = self._finished.get(owner) if waiting else True
        if known is not None:
            return known
        self._finished[owner] = False
        if self._depth >= MAX_FINISHING_DEPTH:
            raise GraphTooLarge
        self._depth += 1
        if all(
            self._is_served(request, name, mode) for request in waiting.values() for name, mode in request.queue_modes()
        ):
            self._finish(owner)
        self._depth -= 1
        return self._finished[owner]

    def _finish(self, owner: Owner) -> None:
        if not self._finished.get(owner):
            self._finished[owner] = True
            for scan in self._scans.values():
                scan.remove(owner)

    def _is_served(self, request: Request, name: str, mode: QueueMode) -> bool:
        """Return whether one resource becomes free for a waiting request: all owners finish that block it there."""
        self._budget.spend()
        for other in self._conflicting_owners(request, name, mode):
            self._budget.spend()
            if other != request.owner and not self.finishes(other):
                return False
        return mode != U or self._units_fit(request, name)

    def _conflicting_owners(self, request: Request, name: str, mode: QueueMode) -> Iterator[Owner]:
        """Yield the owners that block a waiting request on one resource. For a read that finds none, yield its own owner.

        The nearest earlier exclusive waiter is enough in place of the holders and waiters before it: its owner finishes after
        them.
        """
        resource, queue, entry = self._table.resources[name], self._table.wait_queue(name), request.entry(name)
        nearest = queue.exclusive.before(entry)
        special = resource.special
        # `_units_fit` compares units with units.
        only_units = mode == U and isinstance(special, Counted) and len(resource.holders) == special.unit_holder_count
        if nearest is not None:
            yield nearest[2].owner  # an entry is (negated priority, ticket, request)
        elif resource.exclusive_count:  # then all holders have the same owner
            yield next(iter(resource.holders.values())).owner
        elif mode == X or (special is not None and not only_units):
            for holder in resource.holders.values():
                blocks = resource.holder_mode(name, holder) in CONFLICTS[mode]
                yield holder.owner if blocks else request.owner
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
            waits_only_here = len(waiting) == 1 and waiter.queue_count() == 1
            if does_fit and scan.only_units and waits_only_here:  # then its owner finishes
                if owner in scan.held or len(self._scans) > 1:
                    self._finish(owner)
                else:
                    finished[owner] = True  # no scan counts its units
                continue
            scan.asked += units
            scan.asked_by[owner] = scan.asked_by.get(owner, 0) + units
            scan.smallest = smallest
            if does_fit and waiter is not request:
                self.finishes(owner)  # if it does, the scan no longer counts its units
        return scan.fits[request.id]

    def _units_asked_by(self, owner: Owner, name: str) -> int:
        """Return the units that all requests of a waiting owner ask for."""
        waiting = self._table.waiting_of(owner)
        self._budget.spend(len(waiting))
        return sum([request.units[name][0] for request in waiting.values() if name in request.units])


def find_deadlock(table: LockTable, victim: Owner, budget: StepBudget) -> Cycle | None:
    """Return the shortest cycle through `victim`, the owner of a new request, if there is a deadlock, or None.

    Raises GraphTooLarge.
    """
    return Reduction(table, victim, _blocking_owners(table, victim, budget), budget).find_deadlock()


def find_rearrangement(table: LockTable, owner: Owner, budget: StepBudget) -> Rearrangement:
    """Return how to rearrange wait queues so that all owners can finish in queue order. There must be no deadlock.

    Only the strongly connected component of `owner` is examined: before its request arrived, all other owners could finish
    without it. Raises GraphTooLarge. Changes nothing.
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
    """Yield the owners that hold a resource in a mode that conflicts with `mode`. Units conflict with units.

    Yields `owner` for holders that do not conflict or do not wait, so that the caller can count the reads.
    """
    resource = table.resources[name]
    special = resource.special
    if isinstance(special, Counted) and mode == U and len(resource.holders) == special.unit_holder_count:
        for count, transaction in enumerate(special.held_by_transaction):
            if table.transactions[str(transaction)].waiting:
                yield transaction
            elif count % UNITS_PER_STEP == 0:
                yield owner
        return
    for holder in resource.holders.values():
        yield holder.owner if resource.holder_mode(name, holder) in _BLOCKING_MODES[mode] else owner
    if isinstance(special, Subtree) and mode in (S, X, SIX):
        yield from waiting_owners_below(table, name, special, owner)


class Reduction:
    """The reduction of some waiting owners. All other owners count as finished.

    The constructor and all methods raise GraphTooLarge.
    """

    def __init__(self, table: LockTable, victim: Owner, owners: Iterable[Owner], budget: StepBudget) -> None:
        self._table, self._victim, self._budget = table, victim, budget
        self._owners = {owner: min(waiting) for owner in owners if (waiting := table.waiting_of(owner))}
        """The waiting owners, each with the id of its earliest waiting request."""
        self._examined: dict[str, _ExaminedResource] = {}
        self._names_by_owner: dict[Owner, list[str]] = {owner: [] for owner in self._owners}
        """The resources that each owner holds or waits for. A name may occur more than once."""
        self._first: dict[Owner, tuple[float, int]] = {}
        """The first position of each owner in any queue: (negated priority, ticket)."""
        self._needed: dict[Owner, tuple[float, int]] = {}
        """For an owner whose held locks block an earlier owner: the position of the earlier owner. See `_find_needed`."""
        for owner in self._owners:
            for request in table.waiting_of(owner).values():
                for name, mode in request.queue_modes():
                    budget.spend(STEPS_PER_WAITER)
                    waiter = _Waiter(request, name, mode)
                    self._examine(name).add_waiter(waiter)
                    self._names_by_owner[owner].append(name)
                    position = waiter.entry[:2]
                    self._first[owner] = min(position, self._first.get(owner, position))
        for examined in self._examined.values():
            examined.waiters.sort(key=_entry)

    def _examine(self, name: str) -> _ExaminedResource:
        """Return the examined resource with this name. Create it, with its holders among the waiting owners, if needed."""
        examined = self._examined.get(name)
        if examined is None:
            resource = self._table.resources[name]
            examined = self._examined[name] = _ExaminedResource(name, resource)
            self._read_holders(examined)
            if isinstance(resource.special, Subtree):
                self._read_locks_below(examined, resource.special)
        return examined

    def _read_holders(self, examined: _ExaminedResource) -> None:
        """Add the waiting owners that hold a resource to it."""
        name, resource, owners = examined.name, examined.resource, self._owners
        special = resource.special
        if isinstance(special, Counted) and len(resource.holders) == special.unit_holder_count:
            held = special.held_by_transaction
            self._budget.spend(min(len(held), len(owners)) // UNITS_PER_STEP)
            for owner in held if len(held) < len(owners) else owners:
                if owner in held and owner in owners:
                    self._add_holder(examined, owner, U, held[owner])
            return
        self._budget.spend(len(resource.holders))
        for holder in resource.holders.values():
            if holder.owner in owners:
                mode = resource.holder_mode(name, holder)
                self._add_holder(examined, holder.owner, mode, holder.units[name][0] if mode == U else 0)

    def _read_locks_below(self, examined: _ExaminedResource, special: Subtree) -> None:
        """Add the waiting owners that hold locks below a subtree to it, as holders of intentions."""
        for owner in self._owners:
            grants = self._table.grants_of(owner)
            if grants:
                self._budget.spend(1 + len(grants) // NAMES_PER_STEP)
                shared, exclusive = locks_below(self._table, examined.name, special, owner)
                if shared:
                    self._add_holder(examined, owner, IS)
                if exclusive:
                    self._add_holder(examined, owner, IX)

    def _add_holder(self, examined: _ExaminedResource, owner: Owner, mode: QueueMode, units: int = 0) -> None:
        examined.add_holder(owner, mode, units)
        self._names_by_owner[owner].append(examined.name)

    def _reduce(
        self, states: Mapping[str, _HeldOnly | _UnitsInOrder], blockers: dict[Owner, set[Owner]]
    ) -> list[Owner]:
        """Take owners that can finish, one after the other, until no owner can. Return them in this order.

        `states` are resources by name, and change. An owner can finish if all its waiters in `states` fit, and all its
        `blockers` have finished. Of several such owners, the first by `_key` is taken.
        """
        obstacles = self._count_obstacles(states, blockers)
        blocked_by: dict[Owner, list[Owner]] = {}
        for owner, others in blockers.items():
            for other in others:
                blocked_by.setdefault(other, []).append(owner)
        ready = [self._key(owner) for owner, count in obstacles.items() if not count]
        heapify(ready)
        order: list[Owner] = []
        advanced: Iterable[Owner] = self._fitting_owners(states, states)  # each item is an owner with one obstacle less
        while True:
            for owner in advanced:
                obstacles[owner] -= 1
                if not obstacles[owner]:
                    heappush(ready, self._key(owner))
            if not ready:
                return order
            taken = heappop(ready)[-1]
            order.append(taken)
            changed = [name for name in dict.fromkeys(self._names_by_owner[taken]) if name in states]
            for name in changed:
                states[name].take(taken)
            advanced = [*blocked_by.get(taken, ()), *self._fitting_owners(states, changed)]

    def _count_obstacles(
        self, states: Mapping[str, _HeldOnly | _UnitsInOrder], blockers: dict[Owner, set[Owner]]
    ) -> dict[Owner, int]:
        """Return for each owner the number of its waiters that `fitting` will yield once they fit, plus that of its blockers."""
        obstacles = {owner: len(blockers.get(owner, ())) for owner in self._owners}
        for name, state in states.items():
            for waiter in self._examined[name].waiters:
                obstacles[waiter.owner] += isinstance(state, _HeldOnly) or waiter.mode == U  # see `_UnitsInOrder`
        return obstacles

    def _key(self, owner: Owner) -> tuple[tuple[float, int], tuple[float, int], int, Owner]:
        """Return a sort key by the first position of an owner in any queue, or by `_needed`. Its last item is the owner."""
        first = self._first[owner]
        return self._needed.get(owner, first), first, self._owners[owner], owner

    def _find_needed(self) -> None:
        """Fill `_needed` with the owners whose held locks block an earlier owner, directly or indirectly.

        They get the position of the earlier owner, so that owners after the earlier one do not overtake it.
        """
        waits = self._waits_by_owner()
        searched: set[tuple[str, QueueMode]] = set()  # holders by the name of the resource and their mode
        for earlier in sorted(self._owners, key=self._first.__getitem__):
            position = self._first[earlier]
            stack = [earlier]
            while stack:
                for examined, waiter in waits[stack.pop()]:
                    for mode in _BLOCKING_MODES[waiter.mode]:
                        if (examined.name, mode) in searched:
                            continue
                        searched.add((examined.name, mode))
                        for owner in examined.holders.get(mode, ()):
                            self._budget.spend()
                            if position < self._first[owner] and owner not in self._needed:
                                self._needed[owner] = position
                                stack.append(owner)

    def _waits_by_owner(self) -> dict[Owner, list[tuple[_ExaminedResource, _Waiter]]]:
        """Return for each owner its waiters, as pairs of the resource and the waiter."""
        waits: dict[Owner, list[tuple[_ExaminedResource, _Waiter]]] = {owner: [] for owner in self._owners}
        for examined in self._examined.values():
            for waiter in examined.waiters:
                waits[waiter.owner].append((examined, waiter))
        return waits

    def _fitting_owners(
        self, states: Mapping[str, _HeldOnly | _UnitsInOrder], changed: Iterable[str]
    ) -> Iterator[Owner]:
        """Yield the owner of each waiter that has become able to fit on the resources `changed`: once for each waiter."""
        for name in changed:
            self._budget.spend()
            for waiter in states[name].fitting(self._budget):
                yield waiter.owner

    def _blockers_in_order(self) -> dict[Owner, set[Owner]]:
        """Return for each owner the owners that must finish before it if no waiter overtakes another one.

        Units are not considered. The nearest of these owners are enough, because they have the others as blockers.
        """
        blockers: dict[Owner, set[Owner]] = {owner: set() for owner in self._owners}
        for examined in self._examined.values():
            queue = self._table.wait_queue(examined.name)
            for waiter in examined.waiters:
                found, entry = blockers[waiter.owner], waiter.entry
                nearest = queue.exclusive.before(entry)
                if nearest is not None:  # its request waits for all entries before it, except those of its own owner
                    found.add(nearest[2].owner)
                else:
                    for mode in CONFLICTS[waiter.mode]:
                        holding_owners = examined.holders.get(mode, ())
                        self._budget.spend(len(holding_owners) // HOLDERS_PER_STEP)
                        found.update(holding_owners)
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
        """Return the owners that can finish in some order of the queues, in the order in which they can finish."""
        return self._reduce({name: _HeldOnly(examined) for name, examined in self._examined.items()}, {})

    # -- Deadlocks --------------------------------------------------------------------

    def find_deadlock(self) -> Cycle | None:
        """Return the shortest cycle through the victim among the owners that can never finish, or None if all can finish."""
        order = self._reduce_held()
        if len(order) == len(self._owners):
            return None
        deadlocked = self._owners.keys() - set(order)
        steps: dict[Owner, _Edge] = {}  # the edge by which each owner was reached
        waits = self._waits_by_owner()
        queue = deque([self._victim])
        while queue:
            owner = queue.popleft()
            for examined, waiter in waits[owner]:
                for other in self._blocking_owners(examined, waiter, deadlocked):
                    self._budget.spend()
                    if other == self._victim:
                        return self._build_cycle(steps, (waiter, examined.name, owner))
                    if other not in steps:
                        steps[other] = waiter, examined.name, owner
                        queue.append(other)
        raise AssertionError("the victim of a deadlock is in a cycle")

    def _blocking_owners(
        self, examined: _ExaminedResource, waiter: _Waiter, deadlocked: AbstractSet[Owner]
    ) -> Iterator[Owner]:
        """Yield the deadlocked owners whose held locks block a waiter. Its own owner is yielded if its own units block it."""
        for mode in CONFLICTS[waiter.mode]:
            for other in examined.holders.get(mode, ()):
                if other != waiter.owner and other in deadlocked:
                    yield other
        if waiter.mode == U:
            held = {owner: units for owner, units in examined.holders.get(U, {}).items() if owner in deadlocked}
            self._budget.spend(len(held))
            asked, limit = examined.asked[waiter.owner][0], waiter.units[1]
            if held.get(waiter.owner, 0) + asked > limit:
                yield waiter.owner
            elif sum(held.values()) + asked > limit:
                yield from (other for other in held if other != waiter.owner)

    def _build_cycle(self, steps: dict[Owner, _Edge], last: _Edge) -> Cycle:
        """Return the cycle that the edge `last` to the victim closes. `steps` has the edge by which each owner was reached."""
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
        """Return the resource on which `owner` blocks a waiter for `name`, and the request of `owner` that holds it.

        The resource is `name`, or a name below it if `name` is a subtree.
        """
        transaction = self._table.transactions[str(owner)]
        blocking_modes = _BLOCKING_MODES[waiter.mode]
        for request in transaction.held.values():
            for held, mode in request.modes():
                self._budget.spend()
                is_below = name in self._table.subtrees and contains(name, held)
                intention = IS if mode == S else IX
                if (held == name and mode in blocking_modes) or (is_below and intention in blocking_modes):
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
        in_order = {name: _UnitsInOrder(examined) for name, examined in self._examined.items() if examined.asked}
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
        for name, examined in self._examined.items():
            members = [waiter.entry for waiter in examined.waiters if waiter.owner in ranks]
            if len(members) < 2:  # noqa: PLR2004
                continue
            first, last = members[0], members[-1]
            between = self._table.wait_queue(name).entries_between(first, last, self._budget.left + len(members))
            self._budget.spend(len(between))
            entries = [first, *between, last]
            requests = [entry[2] for entry in entries]
            if examined.resource.special is None:
                order = rearranged_order(requests, name, ranks)
            else:
                self._budget.spend(len(entries) ** 2 // PAIRS_PER_STEP)
                order = _order_by_ranks(requests, name, ranks)
            if order is not None:
                moves = [request for entry, request in zip(entries, order, strict=True) if entry[2] is not request]
                self._budget.spend(move_steps(moves))
                if not self._table.wait_queue(name).may_move(name, moves):
                    raise GraphTooLarge
                rearrangement[name] = (entries, order)
        return rearrangement


def _entry(waiter: _Waiter) -> QueueEntry:
    return waiter.entry


def _order_by_ranks(requests: list[Request], name: str, ranks: dict[Owner, int]) -> list[Request] | None:
    """Return contiguous requests of the queue of a special resource in a new order, or None if the order does not change.

    Conflicting requests of owners in `ranks` are ordered by rank. Other conflicting requests keep their order, and requests
    that do not conflict keep it as far as possible.

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
            conflict = modes[j] in CONFLICTS[modes[i]] or modes[i] == modes[j] == U
            if conflict and one.owner != other.owner:
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
