"""The tables: what is held and what waits, by id, by resource and by owner. Bookkeeping, no decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, cast

from genie.core.model import HELD, WAITING, Owner, QueueEntry, Request
from genie.core.wait_queue import LockedResource, WaitQueue

AffectedQueues = list[tuple[str, bool, QueueEntry | None]]
"""Lines that someone left or where someone gave way: (resource, whether shared waiters may profit, from which on)."""

_NO_REQUESTS: Final[dict[int, Request]] = {}


def _dict_with_stored_hashes() -> dict[str, Request]:
    """An empty dict that will keep the hash of every key beside it.

    CPython saves that room while all the keys have been strings; but then each other key that a search comes by has to
    be fetched from memory to see that it is another. Among a million names this is a tenth of what a cycle costs. A key
    that is no string settles it for good.
    """
    table: dict[object, Request] = {0: Request()}
    del table[0]
    return cast("dict[str, Request]", table)


@dataclass(slots=True, eq=False)
class Transaction:
    """A named owner that holds or waits for something. (An anonymous request is its own owner and needs none.)"""

    held: dict[int, Request] = field(default_factory=dict)
    waiting: dict[int, Request] = field(default_factory=dict)
    grants: dict[str, int] = field(default_factory=dict)
    """How many of its grants are on a resource, by name."""


class LockTable:
    """Everything that is held or waits. Resources and transactions that do neither are not in it.

    A resource is in one of two dicts. Nearly all are in `uncontended`: held exclusively by one request, waited for by nobody,
    and so worth no object of their own. What is shared or waited for has one, in `resources`.
    """

    __slots__ = ("grants", "held", "queue_entries", "resources", "transactions", "uncontended", "waiting")

    def __init__(self) -> None:
        self.grants = 0
        """How many grants there are on the resources in `resources`."""
        self.queue_entries = 0
        """How many places there are in all lines."""
        self.held: dict[int, Request] = {}
        self.waiting: dict[int, Request] = {}
        self.uncontended: dict[str, Request] = _dict_with_stored_hashes()
        self.resources: dict[str, LockedResource] = {}
        self.transactions: dict[str, Transaction] = {}

    @property
    def locks(self) -> int:
        """How many resources are held, each as often as there are grants on it."""
        return len(self.uncontended) + self.grants

    def find(self, id: int) -> Request | None:
        """The request with this id, held or waiting."""
        return self.held.get(id) or self.waiting.get(id)

    def lookup(self, name: str) -> LockedResource | None:
        """A resource as it is, to be read only; None where nobody holds it or waits for it."""
        return LockedResource(self.uncontended[name], 1) if name in self.uncontended else self.resources.get(name)

    def resource_names(self) -> list[str]:
        """Every resource that is held or waited for."""
        return [*self.uncontended, *self.resources]

    def waiting_of(self, owner: Owner) -> dict[int, Request]:
        """The waiting requests of an owner, by id."""
        if isinstance(owner, str):
            transaction = self.transactions.get(owner)
            return _NO_REQUESTS if transaction is None else transaction.waiting
        request = self.waiting.get(owner)
        return _NO_REQUESTS if request is None else {owner: request}

    def grant_count(self, owner: Owner, name: str) -> int:
        """How many grants an owner has on a resource. An anonymous one that still asks has none."""
        if not isinstance(owner, str):
            return 0
        transaction = self.transactions.get(owner)
        return 0 if transaction is None else transaction.grants.get(name, 0)

    # -- what changes it ----------------------------------------------------------------------------------

    def add_held(self, request: Request) -> None:
        """Let a request hold all that it names."""
        uncontended, resources, id_ = self.uncontended, self.resources, request.id
        self.held[id_] = request
        for name in request.exclusive:
            if name not in uncontended and name not in resources:
                uncontended[name] = request
            else:
                resource = self.get_or_create_resource(name)
                resource.holders[id_] = request
                resource.exclusives += 1
                self.grants += 1
        for name in request.shared:
            self.get_or_create_resource(name).holders[id_] = request
            self.grants += 1
        if request.transaction is not None:
            transaction = self._transaction(request.transaction)
            transaction.held[id_] = request
            for name in request.names():
                transaction.grants[name] = transaction.grants.get(name, 0) + 1

    def remove_held(self, request: Request) -> AffectedQueues:
        """Take all that a request holds from it; returns the lines of those who wait for some of it."""
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
            resource.exclusives -= 1
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

    def enqueue(self, request: Request) -> dict[Request, None]:
        """Let a request stand in the lines of all that it names; returns those whose places changed by it."""
        request.state = WAITING
        request.queue_entry = (-request.priority, request.id, request)
        self.waiting[request.id] = request
        if request.transaction is not None:
            self._transaction(request.transaction).waiting[request.id] = request
        request.simple = request.transaction is None and len(request.exclusive) + len(request.shared) == 1
        self.queue_entries += len(request.exclusive) + len(request.shared)
        moved: dict[Request, None] = {}
        for name in request.exclusive:
            self.wait_queue(name).insert(name, request, True, moved)
        for name in request.shared:
            self.wait_queue(name).insert(name, request, False, moved)
        return moved

    def restore(self, request: Request) -> None:
        """Put a loaded request where it was: among the holders, or in its lines at the places that it had."""
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
        """Take a request out of all its lines. Who stands behind it is the caller's business."""
        del self.waiting[request.id]
        self.queue_entries -= len(request.exclusive) + len(request.shared)
        for name in request.exclusive:
            self._leave_queue(name, request, exclusive=True)
        for name in request.shared:
            self._leave_queue(name, request, exclusive=False)
        request.queue_entry = request.moved = (
            None  # an entry names its request: kept, the two would be garbage in a ring
        )
        if request.transaction is not None:
            transaction = self.transactions[request.transaction]
            del transaction.waiting[request.id]
            self._discard_if_empty(request.transaction, transaction)

    def get_or_create_resource(self, name: str) -> LockedResource:
        """A resource with an object of its own, made where there is none yet."""
        resource = self.resources.get(name)
        if resource is None:
            holder = self.uncontended.pop(name, None)
            self.grants += holder is not None
            resource = self.resources[name] = LockedResource() if holder is None else LockedResource(holder, 1)
        return resource

    def wait_queue(self, name: str) -> WaitQueue:
        """The queue of a resource, made where there is none yet."""
        resource = self.resources.get(name) or self.get_or_create_resource(name)
        queue = resource.wait_queue
        if queue is None:
            queue = resource.wait_queue = WaitQueue()
        return queue

    def _leave_queue(self, name: str, request: Request, exclusive: bool) -> None:
        resource = self.resources[name]
        queue = resource.wait_queue
        assert queue is not None, "a waiting request stands in every queue that it names"  # noqa: S101
        (queue.exclusive if exclusive else queue.shared).remove(request.entry(name))
        if not request.simple:
            queue.non_simple_count -= 1
        if not queue.exclusive and not queue.shared:
            resource.wait_queue = None
            if not resource.holders:
                del self.resources[name]

    def _transaction(self, name: str) -> Transaction:
        transaction = self.transactions.get(name)
        if transaction is None:
            transaction = self.transactions[name] = Transaction()
        return transaction

    def _remove_grants(self, owner: str, request: Request) -> None:
        transaction = self.transactions[owner]
        del transaction.held[request.id]
        for name in request.names():
            transaction.grants[name] -= 1
            if not transaction.grants[name]:
                del transaction.grants[name]
        self._discard_if_empty(owner, transaction)

    def _discard_if_empty(self, name: str, transaction: Transaction) -> None:
        if not transaction.held and not transaction.waiting:
            del self.transactions[name]
