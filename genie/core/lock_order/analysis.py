"""The analysis of the lock order: which edges a request makes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Final

from genie.core.context import shown_context
from genie.core.lock_order.budget import CHARS_PER_STEP, MAX_STEPS, SEARCHED_NAMES_PER_STEP
from genie.core.lock_order.classes import MAX_NAMES, LockClass, LockClasses, Rule
from genie.core.lock_order.edges import (
    ANY_DESCENDING,
    ASKED_EXCLUSIVE,
    BOTH_EXCLUSIVE,
    DESCENDING,
    HELD_EXCLUSIVE,
    UPGRADE,
    Edge,
    EdgeGraph,
    Example,
    Guards,
    direction,
)
from genie.core.lock_order.inversions import Inversions
from genie.core.lock_order.members import MAX_HELD_REQUESTS, HeldClasses, Members
from genie.core.lock_order.search import InversionSearch
from genie.core.lock_table import Transaction
from genie.core.model import Request
from genie.core.special import contains, possible_subtrees
from genie.lock_modes import QueueMode, S

MAX_WAITING_REQUESTS: Final = 32
"""Maximum number of waiting requests of a transaction, the first ones, that are analysed when another request of the
transaction is granted."""
MAX_COMPARED_HELD_NAMES: Final = 64
"""Maximum number of held names, the first ones, that are compared with a subtree that a transaction asks for."""


class LockOrder:
    """The classes, edges and inversions of a namespace. Times are unix ms."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.classes = LockClasses(rules)
        self.graph = EdgeGraph()
        self.inversions = Inversions()
        self.dropped = 0
        """Number of requests that were not analysed completely, because of a limit."""
        self._budget = self.classes.budget
        self._granted_unix_ms = 0.0
        """The time of the last grants. All grants of this time share `_budget`."""
        self._search = InversionSearch(self.graph, self.inversions, self._budget)

    def on_request(self, transaction: Transaction, request: Request, unix_ms: float) -> None:
        """Record a request that may wait, of a transaction that holds locks. Must be called before the request is granted or
        queued.

        Fast path: if the transaction makes only a known edge again, the edge is counted.
        """
        if not self._count_known_edge(transaction, request, unix_ms):
            self._budget.search_steps = self._budget.steps = 0
            self._observe(transaction, self._held_classes(transaction), request, unix_ms)
            self._count_if_incomplete()

    def on_grant(self, transaction: Transaction, request: Request, unix_ms: float) -> None:
        """Record a grant to a transaction with other waiting requests: the transaction holds the granted locks while it
        waits for the others.
        """
        budget = self._budget
        if unix_ms != self._granted_unix_ms:
            self._granted_unix_ms = unix_ms
            budget.search_steps = budget.steps = 0
        if budget.steps >= MAX_STEPS:
            self.dropped += 1
            return
        held = HeldClasses(self.classes)
        budget.steps += (transaction.held_classes or held).count_missing(transaction.held)
        held.include(request)
        held.guards = self._held_classes(transaction).guards | held.guards
        budget.is_exceeded |= len(transaction.waiting) > MAX_WAITING_REQUESTS
        for waiting in islice(transaction.waiting.values(), MAX_WAITING_REQUESTS):
            if budget.steps >= MAX_STEPS:
                budget.is_exceeded = True
                break
            if waiting is not request:
                self._observe(transaction, held, waiting, unix_ms)
                names = min(len(waiting.exclusive) + len(waiting.shared), MAX_NAMES)
                budget.steps += names * (1 + len(held.by_id))
        self._count_if_incomplete()

    def _count_if_incomplete(self) -> None:
        """Count a request once, however many of its names, edges or searches exceed a limit."""
        self.dropped += self._budget.is_exceeded
        self._budget.is_exceeded = False

    def _held_classes(self, transaction: Transaction) -> HeldClasses:
        """Return the classes of the names that a transaction holds. They are cached in the transaction, and updated here."""
        held = transaction.held_classes
        if held is None or held.classes is not self.classes:  # tests may set other rules while transactions hold locks
            held = transaction.held_classes = HeldClasses(self.classes)
        held.update(transaction.held)
        return held

    def _observe(self, transaction: Transaction, held: HeldClasses, request: Request, unix_ms: float) -> None:
        """Record the edges from each held class to each class that a request asks for."""
        for asked in self._asked_classes(transaction, held, request, unix_ms):
            for members in held.by_id.values():
                flags = HELD_EXCLUSIVE * members.exclusive + ASKED_EXCLUSIVE * asked.exclusive
                if members.cls is asked.cls:
                    if members.is_only(asked):
                        continue  # the same single name: only an upgrade
                    flags |= members.direction_to(asked)
                edge = self.graph.find(members.cls, asked.cls, flags)
                # A new edge, or a known one that may now complete an inversion.
                if edge is None or edge.is_offending or (edge.guards and edge.has_fewer_guards(held.guards)):
                    example = _example(request, *_names(members, asked, flags), unix_ms)
                    self._record(members.cls, asked.cls, flags, held.guards, example)
                else:  # the usual case
                    edge.count_request(unix_ms)

    def _count_known_edge(self, transaction: Transaction, request: Request, unix_ms: float) -> bool:
        """Count the edge between two exclusive locks if it is known. Otherwise return False.

        Transactions that take two locks, one after the other, are the usual case. The result is that of `_observe`.
        """
        if len(transaction.held) != 1 or len(request.exclusive) != 1 or request.shared or request.details is not None:
            return False
        (holder,) = transaction.held.values()
        if len(holder.exclusive) != 1 or holder.shared or holder.details is not None:
            return False
        name, asked_name = holder.exclusive[0], request.exclusive[0]
        held, asked = self.classes.class_of(name), self.classes.class_of(asked_name)
        if held is None or asked is None or name == asked_name:
            return False
        flags = BOTH_EXCLUSIVE if held is not asked else BOTH_EXCLUSIVE | direction(name, asked_name)
        edge = self.graph.find(held, asked, flags)
        if edge is None or edge.is_offending or edge.guards:
            return False
        edge.count_request(unix_ms)
        return True

    def _asked_classes(
        self, transaction: Transaction, held: HeldClasses, request: Request, unix_ms: float
    ) -> Iterable[Members]:
        """Return the classes that a request asks for and may wait for. Records the edges of upgrades."""
        asked_classes: dict[int, Members] = {}
        for cls, name, exclusive in self.classes.classified(request):
            if held.subtrees and not held.subtrees.isdisjoint(possible_subtrees(name)):
                continue  # the transaction holds all names of a subtree, so it does not wait
            if name in transaction.grants:
                if not exclusive or self._holds_exclusive(transaction, name):
                    continue  # the transaction already holds the lock, so it does not wait
                example = _example(request, name, name, unix_ms)
                holds_units = HELD_EXCLUSIVE * any(name in each.units for each in transaction.held.values())
                self._record(cls, cls, UPGRADE | ASKED_EXCLUSIVE | holds_units, held.guards, example)
            elif request.details is not None and name in request.details.subtrees:
                below = _held_below(transaction, name, exclusive)
                if below is not None:
                    held_name, mode = below
                    flags = UPGRADE | ASKED_EXCLUSIVE * exclusive | HELD_EXCLUSIVE * (mode != S)
                    self._record(cls, cls, flags, held.guards, _example(request, held_name, name, unix_ms))
            asked = asked_classes.get(cls.id)
            if asked is None:
                asked_classes[cls.id] = Members(cls, name, exclusive)
            else:
                asked.add(name, exclusive)
                self._budget.steps += len(name) // CHARS_PER_STEP
        return asked_classes.values()

    def _holds_exclusive(self, transaction: Transaction, name: str) -> bool:
        """Return whether a transaction holds the exclusive lock of a name.

        If it has too many requests or names to search, assume that it does.
        """
        budget, requests = self._budget, transaction.held.values()
        if len(requests) > MAX_HELD_REQUESTS or budget.steps >= MAX_STEPS:
            budget.is_exceeded = True
            return True
        budget.steps += len(requests) + sum([len(each.exclusive) for each in requests]) // SEARCHED_NAMES_PER_STEP
        return any(name in request.exclusive for request in requests)

    def _record(self, held: LockClass, asked: LockClass, flags: int, guards: Guards, example: Example) -> None:
        """Count an edge. If it is new, or has fewer guards than before, search for inversions."""
        guards = {name: mode for name, mode in guards.items() if name not in (held.name, asked.name)}
        edge = self.graph.find(held, asked, flags)
        if edge is None:
            edge = Edge(held, asked, flags, guards, example)
            if not self.graph.add(edge):
                self._budget.is_exceeded = True
                return
            self._search.on_edge(edge)
        elif edge.has_fewer_guards(guards):
            edge.guards = {name: mode and guards[name] for name, mode in edge.guards.items() if name in guards}
            self._search.on_edge(edge)
        edge.count_request(example.at_unix_ms)
        if edge.is_offending:
            self.inversions.on_offending_request(edge, guards, example)


def _held_below(transaction: Transaction, subtree: str, exclusive: bool) -> tuple[str, QueueMode] | None:
    """Return the name and the mode of a lock below a subtree, if a transaction holds one that conflicts with a lock of the subtree.

    `exclusive` is the mode of the lock of the subtree. A shared one conflicts with exclusive locks only. At most
    `MAX_COMPARED_HELD_NAMES` locks of the transaction are searched.
    """
    held = chain.from_iterable(request.modes() for request in transaction.held.values())
    for name, mode in islice(held, MAX_COMPARED_HELD_NAMES):
        if (exclusive or mode != S) and contains(subtree, name):
            return name, mode
    return None


def _names(held: Members, asked: Members, flags: int) -> tuple[str, str]:
    """Return a held name and a requested name that have the relation of these flags."""
    if flags & ANY_DESCENDING == DESCENDING:
        return held.last, asked.first
    return held.last_by_number, asked.first_by_number


def _example(request: Request, held: str, asked: str, unix_ms: float) -> Example:
    transaction = request.transaction or ""
    return Example(request.id, transaction, shown_context(request), held, asked, unix_ms)
