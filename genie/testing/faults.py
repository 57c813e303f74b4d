"""Plans of faults for a simulated world: what breaks, when, for how long, and how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

MAX_FAULTS = 1_000
"""Maximum number of faults in a plan."""


class Kind(StrEnum):
    """The kind of a fault."""

    PAUSE_PROCESS = "pause process"
    """A process of the service stops, as for garbage collection or a paused machine, and then continues without
    noticing."""
    CRASH_PROCESS = "crash process"
    """A process of the service crashes, and is started again after the duration."""
    CRASH_SERVER = "crash server"
    """A Genie server crashes, and is started again after the duration."""
    PAUSE_SERVER = "pause server"
    """A Genie server stops, and then continues. A leader may lose its lease."""
    CUT_CONNECTIONS = "cut connections"
    """All connections of a process to Genie break."""
    PARTITION = "partition"
    """A process of the service reaches no Genie server."""
    PAUSE_REDIS = "pause redis"
    """Redis does not answer."""
    ROLL_BACK_REDIS = "roll back redis"
    """Redis restarts without its last writes. Servers that have these writes restore them."""
    LOSE_LEASE = "lose lease"
    """The leader is cut off from Redis until another server leads, and for the duration after that."""
    DELAY_MESSAGES = "delay messages"
    """Messages take much longer, between all parties or between some."""


PROCESS_KINDS = frozenset({Kind.PAUSE_PROCESS, Kind.CRASH_PROCESS, Kind.CUT_CONNECTIONS, Kind.PARTITION})
"""Kinds of faults whose target is a process of the service."""
SERVER_KINDS = frozenset({Kind.CRASH_SERVER, Kind.PAUSE_SERVER})
"""Kinds of faults whose target is a Genie server."""
SERVERS = ("s1", "s2", "s3")
"""The names of the Genie servers, which are also the names of their hosts."""
REDIS = "redis"
"""The name of Redis and of its host."""
DURATIONS_S = (0.05, 0.5, 1.5, 4.0, 12.0)
"""The durations of the faults of a random plan. Some are shorter and some are longer than the timeouts of a service."""
KINDS_IN_PLAN = (1, 2, 3, len(Kind))
"""The numbers of kinds of faults that a random plan may have. With many kinds, faults hide each other: for example, a
crash ends a pause."""
SHARES_OF_TIME = (0.1, 0.3, 1.0)
"""All faults of a random plan begin in the first part of its time. This part is one of these shares."""
DELAYS_S = (0.2, 1.0, 5.0)
"""The maximum delays of messages in a random plan. The last value is longer than the lease of a leader."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Its `repr` is Python source, so that a plan can be pasted into a test."""

    at_s: float
    """When the fault begins, in seconds of virtual time since the service began."""
    kind: Kind | str
    target: str = ""
    """What the fault breaks, by its kind:

    - A fault of a process or a server has the name of a process or a server (`s1`, `s2` or `s3`), or a number. The number
      stands for one of the running processes, counted from 0 in the order in which they were first started. A number that is too
      large starts again from 0.
    - A fault of Redis, and a lost lease, have no target. The lease is that of the server that leads at `at_s`.
    - Late messages have one party, two parties with a comma between them, or no target for all messages. A party is a process,
      a server or `redis`.
    """
    duration_s: float = 0.0
    delay_s: float = 0.0
    """The maximum delay of a message. Each message is delayed by at least half of it. 0 for all kinds except late
    messages."""

    def __post_init__(self) -> None:
        """Raise ValueError if a field is invalid."""
        if self.kind not in list(Kind):
            raise ValueError(f"kind must be one of {', '.join(Kind)}, not {self.kind!r}")
        object.__setattr__(self, "kind", Kind(self.kind))
        if not 0 <= self.at_s < float("inf") or not 0 <= self.duration_s < float("inf"):
            raise ValueError(
                f"at_s and duration_s must be seconds of at least 0, not {self.at_s!r}, {self.duration_s!r}"
            )
        self._check_target()
        if (self.kind is Kind.DELAY_MESSAGES) != (0 < self.delay_s < float("inf")):
            needed = "more than 0" if self.kind is Kind.DELAY_MESSAGES else "0"
            raise ValueError(f"delay_s of {self.kind} must be {needed}, not {self.delay_s!r}")

    def _check_target(self) -> None:
        """Raise ValueError if the target does not suit the kind."""
        if self.kind is Kind.DELAY_MESSAGES:
            if len(self.parties) > 2 or (self.target and "" in self.parties):
                raise ValueError(f"target of {self.kind} must be at most two names, not {self.target!r}")
        elif self.kind in SERVER_KINDS:
            if self.target not in SERVERS:
                raise ValueError(f"target of {self.kind} must be one of {', '.join(SERVERS)}, not {self.target!r}")
        elif self.kind in PROCESS_KINDS:
            if not self.target:
                raise ValueError(f"{self.kind} needs a target, the name or the number of a process")
        elif self.target:
            raise ValueError(f"{self.kind} must have no target, not {self.target!r}")

    @property
    def parties(self) -> tuple[str, ...]:
        """The names in `target`, which a comma separates."""
        if not self.target:
            return ()
        return tuple(name.strip() for name in self.target.split(","))

    def __repr__(self) -> str:
        delay = f", {self.delay_s!r}" if self.delay_s else ""
        return f"Fault({self.at_s!r}, {str(self.kind)!r}, {self.target!r}, {self.duration_s!r}{delay})"


