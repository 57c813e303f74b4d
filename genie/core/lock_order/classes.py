"""Classes of names, and the rules that decide the class of a name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Final

from genie.core.lock_order.budget import CLASSIFIED_CHARS_PER_STEP, Budget
from genie.core.lock_order.names import DIGITS, mask
from genie.core.model import Request
from genie.lock_modes import S

MAX_CLASSES: Final = 1_000
"""Maximum number of classes. Names of further classes are not analysed."""
MAX_NAMES: Final = 32
"""Maximum number of names that are analysed of one request."""
MAX_CACHED_NAMES: Final = 10_000
"""Maximum number of names whose class is cached. When the cache is full, it is cleared."""


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
    """A class of names. `is_name`: whether the class consists of a single name, which is also the name of the class."""

    __slots__ = ("id", "is_name", "name", "treatment")

    def __init__(self, id: int, name: str, treatment: Treatment, is_name: bool) -> None:
        self.id = id
        self.name = name
        self.treatment = treatment
        self.is_name = is_name


class LockClasses:
    """The classes of the names that were seen."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.budget = Budget()
        self.by_name: dict[str, LockClass] = {}
        """Each class by its own name, such as `accounts/*`."""
        self._rules = [(re.compile(_to_regex(rule.pattern)), rule) for rule in rules]
        self._by_stem: dict[str, LockClass | None] = {}
        """The class of the names that consist of this stem and digits. None if there were too many classes."""
        self._by_whole_name: dict[str, LockClass | None] = {}
        """The class of other names."""

    def class_of(self, name: str) -> LockClass | None:
        """Return the class of a name, or None if there are too many classes."""
        stem = name.rstrip(DIGITS)
        found = self._by_whole_name.get(name) if len(stem) == len(name) else self._by_stem.get(stem)
        return found if found is not None else self._classify(name, stem)

    def classified(self, request: Request) -> list[tuple[LockClass, str, bool]]:
        """Return the first `MAX_NAMES` names of a request that are not ignored: class, name, whether it is exclusive."""
        if len(request.exclusive) + len(request.shared) > MAX_NAMES:
            self.budget.is_exceeded = True
        classified = []
        for name, exclusive in islice(request.modes(), MAX_NAMES):
            cls = self.class_of(name)
            if cls is None:
                self.budget.is_exceeded = True
            elif cls.treatment is not Treatment.IGNORED:
                classified.append((cls, name, exclusive != S))
        self.budget.steps += len(classified)
        return classified

    def _classify(self, name: str, stem: str) -> LockClass | None:
        """Return the class of a name, and cache it by the name, or by the stem if the stem decides the class.

        The stem is the name without the digits at its end. Return None if there are too many classes.
        """
        if name in self._by_whole_name:
            return self._by_whole_name[name]
        if stem != name and stem in self._by_stem:
            return None
        self.budget.steps += len(name) // CLASSIFIED_CHARS_PER_STEP
        class_name, treatment = mask(name), Treatment.CHECKED
        for pattern, rule in self._rules:
            if pattern.fullmatch(name):
                class_name, treatment = rule.pattern, rule.treatment
                break
        found = self.by_name.get(class_name)
        if found is None and len(self.by_name) < MAX_CLASSES:
            found = self.by_name[class_name] = LockClass(len(self.by_name), class_name, treatment, class_name == name)
        # A stem decides the class only if other digits after it give the same class.
        by_stem = not self._rules and stem != name and not stem[-1:].isalnum() and class_name == mask(stem) + "*"
        cache, key = (self._by_stem, stem) if by_stem else (self._by_whole_name, name)
        if len(cache) >= MAX_CACHED_NAMES:
            cache.clear()
        cache[key] = found
        return found


def _to_regex(pattern: str) -> str:
    """Return the regular expression of a pattern. It takes linear time.

    The pattern is divided into parts at each `*`. Atomic groups match each part at its first occurrence, and try no other.
    This loses no match: a part without `/` may match earlier, because the text up to a later occurrence contains no `/`; a
    part with `/` can match at one place only.
    """
    first, *parts = map(re.escape, pattern.split("*"))
    last = "[^/]*" + parts.pop() if parts else ""
    return first + "".join(f"(?>[^/]*?{part})" for part in parts) + last
