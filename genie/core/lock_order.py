"""Lock order analysis: finds pairs of locks that transactions take in both orders, before that causes a deadlock.

Names are grouped into classes: `accounts/42` and `accounts/7` are of the class `accounts/*`. Whenever a transaction holds
locks and asks for more, each held class gets an edge to each class that is asked for. A cycle of edges is an inversion:
some interleaving of the transactions that were seen can deadlock, whether it ever did or not. Within one class, names
must be taken in ascending order.

The method is that of lockdep in the Linux kernel; guards are the locksets of Eraser (Savage et al., 1997).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from math import inf
from typing import Any, Final

from genie.core.lock_table import Transaction
from genie.core.model import Mode, Request

MAX_CLASSES: Final = 1_000
"""Maximum number of classes. Names of further classes are not analysed."""
MAX_EDGES: Final = 10_000
"""Maximum number of edges. Further edges are not recorded."""
MAX_INVERSIONS: Final = 100
"""Maximum number of inversions in memory. Further inversions are only counted."""
MAX_OFFENDERS: Final = 20
"""Maximum number of inversions of the same kind and classes: of transactions whose names have different stems."""
MAX_NAMES: Final = 32
"""Maximum number of names that are analysed of one request."""
MAX_CYCLE: Final = 8
"""Maximum number of edges of an inversion."""
MAX_CACHED_NAMES: Final = 10_000
"""Maximum number of names whose class is cached. When the cache is full, it is cleared."""
MAX_CACHED_CLASSES: Final = 10_000
"""Number of held classes of all transactions at which their cache is cleared."""
MAX_SEARCH_STEPS: Final = 2_000
"""Maximum number of edges that the searches for cycles follow for one request, which waits for them: about a millisecond."""
MAX_HELD_CLASSES: Final = 64
"""Maximum number of classes that are analysed of what a transaction holds, the first ones."""
MAX_GUARDS: Final = 16
"""Maximum number of guards of a transaction, the first ones: a lock that guards others is taken before them."""
ANALYSED_PER_S: Final = 2_000
"""How many requests that do not wait are analysed a second, on average: a varying selection if there are more. For transactions
that take two locks, one after the other, this takes about 0.6 % of a processor."""
MAX_CREDIT_MS: Final = 1_000.0
"""The time for which this number may be saved up: a short burst is analysed completely."""
MAX_DEBT_MS: Final = 1_000.0
"""The time for which it may be overdrawn. With `LEFT_OUT_PER_MS`, at most 200 requests are left out between two."""
LEFT_OUT_PER_MS: Final = 0.1
"""How many requests are left out on average before the next one, for each ms that the number is overdrawn."""
GOLDEN_RATIO: Final = 0.6180339887498949
"""The golden ratio without its integer part."""

DIGITS: Final = "0123456789"
# Parts of a name that identify a member of its class: UUIDs, long tokens that contain a digit, and other digits.
_UUID: Final = r"(?<![0-9A-Za-z])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Za-z])"
_TOKEN: Final = r"(?<![0-9A-Za-z])(?=[A-Za-z]*[0-9])(?:[0-9A-Fa-f]{8,}|[0-9A-Za-z]{16,})(?![0-9A-Za-z])"  # noqa: S105
_VARYING: Final = re.compile(f"{_UUID}|{_TOKEN}|[0-9]+")
_NUMBER: Final = re.compile("([0-9]+)")
_ID_BITS: Final = 10
_FLAG_BITS: Final = 5

# The flags of an edge. The last three bits are the relation of the two names.
_ASKED_EXCLUSIVE: Final = 1
_HELD_EXCLUSIVE: Final = 2
_UPGRADE: Final = 4
"""A transaction holds a name in shared mode, and asks for the same name in exclusive mode."""
_DESCENDING: Final = 8
"""Within one class: the name that is asked for precedes a held name, if digits are compared as characters."""
_NUMBER_DESCENDING: Final = 16
"""Likewise, if digits are compared as numbers."""


class Kind(StrEnum):
    """Why an inversion can deadlock."""

    CYCLE = "cycle"
    """Classes are taken in an order that forms a cycle; with two classes, in both orders."""
    MEMBERS = "members"
    """Two names of one class are not taken in ascending order."""
    UPGRADE = "upgrade"
    """A shared lock is upgraded to an exclusive lock: two transactions that hold the shared lock wait for each other."""


class Treatment(StrEnum):
    """How a rule says that its class is treated."""

    CHECKED = "checked"
    ORDERED = "ordered"
    """The members are taken in an order that their names do not show."""
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class Rule:
    """Names that match `pattern` are one class. `*` matches any characters except `/`."""

    pattern: str
    treatment: Treatment = Treatment.CHECKED


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Return the rules of a setting: patterns separated by commas, each with `=ordered` or `=ignored` if needed.

    Raises ValueError for an unknown word after `=`, or an empty pattern.
    """
    rules = []
    for item in text.split(","):
        if not item.strip():
            continue
        pattern, _, treatment = item.strip().rpartition("=") if "=" in item else (item.strip(), "", "checked")
        if not pattern or treatment not in list(Treatment):
            raise ValueError(f"{item.strip()!r} must be PATTERN, PATTERN=ordered or PATTERN=ignored")
        rules.append(Rule(pattern, Treatment(treatment)))
    return tuple(rules)


