"""The inversions that were found, and the transactions that complete them (offenders)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from genie.core.lock_order.edges import ANY_DESCENDING, Edge, Example, Guards, guards_of
from genie.core.lock_order.names import mask

MAX_INVERSIONS: Final = 100
"""Maximum number of inversions in memory. Further inversions are only counted."""
MAX_OFFENDERS: Final = 20
"""Maximum number of inversions of the same kind and classes. They are completed by transactions whose names have different
stems."""


class Kind(StrEnum):
    """Why an inversion can deadlock."""

    CYCLE = "cycle"
    """Classes are taken in an order that forms a cycle; with two classes, in both orders."""
    MEMBERS = "members"
    """Two names of one class are not taken in ascending order."""
    UPGRADE = "upgrade"
    """A shared lock is upgraded to an exclusive lock: two transactions that hold the shared lock wait for each other."""


@dataclass(slots=True)
class Inversion:
    """A cycle of edges: each edge requests the class that the next edge holds, and the last requests the class that the
    first holds.
    """

    kind: Kind
    edges: tuple[Edge, ...]
    guards: tuple[str, ...] = ()
    """The locks that exclude the transactions of two edges from each other. While there is such a lock, the inversion cannot
    deadlock."""
    offender: str = ""
    """The stem of the names of the transactions that completed the inversion: `pay-*` for `pay-17`."""
    is_repeated: bool = False
    """True if transactions with another stem completed an inversion of the same kind and classes before."""

    @property
    def description(self) -> str:
        """What is wrong, in one sentence without a full stop."""
        also_by = f", also by {self.offender}" if self.is_repeated else ""
        return _describe(self.kind, self.classes, self.edges[0]) + also_by

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the cycle."""
        return tuple(edge.held.name for edge in self.edges)

    @property
    def key(self) -> tuple[Kind, frozenset[str]]:
        """A key that is equal for inversions of the same kind and classes."""
        return self.kind, frozenset(self.classes)

    @property
    def found_unix_ms(self) -> float:
        """The time at which the last of the edges was first seen."""
        return max(edge.example.at_unix_ms for edge in self.edges)


class _KnownInversion:
    """The first inversion of its kind and classes, and all offenders by the stems of their names."""

    __slots__ = ("inversion", "offenders", "offending")

    def __init__(self, inversion: Inversion) -> None:
        self.inversion = inversion
        self.offending = _offending_edges(inversion)
        self.offenders: dict[str, Edge | None] = {inversion.offender: None}
        """For each further offender, a separate edge with its example and its count."""


