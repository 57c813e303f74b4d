"""Examples that one leader solves and shards do not, executed with real lock managers, one for each
shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.sharding_parts.graph import cycle, merged, waits_of
from genie.core import HELD, WAITING, LockManager, Release, Request, Take


@dataclass(frozen=True)
class Case:
    """What happens with one leader, and with two shards."""

    name: str
    leader: str
    shards: str


class Ask:
    """A request of a client, whose parts several lock managers execute."""

    def __init__(self, who: str, priority: float = 0) -> None:
        self.who = who
        self.priority = priority
        self.parts: list[Request] = []

    def of(self, manager: LockManager, *names: str) -> Ask:
        """Send the part for these resources to a lock manager."""
        request = Request(exclusive=names, transaction=self.who, priority=self.priority)
        self.parts.append(request)
        manager.step(request, 0)
        return self

    def state(self) -> str:
        """Describe the state of the request: it holds all, some or none of its locks."""
        held = sum(part.state is HELD for part in self.parts)
        if held == len(self.parts):
            return f"{self.who} holds all"
        return f"{self.who} waits" + (" and holds some" if held else "")


def two_lines() -> Case:
    """R1 and R2 both request a and b. They arrive at the two shards in different orders."""
    one = LockManager()
    whole = [Ask("R1").of(one, "a", "b"), Ask("R2").of(one, "a", "b")]
    first, second = LockManager(), LockManager()
    r1, r2 = Ask("R1"), Ask("R2")
    r1.of(first, "a")
    r2.of(second, "b")
    r1.of(second, "b")
    r2.of(first, "a")
    return Case("two lines", _describe(*whole), f"{_describe(r1, r2)}; cycle: {_cycle('R1', first, second)}")


def reserved_is_held() -> Case:
    """T holds a. R requests a and b, then T requests b. They arrive at both shards in the same order."""
    one = LockManager()
    Ask("T").of(one, "a")
    whole = [Ask("R").of(one, "a", "b"), Ask("T").of(one, "b")]
    first, second = LockManager(), LockManager()
    Ask("T").of(first, "a")
    r = Ask("R").of(first, "a").of(second, "b")
    t = Ask("T").of(second, "b")
    return Case("reserved is held", _describe(*whole), f"{_describe(r, t)}; cycle: {_cycle('T', first, second)}")


def inversion(middles: int = 5) -> Case:
    """A request of low priority for a and b waits for b, then an urgent one requests a. Requests of medium priority for b keep arriving."""
    one, first, second = LockManager(), LockManager(), LockManager()
    passed = []
    for managers in ((one, one), (first, second)):
        holder = Ask("H").of(managers[1], "b").parts[0]
        if managers[0] is one:
            Ask("low").of(one, "a", "b")
        else:
            Ask("low").of(first, "a").of(second, "b")
        urgent = Ask("urgent", 9).of(managers[0], "a")
        waited = 0
        while urgent.parts[0].state is WAITING and waited < middles:
            following = Ask(f"middle {waited}", 5).of(managers[1], "b").parts[0]
            managers[1].step(Release(holder.id), 0)
            holder = following
            waited += 1
        passed.append(f"{urgent.state()}, after {waited} grants of lower priority")
    return Case("inversion", *passed)


def two_takes() -> Case:
    """X and Y each request any 3 of 4 tokens, of which each shard has two. Both send to both shards at once."""
    tokens = ("t1", "t2", "t3", "t4")
    one = LockManager()
    got = [_take(one, who, tokens, 3) for who in ("X", "Y")]
    first, second = LockManager(), LockManager()
    x = [_take(first, "X", tokens[:2], 2), 0]
    y = [0, _take(second, "Y", tokens[2:], 2)]
    y[0], x[1] = _take(first, "Y", tokens[:2], 1), _take(second, "X", tokens[2:], 1)
    return Case("two takes", f"X gets {got[0]}, Y gets {got[1]}", f"X gets {sum(x)}, Y gets {sum(y)}: neither has 3")


def cases() -> Iterator[tuple[str, Case]]:
    """Execute each example; yield its description and its result."""
    for case in (two_lines, reserved_is_held, inversion, two_takes):
        yield (case.__doc__ or ""), case()


def _describe(*asks: Ask) -> str:
    return ", ".join(ask.state() for ask in asks)


def _cycle(start: str, *managers: LockManager) -> str:
    found = cycle(merged(waits_of(manager) for manager in managers), start)
    return " waits for ".join([*found, start]) if found else "none"


def _take(manager: LockManager, who: str, tokens: tuple[str, ...], target: int) -> int:
    request = Request(transaction=who)
    manager.step(Take(request, [(token, True) for token in tokens], [1] * len(tokens), target), 0)
    return len(request.exclusive) if request.state is HELD else 0