class LockClass:
    """A class of names. `is_name`: the class has one name, which is that of the class."""

    __slots__ = ("id", "is_name", "name", "treatment", "usual_edges")

    def __init__(self, id: int, name: str, treatment: Treatment, is_name: bool) -> None:
        self.id = id
        self.name = name
        self.treatment = treatment
        self.is_name = is_name
        self.usual_edges: dict[int, Edge] = {}
        """Edges of two exclusive locks without guards, by the id of the class that is asked for. The edges within this class
        by -1 minus the relation of the two names."""


@dataclass(slots=True, frozen=True)
class Example:
    """The request that made an edge first: it asked for `asked` while its transaction held `held`. Names without mode."""

    id: int
    transaction: str
    principal: str | None
    note: str | None
    held: str
    asked: str
    at_unix_ms: float


class Edge:
    """Transactions that held the class `held` asked for the class `asked`, in the modes of `flags`."""

    __slots__ = ("asked", "count", "example", "flags", "guards", "held", "inverted", "last_unix_ms")

    def __init__(
        self, held: LockClass, asked: LockClass, flags: int, guards: dict[str, bool], example: Example
    ) -> None:
        self.held = held
        self.asked = asked
        self.flags = flags
        self.guards = guards
        """Locks that every such transaction also held, by name, with whether it always was exclusive."""
        self.example = example
        self.inverted: list[_Known] = []
        """The inversions of which this edge is an offending one: each new offender is another inversion."""
        self.count = 0
        """How often a request made this edge."""
        self.last_unix_ms = 0.0

    @property
    def held_exclusive(self) -> bool:
        """Whether the held lock is exclusive; `asked_exclusive` likewise for the lock that is asked for."""
        return bool(self.flags & _HELD_EXCLUSIVE)

    @property
    def asked_exclusive(self) -> bool:
        """See `held_exclusive`."""
        return bool(self.flags & _ASKED_EXCLUSIVE)

    @property
    def held_mode(self) -> Mode:
        """The mode of the held lock."""
        return Mode.EXCLUSIVE if self.flags & _HELD_EXCLUSIVE else Mode.SHARED

    @property
    def asked_mode(self) -> Mode:
        """The mode of the lock that is asked for."""
        return Mode.EXCLUSIVE if self.flags & _ASKED_EXCLUSIVE else Mode.SHARED

    @property
    def relation(self) -> str:
        """How the two names are related: `classes`, or within one class one of the following.

        `ascending`, `descending`, `descending by number` (but ascending if digits are compared as characters), `descending
        by text` (but ascending if digits are compared as numbers), or `upgrade`.
        """
        if self.held is not self.asked:
            return "classes"
        if self.flags & _UPGRADE:
            return "upgrade"
        descending = self.flags & (_DESCENDING | _NUMBER_DESCENDING)
        if descending == _DESCENDING | _NUMBER_DESCENDING:
            return "descending"
        if descending == _NUMBER_DESCENDING:
            return "descending by number"
        return "descending by text" if descending else "ascending"

    @property
    def is_within_class(self) -> bool:
        """Whether both names are of one class."""
        return self.held is self.asked


