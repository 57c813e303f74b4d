"""The search for the inversions that an edge completes. The edge is new, or has fewer guards than before."""

from __future__ import annotations

from typing import Final

from genie.core.lock_order.budget import Budget
from genie.core.lock_order.classes import LockClass, Treatment
from genie.core.lock_order.edges import (
    ANY_DESCENDING,
    BOTH_EXCLUSIVE,
    DESCENDING,
    NUMBER_DESCENDING,
    UPGRADE,
    Edge,
    EdgeGraph,
)
from genie.core.lock_order.inversions import Inversions, Kind

MAX_CYCLE: Final = 8
"""Maximum number of edges of an inversion."""
MAX_SEARCH_STEPS: Final = 2_000
"""Maximum number of edges that the searches for cycles follow for one request. They delay the request by about a
millisecond."""


class InversionSearch:
    """Searches the edges for inversions, and adds what it finds to `inversions`."""

    def __init__(self, graph: EdgeGraph, inversions: Inversions, budget: Budget) -> None:
        self._budget = budget
        self._graph = graph
        self._inversions = inversions

    def on_edge(self, edge: Edge) -> None:
        """Search for the inversions that an edge completes."""
        if edge.flags & UPGRADE:
            self._inversions.add(Kind.UPGRADE, (edge,), edge)
            return
        if edge.is_within_class and edge.held.treatment is not Treatment.ORDERED:
            self._add_member_inversion(edge)
        if self._budget.search_steps > MAX_SEARCH_STEPS:
            self._budget.is_exceeded = True
        elif self._leads_to(edge.asked, edge.held):
            if edge.held.id in self._graph.successors.get(edge.asked.id, ()):
                self._find_cycle(edge, direct=True)
            self._find_cycle(edge, direct=False)

    def _leads_to(self, start: LockClass, target: LockClass) -> bool:
        """Return whether edges lead from one class to another, in any modes. Rules out most searches quickly."""
        successors, reached, added = self._graph.successors, {start.id}, {start.id}
        while added and target.id not in reached:
            self._budget.search_steps += len(added)
            added = {successor for class_id in added for successor in successors.get(class_id, ())} - reached
            reached |= added
        return target.id in reached

    def _add_member_inversion(self, added: Edge) -> None:
        """Add an inversion if the names of a class are locked neither in ascending text order nor in ascending numeric order.

        Transactions that all follow one of the two orders cannot deadlock. So there is an inversion only if an edge violates
        the text order, and an edge violates the numeric order.
        """
        edges = [
            edge for edge in self._graph.outgoing[added.held.id] if edge.is_within_class and not edge.flags & UPGRADE
        ]
        violations = []
        for order in (DESCENDING, NUMBER_DESCENDING):
            # A descending edge of two shared locks conflicts only with an ascending edge of two exclusive locks.
            has_exclusive_ascending = any(
                not edge.flags & order and edge.flags & BOTH_EXCLUSIVE == BOTH_EXCLUSIVE for edge in edges
            )
            descending = [
                edge
                for edge in edges
                if edge.flags & order and (edge.flags & BOTH_EXCLUSIVE or has_exclusive_ascending)
            ]
            if not descending:
                return  # no transaction violates this order
            violations.append(_least_guarded(descending))
        by_text, by_number = violations
        if by_text is not by_number:
            self._inversions.add(Kind.MEMBERS, (by_text, by_number), added)
            return
        # One edge violates both orders. It is reported even without an ascending edge, before a transaction can deadlock with it.
        ascending = [edge for edge in edges if not edge.flags & ANY_DESCENDING]
        reported = (by_text, _least_guarded(ascending)) if ascending else (by_text,)
        self._inversions.add(Kind.MEMBERS, reported, added)

    def _find_cycle(self, edge: Edge, *, direct: bool) -> None:
        """Search for the shortest path from the class that an edge requests to the class that it holds, along edges of other
        transactions.

        With `direct`, the path has one edge. Otherwise it has at least two, without the two edges of an inversion that is
        already known. The search first looks for a cycle that no guard makes harmless.
        """
        for with_guards in (False, True):
            path = self._find_path_back(edge, direct=direct, with_guards=with_guards)
            if path is not None:
                self._inversions.add(Kind.CYCLE, path, edge)
                return

    def _find_path_back(self, start: Edge, *, direct: bool, with_guards: bool) -> tuple[Edge, ...] | None:
        """Search by breadth first. Two edges in a row conflict on their common class: one of the locks is exclusive."""
        paths: list[tuple[Edge, ...]] = [(start,)]
        visited: set[tuple[int, bool, bool]] = set()
        for path in paths:  # grows while it is read
            last = path[-1]
            for edge in self._graph.outgoing.get(last.asked.id, ()):
                self._budget.search_steps += 1
                if self._budget.search_steps > MAX_SEARCH_STEPS:
                    self._budget.is_exceeded = True
                    return None
                if edge.flags & UPGRADE or not (last.asked_exclusive or edge.held_exclusive):
                    continue
                if not with_guards and any(edge.excluding_guards(other) for other in path):
                    continue
                if not direct and self._inversions.is_known_pair(edge):
                    continue
                longer = (*path, edge)
                leaves_class = any(not each.is_within_class for each in longer)
                is_cycle = edge.asked is start.held and leaves_class
                if is_cycle and (edge.asked_exclusive or start.held_exclusive):
                    if direct or len(longer) > 2:  # noqa: PLR2004 - a cycle of two edges is direct
                        return longer
                    continue
                state = edge.asked.id, edge.asked_exclusive, leaves_class
                if not direct and len(longer) < MAX_CYCLE and state not in visited:
                    visited.add(state)
                    paths.append(longer)
        return None


def _least_guarded(edges: list[Edge]) -> Edge:
    return min(edges, key=lambda edge: len(edge.guards))
