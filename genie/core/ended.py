"""The memory of what has ended."""

from __future__ import annotations

from genie.core.model import Reason

REMEMBERED = 100_000
"""So many of the last ended ids are remembered at least, and at most twice as many."""


class Ended:
    """Ids that were released, with their first reason.

    Two dicts that take turns: when the newer is full the older is dropped whole. Taking the oldest out of one dict,
    again and again, would walk over the holes that the earlier ones left.
    """

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._newer: dict[int, Reason] = {}
        self._older: dict[int, Reason] = {}

    def add(self, id: int, reason: Reason) -> None:
        """Remember why a request ended."""
        newer = self._newer
        if len(newer) >= REMEMBERED:
            self._older, self._newer = newer, {}
            newer = self._newer
        newer[id] = reason

    def get(self, id: int) -> Reason | None:
        """The first reason of a request that ended, or None."""
        return self._newer.get(id) or self._older.get(id)