@dataclass(slots=True)
class Inversion:
    """A cycle of edges: each asks for the class that the next one holds, and the last for the class that the first holds."""

    kind: Kind
    edges: tuple[Edge, ...]
    guards: tuple[str, ...] = ()
    """The locks that keep the transactions of two of the edges apart. While there is one, the inversion cannot deadlock."""
    offender: str = ""
    """The stem of the names of the transactions that completed the inversion: `pay-*` for `pay-17`."""
    is_repeated: bool = False
    """Whether transactions with another stem had completed an inversion of the same kind and classes before."""

    @property
    def description(self) -> str:
        """What is wrong, in one sentence without a full stop."""
        also_by = f", also by {self.offender}" if self.is_repeated else ""
        return describe(self.kind, self.classes) + also_by

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the cycle."""
        return tuple(edge.held.name for edge in self.edges)

    @property
    def found_unix_ms(self) -> float:
        """When the last of the edges was seen first."""
        return max(edge.example.at_unix_ms for edge in self.edges)


class _Known:
    """An inversion that was reported, and its offenders by the stems of their names."""

    __slots__ = ("inversion", "offenders", "offending")

    def __init__(self, inversion: Inversion) -> None:
        self.inversion = inversion
        self.offending = _offending_edges(inversion)
        self.offenders: dict[str, Edge | None] = {inversion.offender: None}
        """For each further offender an edge of its own, with its example and its count."""


class _HeldClass:
    """The names of one class that a transaction holds."""

    __slots__ = ("cls", "exclusive", "highest", "last")

    def __init__(self, cls: LockClass, name: str, exclusive: bool) -> None:
        self.cls = cls
        self.exclusive = exclusive
        """Whether one of them is locked in exclusive mode, the stronger."""
        self.highest = name
        """The last of the names, if digits are compared as numbers."""
        self.last = name
        """The last of the names, if digits are compared as characters."""


class _AskedClass:
    """The names of one class that a request asks for."""

    __slots__ = ("cls", "exclusive", "first", "lowest")

    def __init__(self, cls: LockClass, name: str, exclusive: bool) -> None:
        self.cls = cls
        self.exclusive = exclusive
        """Whether one of them is asked for in exclusive mode, the stronger."""
        self.lowest = name
        """The first of the names, if digits are compared as numbers."""
        self.first = name
        """The first of the names, if digits are compared as characters."""

    def add(self, name: str, exclusive: bool) -> None:
        """Add another name."""
        self.exclusive = self.exclusive or exclusive
        if _direction(self.lowest, name) & _NUMBER_DESCENDING:
            self.lowest = name
        self.first = min(self.first, name)


class _HeldClasses:
    """The classes of the names that a transaction holds. Updated when the transaction asks for more locks."""

    __slots__ = ("classes", "guards", "removals", "request_count", "transaction")

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction
        self.removals = transaction.removals
        self.request_count = 0
        """How many of the held requests are included, the earliest ones."""
        self.classes: dict[int, _HeldClass] = {}
        """By the id of the class."""
        self.guards: dict[str, bool] = {}
        """The held names that are a class of their own, with whether they are exclusive."""


class LockOrder:
    """The classes, edges and inversions of a namespace. Times are unix ms.

    The lock manager leaves out requests beyond `max_per_s`, but never one that waits. `inf`: it leaves out none.
    """

    def __init__(self, rules: Iterable[Rule] = (), max_per_s: float = ANALYSED_PER_S) -> None:
        self.limited_unix_ms: float | None = None
        """When it was last decided to leave out requests; None: never."""
        self._interval_ms = 1_000 / max_per_s
        self._used_until_unix_ms = -inf
        """Until when `max_per_s` is used up."""
        self._phase = 0.0
        """A number from 0 to 1. Multiples of the golden ratio modulo 1 are evenly distributed, and never repeat."""
        self.edges: dict[int, Edge] = {}
        """By the ids of both classes and the flags (`_edge_key`)."""
        self.inversions: list[Inversion] = []
        """In the order in which they were found, without those that a guard makes harmless."""
        self.guarded: list[Inversion] = []
        """Inversions that a guard makes harmless."""
        self.inversion_count = 0
        """Number of inversions found, including those beyond `MAX_INVERSIONS`, and at most `MAX_OFFENDERS` of the same classes."""
        self.dropped = 0
        """How often a request was not analysed completely, because of a limit."""
        self.classes: dict[str, LockClass] = {}
        self._rules = [(re.compile(_to_regex(rule.pattern)), rule) for rule in rules]
        self._by_stem: dict[str, LockClass | None] = {}
        """The class of names that consist of this stem and digits. None: too many classes."""
        self._by_name: dict[str, LockClass | None] = {}
        """The class of other names."""
        self._held_by_transaction: dict[str, _HeldClasses] = {}
        """What the transactions held that asked for locks lately, by their names. Bounded as the cached names are."""
        self._cached_classes = 0
        """Number of held classes in `_held_by_transaction`, at most."""
        self._edge_by_stems: dict[tuple[str, str], Edge] = {}
        """The edge in `usual_edges` of two classes, by the stems of two names."""
        self._outgoing: dict[int, list[Edge]] = {}
        """Edges by the id of the held class."""
        self._successors: dict[int, set[int]] = {}
        """The ids of the classes that `_outgoing` leads to, by the id of the held class."""
        self._known: dict[tuple[Kind, frozenset[str]], _Known] = {}
        """The first inversion of each kind and classes in `inversions`."""
        self._unreported: list[Inversion] = []
        self._is_incomplete = False
        """Whether the current request exceeds a limit."""
        self._has_guards = False
        """Whether any edge ever had guards."""
        self._search_steps = 0
        """How many edges the searches for the current request have followed."""

    # -- classes --------------------------------------------------------------------------------------------

    def class_of(self, name: str) -> LockClass | None:
        """Return the class of a name, or None if there are too many classes."""
        stem = name.rstrip(DIGITS)
        found = self._by_name.get(name) if len(stem) == len(name) else self._by_stem.get(stem)
        return found if found is not None else self._classify(name, stem)

    def _classify(self, name: str, stem: str) -> LockClass | None:
        if name in self._by_name:
            return self._by_name[name]
        if stem != name and stem in self._by_stem:
            return None
        treatment = Treatment.CHECKED
        for pattern, rule in self._rules:
            if pattern.fullmatch(name):
                class_name, treatment = rule.pattern, rule.treatment
                break
        else:
            class_name = _mask(name)
        found = self.classes.get(class_name)
        if found is None and len(self.classes) < MAX_CLASSES:
            found = LockClass(len(self.classes), class_name, treatment, class_name == name)
            self.classes[class_name] = found
        # A stem decides the class only if other digits after it give the same class.
        by_stem = not self._rules and stem != name and not stem[-1:].isalnum() and class_name == _mask(stem) + "*"
        cache, key = (self._by_stem, stem) if by_stem else (self._by_name, name)
        if len(cache) >= MAX_CACHED_NAMES:
            cache.clear()
        cache[key] = found
        return found

    # -- observations ---------------------------------------------------------------------------------------

    def charge(self, unix_ms: float) -> int:
        """Charge one request that was analysed, and return how many of the next ones are left out.

        The number varies, because a fixed one could leave out the same clients each time.
        """
        used_until_ms = max(self._used_until_unix_ms, unix_ms - MAX_CREDIT_MS) + self._interval_ms
        self._used_until_unix_ms = min(used_until_ms, unix_ms + MAX_DEBT_MS)
        debt_ms = max(0.0, self._used_until_unix_ms - unix_ms)
        self._phase = (self._phase + GOLDEN_RATIO) % 1
        left_out = int(self._phase * 2 * LEFT_OUT_PER_MS * debt_ms)
        if left_out:
            self.limited_unix_ms = unix_ms
        return left_out

    def on_request(self, transaction: Transaction, request: Request, unix_ms: float) -> None:
        """Record a request of a transaction that holds locks, and may wait. Call it before the request is granted or queued."""
        held = transaction.held
        if len(held) == 1 and len(request.exclusive) == 1 and not request.shared:
            for holder in held.values():
                if len(holder.exclusive) == 1 and not holder.shared:
                    edge = self._find_usual_edge(holder.exclusive[0], request.exclusive[0])
                    if edge is not None:
                        edge.count += 1
                        edge.last_unix_ms = unix_ms
                        return
        self._observe(transaction, self._held_classes(transaction, request), request, unix_ms)
        self._count_if_incomplete()

    def _count_if_incomplete(self) -> None:
        """Count a request once, however many of its names, edges or searches exceed a limit."""
        self.dropped += self._is_incomplete
        self._is_incomplete = False

    def _find_usual_edge(self, held: str, asked: str) -> Edge | None:
        """Return the edge for two exclusive locks if it is known and needs no further work.

        This is the usual case of a transaction that takes two locks, one after the other. It takes a quarter of the time of
        `_observe`.
        """
        held_stem, asked_stem = held.rstrip(DIGITS), asked.rstrip(DIGITS)
        if held_stem != asked_stem:
            if held_stem != held and asked_stem != asked:
                return self._edge_by_stems.get((held_stem, asked_stem))
            held_class = self._by_name.get(held) if held_stem == held else self._by_stem.get(held_stem)
            asked_class = self._by_name.get(asked) if asked_stem == asked else self._by_stem.get(asked_stem)
            if held_class is None or asked_class is None or held_class is asked_class:
                return None
            return held_class.usual_edges.get(asked_class.id)
        direction = _direction_of_numbers(held, asked, len(held_stem))
        held_class = self._by_stem.get(held_stem)
        return None if direction < 0 or held_class is None else held_class.usual_edges.get(-1 - direction)

    def on_grant(self, transaction: Transaction, request: Request, unix_ms: float) -> None:
        """Record a grant to a transaction that has other waiting requests: it holds these locks while it waits for those."""
        held = _HeldClasses(transaction)
        self._include(held, request)
        held.guards = self._held_classes(transaction, request).guards | held.guards
        for waiting in transaction.waiting.values():
            if waiting is not request:
                self._observe(transaction, held, waiting, unix_ms)
        self._count_if_incomplete()

    def _held_classes(self, transaction: Transaction, request: Request) -> _HeldClasses:
        """Return the classes that a transaction holds. Only requests since the last call are added to those of that call."""
        name = request.transaction or ""
        held = self._held_by_transaction.get(name)
        if held is None or held.transaction is not transaction or held.removals != transaction.removals:
            if len(self._held_by_transaction) >= MAX_CACHED_NAMES or self._cached_classes >= MAX_CACHED_CLASSES:
                self._held_by_transaction.clear()
                self._cached_classes = 0
            held = self._held_by_transaction[name] = _HeldClasses(transaction)
        missing = len(transaction.held) - held.request_count
        for added in reversed(list(islice(reversed(transaction.held.values()), missing))):
            self._include(held, added)
        held.request_count = len(transaction.held)
        return held

    def _include(self, held: _HeldClasses, request: Request) -> None:
        """Add the first names of a held request."""
        for name, exclusive in self._first_modes(request):
            cls = self.class_of(name)
            if cls is None:
                self._is_incomplete = True
                continue
            if cls.treatment is Treatment.IGNORED:
                continue
            group = held.classes.get(cls.id)
            if group is None:
                if len(held.classes) >= MAX_HELD_CLASSES:
                    self._is_incomplete = True
                    continue
                self._cached_classes += 1
                group = held.classes[cls.id] = _HeldClass(cls, name, exclusive)
            elif name != group.highest or name != group.last:
                group.exclusive = group.exclusive or exclusive
                if name != group.highest and not _direction(group.highest, name) & _NUMBER_DESCENDING:
                    group.highest = name
                group.last = max(group.last, name)
            else:
                group.exclusive = group.exclusive or exclusive
            if cls.is_name and (name in held.guards or len(held.guards) < MAX_GUARDS):
                held.guards[cls.name] = group.exclusive  # equal to `name`, and one text for all transactions

    def _first_modes(self, request: Request) -> Iterable[tuple[str, bool]]:
        """Return the first `MAX_NAMES` names of a request, each with whether it is exclusive."""
        if len(request.exclusive) + len(request.shared) <= MAX_NAMES:
            return request.modes()
        self._is_incomplete = True
        return islice(request.modes(), MAX_NAMES)

    def _observe(self, transaction: Transaction, held: _HeldClasses, request: Request, unix_ms: float) -> None:
        """Add the edges from each held class to each class that a request asks for."""
        self._search_steps = 0
        for asked in self._asked_classes(transaction, held, request, unix_ms):
            for group in held.classes.values():
                flags = _HELD_EXCLUSIVE * group.exclusive + _ASKED_EXCLUSIVE * asked.exclusive
                held_name, name = group.highest, asked.lowest
                if group.cls is asked.cls:
                    if group.highest == asked.lowest and group.last == asked.first:
                        continue  # the same single name: only an upgrade
                    if held_name != name:
                        flags |= _direction(held_name, name) & _NUMBER_DESCENDING
                    if asked.first < group.last:
                        flags |= _DESCENDING
                        if not flags & _NUMBER_DESCENDING:
                            held_name, name = group.last, asked.first
                guards = _without(held.guards, group.cls.name, asked.cls.name)
                self._add(group.cls, asked.cls, flags, guards, request, held_name, name, unix_ms)

    def _asked_classes(
        self, transaction: Transaction, held: _HeldClasses, request: Request, unix_ms: float
    ) -> Iterable[_AskedClass]:
        """Return the classes that a request asks for and may wait for. Adds the edges of upgrades."""
        asked_classes: dict[int, _AskedClass] = {}
        for name, exclusive in self._first_modes(request):
            cls = self.class_of(name)
            if cls is None:
                self._is_incomplete = True
                continue
            if name in transaction.grants:
                if not exclusive or _holds_exclusive(transaction, name):
                    continue  # the transaction already holds the lock, so it does not wait
                guards = _without(held.guards, cls.name, "")
                self._add(cls, cls, _UPGRADE | _ASKED_EXCLUSIVE, guards, request, name, name, unix_ms)
            asked = asked_classes.get(cls.id)
            if asked is None:
                asked_classes[cls.id] = _AskedClass(cls, name, exclusive)
            else:
                asked.add(name, exclusive)
        return asked_classes.values()

    def _add(
        self,
        held: LockClass,
        asked: LockClass,
        flags: int,
        guards: dict[str, bool],
        request: Request,
        held_name: str,
        asked_name: str,
        unix_ms: float,
    ) -> None:
        """Count an edge. If it is new, or has fewer guards than before, search for inversions."""
        if held.treatment is Treatment.IGNORED or asked.treatment is Treatment.IGNORED:
            return
        key = _edge_key(held.id, asked.id, flags)
        edge = self.edges.get(key)
        if edge is None:
            if len(self.edges) >= MAX_EDGES:
                self._is_incomplete = True
                return
            example = _example(request, held_name, asked_name, unix_ms)
            edge = self.edges[key] = Edge(held, asked, flags, guards, example)
            self._has_guards = self._has_guards or bool(guards)
            self._outgoing.setdefault(held.id, []).append(edge)
            self._successors.setdefault(held.id, set()).add(asked.id)
            self._find_inversions(edge)
        elif edge.guards:
            common = _common_guards(edge.guards, guards)
            if common != edge.guards:
                edge.guards = common
                self._find_inversions(edge)
        edge.count += 1
        edge.last_unix_ms = unix_ms
        for known in edge.inverted:
            self._count_offender(known, edge, guards, _example(request, held_name, asked_name, unix_ms))
        is_usual = flags & (_HELD_EXCLUSIVE | _ASKED_EXCLUSIVE) == 3 and not edge.guards  # noqa: PLR2004 - both are exclusive
        if is_usual and not edge.inverted:
            self._add_usual(edge, held_name, asked_name)

    def _add_usual(self, edge: Edge, held_name: str, asked_name: str) -> None:
        """Let `_find_usual_edge` find an edge of two exclusive locks without guards, which is no offending edge."""
        held, asked = edge.held, edge.asked
        if held is asked:
            held.usual_edges[-1 - (edge.flags & ~3)] = edge
            return
        held.usual_edges[asked.id] = edge
        stems = held_name.rstrip(DIGITS), asked_name.rstrip(DIGITS)
        if self._by_stem.get(stems[0]) is held and self._by_stem.get(stems[1]) is asked:
            if len(self._edge_by_stems) >= MAX_EDGES:
                self._edge_by_stems.clear()
            self._edge_by_stems[stems] = edge

    # -- inversions -----------------------------------------------------------------------------------------

    def take_unreported(self) -> list[Inversion]:
        """Return the inversions that were found since the last call."""
        found, self._unreported = self._unreported, []
        return found

    def _find_inversions(self, edge: Edge) -> None:
        """Search for the inversions that an edge, which is new or has fewer guards, completes."""
        if edge.flags & _UPGRADE:
            self._found(Kind.UPGRADE, (edge,), edge)
            return
        if edge.is_within_class and edge.held.treatment is not Treatment.ORDERED:
            self._check_members(edge.held, edge)
        if self._search_steps > MAX_SEARCH_STEPS:
            self._is_incomplete = True
        elif self._leads_to(edge.asked, edge.held):
            if edge.held.id in self._successors.get(edge.asked.id, ()):
                self._find_cycle(edge, direct=True)
            self._find_cycle(edge, direct=False)

    def _leads_to(self, start: LockClass, target: LockClass) -> bool:
        """Return whether edges lead from one class to another, in any modes. Rules out most searches quickly."""
        reached, added = {start.id}, [start.id]
        while added and target.id not in reached:
            successors: set[int] = set()
            for class_id in added:
                successors |= self._successors.get(class_id, set())
            self._search_steps += len(added)
            added = list(successors - reached)
            reached |= successors
        return target.id in reached

    def _check_members(self, cls: LockClass, added: Edge) -> None:
        """Find out whether the names of a class are taken in ascending order, by characters or by numbers."""
        edges = [edge for edge in self._outgoing[cls.id] if edge.is_within_class and not edge.flags & _UPGRADE]
        witnesses = []
        for order in (_DESCENDING, _NUMBER_DESCENDING):
            # Two shared locks conflict with no others of their kind, but with exclusive locks in the opposite order.
            opposed = any(not edge.flags & order and edge.flags & 3 == 3 for edge in edges)  # noqa: PLR2004 - both exclusive
            descending = [edge for edge in edges if edge.flags & order and (edge.flags & 3 or opposed)]
            if not descending:
                return
            witnesses.append(min(descending, key=lambda edge: len(edge.guards)))
        ascending = [edge for edge in edges if not edge.flags & (_DESCENDING | _NUMBER_DESCENDING)]
        first, second = witnesses
        if first is not second:
            self._found(Kind.MEMBERS, (first, second), added)
        elif ascending:
            self._found(Kind.MEMBERS, (first, min(ascending, key=lambda edge: len(edge.guards))), added)
        else:
            self._found(Kind.MEMBERS, (first,), added)

    def _find_cycle(self, edge: Edge, *, direct: bool) -> None:
        """Search for the shortest way back from what an edge asks for to what it holds, by edges of other transactions.

        `direct`: by one edge. Otherwise by at least two, without the two edges of an inversion that is already known. The
        search first looks for a cycle that no guard makes harmless.
        """
        for with_guards in (False, True) if self._has_guards else (True,):
            path = self._find_path_back(edge, direct=direct, with_guards=with_guards)
            if path is not None:
                self._found(Kind.CYCLE, path, edge)
                return

    def _find_path_back(self, start: Edge, *, direct: bool, with_guards: bool) -> tuple[Edge, ...] | None:
        """Search by breadth first. Two edges in a row conflict on their common class: one of the locks is exclusive."""
        paths: list[tuple[Edge, ...]] = [(start,)]
        visited: set[tuple[int, bool, bool]] = set()
        for path in paths:  # grows while it is read
            last = path[-1]
            for edge in self._outgoing.get(last.asked.id, ()):
                self._search_steps += 1
                if self._search_steps > MAX_SEARCH_STEPS:
                    self._is_incomplete = True
                    return None
                if edge.flags & _UPGRADE or not (last.asked_exclusive or edge.held_exclusive):
                    continue
                if not with_guards and any(_excluding_guards(edge, other) for other in path):
                    continue
                if not direct and self._is_known_pair(edge):
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

    def _is_known_pair(self, edge: Edge) -> bool:
        return not edge.is_within_class and (Kind.CYCLE, frozenset((edge.held.name, edge.asked.name))) in self._known

    def _found(self, kind: Kind, edges: tuple[Edge, ...], added: Edge) -> None:
        """Add an inversion that the edge `added` completes. If one with the same classes is known, only look for offenders."""
        inversion = Inversion(kind, edges, _guards_of(edges), _offender(added.example))
        key = kind, frozenset(inversion.classes)
        known = self._known.get(key)
        if known is not None:
            if not inversion.guards and any(_is_same_step(added, edge) for edge in known.offending):
                self._mark_inverted(known, [added])
            return
        self.guarded = [other for other in self.guarded if (other.kind, frozenset(other.classes)) != key]
        if inversion.guards:
            if len(self.guarded) < MAX_INVERSIONS:
                self.guarded.append(inversion)
            return
        self._report(inversion)
        if self.inversions[-1] is inversion:
            known = self._known[key] = _Known(inversion)
            self._mark_inverted(known, known.offending)

    def _report(self, inversion: Inversion) -> None:
        """Count an inversion, and add it unless there are too many."""
        self.inversion_count += 1
        if len(self.inversions) < MAX_INVERSIONS:
            self.inversions.append(inversion)
            self._unreported.append(inversion)

    def _mark_inverted(self, known: _Known, edges: Iterable[Edge]) -> None:
        """Look for new offenders in all further requests that make these edges."""
        for edge in edges:
            if known not in edge.inverted:
                edge.inverted.append(known)
                usual = edge.held.usual_edges
                edge.held.usual_edges = {key: other for key, other in usual.items() if other is not edge}
                stems = [key for key, other in self._edge_by_stems.items() if other is edge]
                for key in stems:
                    del self._edge_by_stems[key]

    def _count_offender(self, known: _Known, edge: Edge, guards: dict[str, bool], example: Example) -> None:
        """Count a request that made an offending edge. The first one with a new stem is another inversion."""
        stem = _offender(example)
        if stem not in known.offenders:
            if len(known.offenders) >= MAX_OFFENDERS:
                return
            own = Edge(edge.held, edge.asked, edge.flags, guards, example)
            edges = _with_edge(known.inversion.edges, own)
            if _guards_of(edges):
                return  # these transactions hold a common lock with the others
            known.offenders[stem] = own
            self._report(Inversion(known.inversion.kind, edges, offender=stem, is_repeated=True))
        counted = known.offenders[stem]
        if counted is not None:
            counted.count += 1
            counted.last_unix_ms = example.at_unix_ms


def describe(kind: str, classes: Sequence[str]) -> str:
    """Return in one sentence what is wrong: `accounts/* and orders/* are locked in both orders`."""
    if kind == Kind.UPGRADE:
        return f"a shared lock on {classes[0]} is upgraded to an exclusive lock"
    if kind == Kind.MEMBERS:
        return f"names of {classes[0]} are not locked in ascending order"
    if len(classes) == 2:  # noqa: PLR2004 - a pair
        return f"{classes[0]} and {classes[1]} are locked in both orders"
    return f"{' → '.join((*classes, classes[0]))} is a cycle of lock orders"


def describe_edge(transaction: str, held: str, asked: str) -> str:
    """Return what the example of an edge did. `held` and `asked` are names with their modes."""
    return f"{transaction} held {held} and asked for {asked}"


def _example(request: Request, held: str, asked: str, unix_ms: float) -> Example:
    transaction = request.transaction or ""
    return Example(request.id, transaction, request.principal, request.shown_note, held, asked, unix_ms)


def _offender(example: Example) -> str:
    """Return the stem of a transaction's name: without the parts that vary."""
    return _mask(example.transaction)