class Inversions:
    """All inversions of a namespace, each reported once."""

    def __init__(self) -> None:
        self.found: list[Inversion] = []
        """In the order in which they were found, without inversions that a guard makes harmless."""
        self.guarded: list[Inversion] = []
        """Inversions that a guard makes harmless."""
        self.count = 0
        """Number of inversions found, including those beyond `MAX_INVERSIONS`, and at most `MAX_OFFENDERS` of the same
        classes."""
        self._known: dict[tuple[Kind, frozenset[str]], _KnownInversion] = {}
        """The first inversion of each kind and classes in `found`."""
        self._by_edge: dict[Edge, list[_KnownInversion]] = {}
        """The known inversions of each offending edge."""
        self._unreported: list[Inversion] = []

    def take_unreported(self) -> list[Inversion]:
        """Return the inversions that were found since the last call."""
        found, self._unreported = self._unreported, []
        return found

    def is_known_pair(self, edge: Edge) -> bool:
        """Return whether an edge is between two classes that are known to be taken in both orders."""
        return not edge.is_within_class and (Kind.CYCLE, frozenset((edge.held.name, edge.asked.name))) in self._known

    def add(self, kind: Kind, edges: tuple[Edge, ...], added: Edge) -> None:
        """Add an inversion that the edge `added` completes.

        If an inversion of the same kind and classes is known, only look for offenders.
        """
        inversion = Inversion(kind, edges, guards_of(edges), _stem(added.example))
        known = self._known.get(inversion.key)
        if known is not None:
            if not inversion.guards and any(added.is_same_step(edge) for edge in known.offending):
                self._look_for_offenders(known, [added])
            return
        self.guarded = [other for other in self.guarded if other.key != inversion.key]
        if inversion.guards:
            if len(self.guarded) < MAX_INVERSIONS:
                self.guarded.append(inversion)
        elif self._report(inversion):
            known = self._known[inversion.key] = _KnownInversion(inversion)
            self._look_for_offenders(known, known.offending)

    def on_offending_request(self, edge: Edge, guards: Guards, example: Example) -> None:
        """Count a request that made an offending edge. The first request with a new stem is another inversion."""
        for known in self._by_edge[edge]:
            self._count_offender(known, edge, guards, example)

    def _count_offender(self, known: _KnownInversion, edge: Edge, guards: Guards, example: Example) -> None:
        stem = _stem(example)
        if stem not in known.offenders:
            if len(known.offenders) >= MAX_OFFENDERS:
                return
            own = Edge(edge.held, edge.asked, edge.flags, guards, example)
            edges = _with_edge(known.inversion.edges, own)
            if guards_of(edges):
                return  # these transactions hold a common lock with the others
            known.offenders[stem] = own
            self._report(Inversion(known.inversion.kind, edges, offender=stem, is_repeated=True))
        counted = known.offenders[stem]
        if counted is not None:
            counted.count_request(example.at_unix_ms)

    def _report(self, inversion: Inversion) -> bool:
        """Count an inversion, and add it unless there are too many. Return whether it was added."""
        self.count += 1
        if len(self.found) >= MAX_INVERSIONS:
            return False
        self.found.append(inversion)
        self._unreported.append(inversion)
        return True

    def _look_for_offenders(self, known: _KnownInversion, edges: Iterable[Edge]) -> None:
        """Mark edges as offending, so that each further request that makes one of them is checked for a new offender."""
        for edge in edges:
            edge.is_offending = True
            inversions = self._by_edge.setdefault(edge, [])
            if known not in inversions:
                inversions.append(known)


def describe_edge(transaction: str, held: str, asked: str) -> str:
    """Return what the example of an edge did. `held` and `asked` are names with their modes."""
    return f"{transaction} held {held} and asked for {asked}"


def _describe(kind: Kind, classes: Sequence[str], edge: Edge) -> str:
    """Return in one sentence what is wrong: `accounts/* and orders/* are locked in both orders`."""
    if kind is Kind.UPGRADE and edge.example.held != edge.example.asked:
        return f"a lock below {classes[0]} is upgraded to a lock on all names below it"
    if kind is Kind.UPGRADE and edge.held_exclusive:
        return f"units of {classes[0]} are held while more of it is requested"
    if kind is Kind.UPGRADE:
        return f"a shared lock on {classes[0]} is upgraded to an exclusive lock"
    if kind is Kind.MEMBERS:
        return f"names of {classes[0]} are not locked in ascending order"
    if len(classes) == 2:  # noqa: PLR2004 - a pair
        return f"{classes[0]} and {classes[1]} are locked in both orders"
    return f"{' → '.join((*classes, classes[0]))} is a cycle of lock orders"


def _stem(example: Example) -> str:
    """Return the stem of a transaction's name: the name without the parts that vary."""
    return mask(example.transaction)


def _offending_edges(inversion: Inversion) -> Sequence[Edge]:
    """Return the edges whose transactions are presumed wrong.

    In a cycle, these are all edges but the most frequent one, which is presumed to be the intended order. Within a class,
    these are the descending edges.
    """
    if inversion.kind is Kind.CYCLE:
        usual = max(inversion.edges, key=lambda edge: edge.count)
        return [edge for edge in inversion.edges if edge is not usual]
    if inversion.kind is Kind.MEMBERS:
        return [edge for edge in inversion.edges if edge.flags & ANY_DESCENDING]
    return inversion.edges


def _with_edge(edges: Sequence[Edge], own: Edge) -> tuple[Edge, ...]:
    """Return the edges of an inversion, with `own` in place of the most similar edge."""
    alike = [edge for edge in edges if own.is_same_step(edge)]
    replaced = next((edge for edge in alike if edge.relation == own.relation), alike[0])
    return tuple(own if edge is replaced else edge for edge in edges)
