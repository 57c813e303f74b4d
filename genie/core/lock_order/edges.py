"""Edges: transactions that held a class requested another class, and the locks that each of these transactions also held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from genie.core.context import Context
from genie.core.lock_order.classes import LockClass
from genie.core.lock_order.names import precedes_by_number
from genie.lock_modes import Mode

MAX_EDGES: Final = 10_000
"""Maximum number of edges. Further edges are not recorded."""

# The flags of an edge. The last three are the relation of the two names.
ASKED_EXCLUSIVE: Final = 1
HELD_EXCLUSIVE: Final = 2
BOTH_EXCLUSIVE: Final = 3
UPGRADE: Final = 4
"""A transaction holds a name in shared mode, and asks for the same name in exclusive mode. With `HELD_EXCLUSIVE`, it holds
units of this name and asks for more of it. If the names of the example differ, it holds a name below the subtree that it
asks for, in either mode."""
DESCENDING: Final = 8
"""Within one class: the name that is asked for precedes a held name, if digits are compared as characters."""
NUMBER_DESCENDING: Final = 16
"""Within one class: the name that is asked for precedes a held name, if digits are compared as numbers."""
ANY_DESCENDING: Final = 24
_ID_BITS: Final = 10
_FLAG_BITS: Final = 5

_RELATIONS: Final = {
    0: "ascending",
    DESCENDING: "descending by text",
    NUMBER_DESCENDING: "descending by number",
    ANY_DESCENDING: "descending",
}

Guards = dict[str, bool]
"""Locks that a transaction also holds: by name, whether the lock is exclusive. Only names that are a class of their own."""


@dataclass(slots=True, frozen=True)
class Example:
    """The request that made an edge first: it asked for `asked` while its transaction held `held`. Names without mode."""

    id: int
    transaction: str
    context: Context
    held: str
    asked: str
    at_unix_ms: float


class Edge:
    """Transactions that held the class `held` asked for the class `asked`, in the modes of `flags`."""

    __slots__ = ("asked", "count", "example", "flags", "guards", "held", "is_offending", "last_unix_ms")

    def __init__(self, held: LockClass, asked: LockClass, flags: int, guards: Guards, example: Example) -> None:
        self.held = held
        self.asked = asked
        self.flags = flags
        self.guards = guards
        """Locks that every such transaction also held, with whether each was always exclusive."""
        self.example = example
        self.is_offending = False
        """True if the edge completes known inversions. Then each new kind of transaction that makes the edge is another
        inversion."""
        self.count = 0
        """Number of requests that made this edge."""
        self.last_unix_ms = 0.0

    @property
    def held_exclusive(self) -> bool:
        """True if the held lock is exclusive."""
        return bool(self.flags & HELD_EXCLUSIVE)

    @property
    def asked_exclusive(self) -> bool:
        """True if the requested lock is exclusive."""
        return bool(self.flags & ASKED_EXCLUSIVE)

    @property
    def held_mode(self) -> Mode:
        """The mode of the held lock."""
        return Mode.EXCLUSIVE if self.held_exclusive else Mode.SHARED

    @property
    def asked_mode(self) -> Mode:
        """The mode of the lock that is asked for."""
        return Mode.EXCLUSIVE if self.asked_exclusive else Mode.SHARED

    @property
    def is_within_class(self) -> bool:
        """True if both names are of one class."""
        return self.held is self.asked

    @property
    def relation(self) -> str:
        """How the two names are related: `classes`, or within one class one of the following.

        `ascending`, `descending`, `descending by number` (but ascending if digits are compared as characters), `descending
        by text` (but ascending if digits are compared as numbers), or `upgrade`.
        """
        if not self.is_within_class:
            return "classes"
        return "upgrade" if self.flags & UPGRADE else _RELATIONS[self.flags & ANY_DESCENDING]

    def count_request(self, unix_ms: float) -> None:
        """Count a request that made this edge."""
        self.count += 1
        self.last_unix_ms = unix_ms

    def is_same_step(self, other: Edge) -> bool:
        """Return whether two edges lead from the same class to the same class, in any modes, and in the same direction."""
        is_ascending, other_is_ascending = self.relation == "ascending", other.relation == "ascending"
        return self.held is other.held and self.asked is other.asked and is_ascending is other_is_ascending

    def has_fewer_guards(self, held: Guards) -> bool:
        """Return whether a transaction with these guards lacks a guard of the edge, or holds it in shared mode only."""
        return any(name not in held or (mode and not held[name]) for name, mode in self.guards.items())

    def excluding_guards(self, other: Edge) -> list[str]:
        """Return the guards that exclude the transactions of two edges from each other: locks that both hold, one of them
        exclusively.
        """
        others = other.guards
        return [name for name, mode in self.guards.items() if name in others and (mode or others[name])]


def guards_of(edges: tuple[Edge, ...]) -> tuple[str, ...]:
    """Return the guards that exclude two of the transactions of an inversion from each other.

    An inversion of one edge is between two transactions that do the same.
    """
    pairs = [(some, other) for index, some in enumerate(edges) for other in edges[index + 1 :]] or [
        (edges[0], edges[0])
    ]
    return tuple(dict.fromkeys(name for some, other in pairs for name in some.excluding_guards(other)))


class EdgeGraph:
    """All edges, and which edges begin at a class."""

    def __init__(self) -> None:
        self.by_key: dict[int, Edge] = {}
        """By the ids of both classes and the flags."""
        self.outgoing: dict[int, list[Edge]] = {}
        """Edges by the id of the held class."""
        self.successors: dict[int, set[int]] = {}
        """The ids of the classes that `outgoing` leads to, by the id of the held class."""

    def find(self, held: LockClass, asked: LockClass, flags: int) -> Edge | None:
        """Return the edge between two classes with these flags, or None."""
        return self.by_key.get((held.id << _ID_BITS | asked.id) << _FLAG_BITS | flags)

    def add(self, edge: Edge) -> bool:
        """Add a new edge. Return False if there are too many."""
        if len(self.by_key) >= MAX_EDGES:
            return False
        self.by_key[(edge.held.id << _ID_BITS | edge.asked.id) << _FLAG_BITS | edge.flags] = edge
        self.outgoing.setdefault(edge.held.id, []).append(edge)
        self.successors.setdefault(edge.held.id, set()).add(edge.asked.id)
        return True


def direction(held: str, asked: str) -> int:
    """Return the flags of whether a name that is asked for precedes a held name of the same class, in both orders."""
    return (DESCENDING if asked < held else 0) | (NUMBER_DESCENDING if precedes_by_number(asked, held) else 0)