def _offending_edges(inversion: Inversion) -> Sequence[Edge]:
    """Return the edges whose transactions are presumed wrong.

    Of a cycle, all but the edge that was seen most often, which is the usual order. Of a class, the descending edges.
    """
    if inversion.kind is Kind.CYCLE:
        usual = max(inversion.edges, key=lambda edge: edge.count)
        return [edge for edge in inversion.edges if edge is not usual]
    if inversion.kind is Kind.MEMBERS:
        return [edge for edge in inversion.edges if edge.flags & (_DESCENDING | _NUMBER_DESCENDING)]
    return inversion.edges


def _with_edge(edges: Sequence[Edge], own: Edge) -> tuple[Edge, ...]:
    """Return the edges of an inversion with `own` in place of the edge that is most like it."""
    alike = [edge for edge in edges if _is_same_step(own, edge)]
    replaced = next((edge for edge in alike if edge.relation == own.relation), alike[0])
    return tuple(own if edge is replaced else edge for edge in edges)


def _is_same_step(edge: Edge, other: Edge) -> bool:
    """Return whether two edges lead from the same class to the same class, in any modes, and in the same direction."""
    return (
        edge.held is other.held
        and edge.asked is other.asked
        and (edge.relation == "ascending") is (other.relation == "ascending")
    )


