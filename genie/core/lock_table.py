"""The lock table: held and waiting requests by id, by resource and by owner.

The table only stores state. `grant.py` and `manager.py` decide which request is granted. `subtrees.py` adds counted resources
and subtrees to the table and removes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from itertools import islice
from typing import Final, cast

from genie.core.lock_order.members import HeldClasses
from genie.core.model import HELD, WAITING, Details, Owner, QueueEntry, Request
from genie.core.special import (
    MAX_CLOSED_WAITERS,
    MAX_QUEUES,
    Counted,
    Subtree,
    possible_subtrees,
    with_intention,
)
from genie.core.tables import CHECKED_SIZES, MANY_ITEMS, MIN_CHECKED_SIZE, clear_in_parts, compact, ordered
from genie.core.wait_queue import NO_REQUESTS, LockedResource, WaitQueue
from genie.lock_modes import IS, IX, MAX_SUBTREE_LEVELS, WHOLE_NAMESPACE, QueueMode, S, U, X

QueueChange = tuple[str, QueueMode, QueueEntry | None]
"""A request left a queue or the holders of a resource: (name of the resource, mode of this request, its queue entry, or None if
it was a holder). Only waiters after this entry may have become grantable."""

AffectedQueues = list[QueueChange]
"""Changes of queues in which a waiter may have become grantable."""


NO_GRANTS: Final[dict[str, int]] = {}
"""The grants of an owner without grants. Never changed."""


def earlier(one: QueueEntry | None, other: QueueEntry | None) -> QueueEntry | None:
    """Return the earlier of two positions of a queue. None is the position before the first waiter."""
    return None if one is None or other is None else min(one, other)


def _dict_with_stored_hashes() -> dict[str, Request]:
    """Return an empty dict that stores the hash of each key.

    CPython omits the hashes in a dict that has only had string keys. A lookup must then read each
    colliding key from memory to compare it, which takes a tenth of the time of lock and release
    among a million names (measured). A dict that once had a key of another type stores the hashes.
    """
    table: dict[object, Request] = {0: Request()}
    del table[0]
    return cast("dict[str, Request]", table)


class Transaction:
    """The requests of a named transaction, which owns their locks.

    A request without a transaction is its own owner and has no `Transaction`.
    """

    __slots__ = ("grants", "held", "held_classes", "waiting")

    def __init__(self) -> None:
        self.held: dict[int, Request] = {}
        self.waiting: dict[int, Request] = {}
        self.grants: dict[str, int] = {}
        """The number of grants of the transaction on each resource."""
        self.held_classes: HeldClasses | None = None
        """Cache of the lock order analysis: the classes of the names in `held`. None after a request was removed from `held`,
        until the analysis computes it again."""

    def add_held(self, request: Request) -> None:
        """Add a held request."""
        self.held[request.id] = request
        grants = self.grants
        if not grants:
            grants |= dict.fromkeys(request.names(), 1)
        else:
            for name in request.names():
                grants[name] = grants.get(name, 0) + 1

    def remove_held(self, request: Request) -> None:
        """Remove a held request."""
        held, grants = self.held, self.grants
        del held[request.id]
        self.held_classes = None
        if not held:
            grants.clear()
            return
        grants_before = len(grants)
        for name in request.names():
            if grants[name] == 1:
                del grants[name]
            else:
                grants[name] -= 1
        if len(held) in CHECKED_SIZES:  # many requests may hold one resource
            compact(held)
        self.compact_if_halved(grants_before)

    def compact_if_halved(self, grants_before: int) -> None:
        """Free the slots of removed items if the number of grants has fallen from `grants_before` below a power of 2."""
        if grants_before > MIN_CHECKED_SIZE and grants_before.bit_length() != len(self.grants).bit_length():
            compact(self.held)
            compact(self.grants)

    def add_waiting(self, request: Request) -> None:
        """Add a waiting request."""
        self.waiting[request.id] = request
        if len(self.waiting) == MANY_ITEMS:
            self.waiting = ordered(self.waiting)

    def remove_waiting(self, request: Request) -> None:
        """Remove a waiting request."""
        del self.waiting[request.id]
        if len(self.waiting) in CHECKED_SIZES:
            compact(self.waiting)


class LockTable:
    """All held and waiting requests. A resource or transaction without requests is not in the table.

    A resource is in one of two dicts. `uncontended` is the fast path for nearly all resources: it
    maps a resource that a single request holds exclusively, without waiters, to this request. Only
    resources that are shared or waited for have a `LockedResource`, in `resources`.
    """

    __slots__ = (
        "close_room",
        "closing",
        "detailed",
        "grants",
        "held",
        "kept_open",
        "pending_grants",
        "queue_entries",
        "resources",
        "specials",
        "subtrees",
        "transactions",
        "uncontended",
        "unmoved",
        "waiting",
    )

    def __init__(self) -> None:
        self.grants = 0
        """The number of grants on the resources in `resources`: one for each pair of a resource and its holder."""
        self.specials = 0
        """The number of counted resources and subtrees in `resources`. While it is 0, all requests take the shorter paths."""
        self.detailed = 0
        """The number of held and waiting requests that name units or subtrees."""
        self.queue_entries = 0
        """The number of wait-queue entries of all resources, with intentions: a request may wait below hundreds of subtrees."""
        self.held: dict[int, Request] = {}
        """Held requests by id."""
        self.waiting: dict[int, Request] = OrderedDict()  # its first items are often removed, and it is iterated often
        """Waiting requests by id, in order of arrival."""
        self.uncontended: dict[str, Request] = _dict_with_stored_hashes()
        """The only holder of each uncontended resource, by resource name."""
        self.resources: dict[str, LockedResource] = {}
        """All other resources that are held or waited for, by name."""
        self.subtrees: dict[str, LockedResource] = {}
        """The subtrees in `resources`."""
        self.closing: set[str] = set()
        """Subtrees that no request names, and from which `subtrees.close_slice` removes the waiters below them."""
        self.close_room = MAX_CLOSED_WAITERS
        """Number of waiters that steps may still remove from the queues of ended subtrees at once. When it is used up,
        `subtrees.close_slice` removes the others later, and resets it: very many requests for subtrees may end together."""
        self.kept_open: Container[str] = ()
        """Subtrees that stay open although no request names them, because a loaded request is about to name them."""
        self.unmoved: list[Request] = []
        """Waiters that had moved in the queue of an ended subtree, so that their stored position there is void. The lock manager
        makes `Moved` events of them and clears the list."""
        self.pending_grants: dict[str, dict[QueueMode, QueueEntry | None]] = {}
        """Changes of queues whose waiters were not all checked, because a step had too many candidates: by resource and mode, the
        position of the `QueueChange` after which the search continues. A resource without waiters is not among them, so that
        their number is bounded. The dict is never replaced, because the lock manager keeps a reference."""
        self.transactions: dict[str, Transaction] = {}
        """Transactions with held or waiting requests, by name."""

    @property
    def locks(self) -> int:
        """The number of grants on all resources."""
        return len(self.uncontended) + self.grants

    def find(self, id: int) -> Request | None:
        """Return the held or waiting request with this id, or None."""
        return self.held.get(id) or self.waiting.get(id)

    def lookup(self, name: str) -> LockedResource | None:
        """Return a resource for reading, or None if it is neither held nor waited for.

        The result must not be changed: it may be a copy.
        """
        return LockedResource(self.uncontended[name], 1) if name in self.uncontended else self.resources.get(name)

    def resource_names(self) -> list[str]:
        """Return the names of all resources that are held or waited for."""
        return [*self.uncontended, *self.resources]

    def waiting_of(self, owner: Owner) -> dict[int, Request]:
        """Return the waiting requests of an owner, by id."""
        if isinstance(owner, str):
            transaction = self.transactions.get(owner)
            return NO_REQUESTS if transaction is None else transaction.waiting
        request = self.waiting.get(owner)
        return NO_REQUESTS if request is None else {owner: request}

    def grants_of(self, owner: Owner) -> dict[str, int]:
        """Return the number of grants of an owner by resource. A waiting request without a transaction has none."""
        if not isinstance(owner, str):
            return NO_GRANTS
        transaction = self.transactions.get(owner)
        return NO_GRANTS if transaction is None else transaction.grants

    def free_in_parts(self) -> Iterator[None]:
        """Empty the table in parts, because it is no longer used. Yield between the parts."""
        yield from clear_in_parts(self.transactions)
        yield from clear_in_parts(self.pending_grants)
        yield from clear_in_parts(self.subtrees)
        yield from clear_in_parts(self.resources)
        yield from clear_in_parts(self.uncontended)
        yield from clear_in_parts(self.waiting)
        yield from clear_in_parts(self.held)

    # -- Changes ------------------------------------------------------------------------

    def add_held(self, request: Request) -> None:
        """Make a request a holder of all its resources. No other owner may hold a conflicting lock on them."""
        uncontended, resources = self.uncontended, self.resources
        self.held[request.id] = request
        for name in request.exclusive:
            resource = resources.get(name)
            if resource is None:
                if name not in uncontended:
                    uncontended[name] = request
                    continue
                resource = self.get_or_create_resource(name)
            # `LockedResource.add_holder`: two calls would be 2.6 % of the instructions of a hand-off.
            holders = resource.holders
            holders[request.id] = request
            if len(holders) == MANY_ITEMS:
                resource.holders = ordered(holders)
            resource.exclusive_count += 1
            self.grants += 1
        for name in request.shared:
            resource = resources.get(name) or self.get_or_create_resource(name)
            resource.add_holder(request.id, request)
            self.grants += 1
        if self.specials:
            self._add_units(request)
            self._count_intentions(request, 1)
        if request.transaction is not None:
            self._transaction(request.transaction).add_held(request)

    def remove_held(self, request: Request) -> AffectedQueues:  # noqa: C901 - the hot path
        """Remove a held request. Return the wait queues of its resources, in which waiters may be grantable now.

        If the request has `details`, the caller must then call `subtrees.close_specials`.
        """
        uncontended, resources = self.uncontended, self.resources
        affected: AffectedQueues = []
        del self.held[request.id]
        for name in request.exclusive:
            if name in uncontended:
                del uncontended[name]
                continue
            resource = resources[name]
            holders = resource.holders  # `LockedResource.remove_holder`: see `add_held`
            del holders[request.id]
            if len(holders) in CHECKED_SIZES:
                compact(holders)
            self.grants -= 1
            resource.exclusive_count -= 1
            if resource.wait_queue is not None:
                affected.append((name, X, None))
            elif not resource.holders:
                self.remove_resource(name, resource)
        for name in request.shared:
            resource = resources[name]
            resource.remove_holder(request.id)
            self.grants -= 1
            if resource.wait_queue is not None:
                affected.append((name, S, None))
            elif not resource.holders:
                self.remove_resource(name, resource)
        if self.specials:
            affected += self._remove_units(request) + self._count_intentions(request, -1)
        if request.transaction is not None:
            transaction = self.transactions[request.transaction]
            transaction.remove_held(request)
            if not transaction.held and not transaction.waiting:
                del self.transactions[request.transaction]
        return affected

    def enqueue(self, request: Request) -> dict[Request, int]:
        """Add a new waiting request to the wait queues of its resources.

        Return the argument `moved` of `WaitQueue.insert`. In the usual case it is empty. Otherwise its keys are the requests
        whose positions changed, and the new request. The value of the new request is the number of steps of its insertions.
        """
        request.state = WAITING
        request.queue_entry = (-request.priority, request.id, request)
        self.waiting[request.id] = request
        if request.transaction is not None:
            self._transaction(request.transaction).add_waiting(request)
        moved: dict[Request, int] = {}
        if self.specials:
            for name, mode in self._special_queues(request):
                self.wait_queue(name).insert(name, request, mode, moved)
            return moved
        count = len(request.exclusive) + len(request.shared)
        request.simple = count == 1 and request.transaction is None
        self.queue_entries += count
        for name in request.exclusive:
            self.wait_queue(name).insert(name, request, X, moved)
        for name in request.shared:
            self.wait_queue(name).insert(name, request, S, moved)
        return moved

    def restore(self, request: Request) -> None:
        """Add a loaded request in its stored state: as a holder, or at its stored positions in the wait queues.

        The special resources that it names must be open.
        """
        if request.state is HELD:
            self.add_held(request)
            return
        self.waiting[request.id] = request
        if request.transaction is not None:
            self._transaction(request.transaction).add_waiting(request)
        for name, mode in self._special_queues(request):
            self.wait_queue(name).restore(name, request, mode)

    def dequeue(self, request: Request) -> None:
        """Remove a waiting request from the table. The caller must grant the waiters that this request blocked."""
        del self.waiting[request.id]
        if request.moved is not None:
            self._forget_inversions(request.id, request.moved)
        if self.specials:
            self._leave_special_queues(request)
        else:
            self.queue_entries -= len(request.exclusive) + len(request.shared)
            for name in request.exclusive:
                self._leave_queue(name, request, exclusive=True)
            for name in request.shared:
                self._leave_queue(name, request, exclusive=False)
        # A queue entry refers to its request: clearing the entries avoids a reference cycle.
        request.queue_entry = request.moved = None
        if request.transaction is not None:
            transaction = self.transactions[request.transaction]
            transaction.remove_waiting(request)
            if not transaction.held and not transaction.waiting:
                del self.transactions[request.transaction]

    def _forget_inversions(self, id: int, moved: Iterable[str]) -> None:
        """Remove a request, which leaves its queues, from the inversions of the queues in which it has moved.

        Otherwise the queue of one waiter would keep the memory of all requests that a rearrangement has moved in it.
        """
        for name in moved:
            resource = self.resources.get(name)
            if resource is not None and resource.wait_queue is not None:
                resource.wait_queue.remove_inverted(id)

    def withdraw(self, request: Request) -> None:
        """Remove a new request that ends in the step of its arrival, and restore the previous order of all queues."""
        for name in list(request.moved or ()):
            self.wait_queue(name).undo_insertion(name, request)
        self.dequeue(request)

    def get_or_create_resource(self, name: str) -> LockedResource:
        """Return the object of a resource. Create it if needed.

        An uncontended resource moves from `uncontended` to `resources`.
        """
        resource = self.resources.get(name)
        if resource is None:
            holder = self.uncontended.pop(name, None)
            self.grants += holder is not None
            resource = self.resources[name] = LockedResource() if holder is None else LockedResource(holder, 1)
        return resource

    def wait_queue(self, name: str) -> WaitQueue:
        """Return the wait queue of a resource. Create the queue if needed."""
        resource = self.resources.get(name) or self.get_or_create_resource(name)
        queue = resource.wait_queue
        if queue is None:
            queue = resource.wait_queue = WaitQueue()
        return queue

    def _leave_queue(self, name: str, request: Request, exclusive: bool) -> None:
        """Remove a request from one wait queue. If this leaves the queue or the resource empty, remove it from the table."""
        resource = self.resources[name]
        queue = resource.wait_queue
        assert queue is not None, "a waiting request is in the queue of each of its resources"  # noqa: S101
        (queue.exclusive if exclusive else queue.shared).remove(request.entry(name))
        if not request.simple:
            queue.non_simple_count -= 1
        if not queue.exclusive and not queue.shared:
            resource.wait_queue = None
            if self.pending_grants:
                self.pending_grants.pop(name, None)
            if not resource.holders:
                del self.resources[name]

    # -- Pending grants -------------------------------------------------------------------

    def add_pending_grants(self, affected: AffectedQueues) -> None:
        """Add changes to `pending_grants`. Of two changes of a queue with the same mode, the earlier position is kept."""
        for name, mode, after in affected:
            resource = self.resources.get(name)
            if resource is not None and resource.wait_queue is not None:
                positions = self.pending_grants.setdefault(name, {})
                positions[mode] = earlier(after, positions.get(mode, after))

    def take_pending_grants(self, count: int) -> AffectedQueues:
        """Remove and return the first queues with pending grants, those of `count` resources."""
        pending = self.pending_grants
        names = [*islice(pending, count)]
        return [(name, mode, after) for name in names for mode, after in pending.pop(name).items()]

    def restart_pending_grants(self, names: Iterable[str]) -> None:
        """Restart the pending searches of these queues at the first waiter, because a request may have moved there."""
        for name in names:
            if name in self.pending_grants:
                self.pending_grants[name] = dict.fromkeys(self.pending_grants[name])

    # -- Counted resources and subtrees ---------------------------------------------------

    def uncounted_names(self, request: Request) -> int:
        """Return how many locks `subtrees.own_below` would read for the subtrees of a request.

        For each subtree for which the locks of the transaction are not counted yet, it reads all of them.
        """
        transaction, details = request.transaction, request.details
        if transaction is None or transaction not in self.transactions or details is None:
            return 0
        counted = 0
        for name in details.subtrees:
            special = self.subtrees[name].special if name in self.subtrees else None
            counted += isinstance(special, Subtree) and transaction in special.counts_by_transaction
        return len(self.transactions[transaction].grants) * (len(details.subtrees) - counted)

    def is_new(self, subtree: str) -> bool:
        """Return whether a request for a subtree must open it, which reads all locks: no other request names the subtree."""
        return subtree not in self.subtrees or subtree in self.closing

    def counted(self, name: str) -> Counted:
        """Return the units of a counted resource, which must be in the table."""
        special = self.resources[name].special
        assert isinstance(special, Counted), "it is one as long as a request names its units"  # noqa: S101
        return special

    def _special_queues(self, request: Request) -> list[tuple[str, QueueMode]]:
        """Return the queues that a waiting request enters, with its modes, in a table with counted resources or subtrees.

        Adds its intentions, its units and its queue entries to the counts of the table.
        """
        self._add_intentions(request)
        if request.transaction is not None:
            for name, asked in request.units.items():
                self.counted(name).begin_wait(request.transaction, asked)
        queues = list(request.queue_modes())
        request.simple = request.transaction is None and len(queues) == 1
        self.queue_entries += len(queues)
        return queues

    def _leave_special_queues(self, request: Request) -> None:
        """Remove a request from its queues, in a table with counted resources or subtrees."""
        if request.transaction is not None:
            for name, (units, _) in request.units.items():
                self.counted(name).end_wait(request.transaction, units)
        for name, mode in request.queue_modes():
            self.queue_entries -= 1
            resource = self.resources[name]
            queue = resource.wait_queue
            assert queue is not None, "a waiting request is in the queue of each of its resources"  # noqa: S101
            queue.remove(request.entry(name), mode)
            if queue.moved:
                queue.moved.pop(request.id, None)
            queue.non_simple_count -= not request.simple
            if queue.is_empty:
                resource.wait_queue = None
                self.pending_grants.pop(name, None)
                # A counted resource stays, because the request may become a holder; if not, see `subtrees.close_specials`.
                if mode != U and not resource.holders:
                    self.remove_resource(name, resource)
        details = request.details
        if details is not None:
            details.queue_modes = None
            if not details.units and not details.subtrees:
                request.details = None

    def hold_units(self, id: int, request: Request, name: str, units: int) -> None:
        """Make a new request, which will get this id, a holder of units of one resource.

        The fast path of `subtrees.open_specials` and `add_held`, for a request without a transaction, and a resource without waiters.
        Does not add the request to `held`.
        """
        resource = self.resources.get(name)
        if resource is None:
            resource = self.resources[name] = LockedResource()
            resource.special = Counted()
            self.specials += 1
        assert isinstance(resource.special, Counted)  # noqa: S101 - what mypy needs to know
        resource.special.add(None, units)
        resource.add_holder(id, request)
        self.grants += 1
        self.detailed += 1

    def drop_units(self, id: int, name: str, units: int) -> None:
        """Undo `hold_units`: remove a request without a transaction from the holders of its units.

        The resource must have no waiters, so it leaves the table with its last holder.
        """
        resource = self.resources[name]
        self.grants -= 1
        self.detailed -= 1
        if len(resource.holders) > 1:
            resource.remove_holder(id)
            assert isinstance(resource.special, Counted)  # noqa: S101 - what mypy needs to know
            resource.special.remove(None, units)
        else:
            del self.resources[name]
            self.specials -= 1

    def _add_units(self, request: Request) -> None:
        """Make a request a holder of its units."""
        for name, (units, _) in request.units.items():
            resource = self.resources[name]
            resource.add_holder(request.id, request)
            self.grants += 1
            assert isinstance(resource.special, Counted)  # noqa: S101 - what mypy needs to know
            resource.special.add(request.transaction, units)

    def _remove_units(self, request: Request) -> AffectedQueues:
        """Remove a request from the holders of its units."""
        affected: AffectedQueues = []
        for name, (units, _) in request.units.items():
            resource = self.resources[name]
            resource.remove_holder(request.id)
            self.grants -= 1
            assert isinstance(resource.special, Counted)  # noqa: S101 - what mypy needs to know
            resource.special.remove(request.transaction, units)
            if resource.wait_queue is not None:
                affected.append((name, U, None))
            elif not resource.holders:
                self.remove_resource(name, resource)
        return affected

    def is_below_subtree(self, name: str) -> bool:
        """Return whether a subtree in the table contains `name`."""
        subtrees = self.subtrees
        if WHOLE_NAMESPACE in subtrees:
            return True
        end, levels = name.find("/"), 0
        while end >= 0 and levels < MAX_SUBTREE_LEVELS:
            if name[: end + 1] + WHOLE_NAMESPACE in subtrees:
                return True
            end, levels = name.find("/", end + 1), levels + 1
        return False

    def innermost_subtree(self, name: str, known: dict[str, str | None]) -> str | None:
        """Return the innermost subtree in the table that contains `name`, or None. All others that contain it contain this one.

        `known` is a cache: by directory (a name up to a slash), the result for names in it. The caller passes the same dict again
        as long as no subtree is opened or closed.
        """
        # A command may name 10,000 resources, each with many slashes: in one directory, or each in a directory of its own.
        if name.endswith(WHOLE_NAMESPACE):  # a subtree is not above itself
            above = self.subtrees_above(name)
            return above[-1][0] if above else None
        directory = name[: name.rfind("/") + 1]
        if directory in known:
            return known[directory]
        if directory.count("/") > MAX_SUBTREE_LEVELS:
            directory = "/".join(directory.split("/", MAX_SUBTREE_LEVELS)[:-1]) + "/"
        subtrees = self.subtrees
        found: str | None = WHOLE_NAMESPACE if WHOLE_NAMESPACE in subtrees else None
        walked: list[str] = []
        while directory:
            if directory in known:
                found = known[directory]
                break
            walked.append(directory)
            if directory + WHOLE_NAMESPACE in subtrees:
                found = directory + WHOLE_NAMESPACE
                break
            directory = directory[: directory.rfind("/", 0, -1) + 1]
        for each in walked[:2]:  # enough for names in one directory, and for names in directories next to each other
            known[each] = found
        return found

    def subtrees_above(self, name: str) -> list[tuple[str, LockedResource]]:
        """Return the subtrees in the table that contain `name`, the outermost first, each with its resource."""
        subtrees = self.subtrees
        return [(subtree, subtrees[subtree]) for subtree in possible_subtrees(name) if subtree in subtrees]

    def group_below_subtrees(
        self, modes: Iterable[tuple[str, QueueMode]]
    ) -> Iterator[tuple[list[str], QueueMode, list[tuple[str, LockedResource]]]]:
        """Group names that have the same mode and the same subtrees above them.

        `modes` are pairs (name, mode). Yields (names, mode, subtrees) for each group; the subtrees are those of
        `subtrees_above`. Names without a subtree above them are omitted.
        """
        groups: dict[tuple[str, QueueMode], list[str]] = {}
        known: dict[str, str | None] = {}
        for name, mode in modes:
            subtree = self.innermost_subtree(name, known)
            if subtree is not None:
                groups.setdefault((subtree, mode), []).append(name)
        for (_, mode), names in groups.items():
            yield names, mode, self.subtrees_above(names[0])

    def count_queues(self, request: Request) -> int:
        """Return in how many queues a new request would wait, without the queues of its units.

        If there are more than `MAX_QUEUES`, the count is incomplete.
        """
        names = {*request.exclusive, *request.shared}
        for _, _, above in self.group_below_subtrees(request.modes()):
            names.update([subtree for subtree, _ in above])
            if len(names) > MAX_QUEUES:
                break
        return len(names)

    def _count_intentions(self, request: Request, sign: int) -> AffectedQueues:
        """Add the locks of a held request to the subtrees above them (`sign` is 1), or remove them (-1).

        Return the changes of the subtrees that have waiters.
        """
        if not self.subtrees:
            return []
        affected: dict[QueueChange, None] = {}
        for names, mode, above in self.group_below_subtrees(request.modes()):
            for subtree, resource in above:
                assert isinstance(resource.special, Subtree)  # noqa: S101 - what mypy needs to know
                resource.special.add(request, names, mode, sign)
                if resource.wait_queue is not None:
                    affected[subtree, IS if mode == S else IX, None] = None
        return list(affected)

    def _add_intentions(self, request: Request) -> None:
        """Add the subtrees above the names of a waiting request to its queues, before it enters them."""
        if not self.subtrees:
            return
        modes: dict[str, QueueMode] = dict(request.modes())
        changed = False
        for _, mode, above in self.group_below_subtrees(request.modes()):
            for subtree, _ in above:
                modes[subtree] = with_intention(modes.get(subtree), mode)
                changed = True
        if changed:
            if request.details is None:
                request.details = Details()
            request.details.queue_modes = modes

    def remove_resource(self, name: str, resource: LockedResource) -> None:
        """Remove a resource that is neither held nor waited for. A subtree stays until `subtrees.close_slice`."""
        if resource.special is None:
            del self.resources[name]
        elif name not in self.subtrees or name in self.closing:
            del self.resources[name]
            self.specials -= 1
            if name in self.closing:
                self.closing.remove(name)
                self.pending_grants.pop(name, None)
                del self.subtrees[name]

    def _transaction(self, name: str) -> Transaction:
        """Return the transaction with this name. Create it if needed."""
        transaction = self.transactions.get(name)
        if transaction is None:
            transaction = self.transactions[name] = Transaction()
        return transaction
