"""Counters that reject accesses with a smaller fencing token than the greatest one so far."""

from __future__ import annotations


class LateWrite(Exception):
    """A holder of a later lock has accessed the counter before."""


class FencedCounters:
    """Counters by name. Clients write absolute values, so that lost updates are detected."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.accepted: dict[str, int] = {}
        self._fences: dict[str, int] = {}

    def read(self, name: str, fence: int) -> int:
        """Return the value of a counter; from now on holders of earlier locks cannot write it."""
        self._check_fence(name, fence)
        return self.values.get(name, 0)

    def write(self, name: str, value: int, fence: int) -> None:
        """Set the value of a counter."""
        self._check_fence(name, fence)
        self.values[name] = value
        self.accepted[name] = self.accepted.get(name, 0) + 1

    def _check_fence(self, name: str, fence: int) -> None:
        greatest = self._fences.get(name, 0)
        if fence < greatest:
            raise LateWrite(f"{name} has had fence {greatest}, and this is {fence}")
        self._fences[name] = fence

    @property
    def increments(self) -> int:
        """The number of accepted writes."""
        return sum(self.accepted.values())

    def mismatches(self) -> list[str]:
        """Describe the counters whose value differs from the number of accepted writes."""
        return [
            f"{name} is {value}, and {self.accepted[name]} increments were acknowledged"
            for name, value in self.values.items()
            if value != self.accepted[name]
        ]