def _edge_key(held: int, asked: int, flags: int) -> int:
    return (held << _ID_BITS | asked) << _FLAG_BITS | flags


def _mask(name: str) -> str:
    return _VARYING.sub("*", name)


def _to_regex(pattern: str) -> str:
    return "[^/]*".join(re.escape(part) for part in pattern.split("*"))


def _direction(held: str, asked: str) -> int:
    """Return the relation of two different names of one class: whether `asked` precedes `held`, in both orders."""
    stem = held.rstrip(DIGITS)
    if stem == asked.rstrip(DIGITS):
        direction = _direction_of_numbers(held, asked, len(stem))
        if direction >= 0:
            return direction
    flags = _DESCENDING if asked < held else 0
    return flags | _NUMBER_DESCENDING if _number_key(asked) < _number_key(held) else flags


def _direction_of_numbers(held: str, asked: str, start: int) -> int:
    """Return the relation of two names that differ only in the number that begins at `start` and ends them.

    Returns -1 if the names are equal, or if a number begins with zero, because then its length does not tell its size.
    """
    if len(held) == len(asked):
        return -1 if held == asked else 0 if held < asked else _DESCENDING | _NUMBER_DESCENDING
    if held[start : start + 1] == "0" or asked[start : start + 1] == "0":
        return -1
    return (_DESCENDING if asked < held else 0) | (_NUMBER_DESCENDING if len(asked) < len(held) else 0)


