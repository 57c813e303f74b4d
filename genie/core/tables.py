"""Dicts from which clients remove most of the items.

CPython keeps the slots of removed items until a later item needs a larger dict. A client could so keep the memory of a million
locks after their release, uncharged, and each iteration would skip all these slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MIN_CHECKED_SIZE: Final = 8
CHECKED_SIZES: Final = frozenset(MIN_CHECKED_SIZE << power for power in range(28))
"""Sizes at which the owner of a dict calls `compact` after it has removed an item, so that a release seldom calls it."""
LARGE_SIZES: Final = frozenset(64 << power for power in range(25))
"""Sizes at which `compact` is called for dicts of which there are fewer: those of a deadline or of a session."""

MAX_ITEM_BYTES: Final = 128
MAX_ORDERED_ITEM_BYTES: Final = 256
"""Bytes for each item that a dict, or an `OrderedDict`, takes at most when it has just grown."""

LARGE_SIZE: Final = 1 << 16
"""Number of items from which on a dict may take four times as many bytes, because a copy of a million items takes 0.1 s."""

MANY_ITEMS: Final = 256
"""Size at which the owner of a dict that is iterated often calls `ordered`, because an `OrderedDict` has no slots to skip."""

MAX_FREED_ITEMS: Final = 2_000
"""Maximum number of items that `clear_in_parts` removes in one part, which takes up to 2 ms."""


def clear_in_parts(table: dict[K, V]) -> Iterator[None]:
    """Remove all items of a dict, in parts: yield before each part except the first.

    The dict belongs to a state that is no longer used, of up to millions of locks. To free all its values at once would take
    up to 0.3 s for a million.
    """
    while len(table) > MAX_FREED_ITEMS:
        for _ in range(MAX_FREED_ITEMS):
            table.popitem()
        yield
    table.clear()


def compact(table: dict[K, V]) -> None:
    """Free the slots of removed items if a dict has many of them."""
    size = len(table)
    item_bytes = MAX_ITEM_BYTES if type(table) is dict else MAX_ORDERED_ITEM_BYTES
    if table.__sizeof__() > item_bytes * size * (4 if size >= LARGE_SIZE else 1):
        items = table.copy()
        table.clear()
        table.update(items)


def ordered(table: dict[K, V]) -> dict[K, V]:
    """Return the items of a dict as an `OrderedDict`, whose iteration skips nothing."""
    return OrderedDict(table) if type(table) is dict else table
