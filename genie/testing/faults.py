"""Plans of faults for a simulated world: what breaks, when, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

MAX_FAULTS = 1_000
"""Maximum number of faults in a plan."""


class Kind(StrEnum):
    """What breaks."""

    PAUSE_PROCESS = "pause process"
    """A process of the service stops, as for garbage collection or a paused machine, and then continues without noticing."""
    CRASH_PROCESS = "crash process"
    """A process of the service crashes, and is started again after the duration."""
    CRASH_SERVER = "crash server"
    """A Genie server crashes, and is started again after the duration."""
    PAUSE_SERVER = "pause server"
    """A Genie server stops; the lease of a leader may be lost."""
    CUT_CONNECTIONS = "cut connections"
    """All connections of a process to Genie break."""
    PARTITION = "partition"
    """A process of the service reaches no Genie server."""
    PAUSE_REDIS = "pause redis"
    """Redis does not answer."""
    ROLL_BACK_REDIS = "roll back redis"
    """Redis restarts without its last writes; servers that have them restore them."""


PROCESS_KINDS = frozenset({Kind.PAUSE_PROCESS, Kind.CRASH_PROCESS, Kind.CUT_CONNECTIONS, Kind.PARTITION})
SERVER_KINDS = frozenset({Kind.CRASH_SERVER, Kind.PAUSE_SERVER})
DURATIONS_S = (0.05, 0.5, 1.5, 4.0, 12.0)
"""Some are shorter and some are longer than the timeouts of a service."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Its `repr` is Python source, so that a plan can be pasted into a test.

    `target` is the name of a process or a server (`s1`, `s2` or `s3`), or a number: the process that was started as that one,
    counted from 0, modulo the number of processes. It is empty for Redis.
    """

    at_s: float
    """The virtual time."""
    kind: Kind | str
    target: str = ""
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError if a field is invalid."""
        if self.kind not in list(Kind):
            raise ValueError(f"kind must be one of {', '.join(Kind)}, not {self.kind!r}")
        object.__setattr__(self, "kind", Kind(self.kind))
        if not 0 <= self.at_s < float("inf") or not 0 <= self.duration_s < float("inf"):
            raise ValueError(
                f"at_s and duration_s must be seconds of at least 0, not {self.at_s!r}, {self.duration_s!r}"
            )
        if bool(self.target) != (self.kind in PROCESS_KINDS | SERVER_KINDS):
            raise ValueError(f"{self.kind} {'has no target' if self.target else 'needs a target'}")

    def __repr__(self) -> str:
        return f"Fault({self.at_s!r}, {str(self.kind)!r}, {self.target!r}, {self.duration_s!r})"


def random_faults(
    seed: int, *, count: int = 8, during_s: float = 30.0, kinds: Sequence[Kind] = tuple(Kind)
) -> list[Fault]:
    """Return a plan of `count` faults in the first `during_s` seconds; the same for the same arguments."""
    if not 0 <= count <= MAX_FAULTS:
        raise ValueError(f"count must be from 0 to {MAX_FAULTS}, not {count}")
    random = Random(f"{seed} faults")
    plan = []
    for _ in range(count):
        kind = Kind(random.choice(list(kinds)))
        target = ""
        if kind in PROCESS_KINDS:
            target = str(random.randrange(100))
        elif kind in SERVER_KINDS:
            target = random.choice(("s1", "s2", "s3"))
        plan.append(Fault(round(random.uniform(0, during_s), 3), kind, target, random.choice(DURATIONS_S)))
    return sorted(plan, key=lambda fault: fault.at_s)


def shrunk_candidates(plan: Sequence[Fault]) -> list[list[Fault]]:
    """Return simpler plans to try, simplest first: without a half, without a quarter, ..., without one, then shorter faults."""
    candidates = []
    size = len(plan) // 2
    while size:
        candidates += [[*plan[:start], *plan[start + size :]] for start in range(0, len(plan), size)]
        size //= 2
    if len(plan) == 1:
        candidates.append([])
    for index, fault in enumerate(plan):
        shorter = [duration_s for duration_s in DURATIONS_S if duration_s < fault.duration_s]
        candidates += (
            [*plan[:index], Fault(fault.at_s, fault.kind, fault.target, duration_s), *plan[index + 1 :]]
            for duration_s in shorter
        )
    return candidates
