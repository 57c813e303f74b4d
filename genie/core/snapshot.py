"""The whole state as a value: what a store keeps, and what a new lock manager starts from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from genie.core.model import Request


@dataclass(slots=True)
class Snapshot:
    """Every request that is held or waits, and the counters.

    A waiting request carries its places in `moved` where a reordering changed them; the others follow from its
    priority and its id.
    """

    requests: Iterable[Request] = ()
    next_id: int = 1
    next_fence: int = 1
    clock_ms: float = 0.0
    """The manager's clock when this was so. It goes on from here: time in which no server ran does not count."""
