"""Kinds of locks: their modes, which of them conflict, and how they are written.

The lock manager, the protocol and the clients share these terms. The theory is in `genie/core/README.md`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Mode(StrEnum):
    """The mode in which a request names a resource.

    Shared locks are compatible with each other; an exclusive lock conflicts with every other lock. Units of a counted
    resource are counted against each other, and conflict with shared and exclusive locks.
    """

    SHARED = "shared"
    EXCLUSIVE = "exclusive"
    UNITS = "units"


QueueMode = int
"""The mode of a request in the wait queue of a resource, one of the following. In the queue of a plain name, which is neither
counted nor a subtree, it is `S` or `X`, which equal False and True."""

S: Final = 0
X: Final = 1
U: Final = 2
"""Units of a counted resource."""
IS: Final = 3
"""An intention: a shared lock below this subtree (Gray et al., Granularity of Locks in a Shared Data Base, 1976)."""
IX: Final = 4
"""An intention: an exclusive lock or units below this subtree."""
SIX: Final = 5
"""A shared lock on this subtree, and an exclusive lock or units below it."""

CONFLICTS: Final = ((X, U, IX, SIX), (S, X, U, IS, IX, SIX), (S, X), (X,), (S, X, SIX), (S, X, IX, SIX))
"""The modes of other owners that exclude each mode. Units exclude each other only by their number."""

WHOLE_NAMESPACE: Final = "**"
"""The subtree of all names."""


MAX_SUBTREE_LEVELS: Final = 16
"""Maximum number of slashes in the name of a subtree. Each locked name is compared with the subtrees above it, so there must be
few: a name has up to 511 slashes."""


def is_subtree(name: str) -> bool:
    """Return whether a name means all names below it: `**`, or a name that ends in `/**`."""
    return name.endswith("**") and (name == WHOLE_NAMESPACE or name.endswith("/**"))


UnitCount = tuple[int, int]
"""Units of a counted resource: how many, and the limit: of how many at most."""


def lock_text(name: str, mode: QueueMode, units: UnitCount | None = None) -> str:
    """Return a lock as clients write it: `shared:NAME`, `exclusive:NAME`, or `2/10:NAME` for units."""
    if units is not None:
        return f"{units[0]}/{units[1]}:{name}"
    return f"{Mode.EXCLUSIVE if mode == X else Mode.SHARED}:{name}"