def random_faults(
    seed: int, *, count: int = 8, during_s: float = 30.0, kinds: Sequence[Kind] = tuple(Kind)
) -> list[Fault]:
    """Return a plan of `count` faults in the first `during_s` seconds. The same arguments give the same plan.

    The seed decides which of the `kinds` occur, because faults of many kinds hide each other. It also decides whether
    the faults are spread over the whole time or only over its beginning, because a service may end early.
    """
    if not 0 <= count <= MAX_FAULTS:
        raise ValueError(f"count must be from 0 to {MAX_FAULTS}, not {count}")
    random = Random(f"{seed} faults")
    drawn_kinds = random.sample(list(kinds), min(random.choice(KINDS_IN_PLAN), len(kinds)))
    last_s = during_s * random.choice(SHARES_OF_TIME)
    plan = []
    for _ in range(count):
        kind = Kind(random.choice(drawn_kinds))
        target = _random_target(kind, random)
        at_s = round(random.uniform(0, last_s), 3)
        duration_s = random.choice(DURATIONS_S)
        delay_s = random.choice(DELAYS_S) if kind is Kind.DELAY_MESSAGES else 0.0
        plan.append(Fault(at_s, kind, target, duration_s, delay_s))
    return sorted(plan, key=lambda fault: fault.at_s)


def _random_target(kind: Kind, random: Random) -> str:
    """Return a random target for a fault of this kind."""
    if kind in PROCESS_KINDS:
        return str(random.randrange(100))
    if kind in SERVER_KINDS:
        return random.choice(SERVERS)
    if kind is Kind.DELAY_MESSAGES:
        return random.choice(("", str(random.randrange(100)), random.choice(SERVERS), REDIS))
    return ""


def shrunk_candidates(plan: Sequence[Fault]) -> list[list[Fault]]:
    """Return simpler plans to try, the simplest first.

    The first plans lack half of the faults, the next ones a quarter, and so on, down to one fault. The last plans have
    all faults, one of them with a shorter duration or a smaller delay.
    """
    candidates = []
    omitted_count = len(plan) // 2
    while omitted_count:
        starts = range(0, len(plan), omitted_count)
        candidates += [[*plan[:start], *plan[start + omitted_count :]] for start in starts]
        omitted_count //= 2
    if len(plan) == 1:
        candidates.append([])
    for index, fault in enumerate(plan):
        weaker = [replace(fault, duration_s=each) for each in DURATIONS_S if each < fault.duration_s]
        weaker += [replace(fault, delay_s=each) for each in DELAYS_S if each < fault.delay_s]
        candidates += ([*plan[:index], each, *plan[index + 1 :]] for each in weaker)
    return candidates
