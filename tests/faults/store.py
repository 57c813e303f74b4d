"""The counters: a store that refuses whoever comes with a fence smaller than one that it has seen."""

from __future__ import annotations


class LateWrite(Exception):
    """Somebody with a newer lock has been here."""


class Store:
    """Counters by name. It adds nothing by itself: it keeps what it is told, so an update that is lost shows."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.accepted: dict[str, int] = {}
        self._fences: dict[str, int] = {}

    def read(self, name: str, fence: int) -> int:
        """The number, once the fence is noted: whoever had the lock before can't write from now on."""
        self._note(name, fence)
        return self.values.get(name, 0)

    def write(self, name: str, value: int, fence: int) -> None:
        """Keep a number."""
        self._note(name, fence)
        self.values[name] = value
        self.accepted[name] = self.accepted.get(name, 0) + 1

    def _note(self, name: str, fence: int) -> None:
        seen = self._fences.get(name, 0)
        if fence < seen:
            raise LateWrite(f"{name} has seen fence {seen}, and this is {fence}")
        self._fences[name] = fence

    @property
    def increments(self) -> int:
        """Writes that were accepted, in all."""
        return sum(self.accepted.values())

    def wrong(self) -> list[str]:
        """The counters that are not what was acknowledged."""
        return [
            f"{name} is {value}, and {self.accepted[name]} increments were acknowledged"
            for name, value in self.values.items()
            if value != self.accepted[name]
        ]