def _number_key(name: str) -> tuple[list[Any], str]:
    """Return a sort key that compares the digits of a name as numbers: text and numbers by turns, as in the name."""
    parts: list[Any] = _NUMBER.split(name)
    parts[1::2] = map(int, parts[1::2])
    return parts, name


def _without(guards: dict[str, bool], *names: str) -> dict[str, bool]:
    """Return the guards without some names."""
    return {name: mode for name, mode in guards.items() if name not in names} if guards else guards


def _holds_exclusive(transaction: Transaction, name: str) -> bool:
    return any(name in request.exclusive for request in transaction.held.values())


def _common_guards(some: dict[str, bool], others: dict[str, bool]) -> dict[str, bool]:
    return {name: some[name] and others[name] for name in some if name in others}


def _excluding_guards(some: Edge, other: Edge) -> list[str]:
    """Return the guards that keep the transactions of two edges apart: held by both, by one exclusively."""
    if not some.guards or not other.guards:
        return []
    return [
        name for name, exclusive in some.guards.items() if name in other.guards and (exclusive or other.guards[name])
    ]


def _guards_of(edges: tuple[Edge, ...]) -> tuple[str, ...]:
    """Return the guards that keep two of the transactions of an inversion apart.

    An inversion of one edge is between two transactions that do the same.
    """
    if len(edges) == 1:
        return tuple(name for name, exclusive in edges[0].guards.items() if exclusive)
    guards = [_excluding_guards(some, other) for index, some in enumerate(edges) for other in edges[index + 1 :]]
    return tuple(dict.fromkeys(name for names in guards for name in names))
