"""The lock table: held and waiting requests by id, by resource and by owner.

The table only stores state. `grant.py` and `manager.py` decide which request is granted.
"""

from __future__ import annotations

from typing import Final, cast

from genie.core.lock_order.members import HeldClasses
from genie.core.model import HELD, WAITING, Owner, QueueEntry, Request
from genie.core.wait_queue import LockedResource, WaitQueue

AffectedQueues = list[tuple[str, bool, QueueEntry | None]]
"""Queues in which a request may have become grantable. Each item is a tuple of the resource, whether an
exclusive request left, and the position after which shared waiters may benefit (None: all)."""

_NO_REQUESTS: Final[dict[int, Request]] = {}


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
        """Of the lock order analysis: the classes of the names in `held`. None: a request was removed since it was computed."""


class LockTable:
    """All held and waiting requests. A resource or transaction without requests is not in the table.

    A resource is in one of two dicts. `uncontended` is the fast path for nearly all resources: it
    maps a resource that a single request holds exclusively, without waiters, to this request. Only
    resources that are shared or waited for have a `LockedResource`, in `resources`.
    """

    __slots__ = ("grants", "held", "queue_entries", "resources", "transactions", "uncontended", "waiting")

    def __init__(self) -> None:
        self.grants = 0
        """The number of grants on the resources in `resources`: one for each pair of a resource and its holder."""
        self.queue_entries = 0
        """The number of wait-queue entries of all resources."""
        self.held: dict[int, Request] = {}
        """Held requests by id."""
        self.waiting: dict[int, Request] = {}
        """Waiting requests by id, in order of arrival."""
        self.uncontended: dict[str, Request] = _dict_with_stored_hashes()
        """The only holder of each uncontended resource, by resource name."""
        self.resources: dict[str, LockedResource] = {}
        """All other resources that are held or waited for, by name."""
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
            return _NO_REQUESTS if transaction is None else transaction.waiting
        request = self.waiting.get(owner)
        return _NO_REQUESTS if request is None else {owner: request}

    def grant_count(self, owner: Owner, name: str) -> int:
        """Return the number of grants of an owner on a resource.

        The owner is a transaction, or a waiting request without a transaction, which has no grants.
        """
        if not isinstance(owner, str):
            return 0
        transaction = self.transactions.get(owner)
        return 0 if transaction is None else transaction.grants.get(name, 0)

    # -- Changes ------------------------------------------------------------------------

    def add_held(self, request: Request) -> None:
        """Make a request a holder of all its resources."""
        uncontended, resources, id_ = self.uncontended, self.resources, request.id
        self.held[id_] = request
        for name in request.exclusive:
            resource = resources.get(name)
            if resource is None:
                if name not in uncontended:
                    uncontended[name] = request
                    continue
                resource = self.get_or_create_resource(name)
            resource.holders[id_] = request
            resource.exclusive_count += 1
            self.grants += 1
        for name in request.shared:
            self.get_or_create_resource(name).holders[id_] = request
            self.grants += 1
        if request.transaction is not None:
            transaction = self._transaction(request.transaction)
            transaction.held[id_] = request
            grants = transaction.grants
            if not grants:
                grants |= dict.fromkeys(request.names(), 1)
            else:
                for name in request.names():
                    grants[name] = grants.get(name, 0) + 1

    def remove_held(self, request: Request) -> AffectedQueues:
        """Remove a held request. Return the wait queues of its resources, in which waiters may be grantable now."""
        uncontended, resources, id_ = self.uncontended, self.resources, request.id
        affected: AffectedQueues = []
        del self.held[id_]
        for name in request.exclusive:
            if name in uncontended:
                del uncontended[name]
                continue
            resource = resources[name]
            del resource.holders[id_]
            self.grants -= 1
            resource.exclusive_count -= 1
            if resource.wait_queue is not None:
                affected.append((name, True, None))
            elif not resource.holders:
                del resources[name]
        for name in request.shared:
            resource = resources[name]
            del resource.holders[id_]
            self.grants -= 1
            if resource.wait_queue is not None:
                affected.append((name, False, None))
            elif not resource.holders:
                del resources[name]
        if request.transaction is not None:
            self._remove_grants(request.transaction, request)
        return affected

    def enqueue(self, request: Request) -> dict[Request, int]:
        """Add a new waiting request to the wait queues of its resources.

        Return the requests whose positions in a queue changed, an ordered set. The value for the new request is the
        number of requests that its insertion read or moved; see `WaitQueue.insert`.
        """
        request.state = WAITING
        request.queue_entry = (-request.priority, request.id, request)
        self.waiting[request.id] = request
        if request.transaction is not None:
            self._transaction(request.transaction).waiting[request.id] = request
        count = len(request.exclusive) + len(request.shared)
        request.simple = count == 1 and request.transaction is None
        self.queue_entries += count
        moved: dict[Request, int] = {}
        for name in request.exclusive:
            self.wait_queue(name).insert(name, request, True, moved)
        for name in request.shared:
            self.wait_queue(name).insert(name, request, False, moved)
        return moved

    def restore(self, request: Request) -> None:
        """Add a loaded request in its stored state: as a holder, or at its stored positions in the wait queues."""
        if request.state is HELD:
            self.add_held(request)
            return
        request.simple = request.transaction is None and len(request.exclusive) + len(request.shared) == 1
        self.queue_entries += len(request.exclusive) + len(request.shared)
        self.waiting[request.id] = request
        if request.transaction is not None:
            self._transaction(request.transaction).waiting[request.id] = request
        for name, exclusive in request.modes():
            self.wait_queue(name).restore(name, request, exclusive)

    def dequeue(self, request: Request) -> None:
        """Remove a waiting request from the table. The caller must grant the waiters that this request blocked."""
        del self.waiting[request.id]
        self.queue_entries -= len(request.exclusive) + len(request.shared)
        for name in request.exclusive:
            self._leave_queue(name, request, exclusive=True)
        for name in request.shared:
            self._leave_queue(name, request, exclusive=False)
        # A queue entry refers to its request: clearing the entries avoids a reference cycle.
        request.queue_entry = request.moved = None
        if request.transaction is not None:
            transaction = self.transactions[request.transaction]
            del transaction.waiting[request.id]
            self._discard_if_empty(request.transaction, transaction)

    def withdraw(self, request: Request) -> None:
        """Remove a new request that ends in the step of its arrival, with no trace: all queues are as they were before."""
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
            if not resource.holders:
                del self.resources[name]

    def _transaction(self, name: str) -> Transaction:
        """Return the transaction with this name. Create it if needed."""
        transaction = self.transactions.get(name)
        if transaction is None:
            transaction = self.transactions[name] = Transaction()
        return transaction

    def _remove_grants(self, owner: str, request: Request) -> None:
        """Remove a held request from its transaction `owner`, and the transaction if it has no requests left."""
        transaction = self.transactions[owner]
        del transaction.held[request.id]
        transaction.held_classes = None
        grants = transaction.grants
        if not transaction.held:
            grants.clear()
        else:
            for name in request.names():
                grants[name] -= 1
                if not grants[name]:
                    del grants[name]
        self._discard_if_empty(owner, transaction)

    def _discard_if_empty(self, name: str, transaction: Transaction) -> None:
        if not transaction.held and not transaction.waiting:
            del self.transactions[name]
