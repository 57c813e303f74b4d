"""A name, and what it may do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOCK: Final = "lock"
"""`request`, `release`, `extend`, and sessions."""
INSPECT: Final = "inspect"
"""`inspect` and `watch`, and what the admin port shows."""
ADMIN: Final = "admin"
"""Everything, also to release what others hold."""
RIGHTS: Final = (LOCK, INSPECT, ADMIN)

USUAL: Final = frozenset((LOCK, INSPECT))
"""What a name may do of which nothing else is said."""

MOST_SHOWN = 10
"""Prefixes that are named to somebody who asked for another name."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who has proved a name. `prefixes` are how the names of resources must begin; None: in any way."""

    name: str
    prefixes: tuple[str, ...] | None = None
    rights: frozenset[str] = USUAL

    def may(self, right: str) -> bool:
        """Whether it has a right; who has `admin` has them all."""
        return right in self.rights or ADMIN in self.rights

    def covers(self, name: str) -> bool:
        """Whether it may lock a resource of this name, or watch what begins so."""
        return self.prefixes is None or name.startswith(self.prefixes)

    @property
    def bounds(self) -> tuple[str, ...] | None:
        """How the names begin that it may see; None: in any way. Who has `admin` may see everything."""
        return None if ADMIN in self.rights else self.prefixes

    @property
    def reach(self) -> str:
        """Its prefixes, for people."""
        if self.prefixes is None:
            return "any name"
        shown = ", ".join(repr(prefix) for prefix in self.prefixes[:MOST_SHOWN])
        more = len(self.prefixes) - MOST_SHOWN
        return f"names that begin with {shown}" + (f" or {more} more" if more > 0 else "")
